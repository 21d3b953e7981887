"""Clocks for the parts of a forward and backward pass, hung into a model while it is measured and only then."""

from __future__ import annotations

import time

from torch.utils._python_dispatch import TorchDispatchMode

from spanformer.model.layered import Layered

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear", "_linear_pointwise"}
"""operators that multiply matrices, PyTorch's and oneDNN's"""


class AttentionClock:
    """Times every mechanism's `mix`, and its backward pass from the gradient of its result to that of its queries."""

    def __init__(self, model: Layered) -> None:
        listening = [block.cross.mechanism for block in model.layers() if block.cross is not None]
        self.mechanisms, self.seconds = [*model.mechanisms(), *listening], 0.0
        self.running = 0
        """calls under way, forward or backward"""

    def __enter__(self) -> AttentionClock:
        for mechanism in self.mechanisms:
            mechanism.mix = self._timed(mechanism.mix)
        return self

    def __exit__(self, *_exception) -> None:
        for mechanism in self.mechanisms:
            del mechanism.mix  # the class's own shows again

    def _timed(self, mix):
        def timed(q, k, v, rule, view):
            # views of their own, so that the hooks see this call's gradients only
            q, k, v = (t.view_as(t) for t in (q, k, v))
            began = self._start()
            found = mix(q, k, v, rule, view)
            self._stop(began)
            marks = {}
            found.out.register_hook(lambda _g: marks.__setitem__("began", self._start()))
            left = {"n": 3}

            def arrived(_g) -> None:
                left["n"] -= 1
                if not left["n"]:
                    self._stop(marks["began"])

            for t in (q, k, v):
                t.register_hook(arrived)
            return found

        return timed

    def _start(self) -> float:
        self.running += 1
        return time.perf_counter()

    def _stop(self, began: float) -> None:
        self.seconds += time.perf_counter() - began
        self.running -= 1


class ProductClock(TorchDispatchMode):
    """Times the products outside attention. It slows down every operator, products too small to matter among them, so a
    pass with this clock tells nothing but how long its products take."""

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
