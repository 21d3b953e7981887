"""A run file and options over it: what is read, and one sentence for every mistake."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from spanformer.cli.options import parse_options
from spanformer.cli.runfile import read_run

KNOWN = ("runs/demo.toml", "runs/enwik8_small.toml")


@dataclass(frozen=True)
class Optim:
    """How weights move."""

    kind: Literal["adagrad", "adam"] = "adagrad"
    """Which optimiser."""
    lr: float = 0.07
    """The learning rate."""
    span_lr: float | None = None
    """The spans' own rate."""
    nesterov: bool = False
    """Look ahead."""
    betas: tuple[float, ...] = (0.9, 0.99)
    """Adam's decays."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr is {self.lr}; expected more than 0")


@dataclass(frozen=True)
class Run:
    """Train a model."""

    steps: int = 100
    """Optimiser steps."""
    source: Annotated[str, tyro.conf.arg(name="from")] = "enwik8"
    """Where the text comes from."""
    out: Path = Path("out")
    """Folder for the results."""
    lengths: tuple[int, ...] | None = None
    """Lengths to measure."""
    optim: Optim = field(default_factory=Optim)


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "x.toml"
    file.write_text('steps = 7\nfrom = "text8"\n[optim]\nlr = 1\nnesterov = true\n')
    return str(file)


def read(*arguments: str) -> Run:
    return read_run(Run, "spanformer train", list(arguments), KNOWN)


def refusal(*arguments: str) -> str:
    with pytest.raises(ValueError) as error:
        read(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_a_file_all_fields_have_defaults() -> None:
    assert read() == Run()


def test_file_overrides_defaults(path: str) -> None:
    assert read(path) == Run(7, "text8", optim=Optim(lr=1.0, nesterov=True))


def test_options_override_the_file(path: str) -> None:
    words = ["--steps", "9", "--optim.span-lr", "0.5", "--optim.betas", "0.5", "0.6", "--optim.no-nesterov"]
    assert read(path, *words) == Run(9, "text8", optim=Optim("adagrad", 1.0, 0.5, False, (0.5, 0.6)))


@pytest.mark.parametrize("option", ["--optim.span-lr", "--optim.span_lr"])
def test_options_accept_dashes_and_underscores(option: str) -> None:
    assert read(option, "3").optim.span_lr == read(f"{option}=3").optim.span_lr == 3.0


def test_option_has_the_name_of_its_key() -> None:
    assert read("--from", "text8").source == "text8"


def test_help_lists_every_field_with_its_help_and_current_value(path: str, capsys) -> None:
    for arguments, usage, values in (
        ((path, "--help"), f"usage: spanformer train {path}", ("7", "text8", "1.0", "True")),
        (("--help",), "usage: spanformer train [RUN.toml]", ("100", "enwik8", "0.07", "False")),
    ):
        with pytest.raises(SystemExit) as end:
            read(*arguments)
        out = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert not end.value.code and " ".join(usage.split()) in out
        for option, text in (
            ("--steps", f"Optimiser steps. (default: {values[0]})"),
            ("--from", f"Where the text comes from. (default: {values[1]})"),
            ("--out", "Folder for the results. (default: out)"),
            ("--optim.kind {adagrad,adam}", "Which optimiser. (default: adagrad)"),
            ("--optim.lr", f"The learning rate. (default: {values[2]})"),
            ("--optim.span-lr", "The spans' own rate. (default: None)"),
            ("--optim.nesterov", f"Look ahead. (default: {values[3]})"),
            ("--optim.betas", "Adam's decays. (default: 0.9 0.99)"),
        ):
            assert option in out and text in out


SEE = " (see spanformer train [RUN.toml] --help)"


@pytest.mark.parametrize(
    "words, said",
    [
        ("--optim.learning-rate 3", "there is no option --optim.learning-rate; did you mean --optim.lr?"),
        ("--lr 3", "there is no option --lr; did you mean --optim.lr?"),
        ("--optim.span-rl 3", "there is no option --optim.span-rl; did you mean --optim.span-lr?"),
        ("--zzz", "there is no option --zzz"),
        ("--steps x", "--steps is 'x'; expected a whole number"),
        ("--steps 1e3", "--steps is '1e3'; expected a whole number"),
        ("--steps=1.5", "--steps is '1.5'; expected a whole number"),
        ("--optim.lr fast", "--optim.lr is 'fast'; expected a number"),
        ("--optim.span_lr no", "--optim.span-lr is 'no'; expected a number"),
        ("--optim.betas 1 x", "--optim.betas is '1 x'; expected numbers"),
        ("--lengths 1 x", "--lengths is '1 x'; expected whole numbers"),
        ("--lengths None --steps x", "--steps is 'x'; expected a whole number"),
        ("--optim.span-lr None --steps x", "--steps is 'x'; expected a whole number"),
        ("--optim.kind sgd", "--optim.kind is 'sgd'; expected one of adagrad, adam"),
        ("--optim.lr", "--optim.lr has no value; expected a number"),
        ("--optim.lr --steps 3", "--optim.lr has no value; expected a number"),
        ("--optim.nesterov true", "--optim.nesterov takes no value; write --optim.nesterov or --optim.no-nesterov"),
        ("--optim.lr -1", "lr is -1.0; expected more than 0"),
        ("--steps 3 runs/demo.toml", "'runs/demo.toml' belongs to no option"),
    ],
)
def test_wrong_option_is_one_sentence(words: str, said: str) -> None:
    assert refusal(*words.split()) == said + SEE


@dataclass(frozen=True)
class Pair:
    sizes: tuple[int, int] = (1, 2)
    """A type that only tyro reads."""


def test_unexplained_error_uses_tyros_message() -> None:
    with pytest.raises(ValueError) as error:
        parse_options(Pair, "spanformer pair", ["--sizes", "1", "x"])
    assert "--sizes" in str(error.value) and "\n" not in str(error.value) and "│" not in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    assert refusal("runs/enwik8_smal.toml") == (
        "runs/enwik8_smal.toml does not exist; did you mean runs/enwik8_small.toml?"
    )
    assert refusal("demo") == "demo does not exist; did you mean runs/demo.toml?"
    assert refusal("qqq") == "qqq does not exist; expected a TOML file, such as runs/demo.toml, runs/enwik8_small.toml"
    assert refusal(str(tmp_path)) == (
        f"{tmp_path} is a folder; expected a TOML file, such as runs/demo.toml, runs/enwik8_small.toml"
    )


@pytest.mark.parametrize(
    "text, said",
    [
        (b"steps = 7\nlr = = 3\n", " is not TOML: Invalid value (at line 2, column 6)"),
        (b"steps = 7\nsteps = 8\n", " is not TOML: Cannot overwrite a value (at line 2, column 10)"),
        (b"x = " + b"[" * 5000 + b"]" * 5000, " is not a run file: its tables or lists are nested too deeply"),
        (b"[steps." + b"a." * 5000 + b"a]\n", " is not a run file: its tables or lists are nested too deeply"),
        (b"#" * (1 << 20) + b"\n", " is not TOML: it has more than 1,048,576 bytes"),
        (b"from = '\xff'", " is not TOML: 'utf-8' codec can't decode byte 0xff in position 8: invalid start byte"),
    ],
)
def test_file_that_is_not_toml(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "x.toml").write_bytes(text)
    assert refusal(str(tmp_path / "x.toml")) == str(tmp_path / "x.toml") + said


def test_wrong_key_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[optim]\nlearning_rate = 3\n")
    assert refusal(str(file)).startswith(f"unknown key optim.learning_rate in {file}; did you mean optim.lr? (known: ")
    file.write_text('[optim]\nlr = "fast"\n')
    assert refusal(str(file)) == f"optim.lr in {file} is 'fast'; expected a number"
    file.write_text("[optim]\nlr = -1\n")
    assert refusal(str(file)) == f"lr is -1.0; expected more than 0 (optim in {file})"


def test_file_overrides_its_base(tmp_path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "whole.toml").write_text("[optim]\nlr = 0.5\n[train]\nsteps = 7\n")
    (tmp_path / "small" / "less.toml").write_text('base = "../whole.toml"\n[train]\nsteps = 3\n')
    from spanformer.cli.runfile import _read

    assert _read(str(tmp_path / "small" / "less.toml"), ()) == {"optim": {"lr": 0.5}, "train": {"steps": 3}}
    (tmp_path / "loop.toml").write_text('base = "loop.toml"\n')
    with pytest.raises(ValueError, match="is its own base"):
        _read(str(tmp_path / "loop.toml"), ())
    (tmp_path / "lost.toml").write_text('base = "nowhere.toml"\n')
    with pytest.raises(ValueError, match=r"nowhere\.toml does not exist"):
        _read(str(tmp_path / "lost.toml"), ())
