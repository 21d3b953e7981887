"""The products of a model's layers. On processors with AVX-512 they are oneDNN's: PyTorch takes products of float32
from MKL, which leaves a tenth to a quarter of such a processor unused (benchmarks/products.py).

    y = x·Wᵀ + b        relu: y = max(x·Wᵀ + b, 0), in the same pass

Shapes: x [..., inputs], W [outputs, inputs], b [outputs].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEW_ROWS = 64
"""Below this many rows a call's fixed cost counts for more than its product."""


class Linear(nn.Linear):
    """As nn.Linear; where oneDNN serves it, once differentiable only."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)

    def relu(self, x: Tensor) -> Tensor:
        """max(this layer of x, 0)"""
        return product(x, self.weight, self.bias, relu=True)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    if _served(x, weight):
        return _Product.apply(x, weight, bias, relu)
    y = F.linear(x, weight, bias)
    return F.relu(y) if relu else y


@contextlib.contextmanager
def counted_products() -> Iterator[None]:
    """PyTorch's own products meanwhile: its counter of operations does not know oneDNN's."""
    global _onednn
    before, _onednn = _onednn, None
    try:
        yield
    finally:
        _onednn = before


def _find():
    """oneDNN's product as an operator, or None where MKL's is as good or it is not to be had."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


_onednn = _find()
_PLAIN = (Tensor, nn.Parameter)


def _served(x: Tensor, weight: Tensor) -> bool:
    return (
        _onednn is not None
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() >= FEW_ROWS * x.shape[-1]
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        y = _run(x, weight, bias, "relu" if relu else "none")
        ctx.save_for_backward(x, weight, y if relu else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, y = ctx.saved_tensors
        if y is not None:
            grad = torch.ops.aten.threshold_backward(grad, y, 0)
        rows = grad.flatten(0, -2)
        wanted = ctx.needs_input_grad
        return (
            _run(grad, weight.t(), None, "none") if wanted[0] else None,
            rows.t() @ x.flatten(0, -2) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
            None,
        )


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, after: str) -> Tensor:
    assert _onednn is not None
    return _onednn(x.contiguous(), weight, bias, after, [], "")
