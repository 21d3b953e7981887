"""Draw docs/img/rooms.svg: the rooms of src/spanformer, and which imports which, read off the source.

python docs/rooms.py        in a clone, after a change of imports

An arrow that follows from others is left out of the drawing (bench → ops, because bench → model → ops). The file's
metadata lists every import, and tests/test_rooms_picture.py compares it with the source.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

from test_rooms import PACKAGE, TOP, imported, room_of  # noqa: E402

PICTURE = ROOT / "docs" / "img" / "rooms.svg"
HOLDS = {
    "core": "atomic files, config fields, events, progress, the machine; every room may import it",
    "cli": "the command line; may import every room",
    "ops": "Rule, attend, backends",
    "cost": "FLOPs, bytes",
    "data": "text → token ids",
    "kinds": "specs, no torch",
    "attention": "mechanisms",
    "position": "encodings",
    "memory": "segments, KV cache",
    "model": "layers, LM, encoder",
    "convert": "the paper's checkpoints",
    "inspect": "attention maps, clocks",
    "train": "loop, checkpoints",
    "infer": "generation, scoring",
    "hf": "Hugging Face",
    "report": "tables, pictures",
    "bench": "measurements",
}
BASE, ROOF = "core", "cli"
"""drawn as slabs, without arrows: every room may import the first, the second may import every room"""
SIZE, GAP, MARGIN = (150, 46), (46, 62), 20
COLUMNS = (("data", "train"), ("memory",), ("ops", "attention", "model", "infer"), ("cost", "kinds", "position", "hf"))
"""from left to right, so that no arrow runs behind a box; other rooms follow on the right"""


def edges() -> list[tuple[str, str]]:
    """(room, room that it imports), sorted, without the package's front door and `python -m spanformer`."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        parts, is_package = path.relative_to(PACKAGE.parent).with_suffix("").parts, path.name == "__init__.py"
        module = ".".join(parts[:-1] if is_package else parts)
        names = (name for _, name in imported(path.read_text(encoding="utf-8"), module, is_package))
        found |= {(room_of(module), room_of(name)) for name in names if name.split(".")[0] == "spanformer"}
    return sorted((a, b) for a, b in found if a != b and not {a, b} & {TOP, "__main__"})


def rows(found: list[tuple[str, str]]) -> list[list[str]]:
    """Rooms by the longest chain of imports below them, the lowest first."""
    below = {room: {b for a, b in found if a == room} - {BASE} for pair in found for room in pair}
    height: dict[str, int] = {}
    while len(height) < len(below):
        ready = [room for room in below if room not in height and below[room] <= height.keys()]
        height |= {room: 1 + max((height[b] for b in below[room]), default=-1) for room in ready}
    named = sorted(below.keys() - {BASE, ROOF})
    levels = [[room for room in named if height[room] == level] for level in range(max(height.values()) + 1)]
    return [level for level in levels if level]


def reduced(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without the imports that follow from others."""
    below: dict[str, set[str]] = {}
    for a, b in found:
        below.setdefault(a, set()).add(b)

    def reach(room: str) -> set[str]:
        return set().union(*({b} | reach(b) for b in below.get(room, ())))

    inner = [(a, b) for a, b in found if not {a, b} & {BASE, ROOF}]
    return [(a, b) for a, b in inner if not any(b in reach(c) for c in below[a] - {b})]


def draw(found: list[tuple[str, str]]) -> str:
    levels, column = rows(found), {room: n for n, rooms in enumerate(COLUMNS) for room in rooms}
    (w, h), (dx, dy) = SIZE, GAP
    bottom = MARGIN + (len(levels) + 1) * (h + dy)
    middle: dict[str, tuple[float, float]] = {}
    for n, level in enumerate(levels):
        others = [room for room in level if room not in column]
        column |= {room: len(COLUMNS) + i for i, room in enumerate(others)}
        for room in level:
            middle[room] = (MARGIN + w / 2 + column[room] * (w + dx), bottom - (n + 1) * (h + dy) + h / 2)
    width = (max(column.values()) + 1) * (w + dx) - dx
    boxes = [_box(room, x, y, w) for room, (x, y) in middle.items()]
    slabs = [
        _box(BASE, MARGIN + width / 2, bottom + h / 2, width),
        _box(ROOF, MARGIN + width / 2, MARGIN + h / 2, width),
    ]
    arrows = [_arrow(middle[a], middle[b], h) for a, b in reduced(found)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 2 * MARGIN:g} {bottom + h + MARGIN:g}" '
            'font-family="sans-serif">',
            f"<metadata>{json.dumps(found)}</metadata>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *arrows,
            *slabs,
            *boxes,
            "</svg>\n",
        ]
    )


def _box(room: str, x: float, y: float, width: float) -> str:
    h = SIZE[1]
    return (
        f'<rect x="{x - width / 2:g}" y="{y - h / 2:g}" width="{width:g}" height="{h}" rx="5" fill="#eef3f8" '
        'stroke="#34567a"/>'
        f'<text x="{x:g}" y="{y - 3:g}" text-anchor="middle" font-size="15" font-weight="bold">{room}</text>'
        f'<text x="{x:g}" y="{y + 14:g}" text-anchor="middle" font-size="12" fill="#444444">'
        f"{HOLDS.get(room, '')}</text>"
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], h: float) -> str:
    (x, y), (u, v) = (start[0], start[1] + h / 2), (end[0], end[1] - h / 2 - 6)
    length = ((u - x) ** 2 + (v - y) ** 2) ** 0.5
    a, b = (u - x) / length, (v - y) / length  # along the arrow; its head is a triangle of 8 × 8
    p, q = (u - 8 * a - 4 * b, v - 8 * b + 4 * a), (u - 8 * a + 4 * b, v - 8 * b - 4 * a)
    return (
        f'<path d="M{x:.1f} {y:.1f}L{u:.1f} {v:.1f}" stroke="#8899aa" stroke-width="1.5"/>'
        f'<path d="M{u:.1f} {v:.1f}L{p[0]:.1f} {p[1]:.1f}L{q[0]:.1f} {q[1]:.1f}Z" fill="#8899aa"/>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(edges()), encoding="utf-8")
    print(PICTURE)
