"""Spans in a terminal."""

from __future__ import annotations

import dataclasses
import math

import pytest

from spanformer.report.events import read_run
from spanformer.report.spans_text import WIDTH, spans_table, summary
from support import synthetic_runs as synthetic

SPANS, REACH = [[0.0, 12.25], [None, 1024.0]], [[32, 45], [1024, 1024]]


def test_every_head_is_listed_in_tokens():
    lines = spans_table(SPANS, REACH, 1024).splitlines()
    assert [line.split()[:3] for line in lines[2:4]] == [["1", "0.0", "32"], ["2", "12.2", "45"]]
    assert [line.split()[:3] for line in lines[5:7]] == [["1", "none", "1,024"], ["2", "1,024.0", "1,024"]]
    assert lines[1].startswith("layer 1") and lines[1].endswith("mean 6.1, longest 12.2")
    assert "limit 1,024" in lines[-1]


def test_bars_are_solid_to_the_span_and_shaded_over_the_ramp():
    lines = spans_table(SPANS, REACH, 1024).splitlines()
    bars = [line.split()[3] for line in (lines[2], lines[3], lines[6])]
    assert set(bars[0]) == {"░"} and bars[2] == "█" * WIDTH
    place = lambda count: WIDTH * math.log2(1 + count) / math.log2(1025)  # noqa: E731
    assert bars[1].count("█") == int(place(12.25)) and len(bars[1]) == round(place(45))


def test_ascii_is_ascii():
    shown = spans_table(SPANS, REACH, 1024, ascii_only=True)
    assert shown.isascii() and "#" * WIDTH in shown and "....." in shown


def test_ruler_is_aligned_with_the_bars():
    top, *_, last, _ = spans_table([[1.0], [256.0]], [[1], [256]], 1024).splitlines()
    assert top.index("256") == len(last)


@pytest.mark.parametrize("spans, reach", [([], []), ([[1.0]], [[1, 2]]), ([[]], [[]])])
def test_tables_that_do_not_fit_are_refused(spans, reach):
    with pytest.raises(ValueError, match=r"spans has .* heads by layer; expected .*, as reach has"):
        spans_table(spans, reach, 8)


def test_limit_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_span is 0; expected at least 1 token"):
        spans_table([[1.0]], [[1]], 0)


def test_run_in_a_paragraph(tmp_path):
    run = read_run(synthetic.write(tmp_path, synthetic.events(layers=2, heads=2, steps=10)))
    said = summary(run)
    assert said.startswith("enwik8 tiny: 100 steps over 205 k tokens in 40 s. Validation went from ")
    assert f"to {run.evals[-2].bits:.3f} bits per byte" in said and "of 1,024 allowed" in said
    assert "FLOPs." in said and "\n" not in said
    unseen = dataclasses.replace(run, evals=[])
    assert "never validated" in summary(unseen)
    assert "recorded no step" in summary(dataclasses.replace(unseen, steps=[]))
    lost = dataclasses.replace(run.steps[-1], loss=math.nan)
    assert "not a number" in summary(dataclasses.replace(unseen, steps=[lost]))
