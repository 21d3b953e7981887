"""Which path runs a call of attention with a matrix state. No path stands in for another that was asked for."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from spanformer.ops.linear.matrix_call import MatrixCall
from spanformer.ops.linear.matrix_reference import run_reference

BACKENDS = ("auto", "native", "portable", "reference")


def choose(
    call: MatrixCall, backend: str, portable: Callable[[MatrixCall], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """out and state by the backend of this name; "auto": the native kernel where it can serve the call."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return run_reference(call)
    if backend == "portable":
        return portable(call)
    from spanformer.ops.linear.matrix_native import refuses, run_native  # lazily: it loads the library

    if not (reasons := refuses(call)):
        return run_native(call)
    if backend == "native":
        raise ValueError(f"backend 'native' cannot serve this call: {'; '.join(reasons)}")
    return portable(call)
