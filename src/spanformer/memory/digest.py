"""Digests of a model and of tensors: a KV cache or a datastore belongs to the model that made it."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import torch
from torch import Tensor


class Maker(Protocol):
    """The model that a KV cache belongs to."""

    config: Any
    """its configuration, everything but weights; compared by `repr`"""

    def state_dict(self) -> dict[str, Tensor]: ...


def digest(model: Maker) -> str:
    """The digest of a model's configuration and of the names and values of its weights."""
    return digest_tensors(f"{model.config!r}\n", model.state_dict())


def digest_tensors(text: str, tensors: dict[str, Tensor]) -> str:
    """The digest of a text, and of the names and values of tensors."""
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
