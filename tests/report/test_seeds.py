"""Comparisons with different seeds in one table: means and ranges, what is refused, and the rows that it is made of."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from spanformer.cli.main import main
from spanformer.core.fields import as_dict
from spanformer.report import measures, seeds
from spanformer.report.compare_rows import compare_rows, read_rows
from spanformer.report.events import read_run
from spanformer.report.seeds import seeds_table
from support import synthetic_runs as synthetic

KINDS = {"adaptive_span": 0.2, "full": 0.6}
"""seconds of a step"""


def comparison(folder, seed, **options):
    """The rows of two runs with this seed, whose bits are lower by 0.1 with each seed."""
    runs = []
    for kind, pace in KINDS.items():
        rows = synthetic.events(
            name=kind, kind=kind, layers=2, heads=2, steps=40, floor=1.6 - 0.1 * seed, pace=pace, seed=seed, **options
        )
        rows[0]["config"]["train"]["seed"] = seed
        runs.append(read_run(synthetic.write(folder / kind, rows)))
    found = compare_rows(runs, list(KINDS))
    folder.joinpath("compare.json").write_text(json.dumps([as_dict(row) for row in found]))
    return found


@pytest.fixture
def both(tmp_path):
    return {f"out-{seed}": comparison(tmp_path / f"out-{seed}", seed) for seed in (1, 2)}


def test_rows_hold_what_the_table_needs(tmp_path):
    rows = comparison(tmp_path / "a", 1)
    run = read_run(tmp_path / "a" / "adaptive_span")
    learned, full = rows
    assert (learned.attention, learned.seed, full.attention) == ("adaptive_span", 1, "full")
    assert learned.test_bits == run.evals[-1].bits and learned.test_tokens == 5_000_000
    spans = measures.looks_back(run.steps[-1])
    assert (learned.span_average, learned.span_longest) == (spans.mean(), spans.max())
    costs = measures.predicted(run)
    assert costs is not None and learned.predicted_attention_share == costs[0].by_span / costs[1].by_span < 0.5
    others = costs[1].total - costs[1].by_span
    assert learned.attention_share == pytest.approx((6.1e10 - others) / (1.9e11 - others))
    assert full.predicted_attention_share == 1.0
    assert read_rows(tmp_path / "a") == read_rows(tmp_path / "a" / "compare.json") == rows


def test_parts_of_a_step_and_the_saving(tmp_path):
    """Synthetic steps: a fifth attention, two fifths other products, three tenths the optimiser."""
    learned, full = comparison(tmp_path / "a", 1)
    parts = [getattr(learned, f"{part}_seconds") for part in measures.TIME_PARTS]
    assert parts == pytest.approx([0.04, 0.08, 0.06, 0.02]) and sum(parts) == pytest.approx(learned.seconds_per_step)
    assert learned.saving == pytest.approx((0.6 - 0.2) / (0.6 - 0.6 * (1 - 0.2))) and full.saving is None
    runs = [read_run(tmp_path / "a" / name) for name in KINDS]
    assert compare_rows(runs[:1], ["adaptive_span"])[0].saving is None  # no full attention beside it
    assert compare_rows([*runs, runs[1]], ["a", "b", "c"])[0].saving is None  # two: which?
    unmeasured = replace(runs[1], costs=[])
    assert compare_rows([runs[0], unmeasured], list(KINDS))[0].saving is None
    layers = replace(runs[1].start, config={"model": {"attention": {"kind": "x", "stack": ["full", "full"]}}})
    assert compare_rows([runs[0], replace(runs[1], start=layers)], list(KINDS))[0].saving == learned.saving


def test_operations_of_attention_are_unknown_without_a_count(tmp_path):
    run = read_run(synthetic.write(tmp_path, synthetic.events(layers=2, heads=2, steps=20)))
    less = [replace(row, flops={"learned": 1.0, "full": 1.9e11}) for row in run.costs]
    assert math.isfinite(measures.counted_attention_share(run))
    assert math.isnan(measures.counted_attention_share(replace(run, costs=less)))  # fewer than the other products
    assert math.isnan(measures.counted_attention_share(replace(run, costs=[])))
    assert math.isnan(measures.predicted_attention_share(replace(run, steps=[])))


def test_means_and_ranges(both):
    header, rows = seeds_table(both)
    assert header[:5] == ["run", "seeds", "bits per byte", "bits at 819 k tokens", "bits at 80 s"]
    assert [row[:2] for row in rows] == [["adaptive_span", "2"], ["full", "2"]]
    cells = dict(zip(header, rows[0], strict=True))
    one, two = (found[0] for found in both.values())
    low, high = f"{two.test_bits:.3f}", f"{one.test_bits:.3f}"
    assert (low, high) == ("1.700", "1.800")
    assert cells["test bits, 5 M tokens"] == f"1.750 ({low} … {high})"
    assert cells["a step"] == "200 ms" and cells["peak memory"] == "486 MiB"
    assert [cells[name] for name in measures.TIME_PARTS.values()] == ["40 ms", "80 ms", "60 ms", "20 ms"]
    assert cells["saving"] == "333 %" and dict(zip(header, rows[1], strict=True))["saving"] == "–"
    assert dict(zip(header, rows[1], strict=True))["by arithmetic"] == "100 %"
    for name, column in (("average span", "span_average"), ("longest span", "span_longest")):
        values = [getattr(row, column) for row in (one, two)]
        low, high = measures.tokens(min(values)), measures.tokens(max(values))
        assert cells[name] == f"{measures.tokens(sum(values) / 2)} ({low} … {high})"


@pytest.mark.parametrize(
    "values, expected",
    [
        ([], "–"), ([None, math.nan], "–"), ([1.0], "1.000"), ([1.0, 1.0001], "1.000"),
        ([2.0, 1.0, 3.0], "2.000 (1.000 … 3.000)"), ([2.0, None], "2.000, 1 of 2"),
    ],
)  # fmt: skip
def test_a_cell_says_how_far_seeds_differ(values, expected):
    assert seeds.said(values, "{:.3f}".format) == expected


def test_run_of_one_comparison_only_has_one_seed(both):
    both["out-2"] = both["out-2"][:1]
    header, rows = seeds_table(both)
    assert [row[1] for row in rows] == ["2", "1"]
    without = {place: found[:1] for place, found in both.items()}
    assert "saving" in header and len(seeds.notes(header)) == 4
    rows = [replace(row, saving=None) for found in without.values() for row in found]
    header = seeds_table({"out-1": rows[:1], "out-2": rows[1:]})[0]
    assert "saving" not in header and len(seeds.notes(header)) == 3


def test_command_prints_and_writes_the_table(tmp_path, both, capsys):
    folders = [str(tmp_path / name) for name in both]
    main(["report", "seeds", *folders, "--out", str(tmp_path / "seeds.md")])
    shown = capsys.readouterr().out
    assert "| adaptive_span | 2 |" in shown and "in brackets the smallest and the largest" in shown
    assert (tmp_path / "seeds.md").read_text() == shown


@pytest.mark.parametrize(
    "change, said",
    [
        ({"seed": 1}, "adaptive_span has the seed 1 in {0} and in {1}; expected another seed for each comparison"),
        ({"parameters": 7}, "adaptive_span has parameters = 4912384 in {0} and 7 in {1}; expected the same model with"),
        ({"attention": "x"}, "adaptive_span has attention = 'adaptive_span' in {0} and 'x' in {1}; expected the same"),
        ({"unit": "word"}, "{0} counts bits per byte and {1} per word; expected the same for all"),
    ],
)
def test_comparisons_that_differ_in_more_are_refused(tmp_path, both, capsys, change, said):
    rows = [as_dict(replace(row, **change)) for row in both["out-2"]]
    folders = [str(tmp_path / name) for name in both]
    (tmp_path / "out-2" / "compare.json").write_text(json.dumps(rows))
    assert said.format(*folders) in refused(capsys, *folders)


def test_files_that_are_no_comparisons_are_one_sentence(tmp_path, both, capsys):
    a, file = tmp_path / "out-1", tmp_path / "out-1" / "compare.json"
    assert "no comparison is given" in refused(capsys)
    assert "expected each once" in refused(capsys, a, tmp_path / "x" / ".." / "out-1")
    assert f"{tmp_path / 'none'} does not exist; expected the folder of a comparison" in refused(
        capsys, tmp_path / "none"
    )
    (row, _) = json.loads(file.read_text())
    for content, said in (
        ("{}", "is not a list of runs in JSON; expected the compare.json of a comparison"),
        ("[", "is not a list of runs in JSON"),
        (json.dumps([row | {"bits": "low"}]), "bits in {0} is 'low'; expected a number; repeat the command"),
        (
            json.dumps([{k: v for k, v in row.items() if k != "seed"}]),
            "the key seed in {0} is missing; expected a whole",
        ),
    ):
        file.write_text(content)
        assert said.format(file) in refused(capsys, a)


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as end:
        main(["report", "seeds", *map(str, arguments)])
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    return error
