"""docs/img/rooms.svg shows the imports as they are."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs" / "rooms.py")
assert _spec is not None and _spec.loader is not None
rooms = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(rooms)
AGAIN = "run python docs/rooms.py"


def test_rooms_picture_holds_every_import() -> None:
    drawn = re.search("<metadata>(.*)</metadata>", rooms.PICTURE.read_text(encoding="utf-8"))
    assert drawn is not None
    assert [tuple(pair) for pair in json.loads(drawn[1])] == rooms.edges(), AGAIN


def test_rooms_picture_is_what_the_script_draws() -> None:
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.draw(rooms.edges()), AGAIN


def test_reduced_drops_arrows_that_follow_from_others() -> None:
    found = [("a", "b"), ("a", "c"), ("b", "c"), ("b", "core"), ("cli", "a")]
    assert rooms.reduced(found) == [("a", "b"), ("b", "c")]
    assert rooms.rows(found) == [["c"], ["b"], ["a"]]
