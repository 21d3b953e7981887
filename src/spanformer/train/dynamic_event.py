"""Dynamic spans (Figure 5 of the adaptive-span paper) and layers along a text, character by character."""

from __future__ import annotations

import numpy as np
import torch

from spanformer.core.events import DepthEvent, DynamicEvent
from spanformer.data import Vocab
from spanformer.inspect.dynamic_spans import token_spans
from spanformer.model.lm import LM

SHOWN = 120  # tokens
HEADS = 4  # the heads whose spans vary most


def dynamic_event(model: LM, ids: np.ndarray, vocab: Vocab, step: int) -> DynamicEvent | None:
    """Spans at the last tokens of `ids` [T]; None if no head has a dynamic span."""
    device = next(model.parameters()).device
    found = token_spans(model, torch.from_numpy(ids.astype(np.int64)).to(device))
    if not found:
        return None
    rows = [(f"{name} head {h}", span[-SHOWN:]) for name, spans in found.items() for h, span in enumerate(spans, 1)]
    rows = sorted(rows, key=lambda row: -float(row[1].std()))[:HEADS]
    text, lengths = _text(ids, vocab)
    spans = np.array([np.repeat(np.array(span.tolist()), lengths) for _, span in rows])
    return DynamicEvent(step, text, spans, [name for name, _ in rows])


@torch.no_grad()
def depth_event(model: LM, ids: np.ndarray, vocab: Vocab, step: int) -> DepthEvent | None:
    """Layers at the last tokens of `ids` [T]; None if all tokens run through all layers."""
    if model.depth is None:
        return None
    training = model.training
    model.eval()
    try:
        model(torch.from_numpy(ids.astype(np.int64)).to(next(model.parameters()).device)[None])
    finally:
        model.train(training)
    taken = model.depth.latest
    assert taken is not None
    text, lengths = _text(ids, vocab)
    return DepthEvent(step, text, np.repeat(taken[0, -SHOWN:].cpu().numpy(), lengths).tolist(), model.config.layers)


def _text(ids: np.ndarray, vocab: Vocab) -> tuple[str, list[int]]:
    """The last tokens as text, and the number of characters of each."""
    tokens = [printable(vocab.decode(ids[n : n + 1])) for n in range(max(0, len(ids) - SHOWN), len(ids))]
    return "".join(tokens), [len(token) for token in tokens]


def printable(token: str) -> str:
    return "".join({"\n": "⏎", "\t": "→"}.get(c, c if c.isprintable() else "�") for c in token) or "�"
