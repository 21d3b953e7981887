"""docs/gallery.md: what the code holds, no more and no less, as the command would write it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spanformer.bench.gallery import entries
from spanformer.bench.gallery_page import about, draw_attention, draw_position, page
from spanformer.bench.results import PartsFile
from spanformer.kinds import POSITIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
RESULTS = ROOT / "docs" / "results" / "gallery.json"
AGAIN = "; run spanformer bench gallery --parts page --out docs/results/gallery.json"
PLAIN = {"none"}
"""which need no equation"""


def test_gallery_lists_every_kind():
    before, after = PAGE.split("\n## Positions\n")
    assert re.findall(r"^### (.+)$", before, re.MULTILINE) == list(entries()), AGAIN
    assert re.findall(r"^### (.+)$", after, re.MULTILINE) == list(POSITIONS), AGAIN


def test_gallery_equals_the_command_output():
    assert page(PartsFile(RESULTS, "gallery").parts) == PAGE, AGAIN


def test_every_picture_is_there_and_no_other():
    shown = {ROOT / "docs" / path for path in re.findall(r"\]\((img/gallery/[^)]+)\)", PAGE)}
    assert shown == set((ROOT / "docs" / "img" / "gallery").glob("*.png")), AGAIN
    assert all(1000 < path.stat().st_size < 60_000 for path in shown)


PATHS = {name: shown.about for name, shown in entries().items()} | {name: p.build for name, p in POSITIONS.items()}


@pytest.mark.parametrize("name", PATHS)
def test_files_open_with_their_equation(name):
    title, equation = about(PATHS[name])
    assert len(title) > 20 and (len(equation) > 10 or name in PLAIN)


@pytest.mark.parametrize("name", ["window", "mixed", "etc"])
def test_pictures_can_be_drawn(tmp_path, name):
    assert 0 < draw_attention(name, tmp_path).mean() < 1
    draw_position("alibi", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png", "position-alibi.png"}
