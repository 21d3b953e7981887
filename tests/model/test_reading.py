"""Reading with a cache gives what one forward pass over the whole text gives, for all that a model can be made of."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from spanformer.core.peak import resident_bytes
from spanformer.model import decoding
from spanformer.model.config import FeedForwardConfig, ModelConfig
from spanformer.model.lm import LM
from spanformer.ops import kernel
from support.small_models import CONFIGS, KINDS, SMALL, make, position, text, with_attention

PIECES = {"at once": [127], "mixed": [64] + [1] * 30 + [33], "steps last": [3, 1, 90] + [1] * 33}
STACKS = {
    "adaptive": ("adaptive_span",),
    "dynamic": ("dynamic_span",),
    "window": ("window(9)", "full"),
    "mixed heads": ("2 window(7) + 2 adaptive_span", "2 adaptive_span + 2 dynamic_span"),
}


def read_in(lm: LM, x: torch.Tensor, pieces: list[int], **options) -> torch.Tensor:
    cache = lm.cache(len(x), **options)
    found = [lm.decode(piece, cache) for piece in x.split(pieces, 1)]
    assert cache.seen.tolist() == [x.shape[1]] * len(x)
    return torch.cat([logits for logits in found if logits is not None], 1)


def close(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    assert a is not None and b is not None
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pieces", PIECES)
def test_equals_one_forward_pass(name: str, pieces: str) -> None:
    lm, x = make(CONFIGS[name]), text(2, 127)
    assert close(read_in(lm, x, PIECES[pieces]), lm(x).logits)


@pytest.mark.parametrize("kind", ["transformer_xl", "shaw", "t5"])
def test_decoding_follows_a_fused_optimiser(kind: str) -> None:
    """torch's fused kernels change tensors without a new version, by which prepared rules are kept."""
    lm, x = make(with_attention(replace(SMALL, position=position(kind)), kind="window(9)")), text(2, 40)
    lm.decode(x[:, :5], lm.cache(2))  # prepares the rules
    optimizer = torch.optim.AdamW(lm.parameters(), lr=0.05, fused=True)
    lm(x[:, :-1], targets=x[:, 1:]).nll.mean().backward()
    optimizer.step()
    lm.after_step()
    assert close(read_in(lm, x, [40]), lm(x).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", STACKS)
def test_every_mechanism_with_every_position(stack: str, kind: str) -> None:
    """Norm before and after, grouped heads with and without tied spans, persistent memory: two layers each. Every kind
    meets all of these, in one stack or another."""
    made = itertools.product(("pre", "post"), ((0, False), (2, False), (2, True)), (0, 5))
    for n, (order, (kv_heads, tied), persistent) in enumerate(made):
        if (n + n // 4 + list(STACKS).index(stack)) % 4:
            continue
        config = replace(
            with_attention(SMALL, stack=STACKS[stack], tied=tied), layers=2, order=order, kv_heads=kv_heads,
            persistent=persistent, position=position(kind), norm=("rms", "layer")[n % 2],
        )  # fmt: skip
        lm, x = make(config), text(1, 75)
        assert close(read_in(lm, x, [60] + [1] * 15), lm(x).logits), (order, kv_heads, tied, persistent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", ["adaptive_span", "full", "2 window(7) + 2 adaptive_span"])
def test_paper_compat_attends_to_zeros_before_the_text(stack: str, kind: str) -> None:
    made = itertools.product(("pre", "post"), (0, 5), ([1] * 9 + [66], [66] + [1] * 9))
    for n, (order, persistent, pieces) in enumerate(made):
        if (n + n // 2 + len(stack)) % 2:
            continue
        config = replace(
            with_attention(SMALL, stack=(stack,)), layers=2, paper_compat=True, order=order, persistent=persistent,
            position=position(kind), feedforward=FeedForwardConfig(kind="relu", dim=40, bias=True),
        )  # fmt: skip
        lm, x = make(config), text(2, 75)
        assert close(read_in(lm, x, pieces), lm(x).logits), (order, persistent, pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "rotary",
        "table",
        "alibi",
        "shaw",
        "transformer_xl",
        "da_transformer",
        "dynamic",
        "grouped",
        "hybrid heads",
        "persistent",
    ],
)
def test_cache_in_other_dtypes_is_as_exact_as_forward(name: str, dtype: torch.dtype) -> None:
    lm, x = make(CONFIGS[name]), text(2, 127)
    truth = lm(x).logits
    lm = lm.to(dtype)
    dense = lm(x).logits.double()
    error, allowed = (read_in(lm, x, PIECES["mixed"]).double() - truth).abs(), (dense - truth).abs()
    assert error.mean() <= 2 * allowed.mean() and error.max() <= 3 * allowed.max()


@pytest.mark.parametrize("name", ["rotary", "dynamic", "hybrid heads"])
def test_text_of_20_spans_equals_segment_recurrence(name: str) -> None:
    lm = make(CONFIGS[name])
    longest = max(max(layer) for layer in lm.context_length()) + 1
    x, state, cache = text(1, 20 * longest), None, lm.cache(1)
    held = cache.bytes()
    with torch.no_grad():
        for n, piece in enumerate(x.split(100, 1)):
            found = lm(piece, state)
            state = found.state
            steps = piece.split(1 if n == 7 else 64, 1)
            assert close(torch.cat([lm.decode(step, cache) for step in steps], 1), found.logits)
    assert cache.bytes() == held and cache.seen.tolist() == [20 * longest]


def test_cache_rows_at_different_positions() -> None:
    lm, x = make(CONFIGS["hybrid heads"]), text(3, 100)
    whole, cache, lengths = lm(x).logits, lm.cache(3), torch.tensor([70, 1, 33])
    found = lm.decode(x[:, :70], cache, lengths=lengths, logits="last")
    assert close(found, torch.stack([whole[b, n - 1] for b, n in enumerate(lengths)]))
    for step in range(30):  # each row goes on from where it stands
        at = lengths + step
        found = lm.decode(x[torch.arange(3), at][:, None], cache)
        assert close(found[:, 0], whole[torch.arange(3), at])
    assert cache.seen.tolist() == [100, 31, 63]
    some = torch.tensor([0, 5, 0])  # no token for two rows
    rest = torch.stack([x[0, :8], x[1, 31:39], x[2, :8]])
    found = lm.decode(rest, cache, lengths=some, logits="last")
    assert close(found[1], whole[1, 35]) and cache.seen.tolist() == [100, 36, 63]
    found = lm.decode(x[:, 63:64], cache, lengths=torch.tensor([0, 0, 1]), logits="last")
    assert close(found[2], whole[2, 63])
    assert close(lm.decode(x[:, 64:72], cache, lengths=torch.tensor([0, 0, 8]))[2], whole[2, 64:72])


@pytest.mark.parametrize("paper_compat", [False, True])
def test_long_texts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, paper_compat: bool) -> None:
    monkeypatch.setattr(decoding, "CHUNK", 16)
    lm, x = make(replace(SMALL, paper_compat=paper_compat)), text(2, 100)
    whole = lm(x).logits
    assert close(lm.decode(x, lm.cache(2)), whole)
    assert close(lm.decode(x, lm.cache(2), logits="last"), whole[:, -1])
    found = lm.decode(x, cache := lm.cache(2), lengths=torch.tensor([100, 13]), logits="last")
    assert close(found, torch.stack([whole[0, 99], whole[1, 12]])) and cache.seen.tolist() == [100, 13]
    assert lm.decode(x, cache, logits="none") is None


def test_dropout_is_off_and_training_goes_on() -> None:
    lm = make(replace(with_attention(SMALL, dropout=0.5), feedforward=FeedForwardConfig(dim=48, dropout=0.5)))
    x, expected = text(1, 30), None
    expected = lm(x).logits
    lm.train()
    found = lm.decode(x, lm.cache(1))
    assert close(found, expected) and lm.training and lm.blocks[0].feedforward.dropout.training
    lm(x).logits.sum().backward()  # what reading left behind does not stand in the way


def test_spans_that_change_resize_the_cache() -> None:
    lm, x = make(with_attention(SMALL, max_span=100)), text(1, 300)
    cache = lm.cache(1)
    lm.decode(x[:, :150], cache)
    before = cache.bytes()
    with torch.no_grad():
        for module in lm.spans_modules():
            module.ratio.mul_(0.5)
    lm.decode(x[:, 150:151], cache)
    assert cache.bytes() < before
    assert [layer.reach for layer in cache.layers] == [[n + 1 for n in each] for each in lm.context_length()]
    with torch.no_grad():
        for module in lm.spans_modules():
            module.ratio.mul_(2)
    lm.decode(x[:, 151:], cache)
    assert cache.bytes() == before
    with torch.no_grad():  # a table of positions that changes is read anew
        lm = make(CONFIGS["distance_bias"])
        cache = lm.cache(1)
        lm.decode(x[:, :5], cache)
        first = lm.decode(x[:, 5:6], cache.fork(1))
        lm.position.bias.add_(torch.randn_like(lm.position.bias))
        assert not close(lm.decode(x[:, 5:6], cache), first)


def test_cache_bytes_are_the_sum_of_reaches() -> None:
    lm = make(with_attention(replace(SMALL, kv_heads=2), max_span=1000))
    cache = lm.cache(3)
    reach = [max(each[g : g + 2]) + 1 for each in lm.context_length() for g in (0, 2)]
    assert cache.bytes() == 3 * sum(reach) * 2 * 8 * 8
    assert cache.full_bytes(5000) == 3 * 5000 * 3 * 2 * 2 * 8 * 8
    assert lm.cache(3, bits=8).bytes() == 3 * sum(reach) * 2 * (8 + 4)
    newest = 16 * len(reach) * 2 * (8 + 4)  # in 8 bits
    assert lm.cache(3, bits=4).bytes() == 3 * (sum(reach) * 2 * (16 + 4) + newest)  # codes and scales of 32 numbers


@pytest.mark.parametrize("name", ["rotary", "paper", "dynamic"])
def test_crop_reorder_and_fork(name: str) -> None:
    lm, x = make(CONFIGS[name]), text(2, 100)
    whole, cache = lm(x).logits, lm.cache(2, slack=7)
    lm.decode(x[:, :80], cache)
    for _ in range(3):  # again and again, past where a ring has wrapped
        lm.decode(x[:, 80:87] + 1, cache)
        cache.crop(torch.tensor([80, 80]))
        with pytest.raises(ValueError, match="row 0 cannot be cropped from 80 to 78"):  # 87 tokens were written
            cache.crop(torch.tensor([78, 78]))
    lm.decode(x[:, 80:84], cache)
    cache.crop(torch.tensor([82, 84]))
    assert cache.seen.tolist() == [82, 84]
    forked = cache.fork(2)
    assert forked.batch == 4 and forked.seen.tolist() == [82, 82, 84, 84]
    with pytest.raises(ValueError, match=r"row 0 cannot be cropped from 82 to 50 tokens.*a slack above 7"):
        cache.crop(torch.tensor([50, 50]))
    cache.reorder(torch.tensor([1, 0, 1]))
    new = torch.stack([x[1, 84:90], x[0, 82:88], x[1, 84:90]])
    found = lm.decode(new, cache)
    assert close(found, torch.stack([whole[1, 84:90], whole[0, 82:88], whole[1, 84:90]]))
    step = lm.decode(x[[0, 0, 1, 1], [82, 82, 84, 84]][:, None], forked)  # knows nothing of what the other did
    assert close(step[:, 0], whole[[0, 0, 1, 1], [82, 82, 84, 84]])


def test_crop_to_anything_before_a_ring_has_wrapped() -> None:
    lm, x = make(with_attention(SMALL, kind="full", max_span=50)), text(1, 60)
    cache = lm.cache(1)
    lm.decode(x[:, :50], cache)
    cache.crop(torch.tensor([3]))
    assert close(lm.decode(x[:, 3:40], cache), lm(x).logits[:, 3:40])
    with pytest.raises(ValueError, match="row 0 has read 40 tokens; it cannot be cropped to 41"):
        cache.crop(torch.tensor([41]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("bits", "share"), [(8, 0.01), (4, 0.1)])
def test_cache_of_few_bits_is_close_to_float(bits: int, share: float, dtype: torch.dtype) -> None:
    lm, x = make(CONFIGS["hybrid heads"]).to(dtype), text(2, 127)
    truth = lm(x).logits
    apart = (read_in(lm, x, PIECES["mixed"], bits=bits) - truth).abs()
    assert 0 < apart.mean() < share * truth.std() and apart.max() < 10 * share * truth.std()


@pytest.mark.skipif(bool(kernel.problem()), reason="the compiled kernel is not here")
@pytest.mark.parametrize("bits", [8, 4])
def test_backends_agree_on_few_bits(bits: int) -> None:
    x = text(2, 60)
    native, banded = (make(with_attention(CONFIGS["grouped"], backend=b)).float() for b in ("native", "banded"))
    assert torch.allclose(*(read_in(lm, x, [1] * 60, bits=bits) for lm in (native, banded)), atol=1e-3)


def test_model_that_was_moved_or_copied_after_reading() -> None:
    lm, x = make(CONFIGS["distance_bias"]), text(1, 40)
    cache = lm.cache(1)
    lm.decode(x[:, :20], cache)
    twin = copy.deepcopy(lm)
    assert close(twin.decode(x, twin.cache(1)), lm(x).logits)
    lm.float()
    with pytest.raises(
        ValueError, match=r"the KV cache was made for torch\.float64 on cpu and the model has torch\.float32 on cpu"
    ):
        lm.decode(x[:, 20:], cache)
    found = lm.decode(x, lm.cache(1))
    assert found is not None and torch.allclose(found, lm(x).logits, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_empty_batch(name: str) -> None:
    lm = make(CONFIGS[name])
    cache = lm.cache(0)
    for t in (5, 1):
        assert lm.decode(text(1, t)[:0], cache).shape == (0, t, 37)
    assert lm.decode(text(1, 3)[:0], cache, logits="last").shape == (0, 37)


def test_rings_that_were_changed_by_reading_can_be_cropped() -> None:
    """Reading runs in inference mode, and what it makes must not be bound to it; nor what others make in it."""
    lm, x = make(with_attention(SMALL, max_span=100)), text(1, 100)
    with torch.inference_mode():
        cache = lm.cache(1, slack=5)
        lm.decode(x[:, :50], cache)
        cache.reorder(torch.tensor([0]))
    with torch.no_grad():
        for module in lm.spans_modules():
            module.ratio.mul_(0.5)
    lm.decode(x[:, 50:60], cache)
    cache.crop(torch.tensor([58]))
    assert cache.seen.tolist() == [58]


REFUSED = {
    r"the KV cache was made for torch\.float64 on cpu and the model has torch\.float32": lambda lm, x: (
        cache := lm.cache(2),
        lm.float().decode(x, cache),
    ),
    r"lengths is \[3\.5, 2\.0\]; expected 2 numbers": lambda lm, x: lm.decode(
        x, lm.cache(2), lengths=torch.tensor([3.5, 2])
    ),
    "the KV cache belongs to another model": lambda lm, x: lm.decode(x, make(SMALL).cache(2)),
    r"x has shape \[1, 9\]; expected 2 rows": lambda lm, x: lm.decode(x[:1], lm.cache(2)),
    r"x has shape \[2, 0\].*T at least 1": lambda lm, x: lm.decode(x[:, :0], lm.cache(2)),
    "outside the vocabulary; expected 0 … 36": lambda lm, x: lm.decode(x + 37, lm.cache(2)),
    r"lengths is \[3, 10\]; expected 2 numbers of real tokens, 0 … 9": lambda lm, x: lm.decode(
        x, lm.cache(2), lengths=torch.tensor([3, 10])
    ),
    "logits is 'some'": lambda lm, x: lm.decode(x, lm.cache(2), logits="some"),
    "bits is 5; expected 0, for the model's dtype, 8 or 4": lambda lm, x: lm.cache(2, bits=5),
    "slack is -1": lambda lm, x: lm.cache(2, slack=-1),
    "copies is 0": lambda lm, x: lm.cache(2).fork(0),
    r"rows holds \[2\]; expected numbers 0 … 1": lambda lm, x: lm.cache(2).reorder(torch.tensor([2])),
    r"rows has shape \[1, 1\]": lambda lm, x: lm.cache(2).reorder(torch.tensor([[0]])),
    r"lengths has shape \[1\]; expected whole numbers \[2\]": lambda lm, x: lm.cache(2).crop(torch.tensor([0])),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_named(message: str) -> None:
    lm = make(SMALL)
    with pytest.raises(ValueError, match=message):
        REFUSED[message](lm, text(2, 9))


def test_refused_token_changes_nothing() -> None:
    lm, x = make(SMALL), text(1, 40)
    cache = lm.cache(1)
    lm.decode(x[:, :39], cache)
    with pytest.raises(ValueError, match="token 37 is outside the vocabulary; expected 0 … 36"):
        lm.decode(torch.tensor([[37]]), cache)
    assert close(lm.decode(x[:, 39:], cache), lm(x).logits[:, 39:])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text() -> None:
    config = ModelConfig(vocab=37, dim=32, layers=2, heads=4, attention=SMALL.attention)
    lm = LM(config)
    cache, x = lm.cache(1), text(1, 4096)
    held, resident = cache.bytes(), []
    for _ in range(50):
        lm.decode(x, cache, logits="none")
        resident.append(resident_bytes())
    assert cache.bytes() == held and cache.seen.tolist() == [50 * 4096]
    assert max(resident[10:]) <= 1.02 * resident[9]
