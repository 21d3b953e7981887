"""Reads prompts of any length in constant memory.

The receptive field of the next token is the sum of the layers' context lengths. The model reads only that many of the
last tokens of a longer prompt.
Shapes: B prompts, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from spanformer.infer.text import Vocabulary
from spanformer.memory.cache import Cache
from spanformer.model.lm import LM

Prompt = str | Tensor | np.ndarray | Sequence[int] | Iterator[np.ndarray]
"""A text, its ids, or an iterator over arrays of ids, for prompts too long for the memory."""
OnRead = Callable[[int, int], None]
"""receives (tokens read so far, tokens to read)"""


def parts_of(prompt: Prompt, vocab: Vocabulary | None, limit: int) -> Iterator[np.ndarray]:
    """The ids of a prompt in parts [n], each checked to be below `limit`."""
    if isinstance(prompt, str):
        if vocab is None:
            raise ValueError("the prompt is a text, but vocab is None; pass vocab, or the ids of its tokens")
        return checked(vocab.prompt([prompt] if prompt else []), limit)
    if isinstance(prompt, Iterator):
        return checked(prompt, limit)
    ids = prompt.cpu().numpy() if isinstance(prompt, Tensor) else np.asarray(prompt)
    ids = ids.astype(np.int64) if not ids.size else ids
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"the prompt has shape {list(ids.shape)} and dtype {ids.dtype}; expected token ids [T]")
    return checked([ids], limit)


def checked(parts: Iterable[np.ndarray], limit: int, name: str = "the prompt") -> Iterator[np.ndarray]:
    """The same parts; raises for the first id outside 0 … limit − 1."""
    at = 0
    for part in parts:
        outside = np.flatnonzero((part < 0) | (part >= limit)) if len(part) else part
        if len(outside):
            raise ValueError(
                f"token {at + outside[0] + 1:,} of {name} is {part[outside[0]]}; expected ids of the vocabulary, "
                f"0 … {limit - 1}"
            )
        at += len(part)
        yield part


def matters(model: LM) -> int:
    """Receptive field: how many of a text's last tokens can affect the next one."""
    return model.receptive_field()


def last_tokens(parts: Iterable[np.ndarray], most: int) -> np.ndarray:
    """[n] int64: the last `most` tokens, or all if there are fewer. Uses little more memory than that."""
    kept: deque[np.ndarray] = deque()
    held = 0
    for part in parts:
        kept.append(part[-most:])
        held += len(kept[-1])
        while held - len(kept[0]) >= most:
            held -= len(kept.popleft())
    return np.concatenate([np.empty(0, np.int64), *kept])[-most:]


def read_prompts(model: LM, prompts: list[np.ndarray], cache: Cache, chunk: int, on_read: OnRead | None) -> Tensor:
    """[B, V] logits after each prompt [n]; reads the prompts as one batch, a chunk at a time, into the KV cache."""
    device = next(model.parameters()).device
    ends = torch.tensor([len(ids) for ids in prompts])
    longest = int(ends.max())
    logits = torch.zeros(0)
    for at in range(0, longest, chunk):
        width = min(chunk, longest - at)
        x = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, ids in enumerate(prompts):
            part = torch.from_numpy(ids[at : at + width])
            x[row, : len(part)] = part
        lengths = (ends - at).clamp(0, width)
        here = (ends > at) & (ends <= at + width)
        found = model.decode(
            x.to(device),
            cache,
            lengths=None if bool((lengths == width).all()) else lengths,
            logits="last" if bool(here.any()) else "none",
        )
        if found is not None:
            logits = found if not len(logits) else torch.where(here.to(device)[:, None], found, logits)
        if on_read is not None:
            on_read(at + width, longest)
    return logits
