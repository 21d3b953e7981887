"""Model folders whose configuration lies: refused in one sentence, before memory is taken for what it describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spanformer.core.fields import as_dict, build
from spanformer.core.peak import peak_of, unsupported
from spanformer.kinds import KINDS
from spanformer.kinds.notation import parse_layer
from spanformer.model import folder
from spanformer.model.config import FeedForwardConfig, ModelConfig
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.load import MODELS, load_any
from spanformer.model.meta import TooLarge, build_on_meta
from spanformer.model.weights import shapes

SMALL = ModelConfig(vocab=17, dim=16, layers=2, heads=2, feedforward=FeedForwardConfig(dim=16))
LIES: dict[str, dict[str, Any]] = {
    "width": {"dim": 10**9},
    "width beyond int64": {"dim": 10**30},
    "layers": {"layers": 10**7},
    "layers that may be": {"layers": 4096},
    "vocabulary": {"vocab": 10**12},
    "vocabulary that may be": {"vocab": 2**31},
    "vocabulary and width": {"vocab": 2**31, "dim": 2**31},
    "heads": {"heads": 10**8, "dim": 10**8},
    "persistent": {"persistent": 2**31},
    "feed-forward": {"feedforward": {"dim": 2**31}},
    "experts": {"feedforward": {"experts": 10**9}},
    "experts that may be": {"feedforward": {"experts": 4096}},
    "learned positions": {"position": {"kind": "learned", "length": 2**31}},
    "table of positions": {"position": {"kind": "table"}, "attention": {"max_span": 2**31}},
    "ramp": {"position": {"kind": "table"}, "attention": {"ramp": 1e300}},
    "clip": {"position": {"kind": "shaw", "clip": 2**31}},
    "cutoffs": {"embedding": {"cutoffs": list(range(1, 2000))}, "vocab": 10**6},
    "cutoffs that fall": {"embedding": {"cutoffs": [5, 3]}},
    "divisor": {"embedding": {"cutoffs": [5], "divisor": 0}},
    "kinds": {"attention": {"stack": ["window(8)"] * 100_000}, "layers": 10**5},
    "encoder": {"kind": "seq2seq", "encoder": {"layers": 10**7}},
}


def write(path: Path, model: dict[str, Any]) -> None:
    """A folder of a small model, signed, whose configuration says otherwise."""
    torch.manual_seed(0)
    folder.write_folder(path, {"model": dict(LM(SMALL).state_dict())}, {"model": as_dict(SMALL) | model})


@pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))
@pytest.mark.slow
def test_config_with_false_sizes_is_refused_without_allocating(tmp_path: Path) -> None:
    for name, lie in LIES.items():
        path = tmp_path / name
        write(path, lie)
        said: list[str] = []

        def load(path: Path = path, said: list[str] = said) -> None:
            with pytest.raises(ValueError) as caught:
                load_any(path)
            said.append(str(caught.value))

        peak, seconds = peak_of(load)
        assert "\n" not in said[0] and ("expected" in said[0] or "do not fit its configuration" in said[0]), said
        assert peak < 64e6 and seconds < 20, (name, peak, seconds)


def test_kind_with_a_number_beyond_tensors_is_refused() -> None:
    for name, kind in KINDS.items():
        for param in kind.params:
            expected = "expected one of" if param in kind.choices else "expected a number up to"
            with pytest.raises(ValueError, match=expected):
                parse_layer(f"{name}({param}={10**30})", SMALL.heads)


@pytest.mark.slow
def test_kind_with_a_large_number_is_refused_or_small() -> None:
    """Built on the meta device: what a kind lists in Python is real memory there too."""
    for name, kind in KINDS.items():
        for param in kind.params:
            text = f"{name}({param}={10**8})"
            peak, seconds = peak_of(lambda text=text: _build_or_refuse(text))
            assert peak < 64e6 and seconds < 5, text


def _build_or_refuse(kind: str) -> None:
    try:
        model = "encoder" if kind.startswith("etc") else "lm"
        position = {"kind": "none"}
        config = build(
            ModelConfig, as_dict(SMALL) | {"kind": model, "attention": {"kind": kind}, "position": position}
        )  # fmt: skip
        build_on_meta(lambda: MODELS[model](config))
    except ValueError as error:
        assert "\n" not in str(error)


def test_shapes_on_the_meta_device_are_the_models() -> None:
    """For every kind that has a name, so that no folder is refused for how it is checked."""
    for name in KINDS:
        make: Callable[[ModelConfig], LM | Encoder] = Encoder if name.startswith(("etc", "linformer")) else LM
        kind = "encoder" if make is Encoder else "lm"
        config = build(
            ModelConfig,
            as_dict(SMALL) | {"kind": kind, "attention": {"kind": name}, "position": {"kind": "none"}},
        )
        planned = build_on_meta(lambda make=make, config=config: make(config))
        assert shapes(planned.state_dict()) == shapes(make(config).state_dict()), name
        assert all(p.is_meta for p in planned.parameters()), name


def test_building_on_the_meta_device_stops_at_its_limits() -> None:
    with pytest.raises(TooLarge, match="there are 6 parameters of "):
        build_on_meta(lambda: LM(SMALL), tensors=5)
    with pytest.raises(TooLarge, match="more to come"):
        build_on_meta(lambda: LM(SMALL), numbers=1000)
    torch.nn.Linear(2, 2)  # nothing is counted any more
    before = torch.get_rng_state()
    build_on_meta(lambda: LM(SMALL))
    assert torch.equal(before, torch.get_rng_state())


def test_config_that_is_no_table_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", {"attention": 5})
    with pytest.raises(ValueError, match=r"attention in .* is 5; expected a table"):
        load_any(tmp_path / "m")
    meta = json.loads((tmp_path / "m" / "meta.json").read_text())
    assert meta["model"]["attention"] == 5
