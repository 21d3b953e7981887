"""Training pairs that need no download: numbers in digits and in English words.

    31407 ⇥ thirty-one thousand four hundred seven

All numbers of up to three digits and some of four to six, each in one split only. Hashes select them, so they are the
same on every machine.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from spanformer.core.files import write_text

VERSION = 1  # part of the file names: raise it when the pairs change
DRAWN = {4: 5000, 5: 8000, 6: 10_000}  # digits → count of numbers
HELD_OUT = 1000  # pairs for valid, and as many for test
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def words(number: int) -> str:
    """0 … 999,999 in English: 342 is three hundred forty-two."""
    if not 0 <= number < 1_000_000:
        raise ValueError(f"number is {number}; expected 0 … 999,999")
    if number < 20:
        return SMALL[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return TENS[ten - 2] + (f"-{SMALL[one]}" if one else "")
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, unit)
    return f"{words(many)} {name}" + (f" {words(rest)}" if rest else "")


def numbers() -> dict[str, list[int]]:
    """The numbers of each split."""
    chosen = set(range(1000))
    for digits, count in DRAWN.items():
        low, at = 10 ** (digits - 1), 0
        wanted = len(chosen) + count
        while len(chosen) < wanted:
            chosen.add(low + _hash(f"{digits} {at}") % (9 * low))
            at += 1
    order = sorted(chosen, key=lambda n: (_hash(str(n)), n))
    return {"test": order[:HELD_OUT], "valid": order[HELD_OUT : 2 * HELD_OUT], "train": order[2 * HELD_OUT :]}


def write(folder: Path) -> dict[str, Path]:
    """One file of lines "digits ⇥ words" per split, written if missing."""
    paths = {split: folder / f"numbers-{VERSION}.{split}.tsv" for split in ("train", "valid", "test")}
    if all(path.exists() for path in paths.values()):
        return paths
    for split, chosen in numbers().items():
        write_text(paths[split], "".join(f"{n}\t{words(n)}\n" for n in chosen))
    return paths


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"numbers {text}".encode()).digest()[:8], "big")
