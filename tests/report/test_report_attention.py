"""Tables and pictures from a result file."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from rich.console import Console

from spanformer.report import attention as report
from spanformer.report import attention_pictures as pictures
from spanformer.report import drawing


def row(**changes):
    base = {
        "part": "cost", "mode": "forward+backward", "profile": "A", "length": 1024, "batch": 1, "heads": 8, "dim": 64,
        "terms": "plain", "dtype": "float32", "streaming": 0, "contender": "sdpa", "label": "SDPA, full causal",
        "same_work": False, "status": "ok", "reason": "", "errors": {}, "allowed": {}, "ms": 30.0, "samples": 5,
        "disturbed": 0, "speedup": 1.0, "gflops": 100.0, "limit_share": 0.6, "sgemm_gflops": 150.0, "peak_mib": None,
        "us_per_token": 30.0,
    }  # fmt: skip
    return base | changes


@pytest.fixture
def results():
    ours = {"contender": "native", "label": "spanformer native", "same_work": True, "ms": 4.0, "speedup": 7.5}
    nothing = {"ms": None, "speedup": None, "limit_share": None, "samples": 0, "us_per_token": None}
    return {
        "kind": report.KIND, "format": 1, "sgemm_gflops": 150.0, "config": {},
        "machine": {"cpu": "Some CPU", "threads": 2, "torch": "2.13.0", "commit": "abc1234", "date": "2026-01-02"},
        "rows": [
            row(), row(**ours), row(length=2048, ms=120.0), row(length=2048, **(ours | {"ms": 9.0, "speedup": 13.0})),
            row(contender="liar", label="A liar", status="WRONG", reason="out is off by 1", **nothing),
            row(contender="flex", label="Flex", status="skipped", reason="no backward", **nothing),
            row(part="memory", peak_mib=79.4, speedup=None, samples=0),
            row(part="per_token", profile="S"),
        ],
    }  # fmt: skip


def text(results):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in report.tables(results):
        console.print(table)
    return console.export_text()


def test_tables_show_speeds_wrong_results_and_reasons(results):
    shown = text(results)
    for expected in ("7.5×", "60 %", "79 MiB", "30 µs/token", "WRONG", "out is off by 1", "no backward",
                     "one head sees all, the rest 64 tokens", "Some CPU", "abc1234"):  # fmt: skip
        assert expected in shown, expected
    assert "~" not in shown


def test_disturbed_numbers_are_marked(results):
    for each in results["rows"]:
        each["disturbed"] = each["samples"]
    assert "4 ms" in text(results) and "other processes disturbed" in text(results)
    assert report.mostly_disturbed(results)


def test_pictures(results, tmp_path):
    written = pictures.draw(results, tmp_path)
    names = {f"{kind}-forward-backward.{ending}" for kind in ("cost", "speedup") for ending in ("png", "svg")}
    assert {path.name for path in written} == names
    assert all(path.stat().st_size > 5000 for path in written)


def test_only_the_yardstick_makes_no_speed_picture(results, tmp_path):
    results["rows"] = [row()]
    assert {path.stem for path in pictures.draw(results, tmp_path)} == {"cost-forward-backward"}


def test_labels_are_moved_apart_as_little_as_possible():
    assert drawing.apart([0, 100], 10) == [0, 100]
    assert drawing.apart([50, 50], 10) == [45, 55]
    places = drawing.apart([0, 1, 2, 40, 41], 10)
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(places))


KIND = f'"kind": "{report.KIND}"'


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ("[]", "not a benchmark result"),
        (f'{{{KIND}, "format": 9}}', "has format 9; expected 1"),
        (f'{{{KIND}, "format": 1, "machine": {{"cpu": "x"}}, "rows": []}}', "has no machine or no rows"),
    ],
)
def test_other_files_are_refused(tmp_path, content, said):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=said):
        report.load(path)


def test_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is a folder; expected the result file"):
        report.load(tmp_path)


def test_result_file_is_read_back(results, tmp_path):
    path = tmp_path / "attention.json"
    path.write_text(json.dumps(results))
    assert report.load(path) == results


def test_plotting_is_imported_only_when_a_picture_is_drawn():
    code = "import sys, spanformer.report.attention_pictures, spanformer.bench; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
