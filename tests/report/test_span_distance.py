"""The distance between the spans of models: against its definition, whatever the order of heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer import LM, ModelConfig
from spanformer.cli.main import main
from spanformer.core.fields import as_dict
from spanformer.model.config import AttentionConfig
from spanformer.model.folder import write_folder
from spanformer.report.span_distance import distance, distribution_table, draw_distributions, octaves
from support.refusals import refusal

CODE = [[0.0, 3.0, 7.0], [1.0, 1.0, 63.0]]
PROSE = [[15.0, 0.0, 1.0], [63.0, 1.0, 1.0]]


def test_distance_of_spans_by_rank() -> None:
    """Layer 1: 0, 2, 3 and 0, 1, 4 octaves; layer 2 is the same in another order."""
    assert distance(CODE, PROSE) == pytest.approx((0 + 1 + 1) / 6) and distance(CODE, CODE) == 0


def test_distance_is_the_mean_wasserstein_distance_of_layers() -> None:
    draw = np.random.default_rng(0)
    a, b = (draw.uniform(0, 500, (5, 8)) for _ in range(2))
    layers = [area_between(np.log2(1 + x), np.log2(1 + y)) for x, y in zip(a, b, strict=True)]
    assert distance(a.tolist(), b.tolist()) == pytest.approx(np.mean(layers))


def area_between(x: np.ndarray, y: np.ndarray) -> float:
    """Between the cumulative distributions: the other definition of the Wasserstein distance."""
    at = np.sort(np.concatenate([x, y]))
    below = [(values[:, None] <= at[:-1]).mean(0) for values in (x, y)]
    return float((np.abs(below[0] - below[1]) * np.diff(at)).sum())


def test_heads_without_spans_do_not_count() -> None:
    mixed = [[None, 3.0, 0.0, 7.0], [None] * 4, [1.0, None, 1.0, 63.0]]
    assert np.array_equal(octaves(mixed), octaves(CODE))


def test_models_of_other_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="one model has 2 layers of 3 heads with spans and the other 1 of 3"):
        distance(CODE, PROSE[:1])
    with pytest.raises(ValueError, match=r"heads with a span, by layer, are \[3, 1\]; expected equally many"):
        octaves([[1.0, 2.0, 3.0], [None, 1.0, None]])


def test_table_and_picture(tmp_path: Path) -> None:
    table = distribution_table({"code": CODE, "prose": PROSE})
    assert "| code | 12.5 | 2.0 | 63.0 | 0 | 0.33 |" in table
    drawn = draw_distributions({"code": CODE, "prose": PROSE}, 64, tmp_path / "spans.png")
    assert drawn.stat().st_size > 5000


def saved(folder: Path, layers: int, kind: str = "adaptive_span") -> str:
    torch.manual_seed(layers)
    attention = AttentionConfig(kind=kind, max_span=64, init=0.5)
    config = ModelConfig(vocab=256, dim=16, layers=layers, heads=2, attention=attention)
    write_folder(folder, {"model": LM(config).state_dict()}, {"model": as_dict(config)})
    return str(folder)


def test_spans_command_compares_models(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one, same = saved(tmp_path / "one", 2), saved(tmp_path / "same", 2)
    main(["spans", one, same, "--out", str(tmp_path / "spans.png")])
    assert "| one | 32.0 | 32.0 | 32.0 | 0 | 0.00 |" in capsys.readouterr().out
    assert (tmp_path / "spans.png").exists()


def test_spans_command_refuses_what_it_cannot_compare(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one, deeper = saved(tmp_path / "one", 2), saved(tmp_path / "deeper", 3)
    fixed = saved(tmp_path / "fixed", 2, "window(8)")
    assert "one model has 2 layers of 2 heads" in refusal(["spans", one, deeper], capsys)
    assert "fixed has no spans that are the same" in refusal(["spans", one, fixed], capsys)
    assert "a model is named twice" in refusal(["spans", one, one], capsys)
    assert "no model is given" in refusal(["spans"], capsys)
