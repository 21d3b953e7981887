"""How dynamic spans move along a text, character by character: the adaptive-span paper's Figure 5."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spanformer.data import Vocab
from spanformer.model.lm import LM

SHOWN = 120  # tokens
HEADS = 4  # those whose span moves most


@torch.no_grad()
def dynamic_event(model: LM, ids: np.ndarray, vocab: Vocab) -> dict | None:
    """The values of a dynamic event for the last tokens of `ids` [T]; None if no head has a dynamic span."""
    parts = model.dynamic_parts()
    if not parts:
        return None
    recorded: dict[str, Tensor] = {}
    for name, part in parts.items():
        part.rule = _recording(part.rule, name, recorded)
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        model(torch.from_numpy(ids.astype(np.int64))[None].to(device))
    finally:
        model.train(was_training)
        for part in parts.values():
            del part.rule  # the class's own shows again
    rows = [
        (f"{name} head {h + 1}", span[0, h, -SHOWN:]) for name, span in recorded.items() for h in range(span.shape[1])
    ]
    rows = sorted(rows, key=lambda row: -float(row[1].std()))[:HEADS]
    tokens = [printable(vocab.decode(ids[n : n + 1])) for n in range(max(0, len(ids) - SHOWN), len(ids))]
    lengths = [len(token) for token in tokens]
    spans = [[z for z, n in zip(span.tolist(), lengths, strict=True) for _ in range(n)] for _, span in rows]
    return {"text": "".join(tokens), "spans": spans, "names": [name for name, _ in rows]}


def printable(token: str) -> str:
    return "".join({"\n": "⏎", "\t": "→"}.get(c, c if c.isprintable() else "�") for c in token) or "�"


def _recording(rule, name: str, recorded: dict[str, Tensor]):
    def record(view):
        found = rule(view)
        recorded[name] = found.span
        return found

    return record
