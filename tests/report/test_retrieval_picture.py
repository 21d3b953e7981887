"""Pictures of datastores and retrieval heads, from the recorded results of the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from spanformer.bench.results import PartsFile
from spanformer.report.retrieval_picture import draw_datastores, draw_retrieval

RESULTS = Path(__file__).parents[2] / "docs/results"


def test_recorded_results_are_drawn(tmp_path: Path) -> None:
    for name, draw in (("knn", draw_datastores), ("retrieval", draw_retrieval)):
        drawn = draw(PartsFile(RESULTS / f"{name}.json", name).all_found(), tmp_path / f"{name}.png")
        assert drawn is not None and drawn.read_bytes().startswith(b"\x89PNG")


def test_results_without_what_is_drawn_make_no_picture(tmp_path: Path) -> None:
    found = PartsFile(RESULTS / "retrieval.json", "retrieval").all_found()
    assert draw_retrieval({name: found[name] for name in ("bits", "decode")}, tmp_path / "a.png") is None
    assert draw_datastores({"wikitext-2, build": {"entries": 5, "seconds": 1.0}}, tmp_path / "b.png") is None
    assert not list(tmp_path.iterdir())


def test_a_text_without_a_gate_is_drawn(tmp_path: Path) -> None:
    row = {"entries": 5, "entry_bytes": 582, "change": -0.02}
    found = {"some $text": {"forms": {"rows": {"int8": row, "float16": row | {"entry_bytes": 1154}}}}}
    assert draw_datastores(found, tmp_path / "a.png") is not None
