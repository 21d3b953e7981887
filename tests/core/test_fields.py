"""Config dataclasses from plain dicts: what is read, what is refused and in which words."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from spanformer.core.fields import as_dict, build, nearest


@dataclass(frozen=True)
class Called:
    """What tyro.conf.arg(name=...) leaves in an annotation, as far as it matters."""

    name: str | None


@dataclass(frozen=True)
class Schedule:
    warm_up: int = 8000


@dataclass(frozen=True)
class Optim:
    kind: Literal["adagrad", "adam"] = "adagrad"
    lr: float = 0.07
    span_lr: float | None = None
    nesterov: bool = False
    betas: tuple[float, ...] = (0.9, 0.99)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; expected more than 0")


@dataclass(frozen=True)
class Run:
    steps: int = 100
    source: Annotated[str, Called("from")] = "enwik8"
    out: Annotated[Path, Called(None)] = Path("out")
    splits: list[str] = field(default_factory=lambda: ["train", "valid"])
    window: int | Literal["all"] = "all"
    optim: Optim = field(default_factory=Optim)
    second: Optim | None = None
    derived: int = field(default=3, init=False)


@dataclass(frozen=True)
class Needs:
    depth: int
    optim: Optim = field(default_factory=Optim)


def test_empty_dict_gives_all_defaults() -> None:
    assert build(Run, {}) == Run()


def test_every_kind_of_value_is_read() -> None:
    got = build(
        Run,
        {
            "steps": 3,
            "from": "text8",
            "out": "runs/out",
            "splits": ["a"],
            "window": 64,
            "optim": {"kind": "adam", "lr": 1, "span_lr": 2, "nesterov": True, "betas": [0, 0.5]},
            "second": {"schedule": {"warm_up": 1}},
        },
    )
    optim = Optim("adam", 1.0, 2.0, True, (0.0, 0.5))
    assert got == Run(3, "text8", Path("runs/out"), ["a"], 64, optim, Optim(schedule=Schedule(1)))
    assert isinstance(got.optim.lr, float) and isinstance(got.optim.betas, tuple) and isinstance(got.out, Path)


def test_as_dict_and_json_round_trip() -> None:
    run = Run(7, "text8", Path("a/b"), [], 9, Optim(span_lr=0.5, betas=(1.0,)), Optim("adam"))
    for one in (run, Run()):
        values = as_dict(one)
        assert "from" in values and "source" not in values and "derived" not in values
        assert build(Run, json.loads(json.dumps(values))) == one


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "initials": (
        {"optim": {"learning_rate": 1}},
        "unknown key optim.learning_rate in runs/x.toml; did you mean optim.lr? "
        "(known: kind, lr, span_lr, nesterov, betas, schedule)",
    ),
    "a slip": ({"optim": {"span_rl": 1}}, "unknown key optim.span_rl in runs/x.toml; did you mean optim.span_lr? ("),
    "a section": ({"optm": {}}, "unknown key optm in runs/x.toml; did you mean optim? ("),
    "another section": ({"warm_up": 1}, "unknown key warm_up in runs/x.toml; did you mean optim.schedule.warm_up? ("),
    "the attribute": ({"source": "x"}, "unknown key source in runs/x.toml (known: steps, from, out, splits,"),
    "not settable": ({"derived": 1}, "unknown key derived in runs/x.toml ("),
    "text for a number": ({"optim": {"lr": "fast"}}, "optim.lr in runs/x.toml is 'fast'; expected a number"),
    "true for a number": ({"optim": {"lr": True}}, "optim.lr in runs/x.toml is True; expected a number"),
    "true for an int": ({"steps": True}, "steps in runs/x.toml is True; expected a whole number"),
    "a fraction for an int": ({"steps": 1.5}, "steps in runs/x.toml is 1.5; expected a whole number"),
    "a number for a bool": ({"optim": {"nesterov": 1}}, "optim.nesterov in runs/x.toml is 1; expected true or false"),
    "a number for a string": ({"from": 3}, "from in runs/x.toml is 3; expected a string"),
    "optional": ({"optim": {"span_lr": "x"}}, "optim.span_lr in runs/x.toml is 'x'; expected a number"),
    "a choice": ({"optim": {"kind": "sgd"}}, "optim.kind in runs/x.toml is 'sgd'; expected one of adagrad, adam"),
    "a union": ({"window": "some"}, "window in runs/x.toml is 'some'; expected a whole number or all"),
    "an element": ({"optim": {"betas": [1, "x"]}},
                   "optim.betas in runs/x.toml is [1, 'x']; expected a list of numbers"),
    "no list": ({"splits": "train"}, "splits in runs/x.toml is 'train'; expected a list of strings"),
    "no table": ({"optim": {"schedule": 3}},
                 "optim.schedule in runs/x.toml is 3; expected a table with the keys warm_up"),
    "None": ({"steps": None}, "steps in runs/x.toml is None; expected a whole number"),
    "its own check": ({"optim": {"lr": -1}}, "lr is -1.0; expected more than 0 (optim in runs/x.toml)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_value_is_refused_in_one_sentence(name: str) -> None:
    values, said = REFUSED[name]
    with pytest.raises(ValueError) as refusal:
        build(Run, values, "runs/x.toml")
    assert str(refusal.value).startswith(said) and "\n" not in str(refusal.value)
    assert said.endswith(("(", ",", ";")) or str(refusal.value) == said


@dataclass
class Pair:
    betas: tuple[float, float] = (0.9, 0.99)


def test_unreadable_type_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="betas is of type"):
        build(Pair, {})


def test_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"^the key depth in a\.toml is missing; expected a whole number$"):
        build(Needs, {}, "a.toml")
    assert build(Needs, {"depth": 2}) == Needs(2)


def test_error_without_a_file_names_no_file() -> None:
    with pytest.raises(ValueError, match=r"^optim\.lr is 'fast'; expected a number$"):
        build(Run, {"optim": {"lr": "fast"}})
    with pytest.raises(ValueError, match=r"^lr is 0\.0; expected more than 0 \(optim\)$"):
        build(Run, {"optim": {"lr": 0}})
    with pytest.raises(ValueError, match=r"^lr is 0\.0; expected more than 0$"):
        build(Optim, {"lr": 0})


@pytest.mark.parametrize(
    "wrong, meant",
    [
        ("learning_rate", "lr"),
        ("sp", "span_penalty"),
        ("layer", "layers"),
        ("optim.layers", "layers"),
        ("optm.span_lr", "optim.span_lr"),
        ("optim.qqq", None),
    ],
)
def test_nearest_key_is_suggested(wrong: str, meant: str | None) -> None:
    assert nearest(wrong, ["lr", "span_penalty", "layers", "optim.span_lr"]) == meant


def test_tyros_name_is_read_without_tyro() -> None:
    tyro = pytest.importorskip("tyro")

    @dataclass
    class Start:
        source: str = "x"

    Start.__annotations__["source"] = Annotated[str, tyro.conf.arg(name="from")]
    assert build(Start, {"from": "y"}).source == "y" and as_dict(Start()) == {"from": "x"}


def test_reading_configs_loads_neither_torch_nor_tyro() -> None:
    probe = "import sys, spanformer.core.fields; print({'torch', 'tyro', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
