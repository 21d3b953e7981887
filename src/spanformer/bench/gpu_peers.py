"""Contenders on a GPU: PyTorch's SDPA in its FlashAttention kernel, flash-attn, flash-sparse-attn, and our backends.

flash-sparse-attn has hard windows by head, of whole tokens, and no gradient for them; the first two have no windows by
head at all, and compute full causal attention.

Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.bench.contenders import Contender, backend, full_rule
from spanformer.bench.work import Inputs, Work
from spanformer.ops import Rule


def _whole(work: Work) -> str | None:
    return None if work.kind == "whole" else "is timed on whole sequences only"


def _half(work: Work) -> str | None:
    return _whole(work) or ("takes 16-bit numbers only" if work.dtype == "float32" else None)


def _needs(module: str, package: str) -> Callable[[Work], str | None]:
    def cannot(work: Work) -> str | None:
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed (pip install {package})"
        return _half(work)

    return cannot


def _sdpa(inputs: Inputs) -> Callable[[], Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)

    return forward


def _flash(inputs: Inputs) -> Callable[[], Tensor]:
    attend = importlib.import_module("flash_attn").flash_attn_func
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))  # [B, T, H, D], as views
    return lambda: attend(q, k, v, causal=True).transpose(1, 2)


def _flash_sparse(inputs: Inputs) -> Callable[[], Tensor]:
    attend = importlib.import_module("flash_sparse_attn.ops.triton").flash_dense_attn_func
    q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
    near = torch.tensor(inputs.work.reaches(), dtype=torch.int32, device=q.device)
    windows = torch.stack([0 * near, 0 * near, 0 * near, near], 1)  # [H, 4]: sink, distant band, its gap, near
    return lambda: attend(q, k, v, is_causal=True, window_sizes=windows).transpose(1, 2)


def hard_rule(inputs: Inputs) -> Rule:
    """Windows with hard edges, as long as the spans with their ramps."""
    return Rule(inputs.work.heads, reach=inputs.work.reaches())


SDPA_FLASH = Contender("sdpa", "SDPA, FlashAttention kernel", _half, _sdpa, full_rule, same_work=False)
PEERS = (
    SDPA_FLASH,
    Contender("flash-attn", "flash-attn, full causal", _needs("flash_attn", "flash-attn"), _flash, full_rule,
              same_work=False),
    Contender("flash-sparse-attn", "flash-sparse-attn, hard windows",
              _needs("flash_sparse_attn", "flash-sparse-attn"), _flash_sparse, hard_rule, same_work=False),
    backend("triton"),
    backend("flex"),
)  # fmt: skip
