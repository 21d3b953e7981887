"""Counts bfloat16 products: those of PyTorch, forward, backward and in an optimiser, and calls of the native kernel."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spanformer.ops import kernel

NAMES = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear", "mkldnn_linear",
         "_linear_pointwise", "convolution", "einsum"}  # fmt: skip


class Bfloat16Products(TorchDispatchMode):
    """`counted` has the products by name while the block runs; "native" is a call of the compiled kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in NAMES and any(isinstance(t, Tensor) and t.dtype == torch.bfloat16 for t in tree_leaves(args)):
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        pack = kernel.pack_call

        def counting(q: Tensor, *rest):
            self.counted["native"] += q.dtype == torch.bfloat16
            return pack(q, *rest)

        self.patch = mock.patch.object(kernel, "pack_call", counting)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *exception):
        self.patch.stop()
        return super().__exit__(*exception)
