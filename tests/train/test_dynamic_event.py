"""The event that shows dynamic spans along a text."""

from __future__ import annotations

import numpy as np
import torch

from spanformer.data import Bytes
from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.model.lm import LM
from spanformer.train.dynamic_event import SHOWN, dynamic_event, printable


def model(kind: str) -> LM:
    torch.manual_seed(0)
    lm = LM(ModelConfig(vocab=256, dim=16, layers=2, heads=2, attention=AttentionConfig(kind=kind, max_span=50)))
    with torch.no_grad():
        for part in lm.dynamic_parts().values():
            part.weight.normal_()
    return lm


def test_spans_of_every_character() -> None:
    lm = model("dynamic_span")
    ids = np.frombuffer(b"def f(x):\n\treturn x\n" * 20, dtype=np.uint8)
    event = dynamic_event(lm, ids, Bytes(), 3)
    assert event is not None and len(event.text) == SHOWN and event.text.endswith("x⏎")
    assert [len(row) for row in event.spans] == [SHOWN] * len(event.names)
    assert all(0 <= z <= 50 for row in event.spans for z in row)
    # the same spans as the mechanism gives when asked outright
    seen = []
    part = lm.dynamic_parts()["layer 1"]
    hook = lm.blocks[0].attention.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    lm.eval()(torch.from_numpy(ids.astype(np.int64))[None])
    hook.remove()
    expected = part.spans_of(seen[0])[0, :, -SHOWN:]
    for name, row in zip(event.names, event.spans, strict=True):
        if name.startswith("layer 1"):
            assert torch.allclose(torch.tensor(row, dtype=torch.float32), expected[int(name[-1]) - 1])


def test_mean_context_follows_the_tokens() -> None:
    """What is paid for is what tokens choose, not the most they might."""
    lm = model("dynamic_span")
    most = lm.distances()
    assert most == [[50 + 32] * 2] * 2  # nothing was read yet
    lm(torch.arange(40)[None])
    for found, chosen in zip(lm.distances(), lm.spans(), strict=True):
        for n, z in zip(found, chosen, strict=True):
            assert z is not None and z + 32 - 0.5 <= n <= z + 32 + 1.5 and n < 82


def test_mean_context_follows_expiry() -> None:
    lm = model("expire_span")
    assert lm.distances() == [[50 + 32] * 2] * 2
    lm(torch.arange(40)[None])
    for found, lasts in zip(lm.distances(), lm.spans(), strict=True):
        for n, e in zip(found, lasts, strict=True):
            assert e is not None and e + 32 - 0.5 <= n <= e + 32 + 1.5 and n < 82


def test_nothing_to_show_without_dynamic_spans() -> None:
    assert dynamic_event(model("adaptive_span"), np.zeros(30, np.uint8), Bytes(), 3) is None


def test_characters_that_cannot_be_shown() -> None:
    assert printable("a\n\tb\x00") == "a⏎→b�" and printable("") == "�"
