"""The page: self-contained, escaped, and written from whatever a run recorded."""

from __future__ import annotations

import base64
import json
import math
import re
from html.parser import HTMLParser

import pytest

from spanformer.report import drawing
from spanformer.report.page import write_report
from support import synthetic_runs as synthetic

SMALL = {"layers": 2, "heads": 2, "steps": 6}
VOID = {"meta", "img", "link", "br"}


@pytest.fixture(autouse=True)
def coarse_pictures(monkeypatch):
    monkeypatch.setattr(drawing, "DPI", 30)


class Reader(HTMLParser):
    """Tags with their attributes and the text between them; tags must close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text, self._open = "", []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def report(tmp_path, *runs, out="out"):
    folders = [synthetic.write(tmp_path / f"run{at}", rows) for at, rows in enumerate(runs)]
    path = write_report(folders, tmp_path / out)
    assert path == tmp_path / out / "report.html"
    return path.read_text(encoding="utf-8")


def names(tmp_path):
    return {path.name for path in (tmp_path / "out").glob("*.png")}


def assert_self_contained(page):
    read = Reader(page)
    for tag, attributes in read.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        assert not any(name.startswith("on") for name in attributes), tag
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        assert attributes.get("href", "#").startswith("#")
        assert "srcset" not in attributes and "style" not in attributes
    style = "".join(re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL))
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"https?://", page)
    (policy,) = [attributes["content"] for _, attributes in read.tags if attributes.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    return read


def test_one_run(tmp_path):
    page = report(tmp_path, synthetic.events(**SMALL, dynamic=True))
    read = assert_self_contained(page)
    expected = {"loss", "spans-by-layer", "spans-history", "spans-trend", "cost", "dynamic-spans"}
    assert names(tmp_path) == {f"{name}.png" for name in expected}
    images = [attributes for tag, attributes in read.tags if tag == "img"]
    embedded = {base64.b64decode(image["src"].partition(",")[2]) for image in images}
    assert embedded == {(tmp_path / "out" / f"{name}.png").read_bytes() for name in expected}
    assert all(image["alt"] and image["alt"] in read.text for image in images)
    for said in ("bits per byte", "4.91 M", "average span", "longest span", "attention FLOPs", "head 2",
                 "2 of 24 heads look at nothing but the ramp.", "model.attention.kind",
                 "adaptive_span", "Stopped"):  # fmt: skip
        assert said in read.text, said


def test_time_of_a_step_fits_the_time_of_training(tmp_path):
    """The average of the rows stands beside their total; what was measured afterwards has a place of its own."""
    rows = synthetic.events(**SMALL, pace=3.5)
    (cost,) = (row for row in rows if row["event"] == "cost")
    for name, seconds in {"step": 3.0, "attention": 0.3, "products": 0.6, "optimizer": 1.8}.items():
        cost[f"{name}_seconds"]["learned"] = seconds
    said = Reader(report(tmp_path, rows)).text
    assert "3.5 min" in said and "60 steps, 3.5 s each" in said
    assert "time of a step" in said and "attention 10 %, other products 20 %, optimiser 60 %, the rest 10 %" in said


def test_several_runs_on_one_page(tmp_path):
    runs = [
        synthetic.events(**SMALL, name="same", max_span=limit, floor=floor) for limit, floor in ((128, 2.0), (512, 1.5))
    ]
    read = assert_self_contained(report(tmp_path, *runs))
    assert {"compare-bits.png", "compare-cost.png", "sweep.png", "1-run0-loss.png", "2-run1-loss.png"} <= names(
        tmp_path
    )
    targets = {attributes["href"][1:] for tag, attributes in read.tags if tag == "a"}
    assert targets == {attributes["id"] for tag, attributes in read.tags if tag == "h2"} == {"run-1", "run-2"}
    assert "run1" in read.text and "same (2)" not in read.text and "What differs in their configurations" in read.text
    assert "model.attention.max_span" in read.text
    assert "test bits" in read.text


def test_empty_columns_are_omitted(tmp_path):
    runs = [[row for row in synthetic.events(**SMALL, name=name) if row.get("split") != "test"] for name in "ab"]
    said = Reader(report(tmp_path, *runs)).text
    assert "test bits" not in said and "peak memory" in said


def test_characters_are_spelt_out(tmp_path):
    said = Reader(report(tmp_path, synthetic.events(**SMALL, unit="char"))).text
    assert "bits per character" in said and "per char " not in said and "per char." not in said


def test_runs_of_different_units_are_not_compared(tmp_path):
    page = report(tmp_path, synthetic.events(**SMALL), synthetic.events(**SMALL, unit="word"))
    assert "These runs count bits per byte, per word: they cannot be compared." in Reader(page).text
    assert "perplexity" in page and not {"compare-bits.png", "sweep.png"} & names(tmp_path)


def test_without_cost_or_evaluation(tmp_path):
    read = assert_self_contained(report(tmp_path, synthetic.events(**SMALL, cost=False, evals=False)))
    assert "nothing was measured in this run" in read.text and "never validated" in read.text


@pytest.mark.parametrize("objective", ["encoder", "seq2seq"])
@pytest.mark.parametrize("cost", [True, False])
def test_models_whose_cost_is_measured_and_not_predicted(tmp_path, objective, cost):
    read = assert_self_contained(report(tmp_path, synthetic.events(**SMALL, objective=objective, cost=cost)))
    said = ("FLOPs of a step", "of full attention's, counted", "a step needs 32 % of the FLOPs")
    assert all((each in read.text) == cost for each in said) and ("cost.png" in names(tmp_path)) == cost
    assert "predicted" not in read.text.lower() and "cached states" not in read.text.split("Every head")[0]


def test_without_steps(tmp_path):
    begun = synthetic.events(**SMALL)[0]
    read = assert_self_contained(report(tmp_path, [begun]))
    assert "recorded no step yet" in read.text and not names(tmp_path)
    assert "still goes on, or was killed" in read.text


def test_run_without_steps_among_others(tmp_path):
    read = assert_self_contained(
        report(tmp_path, [synthetic.events(**SMALL, name="empty")[0]], synthetic.events(**SMALL))
    )
    assert "empty" in read.text and not {"compare-bits.png"} & names(tmp_path)


ODD = {
    "diverged": {"loss": math.nan},
    "a loss of nothing": {"loss": 0.0, "seconds": 0},
    "far beyond": {"loss": 1e300, "seconds": 1e15, "reach": [[2**50] * 2] * 2, "spans": [[2.0**50] * 2] * 2},
    "seeing nothing": {"reach": [[0, 0], [0, 0]], "spans": [[0, 0], [0, 0]]},
}


@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
@pytest.mark.filterwarnings("error")
def test_odd_numbers_are_reported_as_well_as_they_can_be(tmp_path, change):
    rows = synthetic.events(**SMALL, evals=False)
    assert_self_contained(report(tmp_path, [row | change if row["event"] == "step" else row for row in rows]))


def test_resumed_run_cut_short(tmp_path):
    rows = synthetic.events(**SMALL, cost=False)[:-4]
    undone = next(row for row in reversed(rows) if row["event"] == "step") | {"step": 9990, "loss": 99.0}
    folder = synthetic.write(tmp_path / "run", [*rows, undone, {"event": "resume", "step": 60}], after='{"event": "st')
    read = assert_self_contained(write_report([folder], tmp_path / "out").read_text(encoding="utf-8"))
    assert "Resumed from here." in read.text and "9,990" not in read.text and "60 steps" in read.text


def test_empty_file_is_one_sentence_and_writes_nothing(tmp_path):
    good, bad = synthetic.write(tmp_path / "good", synthetic.events(**SMALL)), synthetic.write(tmp_path / "bad", [])
    with pytest.raises(ValueError, match=r"events\.jsonl is empty; expected") as caught:
        write_report([good, bad], tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


EVIL = "$\\frac{$<script>alert(1)</script>\"'><img src=https://evil.example/x.png onerror=alert(1)>&"


def evil(value):
    """Every text of a value, spoilt; and every key of the configuration."""
    if isinstance(value, dict):
        return {EVIL + key: evil(inner) for key, inner in value.items()}
    return EVIL + value if isinstance(value, str) else value


def test_everything_from_files_is_escaped(tmp_path):
    rows = synthetic.events(**SMALL, dynamic=True)
    spoilt = []
    for row in rows:
        changed = {key: EVIL for key in ("run", "version", "reason", "path") if key in row}
        changed |= {key: evil(row[key]) for key in ("config", "machine") if key in row}
        changed |= {"text": EVIL} if row["event"] == "note" else {}
        if row["event"] == "dynamic":
            changed |= {"text": EVIL, "names": [EVIL] * 6, "spans": [[3.0] * len(EVIL)] * 6}
        spoilt.append(row | changed)
    spoilt[0]["config"]["model"] = {"attention": {"kind": EVIL, "max_span": EVIL}}
    spoilt.insert(1, {"event": "skip", "step": 1, "reason": EVIL + "\ud800\x00"})
    other = json.loads(json.dumps(spoilt))
    page = report(tmp_path, spoilt, other)
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    text = page.replace("https://evil.example", "")
    read = assert_self_contained(text)
    assert {tag for tag, _ in read.tags} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "a", "ul", "li", "small", "b",
        "figure", "figcaption", "img", "div", "table", "thead", "tbody", "tr", "th", "td", "details", "summary",
    }  # fmt: skip
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+\.png", name) for name in names(tmp_path))


def test_nothing_to_report_and_nowhere_to_write_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no run was given; expected the folder of at least one training run"):
        write_report([], tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; expected a folder to write the report into"):
        write_report([synthetic.write(tmp_path / "run", synthetic.events(**SMALL))], tmp_path / "file")
