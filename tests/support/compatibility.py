"""docs/compatibility.md: written by running every combination, and read again by the product test.

python tests/support/compatibility.py
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

from support.product import BACKENDS, BEFORE, STACKS, TABLES, Case, Table, product, refused  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
ABOUT = {
    "Language models": "Trained, and decoding from a KV cache.",
    "Encoders": (
        "Trained, in both directions: windows and spans reach as far ahead as back. `alibi`, `table`, `distance_bias` "
        "and `da_transformer` depend on |i − j|, the others also on the sign."
    ),
    "Decoders": (
        "Self-attention of the decoder in an encoder–decoder model, trained, and decoding from a KV cache; the encoder "
        "has learned spans."
    ),
    "Cross-attention": (
        "Scorings of `model.cross` in an encoder–decoder model, trained, and decoding from a KV cache; the second "
        "source is shorter and padded. The positions are those of the encoder and the decoder; cross-attention uses "
        "none."
    ),
    "Layers that differ": (
        '`attention.stack`, trained, and decoding from a KV cache: `["Window(6)", "Every(5)"]` is strided attention '
        "with one factor per layer, `Block` and `Summary` are the factors of fixed attention."
    ),
}


def page(found: dict[Case, str]) -> str:
    """The whole page, from the reasons why combinations are refused."""
    lines = [
        "# What goes with what",
        "",
        "Every kind of attention with every position encoding, on every backend. `yes`: equal to a dense float64 "
        "oracle, values and all gradients. Otherwise the number of the reason below, with the backends and uses that "
        "it is about. `python tests/support/compatibility.py` writes this page from what the code says, and "
        "`tests/test_product.py` checks it.",
        "",
    ]
    reasons: dict[str, int] = {}
    for table in TABLES.values():
        lines += [f"## {table.title}", "", ABOUT[table.title], ""]
        lines += ["| | " + " | ".join(f"`{position}`" for position in table.positions) + " |"]
        lines += ["|---" * (len(table.positions) + 1) + "|"]
        for row in table.rows:
            cells = [cell(table, row, position, found, reasons) for position in table.positions]
            lines.append(f"| {shown(row)} | " + " | ".join(cells) + " |")
        lines += [""]
    lines += ["## Reasons", "", *(f"{number}. {reason}" for reason, number in reasons.items()), ""]
    lines += [
        'With `backend="auto"`, the next backend that can serve a call takes it. `flex` and `native` are compared with '
        "the oracle in float32, `reference` and `banded` in float64. Encoders do not run on `flex` with "
        f"{', '.join(f'`{position}`' for position in BEFORE)}: these are applied before a backend is called, as in "
        "language models.",
    ]
    return "\n".join(lines) + "\n"


def shown(row: str) -> str:
    return ", ".join(f"`{name}`" for name in STACKS.get(row, (row,))).replace("|", chr(92) + "|")


def cell(table: Table, row: str, position: str, found: dict[Case, str], reasons: dict[str, int]) -> str:
    """Numbers of reasons, "3 (native, cached)"; `refusals` reads this back."""
    every = table.backends(position)
    places: dict[str, dict[str, tuple[str, ...]]] = {}
    for use in table.uses:
        for backend in every:
            if reason := found.get(Case(table.title, row, position, backend, use)):
                uses = places.setdefault(reason, {})
                uses[use] = (*uses.get(use, ()), backend)
    entries = []
    for reason, uses in places.items():
        number = reasons.setdefault(reason, len(reasons) + 1)
        same = len(uses) == len(table.uses) and len(set(uses.values())) == 1
        for use, backends in list(uses.items())[: 1 if same else None]:
            words = [*(() if backends == every else backends), *([] if same else [use])]
            entries.append(f"{number}" + (f" ({', '.join(words)})" if words else ""))
    return ", ".join(entries) or "yes"


def refusals(text: str, tables: Iterable[Table] = tuple(TABLES.values())) -> dict[Case, str]:
    """Every combination that the page says is refused, with the reason."""
    numbered = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))
    found = {}
    for table in tables:
        section = text.partition(f"\n## {table.title}\n")[2].partition("\n## ")[0]
        for row in table.rows:
            line = re.search(rf"^\| {re.escape(shown(row))} \|(.+)\|$", section, re.MULTILINE)
            if line is None:
                continue  # a kind that is not on the page yet
            for position, said in zip(table.positions, line[1].split("|"), strict=True):
                for number, inside in re.findall(r"(\d+)(?: \(([^)]*)\))?", said):
                    words = inside.split(", ") if inside else []
                    backends = [b for b in words if b in BACKENDS] or table.backends(position)
                    uses = [u for u in words if u in table.uses] or table.uses
                    found |= {Case(table.title, row, position, b, u): numbered[number] for b in backends for u in uses}
    return found


if __name__ == "__main__":
    cases = list(product())
    with multiprocessing.get_context("spawn").Pool(initializer=torch.set_num_threads, initargs=(1,)) as pool:
        PAGE.write_text(page(dict(zip(cases, pool.map(refused, cases, chunksize=50), strict=True))), encoding="utf-8")
