"""Attention on GPUs through FlexAttention: the rule becomes a score_mod, a mask_mod and an analytic BlockMask.

Which blocks of 128 × 128 pairs a head needs is arithmetic on the range of distances a block holds, so the mask is made
of device tensors of O(heads · blocks²) numbers, without `create_block_mask` and without waiting for the device.
Distances bound a band and m(d) falls with d, so a block holds a visible pair if the nearest distance in it is visible
to its longest span, and only visible pairs if the farthest is visible to its shortest.

On CUDA the call goes through `torch.compile(flex_attention)`. On the CPU it runs FlexAttention's own eager definition,
which is dense inside: for tests of equality, never for use.

Shapes: B batch, H query heads, Tq and Tk queries and keys, padded here to whole blocks, nq and nk of them.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from spanformer.ops.backend import Backend
from spanformer.ops.blocks import FULL
from spanformer.ops.call import Attended, Call

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

log = logging.getLogger("spanformer")

BLOCK = 128
VEC_DISTANCES = 1024  # q·r[d] is stored for every query and this many distances at most
GRID_CELLS = 1 << 26  # of a BlockIndex spelled out as a grid, 256 MiB
VARIANTS = 64  # compiled kernels kept, one for each set of terms and padded shape
FAR = 1 << 40  # a position no token has


class Mod(NamedTuple):
    """A score_mod or mask_mod written with its captured tensors as trailing arguments."""

    apply: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    def closed_score(self) -> Callable[..., Tensor]:
        """With the tensors captured, as `flex_attention` takes it."""
        apply, tensors = self
        return lambda score, b, h, i, j: apply(score, b, h, i, j, *tensors)

    def closed_mask(self) -> Callable[..., Tensor]:
        apply, tensors = self
        return lambda b, h, i, j: apply(b, h, i, j, *tensors)


class Plan(NamedTuple):
    """A call as FlexAttention takes it; q, k and v are padded to whole blocks."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: Mod | None
    mask: Mod
    block_mask: BlockMask
    scale: float


def attend_flex(call: Call) -> Attended:
    made = plan(call)
    if call.q.device.type == "cpu":
        _warn_dense()
        out, lse = _run_eager(made)
    else:
        out, lse = run_public(made, _flex().flex_attention if torch.compiler.is_compiling() else _compiled())
    tq = call.q.shape[2]
    out, lse = out[:, :, :tq], lse[:, :, :tq]
    return Attended(out, lse) if call.rule.sinks is None else _with_sinks(out, lse, call.rule.sinks)


def plan(call: Call) -> Plan:
    """Pad, and put the rule into FlexAttention's terms."""
    q, k, v = (_pad(t, 2) for t in (call.q, call.k, call.v))
    shared = _shared_tensors(call)
    mask = _mask_mod(call, shared)
    return Plan(q, k, v, _score_mod(call, q, shared), mask, block_mask(call, mask.closed_mask()), call.scale)


def run_public(made: Plan, flex_attention: Callable[..., Any], *, lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Through the public function, compiled or not."""
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
    """Through the operator below the public function, which refuses gradients on the CPU though the operator has them.
    It reads mask_mod alone: the block lists play no part here."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    score, mask = made.score or Mod(_untouched, ()), made.mask
    lists = (*made.block_mask.as_tuple()[:-1], mask.apply)
    tensors = score.tensors, mask.tensors
    out, lse, _ = operator(made.q, made.k, made.v, score.apply, lists, made.scale, {}, *tensors)
    return out, lse * math.log(2.0)  # the operator counts in powers of two


def _untouched(score: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
    return score


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Attended:
    """A sink is one more term in the sum, with no value: it scales the output, so it needs no key of its own."""
    sink = sinks.to(lse.dtype)[None, :, None]
    seen, sunk = lse > -math.inf, sink > -math.inf
    both = seen & sunk
    gap = torch.where(both, lse - torch.where(sunk, sink, 0), 0)
    share = torch.where(both, gap.sigmoid(), 1)  # a row that saw nothing is zeros already
    total = torch.where(both, torch.logaddexp(torch.where(seen, lse, 0), torch.where(sunk, sink, 0)), 0)
    lse = torch.where(both, total, torch.where(seen, lse, sink))
    return Attended(out * share[..., None].to(out.dtype), lse)


# --- score_mod and mask_mod -------------------------------------------------------------------------------------------


def _shared_tensors(call: Call) -> dict[str, Tensor]:
    """What both mods read to know a distance and a span. Numbers that change from call to call (an offset, a length)
    are tensors too, filled on the device: as Python numbers they would be compiled in, and compile again when they
    change."""
    rule, (b, h, _, _), at = call.rule, call.q.shape, call.q.device
    shared: dict[str, Tensor] = {}
    if call.q_positions is not None and call.k_positions is not None:
        shared["q_pos"] = _pad(call.q_positions, 1).expand(b, -1)
        shared["k_pos"] = _pad(call.k_positions, 1).expand(b, -1)
    else:
        shared["offset"] = torch.full((h,), call.offset, dtype=torch.int32, device=at)
    if rule.span is not None:
        z = rule.span.to(_working(call.q))
        z = z if rule.dynamic else z[None, :, None].expand(b, -1, call.q.shape[2])
        # One number a query even for a static span: the kernel adds span gradients up with atomics, and all of a
        # head's on one address would be slow.
        shared["span"] = _pad(z, 2).contiguous()
    return shared


def _score_mod(call: Call, q: Tensor, shared: dict[str, Tensor]) -> Mod | None:
    """log m(d), the biases over distances and keys, and q·r[d]; None if there is nothing to add.
    Every learned tensor is indexed once: FlexAttention cannot add up two gradients of one."""
    rule, work = call.rule, _working(call.q)
    learned: dict[str, Tensor] = {}
    if rule.distance_bias is not None:
        learned["distance_bias"] = rule.distance_bias.to(work)
    if rule.distance_vec is not None:
        table = rule.distance_vec[:, : _vec_width(call)].to(work) * call.scale
        learned["vec"] = q @ table.to(q.dtype).transpose(-1, -2)  # [B, H, Tq, W]
    if rule.key_bias is not None:
        bias = torch.where(_hidden(rule.key_bias), 0, rule.key_bias).to(work)  # mask_mod hides what is −inf
        bias = bias.repeat_interleave(rule.heads // bias.shape[1], 1).expand(q.shape[0], -1, -1)
        learned["key_bias"] = _pad(bias, 2).contiguous()
    if rule.span is None and not learned:
        return None
    tensors = shared | learned
    names, ramp, geometry = tuple(tensors), rule.ramp, _Geometry(call)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *captured: Tensor) -> Tensor:
        t = dict(zip(names, captured, strict=True))
        d = geometry.distance(t, b, h, i, j)
        if "distance_bias" in t:
            score = score + t["distance_bias"][h, d.clamp(0, t["distance_bias"].shape[1] - 1)]
        if "vec" in t:
            score = score + t["vec"][b, h, i, d.clamp(0, t["vec"].shape[3] - 1)]
        if "key_bias" in t:
            score = score + t["key_bias"][b, h, j]
        if "span" in t:
            left = t["span"][b, h, i] + (ramp - d.to(t["span"].dtype))
            on_ramp = (left > 0) & (left < ramp)  # strictly: nothing to learn, and no log 0, outside
            score = score + torch.where(on_ramp, torch.where(on_ramp, left / ramp, 1.0).log(), 0.0)
        return score

    return Mod(score_mod, tuple(tensors.values()))


def _mask_mod(call: Call, shared: dict[str, Tensor]) -> Mod:
    rule, (b, h, _, _), at = call.rule, call.q.shape, call.q.device
    tensors = {name: t.detach() for name, t in shared.items()}
    if rule.reach is not None:
        tensors["reach"] = _reach(call)
    if rule.key_bias is not None:
        shown = ~_hidden(rule.key_bias.detach())
        shown = shown.repeat_interleave(h // shown.shape[1], 1).expand(b, -1, -1)
        tensors["shown"] = _pad(shown, 2)  # padded with False: also hides the keys we added
    else:
        tensors["keys"] = torch.full((h,), call.k.shape[2], dtype=torch.int32, device=at)
    if call.q_documents is not None and call.k_documents is not None:
        tensors["q_doc"] = _pad(call.q_documents, 1).expand(b, -1)
        tensors["k_doc"] = _pad(call.k_documents, 1).expand(b, -1)
    size = 0
    if rule.blocks is not None:
        size, grid = rule.blocks.size, _grid(call)
        tensors["grid"] = grid.expand(h, -1, -1)
        if rule.blocks.masks.shape[0]:
            tensors["masks"] = rule.blocks.masks.to(at)
    names, ramp, causal, geometry = tuple(tensors), rule.ramp, rule.causal, _Geometry(call)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *captured: Tensor) -> Tensor:
        t = dict(zip(names, captured, strict=True))
        seen = t["shown"][b, h, j] if "shown" in t else j < t["keys"][h]
        d = geometry.distance(t, b, h, i, j)
        if causal:
            seen = seen & (d >= 0)
        if "reach" in t:
            seen = seen & (d < t["reach"][h])
        if "span" in t:
            seen = seen & (t["span"][b, h, i] + (ramp - d.to(t["span"].dtype)) > 0)
        if "q_doc" in t:
            seen = seen & (t["q_doc"][b, i] == t["k_doc"][b, j])
        if "grid" in t:
            q_pos, k_pos = geometry.positions(t, b, h, i, j)
            row = (q_pos // size).clamp(0, t["grid"].shape[1] - 1)  # only a padded query is beyond
            cell = t["grid"][h, row, (k_pos // size).clamp(0, t["grid"].shape[2] - 1)]
            shown = cell == FULL
            if "masks" in t:
                shown = shown | ((cell >= 0) & t["masks"][cell.clamp(min=0), q_pos % size, k_pos % size])
            seen = seen & shown
        return seen

    return Mod(mask_mod, tuple(tensors.values()))


class _Geometry:
    """Where a query and a key stand, inside a mod."""

    def __init__(self, call: Call) -> None:
        self.shift, self.causal = call.shift, call.rule.causal

    def positions(self, t: dict[str, Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return (t["q_pos"][b, i], t["k_pos"][b, j]) if "q_pos" in t else (i + t["offset"][h], j)

    def distance(self, t: dict[str, Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q_pos, k_pos = self.positions(t, b, h, i, j)
        d = q_pos - k_pos - self.shift
        return d if self.causal else d.abs()


# --- the block mask ---------------------------------------------------------------------------------------------------


def block_mask(call: Call, mask_mod: Callable[..., Tensor]) -> BlockMask:
    """The blocks with a visible pair, those of only visible pairs listed as full, computed without a sync."""
    some, full = block_cover(call)
    lengths = _blocks(call.q.shape[2]) * BLOCK, _blocks(call.k.shape[2]) * BLOCK
    return _flex().BlockMask.from_kv_blocks(
        *_listed(some & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths
    )


def block_cover(call: Call) -> tuple[Tensor, Tensor]:
    """[1 or B, 1 or H, nq, nk] each: blocks that may hold a visible pair, and among them those that hold no other.
    Exact for a band over consecutive positions; other terms, and positions with gaps, may list a block in vain."""
    rule, tk = call.rule, call.k.shape[2]
    q_pos, k_pos = call.positions()
    (q_min, q_max), (k_min, k_max) = _ranges(q_pos, FAR), _ranges(k_pos, FAR)  # [1 or B, n]
    q_min, q_max = q_min[:, None, :, None], q_max[:, None, :, None]
    k_min, k_max = k_min[:, None, None], k_max[:, None, None]
    low, high = q_min - k_max - call.shift, q_max - k_min - call.shift  # the distances in a block
    if rule.causal:
        near, far, some, full = low.clamp(min=0), high, high >= 0, low >= 0
    else:
        near = torch.where((low <= 0) & (high >= 0), 0, torch.minimum(low.abs(), high.abs()))
        far = torch.maximum(low.abs(), high.abs())
        some = full = torch.ones_like(low, dtype=torch.bool)
    first_key = torch.arange(k_min.shape[-1], device=call.q.device) * BLOCK
    some, full = some & (first_key < tk), full & (first_key + BLOCK <= tk)  # keys we added are not visible

    if rule.reach is not None:
        reach = _reach(call)[None, :, None, None]
        some, full = some & (near < reach), full & (far < reach)
    if rule.span is not None:
        shortest, longest = _span_ranges(call)
        some = some & (longest + (rule.ramp - near.to(longest.dtype)) > 0)
        full = full & (shortest + (rule.ramp - far.to(longest.dtype)) > 0)
    if rule.key_bias is not None:
        hidden = _hidden(rule.key_bias.detach())
        hidden = hidden.repeat_interleave(rule.heads // hidden.shape[1], 1) if hidden.shape[1] > 1 else hidden
        some = some & ~_tiles(hidden, True).all(-1)[:, :, None]
        full = full & ~_tiles(hidden, True).any(-1)[:, :, None]
    if call.q_documents is not None and call.k_documents is not None:
        (q_min, q_max), (k_min, k_max) = _ranges(call.q_documents), _ranges(call.k_documents)
        q_min, q_max = q_min[:, None, :, None], q_max[:, None, :, None]
        k_min, k_max = k_min[:, None, None], k_max[:, None, None]
        some = some & (q_min <= k_max) & (k_min <= q_max)
        full = full & (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    if rule.blocks is not None:
        listed, covered = _pattern_cover(call)
        some, full = some & listed, full & covered
    return some, some & full


def _span_ranges(call: Call) -> tuple[Tensor, Tensor]:
    """The shortest and longest span of each query block, [1 or B, H, nq or 1, 1]."""
    assert call.rule.span is not None
    z = call.rule.span.detach().to(_working(call.q))
    if not call.rule.dynamic:
        return z[None, :, None, None], z[None, :, None, None]
    return _tiles(z, math.inf).amin(-1)[..., None], _tiles(z, -math.inf).amax(-1)[..., None]


def _listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which: the listed ones first, ascending."""
    order = torch.argsort(mask.to(torch.int32), dim=-1, descending=True, stable=True)
    return mask.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _ranges(ids: Tensor, far: int | None = None) -> tuple[Tensor, Tensor]:
    """The smallest and largest id of each block, [1 or B, n]."""
    low, high = (-far, far) if far is not None else (torch.iinfo(ids.dtype).min, torch.iinfo(ids.dtype).max)
    return _tiles(ids, high).amin(-1), _tiles(ids, low).amax(-1)


def _tiles(t: Tensor, fill: float) -> Tensor:
    """[..., T] as [..., n, 128]."""
    return _pad(t, -1, fill).unflatten(-1, (-1, BLOCK))


def _grid(call: Call) -> Tensor:
    """The pattern's mask ids spelled out, [1 or H, rows, columns + 1] int32, −2 where nothing is seen. Keys beyond
    the last column read the one added."""
    blocks, at = call.rule.blocks, call.q.device
    assert blocks is not None
    offsets, columns, ids = blocks.offsets.to(at), blocks.columns.to(at), blocks.mask_ids.to(at, torch.int32)
    heads, rows, width = offsets.shape[0], blocks.rows, _pattern_width(call)
    grid = torch.full((heads, rows * (width + 1)), FULL - 1, dtype=torch.int32, device=at)
    entry = torch.arange(columns.shape[0], device=at)
    for head in range(heads):
        row = torch.searchsorted(offsets[head].contiguous(), entry, right=True) - 1
        inside = (row >= 0) & (row < rows) & (columns < width)
        cell = torch.where(inside, row * (width + 1) + columns, width)  # others go to the added column
        grid[head].scatter_(0, cell, ids)
    grid = grid.view(heads, rows, width + 1)
    grid[:, :, width] = FULL - 1
    return grid


def _pattern_width(call: Call) -> int:
    """How many block columns a key of this call can fall in and be seen."""
    blocks = call.rule.blocks
    assert blocks is not None
    if call.rule.causal:
        return blocks.rows  # a key is not after its query
    if call.k_positions is None:
        return max(1, -(-call.k.shape[2] // blocks.size))
    return int(blocks.columns.max()) + 1 if blocks.columns.numel() else 1  # the one read from the device


def _pattern_cover(call: Call) -> tuple[Tensor, Tensor]:
    """Blocks of 128 that meet a listed block of the pattern, and those made of its full blocks alone,
    [1 or B, 1 or H, nq, nk]: counted over the rectangle of pattern blocks that a block's positions span, by a
    summed-area table."""
    assert call.rule.blocks is not None
    size, grid = call.rule.blocks.size, _grid(call)
    heads, rows, columns = grid.shape
    q_pos, k_pos = call.positions()
    (q_min, q_max), (k_min, k_max) = _ranges(q_pos, FAR), _ranges(k_pos, FAR)
    top, bottom = q_min[:, None, :, None] // size, q_max[:, None, :, None] // size + 1
    left, right = k_min[:, None, None] // size, k_max[:, None, None] // size + 1
    head = torch.arange(heads, device=grid.device)[None, :, None, None]

    def count(cells: Tensor) -> Tensor:
        area = torch.zeros(heads, rows + 1, columns + 1, dtype=torch.int64, device=grid.device)
        area[:, 1:, 1:] = cells.cumsum(1).cumsum(2)

        def at(row: Tensor, column: Tensor) -> Tensor:
            return area[head, row.clamp(0, rows), column.clamp(0, columns)]

        return at(bottom, right) - at(top, right) - at(bottom, left) + at(top, left)

    return count(grid > FULL - 1) > 0, count(grid == FULL) == (bottom - top) * (right - left)


# --- small things -----------------------------------------------------------------------------------------------------


def _blocks(length: int) -> int:
    return max(1, -(-length // BLOCK))


def _pad(t: Tensor, dim: int, fill: float = 0) -> Tensor:
    """Axis `dim` lengthened to whole blocks, at least one."""
    dim %= t.ndim
    missing = _blocks(t.shape[dim]) * BLOCK - t.shape[dim]
    if not missing:
        return t
    return torch.constant_pad_nd(t, [0, 0] * (t.ndim - 1 - dim) + [0, missing], fill)


def _working(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _hidden(key_bias: Tensor) -> Tensor:
    return key_bias == -math.inf


def _reach(call: Call) -> Tensor:
    assert isinstance(call.rule.reach, Tensor)
    reach = call.rule.reach.clamp(max=torch.iinfo(torch.int32).max).to(torch.int32)
    return reach.to(call.q.device, non_blocking=True)


def _vec_width(call: Call) -> int:
    """How many distances q·r[d] is stored for: a power of two (so that a growing span seldom compiles anew), but no
    more than the table has."""
    needed = _vec_needed(call)
    assert call.rule.distance_vec is not None
    return min(call.rule.distance_vec.shape[1], max(BLOCK, 1 << max(0, needed - 1).bit_length()))


def _vec_needed(call: Call) -> int:
    """The distances that can have weight, by what is known on the host; the spans are read only if that is too many."""
    rule = call.rule
    assert rule.distance_vec is not None
    needed = min(rule.distance_vec.shape[1], max(rule.reach_list()))
    if call.q_positions is None:
        needed = min(needed, max(call.k.shape[2], call.q.shape[2]))
    if needed > VEC_DISTANCES and rule.span is not None and not torch.compiler.is_compiling():
        needed = min(needed, max(rule.limits()))
    return needed


@functools.cache
def _flex() -> Any:
    import torch.nn.attention.flex_attention as module

    return module


@functools.cache
def _compiled() -> Callable[..., Any]:
    """One kernel for each set of terms and padded shape. Past VARIANTS of them fullgraph makes torch raise; without it,
    it would go on with the dense eager code, silently."""
    return torch.compile(
        _flex().flex_attention, dynamic=False, fullgraph=True, recompile_limit=VARIANTS, isolate_recompiles=True
    )


@functools.cache
def _warn_dense() -> None:
    log.warning(
        "backend 'flex' on the CPU runs FlexAttention's eager definition, which is dense inside: "
        "it serves to test equality, not to attend; use 'native' or 'banded' here"
    )


# --- what it serves ---------------------------------------------------------------------------------------------------


def unusable() -> list[str]:
    try:
        module = _flex()
    except ImportError as error:
        return [f"torch.nn.attention.flex_attention cannot be imported ({error})"]
    missing = [name for name in ("flex_attention", "BlockMask", "AuxRequest") if not hasattr(module, name)]
    return [f"this torch ({torch.__version__}) has no flex_attention.{', '.join(missing)}"] if missing else []


def refuses(call: Call) -> list[str]:
    rule, device = call.rule, call.q.device.type
    reasons = []
    if not call.q.shape[0]:
        reasons.append("an empty batch")
    if call.dropout:
        reasons.append("dropout acts on weights after the softmax, where FlexAttention has no hook")
    if rule.distance_vec is not None and (needed := _vec_needed(call)) > VEC_DISTANCES:
        reasons.append(
            f"distance_vec over {needed} distances: q·r[d] would be stored for every query, "
            f"served up to {VEC_DISTANCES}; a shorter reach or span would do"
        )
    if rule.blocks is not None:
        reasons += _refuses_blocks(call)
    if device == "cuda":
        reasons += _refuses_sizes(call)
    elif device != "cpu":
        reasons.append(f"device {device!r}: only CUDA is served (and the CPU, for tests)")
    elif torch.compiler.is_compiling():
        reasons.append("on the CPU, compiled FlexAttention has neither lse nor gradients")
    return reasons


def _refuses_blocks(call: Call) -> list[str]:
    blocks = call.rule.blocks
    assert blocks is not None
    if not call.rule.causal and call.k_positions is not None and torch.compiler.is_compiling():
        return ["blocks without causality at explicit positions: their extent cannot be read while compiling"]
    cells = blocks.offsets.shape[0] * blocks.rows * (_pattern_width(call) + 1)
    if cells <= GRID_CELLS:
        return []
    return [
        f"blocks of size {blocks.size} make a grid of {cells} cells, served up to {GRID_CELLS}; larger blocks would do"
    ]


def _refuses_sizes(call: Call) -> list[str]:
    """What FlexAttention's Triton kernels do not take."""
    reasons = []
    for names, size in (("q and k", call.q.shape[3]), ("v", call.v.shape[3])):
        if not 16 <= size <= 256:
            reasons.append(f"head size {size} of {names}; FlexAttention's CUDA kernels take 16 to 256")
    if call.q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"dtype {call.q.dtype}; FlexAttention's CUDA kernels sum in float32")
    return reasons


BACKEND = Backend("flex", unusable=unusable, refuses=refuses, run=attend_flex)
