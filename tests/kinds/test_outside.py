"""A mechanism and a position encoding from outside the package (tests/support/outside.py), registered by one line each,
get all that ours get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

import spanformer.kinds
from spanformer.bench.gallery import GalleryBench, entries
from spanformer.bench.gallery_page import about, draw_attention, draw_position
from spanformer.cli.main import main
from spanformer.cli.show import visible
from spanformer.kinds import KINDS, POSITIONS
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.report.events import read_run
from support import oracles, outside, position_oracles
from support.covering import covering
from support.product import Case, Table, cases, outcome, unbuildable, unsupported
from support.tiny_runs import options

ROWS = (*outside.KIND.tested, "2 every_other(9) + 2 adaptive_span")
PLACES = ("none", "rotary", "shaw", "log_distance")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    spanformer.kinds.register(outside.KIND)
    spanformer.kinds.register_position(outside.POSITION)
    monkeypatch.setitem(oracles.ORACLES, outside.KIND.name, outside.oracle)
    monkeypatch.setitem(position_oracles.SCORES, outside.POSITION.name, outside.scores)
    yield
    KINDS.unregister(outside.KIND.name)
    POSITIONS.unregister(outside.POSITION.name)


def test_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="'every_other' is already registered"):
        spanformer.kinds.register(outside.KIND)
    with pytest.raises(ValueError, match="'log_distance' is already registered"):
        spanformer.kinds.register_position(outside.POSITION)


def test_errors_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(kind: str) -> str:
        with pytest.raises(ValueError) as said:
            ModelConfig(vocab=5, dim=8, layers=1, heads=2, attention=AttentionConfig(kind=kind)).layer_specs()
        return str(said.value)

    assert "every_other" in refused("nonsense")
    assert "did you mean every_other?" in refused("every_othr")
    assert "every_other(window=…)" in refused("every_other(1, 2)")
    assert "window" in refused("every_other(window=0)") and "at least 1" in refused("every_other(window=0)")
    with pytest.raises(ValueError, match="log_distance"):
        PositionConfig(kind="nonsense")


def test_cost_prices_it(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    main(["cost", "--length", "64"])
    assert "every_other" in capsys.readouterr().out
    for causal in (True, False):
        main([
            "cost", "--length", "40", "--heads", "4", "--dim", "64", "--kinds", "every_other(9)", "--json",
            str(tmp_path / "cost.json"), *([] if causal else ["--no-causal"]),
        ])  # fmt: skip
        seen = int(visible("every_other(9)", 40, causal=causal)[0].sum())
        assert str(4 * 4 * 16 * seen) in (tmp_path / "cost.json").read_text().replace(".0", "")


def test_show_draws_it(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    main(["show", "every_other(9)", "--length", "40", "--out", str(tmp_path / "x.png")])
    assert "5 at most" in capsys.readouterr().out
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_gallery_has_an_entry_and_a_picture(tmp_path) -> None:
    shown = entries()["every_other"]
    assert shown.drawn == "every_other(12)" and shown.keys.startswith("window/2")
    assert GalleryBench(names=("every_other", "log_distance")).names
    title, equation = about(shown.about)
    assert title.startswith("Every other token of a window") and "a_ij" in equation
    (seen,) = draw_attention("every_other", tmp_path)
    assert seen[20].nonzero()[0].tolist() == [10, 12, 14, 16, 18, 20]
    draw_position("log_distance", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"every_other.png", "position-log_distance.png"}


def test_train_from_a_run_file(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"model.attention.kind": "1 every_other(window=7) + 1 adaptive_span", "train.steps": 3}
    main(["train", *options(tmp_path, changes | {"model.position.kind": "log_distance", "train.save_every": 0})])
    found = read_run(tmp_path / "run")
    assert len(found.steps) == 3 and all(row.loss > 0 for row in found.steps)
    capsys.readouterr()


@pytest.mark.parametrize("kind", ["lm", "encoder", "seq2seq"])
def test_product_rows_equal_the_oracle(kind: Literal["lm", "encoder", "seq2seq"]) -> None:
    uses = ("trained",) if kind == "encoder" else ("trained", "cached")
    table = Table("Outside", kind, ROWS, PLACES, uses)
    for case in covering(list(cases(table))):
        assert not unbuildable(case, table) and not unsupported(case, table)
        assert outcome(case, table) == "", case


def test_kind_without_an_oracle_fails_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(oracles.ORACLES, outside.KIND.name)
    case = Case("Outside", ROWS[0], "none", "reference", "trained")
    with pytest.raises(AssertionError, match="'every_other' has no dense oracle; add one to ORACLES"):
        outcome(case, Table("Outside", "lm", ROWS))


@pytest.mark.parametrize("use", ["trained", "cached"])
def test_position_that_supports_refuses_is_refused(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    """With a KV cache too."""

    def supports(self, *, position=None, **others) -> list[str]:
        return ["EveryOther goes with no rotated keys"] if getattr(position, "rotates", False) else []

    monkeypatch.setattr(outside.EveryOther, "supports", supports)
    table = Table("Outside", "lm", ROWS)
    assert outcome(Case("Outside", ROWS[0], "rotary", "banded", use), table) == "EveryOther goes with no rotated keys"
    assert outcome(Case("Outside", ROWS[0], "log_distance", "banded", use), table) == ""


def test_unregistered_kind_is_unknown_again() -> None:
    KINDS.unregister("every_other")
    with pytest.raises(ValueError, match="every_other"):
        ModelConfig(vocab=5, dim=8, layers=1, heads=2, attention=AttentionConfig(kind="every_other(9)")).layer_specs()
    spanformer.kinds.register(outside.KIND)
