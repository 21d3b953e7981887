"""An operation with a matrix state together with what a layer has around it, in one pass of the compiled CPU kernel
(csrc/layer.h), which stores none of it: a short convolution, SiLU and unit length before it, a gated norm behind it.

    q, k, v ← SiLU(conv(q, k, v));  |q| = |k| = 1        out_t = y_t / rms(y_t) ⊙ w ⊙ SiLU(gate_t)

The same in plain PyTorch is what the mechanisms do themselves (attention/matrix_state.py).
Shapes as in matrix_call.py; conv tokens are read by the convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.linear.matrix_call import MatrixCall, hide

MOST = 64
"""tokens that the kernel's convolution reads"""


class Convolution(NamedTuple):
    """Of q, k and v each."""

    weights: tuple[Tensor, Tensor, Tensor]
    """[H or Hkv, D or Dv, conv], the newest token's last"""
    tails: tuple[Tensor, Tensor, Tensor] | None
    """[B, H or Hkv, conv − 1, D or Dv]: the tokens before the first; None: zeros"""
    padding: Tensor | None
    """[B, T] bool: passed over"""


class Layer(NamedTuple):
    gate: Tensor
    """[B, H, T, Dv] float32"""
    norm: Tensor
    """[Dv]: w"""
    eps: float
    """added to the mean square"""
    convolution: Convolution | None = None


def run_layer(call: MatrixCall, layer: Layer, backend: str) -> tuple[Tensor, Tensor] | None:
    """out [B, H, T, Dv] and the state after the last token; None where the kernel cannot serve the call."""
    if backend not in ("auto", "native") or torch.compiler.is_compiling() or layer.gate.dtype != torch.float32:
        return None
    from spanformer.ops.linear.matrix_native import refuses  # lazily: it loads the library

    if refuses(call) or not _served(layer.convolution):
        return None
    from spanformer.ops.linear.layer_native import run_native

    if layer.convolution is not None and (padding := layer.convolution.padding) is not None:
        beta, decay = (None if t is None else hide(t, padding) for t in (call.beta, call.decay))
        call = call._replace(beta=beta, decay=decay)
    return run_native(call, layer)


def _served(convolution: Convolution | None) -> bool:
    if convolution is None:
        return True
    tails = convolution.tails or ()
    return convolution.weights[0].shape[2] <= MOST and not any(t.requires_grad for t in tails)
