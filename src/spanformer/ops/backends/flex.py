"""Attention on GPUs through FlexAttention: the rule becomes a score_mod and a mask_mod (flex_mods) and an analytic
BlockMask (flex_blocks).

On CUDA the call goes through `torch.compile(flex_attention)`. On the CPU it runs FlexAttention's own eager definition,
which is dense inside: for tests only.

A score_mod runs on every pair, and its logarithm is computed in software: 57 instructions a pair instead of 12. So a
long call with spans runs twice, without log m on blocks whose pairs all have m = 1, with it on the ramp; `merge` joins.

Shapes: B batch, H query heads, Tq and Tk queries and keys, padded here to whole blocks of 128, in buckets.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import types
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import COMMON, Backend, unserved_terms
from spanformer.ops.backends.flex_blocks import (
    BLOCK,
    Lists,
    block_lists,
    bucket,
    grid_shape,
    pad,
    padded_length,
    pattern_width,
)
from spanformer.ops.backends.flex_mods import (
    VEC_DISTANCES,
    Mod,
    mask_mod_of,
    score_mod_of,
    shared_tensors,
    table_width,
    vec_needed,
    vec_width,
)
from spanformer.ops.backends.flex_plans import Plans, Seen
from spanformer.ops.lower import Lowered
from spanformer.ops.merge import merge

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

log = logging.getLogger("spanformer")

GRID_CELLS = 1 << 26  # the largest grid of a BlockIndex: 256 MiB
RECOMPILES = 64  # limit for one variant: with and without gradients, and for other strides
SPLIT_FROM = 2048  # visible keys from which the logarithm costs more than a second call and the merge, by arithmetic
_plans = Plans()


class Plan(NamedTuple):
    """A call in FlexAttention's form; q, k and v are padded to whole blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: Mod | None
    mask: Mod
    block_mask: BlockMask
    scale: float


def attend_flex(call: Lowered) -> Attended:
    parts, made = parts_of(call), plan(call)
    if call.q.device.type == "cpu":
        _warn_dense()
        done = [_run_eager(one) for one in made]
    elif torch.compiler.is_compiling():
        done = [run_public(one, _flex().flex_attention) for one in made]
    else:
        done = [run_public(one, _compiled(variant(part))) for part, one in zip(parts, made, strict=True)]
    tq = call.q.shape[2]
    each = [Attended(out[:, :, :tq], lse[:, :, :tq]) for out, lse in done]
    out, lse = each[0] if len(each) == 1 else merge(each)
    return Attended(out, lse) if call.sink_logits is None else _with_sinks(out, lse, call.sink_logits)


def parts_of(call: Lowered) -> tuple[Lowered, ...]:
    """The call, or two with the same keys, of which each visits other blocks: those of the first need no span."""
    if call.span is None or min(call.k.shape[2], max(call.reach_list())) < SPLIT_FROM:
        return (call,)
    return replace(call, span=None), call


def plan(call: Lowered) -> list[Plan]:
    """Pad the call and translate each part of it into FlexAttention's terms."""
    q, k, v = (pad(t, 2) for t in (call.q, call.k, call.v))
    parts, seen = parts_of(call), _plans.find(call)
    shared = [shared_tensors(part) for part in parts]
    scores = [score_mod_of(part, q, tensors) for part, tensors in zip(parts, shared, strict=True)]
    if seen is None:
        lists = block_lists(call, len(parts) == 2)
        size = q.shape[2], k.shape[2]
        masks = [mask_mod_of(part, tensors, one.own) for part, tensors, one in zip(parts, shared, lists, strict=True)]
        seen = tuple(Seen(mask, _block_mask(mask, one, size)) for mask, one in zip(masks, lists, strict=True))
        _plans.keep(call, seen)
    return [Plan(q, k, v, score, *one, call.scale) for score, one in zip(scores, seen, strict=True)]


def _block_mask(mask: Mod, lists: Lists, lengths: tuple[int, int]) -> BlockMask:
    make = _flex().BlockMask.from_kv_blocks
    return make(*lists.some, *lists.full, BLOCK_SIZE=BLOCK, mask_mod=mask.closed_mask(), seq_lengths=lengths)


def variant(call: Lowered) -> Hashable:
    """The parts of a call that are compiled in: terms, constants, bucketed sizes. Calls of one variant share
    kernels."""
    lengths = (padded_length(call.q.shape[2]), padded_length(call.k.shape[2]))
    sizes = *call.q.shape[:2], call.q.shape[3], *call.k.shape[:2], call.v.shape[3], *lengths
    tables = [t if t is None else table_width(call, t) for t in (call.distance_bias, call.distance_scale)]
    vectors = None if call.distance_vec is None else vec_width(call)
    ids = [
        t if t is None else t.shape[0] for t in (call.q_positions, call.k_positions, call.q_documents, call.k_documents)
    ]
    pattern, keys = None, None if call.key_bias is None else call.key_bias.shape[:2]
    if call.blocks is not None:
        masks = call.blocks.masks.shape[0]
        pattern = call.blocks.size, call.blocks.offsets.shape[0], *grid_shape(call), masks and bucket(masks)
    spans = None if call.span is None else (call.span.ndim, call.ramp)
    flags = call.causal, call.shift, call.max_future > 0, call.reach is None
    return call.q.device, call.q.dtype, call.scale, *sizes, *tables, vectors, *ids, keys, pattern, spans, *flags


def run_public(made: Plan, flex_attention: Callable[..., Any], *, lse: bool = True) -> tuple[Tensor, Any]:
    """Run the public function, compiled or not."""
    out = flex_attention(
        made.q,
        made.k,
        made.v,
        score_mod=None if made.score is None else made.score.closed_score(),
        block_mask=made.block_mask,
        scale=made.scale,
        enable_gqa=made.q.shape[1] != made.k.shape[1],
        return_aux=_flex().AuxRequest(lse=True) if lse else None,
    )
    return (out[0], out[1].lse) if lse else (out, None)


def _run_eager(made: Plan) -> tuple[Tensor, Tensor]:
    """Run the operator below the public function: on the CPU only the operator has gradients.
    It reads mask_mod alone: the block lists are not used here."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    score, mask = made.score or Mod(_untouched, ()), made.mask
    lists = (*made.block_mask.as_tuple()[:-1], mask.apply)
    tensors = score.tensors, mask.tensors
    out, lse, _ = operator(made.q, made.k, made.v, score.apply, lists, made.scale, {}, *tensors)
    return out, lse * math.log(2.0)  # the operator's lse is in base 2


def _untouched(score: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
    return score


def _with_sinks(out: Tensor, lse: Tensor, sink_logits: Tensor) -> Attended:
    """A sink logit adds a term to the softmax's denominator and has no value, so it only scales the output."""
    sink = sink_logits.to(lse.dtype)[None, :, None]
    seen, sunk = lse > -math.inf, sink > -math.inf
    both = seen & sunk
    gap = torch.where(both, lse - torch.where(sunk, sink, 0), 0)
    share = torch.where(both, gap.sigmoid(), 1)  # a row that saw no key is zero already
    total = torch.where(both, torch.logaddexp(torch.where(seen, lse, 0), torch.where(sunk, sink, 0)), 0)
    lse = torch.where(both, total, torch.where(seen, lse, sink))
    return Attended(out * share[..., None].to(out.dtype), lse)


@functools.cache
def _flex() -> Any:
    import torch.nn.attention.flex_attention as module

    return module


@functools.cache
def _compiled(variant: Hashable, backend: Any = "inductor") -> Callable[..., Any]:
    """A separate function, with separate code, for each variant: torch counts compilations by code and stops at a
    limit, which a run with many variants would reach. (fullgraph makes it raise there; without it, torch would silently
    continue with the dense eager code.)"""
    flex_attention = _flex().flex_attention

    def run(*tensors, **options):
        return flex_attention(*tensors, **options)

    code = run.__code__.replace(co_name=f"flex_attention_{next(_count)}")
    own = types.FunctionType(code, globals(), closure=run.__closure__)
    compiler: Callable[..., Any] = torch.compile  # its stubs do not know the last option
    return compiler(own, backend=backend, dynamic=False, fullgraph=True, recompile_limit=RECOMPILES)


_count = itertools.count()


@functools.cache
def _warn_dense() -> None:
    log.warning(
        "backend 'flex' on the CPU runs FlexAttention's eager definition, which is dense inside: "
        "it is for tests only; use 'native' or 'banded' here"
    )


# --- what it supports -------------------------------------------------------------------------------------------------


def unusable() -> list[str]:
    try:
        module = _flex()
    except ImportError as error:
        return [f"torch.nn.attention.flex_attention cannot be imported ({error})"]
    missing = [name for name in ("flex_attention", "BlockMask", "AuxRequest") if not hasattr(module, name)]
    return [f"this torch ({torch.__version__}) has no flex_attention.{', '.join(missing)}"] if missing else []


_unserved = unserved_terms(Lowered, "flex", (*COMMON, "distance_scale"))


def refuses(call: Lowered) -> list[str]:
    device = call.q.device.type
    reasons = _unserved(call)
    if not call.q.shape[0]:
        reasons.append("the batch is empty")
    if call.dropout:
        reasons.append("dropout acts on weights after the softmax, where FlexAttention has no hook")
    if call.distance_vec is not None and (needed := vec_needed(call)) > VEC_DISTANCES:
        reasons.append(
            f"distance_vec needs {needed} distances: flex stores q·r[d] for every query, "
            f"and takes at most {VEC_DISTANCES}; shorten the reach or span"
        )
    if call.blocks is not None:
        reasons += _refuses_blocks(call)
    if device == "cuda":
        reasons += _refuses_sizes(call)
    elif device != "cpu":
        reasons.append(f"device {device!r}: flex runs on CUDA (and on the CPU, for tests)")
    elif torch.compiler.is_compiling():
        reasons.append("on the CPU, compiled FlexAttention has neither lse nor gradients")
    return reasons


def _refuses_blocks(call: Lowered) -> list[str]:
    blocks = call.blocks
    assert blocks is not None
    if not call.causal and call.k_positions is not None and torch.compiler.is_compiling():
        return ["blocks with causal=False at explicit positions: torch.compile cannot read their extent"]
    cells = blocks.offsets.shape[0] * blocks.rows * (pattern_width(call) + 1)
    if cells <= GRID_CELLS:
        return []
    return [
        f"blocks of size {blocks.size} make a grid of {cells} cells; flex takes at most {GRID_CELLS}, so use larger "
        "blocks"
    ]


def _refuses_sizes(call: Lowered) -> list[str]:
    """Reasons why FlexAttention's Triton kernels do not take the call."""
    reasons = []
    for names, size in (("q and k", call.q.shape[3]), ("v", call.v.shape[3])):
        if not 16 <= size <= 256:
            reasons.append(f"the head size of {names} is {size}; FlexAttention's CUDA kernels take 16 to 256")
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"q has dtype {call.q.dtype}; FlexAttention's CUDA kernels sum in float32")
    return reasons


BACKEND = Backend("flex", unusable=unusable, refuses=refuses, run=attend_flex)
