"""docs/gallery.md: what the code holds, no more and no less, as the command would write it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spanformer.attention import ATTENTIONS
from spanformer.bench.gallery_page import draw_attention, draw_position, page, told
from spanformer.bench.results import PartsFile
from spanformer.cost.positions import POSITION_COSTS
from spanformer.position import POSITIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
RESULTS = ROOT / "results" / "gallery.json"
AGAIN = "; run spanformer bench gallery --parts page --out results/gallery.json"
PLAIN = {"none"}
"""which need no equation"""


def test_it_lists_what_there_is():
    before, after = PAGE.split("\n## Positions\n")
    assert re.findall(r"^### (.+)$", before, re.MULTILINE) == list(ATTENTIONS), AGAIN
    assert re.findall(r"^### (.+)$", after, re.MULTILINE) == list(POSITIONS), AGAIN
    assert set(POSITION_COSTS) >= set(POSITIONS)


def test_it_is_what_the_command_writes():
    assert page(PartsFile(RESULTS, "gallery").parts) == PAGE, AGAIN


def test_every_picture_is_there_and_no_other():
    shown = {ROOT / "docs" / path for path in re.findall(r"\]\((img/gallery/[^)]+)\)", PAGE)}
    assert shown == set((ROOT / "docs" / "img" / "gallery").glob("*.png")), AGAIN
    assert all(1000 < path.stat().st_size < 60_000 for path in shown)


@pytest.mark.parametrize("name", [*ATTENTIONS, *POSITIONS])
def test_files_open_with_their_equation(name):
    title, equation = told((ATTENTIONS | POSITIONS)[name])
    assert len(title) > 20 and (len(equation) > 10 or name in PLAIN)


@pytest.mark.parametrize("name", ["window", "mixed", "etc"])
def test_pictures_can_be_drawn(tmp_path, name):
    assert 0 < draw_attention(name, tmp_path).mean() < 1
    draw_position("alibi", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png", "position-alibi.png"}
