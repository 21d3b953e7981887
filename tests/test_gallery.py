"""docs/gallery.md: what the code holds, no more and no less, as the script would write it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from spanformer.attention import ATTENTIONS
from spanformer.cost.positions import POSITION_COSTS
from spanformer.position import POSITIONS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
AGAIN = "; run python benchmarks/gallery.py"
PLAIN = {"none"}
"""which need no equation"""


@pytest.fixture(scope="module")
def gallery():
    spec = importlib.util.spec_from_file_location("gallery_script", ROOT / "benchmarks" / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_it_lists_what_there_is(gallery):
    before, after = PAGE.split("\n## Positions\n")
    assert re.findall(r"^### (.+)$", before, re.MULTILINE) == list(ATTENTIONS), AGAIN
    assert re.findall(r"^### (.+)$", after, re.MULTILINE) == list(POSITIONS), AGAIN
    assert set(POSITION_COSTS) >= set(POSITIONS)


def test_it_is_what_the_script_writes(gallery):
    assert gallery.page(json.loads(gallery.RESULTS.read_text(encoding="utf-8"))) == PAGE, AGAIN


def test_every_picture_is_there_and_no_other():
    shown = {ROOT / "docs" / path for path in re.findall(r"\]\((img/gallery/[^)]+)\)", PAGE)}
    assert shown == set((ROOT / "docs" / "img" / "gallery").glob("*.png")), AGAIN
    assert all(1000 < path.stat().st_size < 60_000 for path in shown)


@pytest.mark.parametrize("name", [*ATTENTIONS, *POSITIONS])
def test_files_open_with_their_equation(gallery, name):
    title, equation = gallery.told((ATTENTIONS | POSITIONS)[name])
    assert len(title) > 20 and (len(equation) > 10 or name in PLAIN)


@pytest.mark.parametrize("name", ["window", "mixed", "etc"])
def test_pictures_can_be_drawn(gallery, tmp_path, monkeypatch, name):
    monkeypatch.setattr(gallery, "IMAGES", tmp_path)
    assert "pairs are seen" in gallery.draw_attention(name)[0]
    gallery.draw_position("alibi")
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png", "position-alibi.png"}
