"""How large tensors get."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The most numbers any tensor holds that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [
            t.untyped_storage().nbytes() // t.element_size() for t in tree_leaves(out) if isinstance(t, torch.Tensor)
        ]
        self.most = max([self.most, *sizes])
        return out
