"""Linear layers. On processors with AVX-512 they use oneDNN: PyTorch computes float32 products
by MKL, which leaves a tenth to a quarter of such a processor unused (`spanformer bench products`).

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
"""Below this many rows the fixed cost of a call outweighs its product."""


class Linear(nn.Linear):
    """Like nn.Linear; with oneDNN it has no second derivative."""

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


def through_relu(x: Tensor, up: Linear, down: Linear) -> Tensor:
    """down(max(up(x), 0)) in one function, which reads the gradient of the inner activations fewer times."""
    if _served(x, up.weight) and _served(x, down.weight):
        return _ThroughRelu.apply(x, up.weight, up.bias, down.weight, down.bias)
    return down(up.relu(x))


@contextlib.contextmanager
def counted_products() -> Iterator[None]:
    """Use PyTorch's products inside this block: its FLOP counter does not count oneDNN's."""
    global _onednn
    before, _onednn = _onednn, None
    try:
        yield
    finally:
        _onednn = before


def _find():
    """oneDNN's product as an operator, or None where it is not available or MKL is as fast."""
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
        return *_gradients(grad, x, weight, ctx.needs_input_grad), None


class _ThroughRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, up: Tensor, up_bias, down: Tensor, down_bias) -> Tensor:
        inner = _run(x, up, up_bias, "relu")
        ctx.save_for_backward(x, up, inner, down)
        return _run(inner, down, down_bias, "none")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, up, inner, down = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        g_inner, *g_down = _gradients(grad, inner, down, (True, *wanted[3:]))
        assert g_inner is not None
        # in place: nothing else uses this gradient
        torch.ops.aten.threshold_backward.grad_input(g_inner, inner, 0, grad_input=g_inner)
        return *_gradients(g_inner, x, up, wanted), *g_down


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, wanted) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, where wanted."""
    rows = grad.flatten(0, -2)
    return (
        _run(grad, weight.t(), None, "none") if wanted[0] else None,
        rows.t() @ x.flatten(0, -2) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, after: str) -> Tensor:
    assert _onednn is not None
    return _onednn(x.contiguous(), weight, bias, after, [], "")
