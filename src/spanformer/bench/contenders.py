"""Contenders of the attention benchmark: PyTorch's SDPA and spanformer's backends. Other projects are in peers.py.

A contender states whether it supports a work (or why not) and which rule its result must equal, and builds a callable.
Most other implementations do not support soft spans and compute something else: then `same_work` is False, and they are
checked against the oracle of what they compute.

Shapes: B batch, H heads, Tq queries, Tk keys, D head size.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.bench import profiles
from spanformer.bench.work import KINDS, Inputs, Work
from spanformer.ops import Rule, attend

YARDSTICK = "sdpa"


@dataclass(frozen=True)
class Contender:
    name: str
    label: str
    """name in tables and pictures"""
    cannot: Callable[[Work], str | None]
    """why it does not support this work here; None if it does"""
    build: Callable[[Inputs], Callable[[], Tensor]]
    """returns a callable that computes out [B, H, Tq, D]; prepares everything that can be prepared once"""
    rule: Callable[[Inputs], Rule] = Inputs.rule
    """the rule that its result must equal"""
    same_work: bool = True
    """whether it computes exactly this work, including soft spans and their gradients"""
    dense: float = 0.0
    """number of B × H × Tq × Tk tensors it holds at once; works that do not fit into memory are skipped"""
    kinds: tuple[str, ...] = KINDS
    """kinds of work it is for; other kinds omit it without a reason"""
    floor: float = 0.0
    """relative error allowed because of its definition"""


def runner(contender: Contender, inputs: Inputs, forward: Callable[[], Tensor]) -> Callable[[], object]:
    """The callable to time: forward without autograd, or forward with the gradients of all inputs and parameters."""
    if inputs.work.mode != "forward+backward":

        def run() -> object:
            with torch.no_grad():
                return forward()

        return run
    learned = inputs.leaves() if contender.same_work else {name: getattr(inputs, name) for name in ("q", "k", "v")}
    leaves = list(learned.values())
    return lambda: torch.autograd.grad(forward(), leaves, inputs.grad)


def reason_not(contender: Contender, work: Work) -> str | None:
    """Why this contender skips this work: it does not support it, or it would not fit into memory."""
    reason = contender.cannot(work)
    if reason is None and contender.dense:
        needed, free = contender.dense * work.dense_bytes(), available_bytes()
        if free is not None and needed > 0.6 * free:
            return f"needs about {needed / 2**30:.0f} GiB for dense matrices; {free / 2**30:.0f} GiB are free"
    return reason


def available_bytes() -> int | None:
    """Memory available without swapping; None if the system does not report it."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def unusable_backend(name: str) -> str | None:
    """Why a backend of spanformer cannot be used on this machine; None if it can."""
    try:
        reasons = importlib.import_module(f"spanformer.ops.backends.{name}").BACKEND.unusable()
    except (ImportError, OSError) as error:
        return f"not usable here: {error}"
    return f"not usable here: {'; '.join(reasons)}" if reasons else None


def backend(name: str, dense: float = 0.0) -> Contender:
    """attend(…, backend=name); the rule is built once."""

    def build(inputs: Inputs) -> Callable[[], Tensor]:
        rule = inputs.rule()
        return lambda: attend(inputs.q, inputs.k, inputs.v, rule, backend=name).out

    return Contender(name, f"spanformer {name}", lambda _work: unusable_backend(name), build, dense=dense)


def full_rule(inputs: Inputs) -> Rule:
    """Ordinary causal attention."""
    return Rule(inputs.work.heads)


def _sdpa_cannot(work: Work) -> str | None:
    return "is_causal aligns queries with the first keys, not with the end of a KV cache" if work.streaming else None


def _sdpa_build(inputs: Inputs) -> Callable[[], Tensor]:
    causal = inputs.work.mode != "decode"  # the newest query sees every key
    return lambda: F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=causal)


def _masked_build(inputs: Inputs) -> Callable[[], Tensor]:
    """Builds the mask in each call, as training must, because the spans in it are learned."""
    work, shift = inputs.work, int(inputs.work.original)
    at = torch.arange(work.queries)[:, None] + (work.keys - work.queries - shift)
    distance = at - torch.arange(work.keys)  # [Tq, Tk]
    seen = (distance >= 0) & (distance < work.length)
    index = distance.clamp(0, work.length - 1)
    far = distance.to(torch.float32)

    def forward() -> Tensor:
        ramp = profiles.RAMP
        m = (ramp + inputs.span[:, None, None] - far) / ramp
        m = torch.where(m >= 1, 1, m)
        shown = seen & (m > 0)
        mask = torch.where(shown, m, 1).log()
        if inputs.distance_bias is not None:
            mask = mask + inputs.distance_bias[:, index]
        if inputs.distance_vec is not None:
            table = inputs.q @ inputs.distance_vec.transpose(-1, -2) / math.sqrt(work.dim)  # [B, H, Tq, L]
            mask = mask + table.gather(-1, index.expand(*table.shape[:3], -1))
        mask = torch.where(shown, mask, -math.inf).to(inputs.q.dtype)
        mask = mask if mask.ndim == 4 else mask[None]
        return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=mask)

    return forward


SDPA = Contender(YARDSTICK, "SDPA, full causal", _sdpa_cannot, _sdpa_build, full_rule, same_work=False)
SDPA_MASK = Contender("sdpa-mask", "SDPA with a span mask", lambda _work: None, _masked_build, dense=8.0)
NATIVE, BANDED, REFERENCE = backend("native"), backend("banded"), backend("reference", dense=14.0)
