"""What a key/value budget costs in long-range ability: a pass key hidden in filler text, at several depths.

Loss on ordinary text hardly shows whether a model can still fetch one fact from far back. Here a sentence with a random
key stands somewhere in a text of known length, and the text ends by asking for it. The score is plain: the probability
of the key's tokens, and whether the model would write the whole key (every token the likeliest). Kept by depth it is a
needle-in-a-haystack test; its shape over the depths is the lost-in-the-middle curve.

Everything is made here from a seed; the same seed makes the same tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from spanformer.hf.text import hidden_states, logits_of

SUBJECTS = ("The river", "A merchant", "The old clock", "Her brother", "The garden", "A traveller", "The harbour",
            "His letter", "The village", "An engineer", "The forest", "A teacher")  # fmt: skip
VERBS = ("waited near", "was painted beside", "looked towards", "belonged to", "stood behind", "remembered",
         "was older than", "had never seen", "kept a drawing of", "was named after")  # fmt: skip
OBJECTS = ("the mountain", "the market", "a wooden bridge", "the railway", "a quiet street", "the northern coast",
           "the library", "a field of barley", "the museum", "an empty theatre", "the lighthouse")  # fmt: skip
NEEDLE = " The pass key is {key}. Remember it: {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"


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
    """What a model made of the tasks of one context and one depth."""

    context: int
    depth: float
    tasks: int
    distance: float
    """in tokens, on average"""
    accuracy: float
    """share of the keys that the model would write whole"""
    nats: float
    """of a token of the key, on average; 0 is certainty"""


def filler(rng: random.Random, tokens: int, count: Callable[[str], int]) -> list[str]:
    """Sentences that come to `tokens` tokens or a few fewer."""
    sentences, used = [], 0
    while True:
        sentence = f" {rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."
        used += count(sentence)
        if used > tokens:
            return sentences
        sentences.append(sentence)


def make_task(tokenizer: Any, context: int, depth: float, seed: int) -> Task:
    """A task of at most `context` tokens, answer included. The same arguments make the same task."""
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; expected 0 (the beginning) to 1 (just before the question)")
    rng = random.Random(f"{context} {depth:.4f} {seed}")
    key = str(rng.randrange(10_000, 100_000))

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    needle, question, answer = encode(NEEDLE.format(key=key)), encode(QUESTION), encode(" " + key)
    room = context - len(needle) - len(question) - len(answer)
    if room < 1:
        raise ValueError(
            f"context is {context}, and the pass key with its question takes {context - room}; ask for more tokens"
        )
    sentences = [encode(each) for each in filler(rng, room, lambda text: len(encode(text)))]
    before = round(depth * len(sentences))
    text = [*sentences[:before], needle, *sentences[before:], question, answer]
    ids = [token for part in text for token in part]
    distance = sum(map(len, sentences[before:])) + len(question) + 1
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
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Found]:
    """Pass keys at `depths` depths of each context, `tasks` of each, before or after fitting alike."""
    if depths < 2 or tasks < 1 or not contexts:
        raise ValueError(f"depths is {depths}, tasks {tasks}; expected at least 2 depths, 1 task and 1 context")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and max(contexts) > longest:
        raise ValueError(f"context is {max(contexts)}, and the model was made for {longest}; ask for fewer tokens")
    found, total = [], len(contexts) * depths * tasks
    for context in contexts:
        for place in range(depths):
            depth = place / (depths - 1)
            made = [make_task(tokenizer, context, depth, seed + n) for n in range(tasks)]
            scores = []
            for task in made:
                scores.append(solve(model, task))
                if on_progress:
                    on_progress(len(found) * tasks + len(scores), total)
            found.append(
                Found(
                    context,
                    depth,
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
