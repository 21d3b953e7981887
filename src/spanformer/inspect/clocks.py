"""Clocks for the parts of a forward and backward pass, attached to a model while it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from spanformer.attention import MixedMemory
from spanformer.model.stack import TransformerStack
from spanformer.ops import Attended

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_linear_pointwise"}
"""matrix product operators of PyTorch and oneDNN"""


class AttentionClock:
    """Times by hooks every mechanism's forward pass, and its backward pass from the gradient of its output to those of
    queries, keys and values. For heads with a recurrent state, `run` is timed."""

    def __init__(self, model: TransformerStack) -> None:
        cross = [block.cross.mechanism for block in model.layers() if block.cross is not None]
        layers = (m.each() if isinstance(m, MixedMemory) else [m] for m in model.mechanisms())
        self.mechanisms, self.seconds = [*(part for layer in layers for part in layer), *cross], 0.0
        self.running = 0
        """number of active calls, forward or backward"""
        self.hooks: list[RemovableHandle] = []
        self.calls: list[tuple[float, tuple[Tensor, ...]]] = []
        """active forward calls: start time, and queries, keys and values"""

    def __enter__(self) -> AttentionClock:
        for mechanism in self.mechanisms:
            if hasattr(mechanism, "run"):
                mechanism.run = self._timed(mechanism)  # pyright: ignore[reportArgumentType]
                continue
            self.hooks.append(mechanism.register_forward_pre_hook(self._before))
            self.hooks.append(mechanism.register_forward_hook(self._after))
        return self

    def __exit__(self, *_exception) -> None:
        for hook in self.hooks:
            hook.remove()
        for mechanism in self.mechanisms:
            mechanism.__dict__.pop("run", None)

    def _timed(self, mechanism: Any) -> Callable[..., tuple[Attended, dict[str, Tensor]]]:
        def run(q: Tensor, inputs: dict[str, Tensor], *others: Any) -> tuple[Attended, dict[str, Tensor]]:
            given = tuple(t.view_as(t) for t in (q, *inputs.values()))
            self.calls.append((self._start(), given))
            found, state = type(mechanism).run(mechanism, given[0], dict(zip(inputs, given[1:], strict=True)), *others)
            self._after(mechanism, (), found)
            return found, state

        return run

    def _before(self, mechanism: nn.Module, arguments: tuple) -> tuple:
        # new views, so that the hooks see the gradients of this call only
        qkv = tuple(t.view_as(t) for t in arguments[:3])
        self.calls.append((self._start(), qkv))
        return *qkv, *arguments[3:]

    def _after(self, mechanism: nn.Module, arguments: tuple, found) -> None:
        began, qkv = self.calls.pop()
        self._stop(began)
        if not found.out.requires_grad:
            return
        marks, left = {}, {"n": sum(t.requires_grad for t in qkv)}
        found.out.register_hook(lambda _g: marks.__setitem__("began", self._start()))

        def arrived(_g: Tensor) -> None:
            left["n"] -= 1
            if not left["n"]:
                self._stop(marks["began"])

        for t in qkv:
            if t.requires_grad:
                t.register_hook(arrived)

    def _start(self) -> float:
        self.running += 1
        return time.perf_counter()

    def _stop(self, began: float) -> None:
        self.seconds += time.perf_counter() - began
        self.running -= 1


class ProductClock(TorchDispatchMode):
    """Times the matrix products outside attention. It slows down every operator: time nothing else in such a pass."""

    def __init__(self, attention: AttentionClock) -> None:
        super().__init__()
        self.attention, self.seconds = attention, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.attention.running or func.overloadpacket.__name__ not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        began = time.perf_counter()
        found = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - began
        return found
