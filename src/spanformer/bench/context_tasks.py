"""The questions of `bench context`: loss by position in long texts, and facts from a distance.

Every model gets the same texts, from the same places, and the same facts. Distances and positions are in its own
tokens.
Shapes: T tokens of a text.
"""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spanformer.bench.context_models import ContextModel
from spanformer.core.text import read_text
from spanformer.hf.probe import Find, filler, make_task
from spanformer.hf.text import beginning

STDLIB = "stdlib"
FILES, SIZE = 12, 1 << 16
"""of the standard library: its largest modules, and characters of each"""
CHARACTERS = 8
"""of a text's window for each token; tokenizers make a token of fewer"""
WORDS = ("amber", "bridge", "candle", "desert", "engine", "forest", "garden", "harbour", "island", "jacket", "kettle",
         "lantern", "mirror", "needle", "orchard", "pencil", "quarry", "ribbon", "silver", "tunnel")  # fmt: skip
LIST, COPIED, CUE = " The list: ", 12, 2
"""words of a list, and how many of its copy are given"""
Tick = Callable[[], object]
"""called after every text"""


def read_source(source: str) -> str:
    """The text of a path, or of the largest modules of the standard library."""
    if source != STDLIB:
        return read_text(source)
    files = [path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.is_file()]
    largest = sorted(files, key=lambda path: (-path.stat().st_size, path.name))[:FILES]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace")[:SIZE] for path in largest)


def ranges(context: int, shortest: int = 64) -> list[tuple[int, int]]:
    """Positions in octaves, from the end: the last half of the context, the quarter before it, and so on."""
    ends = [context]
    while ends[-1] // 2 >= shortest:
        ends.append(ends[-1] // 2)
    return [(low, high) for low, high in zip([*ends[1:], 1], ends, strict=True)][::-1]


def loss_by_position(model: ContextModel, text: str, name: str, context: int, texts: int, tick: Tick) -> list[dict]:
    """Bits per byte of the text in each range of positions, of `texts` windows spread over it."""
    first, span = beginning(model), min(len(text), CHARACTERS * context)
    bits, size = np.zeros(len(places := ranges(context))), np.zeros(len(places))
    for start in np.linspace(0, len(text) - span, texts).astype(int):
        ids = [*first, *model(text[start : start + span])["input_ids"]][:context]
        if len(ids) < context:
            raise ValueError(
                f"{name} has {len(ids):,} tokens from character {start:,} on, and positions up to {context:,} are "
                "asked for; give a longer text, or a shorter --context"
            )
        nats = model.predict(ids, 1).nats.double().numpy()
        for n, (low, high) in enumerate(places):
            bits[n] += nats[low - 1 : high - 1].sum() / math.log(2)
            size[n] += len(model.decode(ids[low:high]).encode())
        tick()
    return [{"from": low, "to": high, "bits": float(b / s)}
            for (low, high), b, s in zip(places, bits, size, strict=True)]  # fmt: skip


def found_facts(model: ContextModel, find: Find, distance: int, tasks: int, seed: int, tick: Tick) -> float:
    """The share of facts at the beginning of texts of `distance` tokens whose every token is the likeliest."""
    right = 0
    for n in range(tasks):
        task = make_task(model, distance, 0.0, seed + n, find)
        right += bool(model.predict(task.ids, len(task.ids) - task.answer).right.all())
        tick()
    return right / tasks


def copied(model: ContextModel, distance: int, tasks: int, seed: int, tick: Tick) -> float:
    """The share of a list's tokens that are the likeliest in its copy, `distance` tokens later. Its first words are
    given."""
    right = total = 0
    for n in range(tasks):
        ids, start = copy_task(model, distance, seed + n)
        found = model.predict(ids, start).right
        right, total = right + int(found.sum()), total + len(found)
        tick()
    return right / total


def copy_task(model: ContextModel, distance: int, seed: int) -> tuple[list[int], int]:
    """(tokens of the list, of other sentences and of the list again; where the words to predict begin)"""
    rng = random.Random(f"copy {distance} {seed}")
    words = rng.sample(WORDS, COPIED)
    encode = lambda text: list(model(text)["input_ids"])  # noqa: E731
    whole, cue = encode(LIST + " ".join(words) + "."), encode(LIST + " ".join(words[:CUE]))
    if distance <= len(whole):
        raise ValueError(f"distance is {distance}, and the list alone takes {len(whole)} tokens; ask for more")
    between: list[int] = []
    while len(whole) + len(between) + len(sentence := encode(filler(rng))) <= distance:
        between += sentence
    start = [*beginning(model), *whole, *between, *cue]
    return [*start, *encode(" " + " ".join(words[CUE:]) + ".")], len(start)
