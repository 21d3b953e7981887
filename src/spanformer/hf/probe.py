"""What a key/value budget costs in long-range ability: one fact fetched from far back, at several depths.

Loss on ordinary text hardly measures this. There are two tasks; each text has a known length and ends with a question:

    key    a needle in a haystack: one sentence with a random pass key among sentences of filler
    pair   lost in the middle (Liu et al., 2023, https://arxiv.org/abs/2307.03172): the text is a list of boxes and the
           numbers they hold, all alike, and one of them is asked for

The scores: the probability of the answer's tokens, and whether the model would generate all of it (every token the
likeliest). Its shape over the depths is the lost-in-the-middle curve.

Everything is made here from a seed; the same seed makes the same tasks.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from spanformer.core.progress import OnCount
from spanformer.hf.text import beginning, check_logits, hidden_states, logits_of

SUBJECTS = ("The river", "A merchant", "The old clock", "Her brother", "The garden", "A traveller", "The harbour",
            "His letter", "The village", "An engineer", "The forest", "A teacher")  # fmt: skip
VERBS = ("waited near", "was painted beside", "looked towards", "belonged to", "stood behind", "remembered",
         "was older than", "had never seen", "kept a drawing of", "was named after")  # fmt: skip
OBJECTS = ("the mountain", "the market", "a wooden bridge", "the railway", "a quiet street", "the northern coast",
           "the library", "a field of barley", "the museum", "an empty theatre", "the lighthouse")  # fmt: skip
NEEDLE = " The pass key is {key}. Remember it: {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"
BOX = " Box {name} holds"
Find = Literal["key", "pair"]
FINDS: tuple[Find, ...] = ("key", "pair")


@dataclass(frozen=True)
class Task:
    """One text with a key hidden at `depth` (0: the beginning, 1: just before the question) and its answer."""

    ids: list[int]
    answer: int
    """how many tokens at the end of ids spell the key"""
    depth: float
    distance: int
    """tokens from the end of the needle to the first token of the answer"""
    key: str


@dataclass(frozen=True)
class Found:
    """A model's results on the tasks of one context and one depth."""

    context: int
    depth: float
    find: Find
    tasks: int
    distance: float
    """in tokens, on average"""
    accuracy: float
    """share of the keys that the model would generate completely"""
    nats: float
    """mean loss per token of the key; 0 is certainty"""


def filler(rng: random.Random) -> str:
    return f" {rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."


def make_task(tokenizer: Any, context: int, depth: float, seed: int, find: Find = "key") -> Task:
    """A task of at most `context` tokens, answer included. The same arguments make the same task."""
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; expected 0 (the beginning) to 1 (just before the question)")
    if find not in FINDS:
        raise ValueError(f"find is {find!r}; expected {' or '.join(map(repr, FINDS))}")
    rng = random.Random(f"{context} {depth:.4f} {seed}")
    key, boxes = str(rng.randrange(10_000, 100_000)), iter(())
    needle, question = NEEDLE.format(key=key), QUESTION
    if find == "pair":
        boxes = map(str, rng.sample(range(1_000, 10_000), 9_000))  # no name twice
        question = BOX.format(name=next(boxes))
        needle = f"{question} {key}."

    def other() -> str:
        if find == "key":
            return filler(rng)
        return f"{BOX.format(name=next(boxes))} {rng.randrange(10_000, 100_000)}."

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    first, hidden, asked, answer = beginning(tokenizer), encode(needle), encode(question), encode(" " + key)
    room = context - len(first) - len(hidden) - len(asked) - len(answer)
    if room < 1:
        raise ValueError(
            f"context is {context}, and the pass key with its question takes {context - room}; ask for more tokens"
        )
    sentences: list[list[int]] = []
    while room >= len(sentence := encode(other())):
        sentences.append(sentence)
        room -= len(sentence)
    before = round(depth * len(sentences))
    text = [first, *sentences[:before], hidden, *sentences[before:], asked, answer]
    ids = [token for part in text for token in part]
    distance = sum(map(len, sentences[before:])) + len(asked) + 1
    return Task(ids, len(answer), depth, distance, key)


@torch.no_grad()
def solve(model: PreTrainedModel, task: Task) -> tuple[bool, float]:
    """(whether every token of the key is the likeliest, nats per token of the key)"""
    ids = torch.tensor([task.ids])
    start = len(task.ids) - task.answer
    logits = logits_of(model, hidden_states(model, ids, start))[0]
    targets = ids[0, start:]
    nats = torch.nn.functional.cross_entropy(logits, targets)
    return bool((logits.argmax(-1) == targets).all()), float(nats)


def probe(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    contexts: tuple[int, ...] = (512, 1024, 2048),
    depths: int = 5,
    tasks: int = 4,
    find: Find = "key",
    seed: int = 0,
    on_progress: OnCount | None = None,
) -> list[Found]:
    """Facts at `depths` depths of each context, `tasks` of each, before or after fitting alike."""
    if depths < 2 or tasks < 1 or not contexts:
        raise ValueError(f"depths is {depths}, tasks {tasks}; expected at least 2 depths, 1 task and 1 context")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and max(contexts) > longest:
        raise ValueError(f"context is {max(contexts)}, and the model was made for {longest}; ask for fewer tokens")
    check_logits(model)
    found, total = [], len(contexts) * depths * tasks
    for context in contexts:
        for place in range(depths):
            depth = place / (depths - 1)
            made = [make_task(tokenizer, context, depth, seed + n, find) for n in range(tasks)]
            scores = []
            for task in made:
                scores.append(solve(model, task))
                if on_progress:
                    on_progress(len(found) * tasks + len(scores), total)
            found.append(
                Found(
                    context,
                    depth,
                    find,
                    tasks,
                    sum(t.distance for t in made) / tasks,
                    sum(right for right, _ in scores) / tasks,
                    sum(nats for _, nats in scores) / tasks,
                )
            )
    return found


def table(found: list[Found], title: str = "") -> str:
    """Accuracy by context (rows) and depth (columns), with the mean nats below each."""
    contexts = sorted({f.context for f in found})
    depths = sorted({f.depth for f in found})
    at = {(f.context, f.depth): f for f in found}
    lines = [title] if title else []
    lines.append("context  " + "".join(f"{f'depth {d:.2f}':>12}" for d in depths))
    for context in contexts:
        lines.append(f"{context:>7}  " + "".join(f"{at[context, d].accuracy:>12.0%}" for d in depths))
        lines.append(" " * 9 + "".join(f"{f'{at[context, d].nats:.2f} nats':>12}" for d in depths))
    return "\n".join(lines)


def as_rows(found: list[Found]) -> list[dict]:
    return [asdict(f) for f in found]
