"""A rule in FlexAttention's terms: a score_mod that adds to the score of a pair, a mask_mod that says whether the pair
is visible.

    score_mod   s + scale · q_i·r[d] + b[d] + c_j + log m(d), the first sum as relu(…) · f[d] with distance_scale
    mask_mod    c_j > −∞, d ≥ 0 (if causal), d < reach, m(d) > 0, one document, and in the block pattern

Both are functions of the indices (b, h, i, j) of one pair, which FlexAttention traces into its kernel. They read
captured tensors. Numbers that change from call to call (an offset, a length) are tensors too, filled on
the device: Python numbers would be compiled in, and every change would compile again. So would shapes: tables and
patterns are padded to buckets, like queries and keys.

Shapes: B batch, H query heads, Tq and Tk queries and keys, both padded to whole blocks; W distances of q·r[d].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.backends.flex_blocks import (
    BLOCK,
    bucket,
    is_hidden,
    pad,
    padded_length,
    pattern_grid,
    ramp_left,
    reaches,
    working_dtype,
)
from spanformer.ops.blocks import FULL
from spanformer.ops.lower import Lowered
from spanformer.ops.tables import entry

VEC_DISTANCES = 1024  # q·r[d] is stored for every query and at most this many distances


class Mod(NamedTuple):
    """A score_mod or mask_mod with its captured tensors as trailing arguments."""

    apply: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    # With the tensors captured: `flex_attention` counts parameters to tell a score_mod from a mask_mod.

    def closed_score(self) -> Callable[..., Tensor]:
        apply, tensors = self
        return lambda score, b, h, i, j: apply(score, b, h, i, j, *tensors)

    def closed_mask(self) -> Callable[..., Tensor]:
        apply, tensors = self
        return lambda b, h, i, j: apply(b, h, i, j, *tensors)


def shared_tensors(call: Lowered) -> dict[str, Tensor]:
    """The tensors from which both mods compute a distance and a span."""
    (b, _, tq, _) = call.q.shape
    shared: dict[str, Tensor] = {}
    if call.q_positions is not None and call.k_positions is not None:
        shared["q_pos"], shared["k_pos"] = _ids(call.q_positions, b), _ids(call.k_positions, b)  # [B, T]
    else:
        shared["offset"] = _number(call.offset, call)
    if call.max_future:
        shared["max_future"] = _number(call.max_future, call)
    if call.span is not None:
        z = call.span.to(working_dtype(call.q))
        z = z if call.dynamic else z[None, :, None].expand(b, -1, tq)
        # One number per query even for a static span: the kernel adds up span gradients with atomics, and those of a
        # whole head at one address would be slow.
        shared["span"] = pad(z, 2).contiguous()  # [B, H, Tq]
    return shared


def score_mod_of(call: Lowered, q: Tensor, shared: dict[str, Tensor]) -> Mod | None:
    """log m(d), the biases over distances and keys, and q·r[d]; None if there is nothing to add. q is padded.
    Every learned tensor is indexed once: FlexAttention cannot sum two gradients of one tensor."""
    work = working_dtype(call.q)
    learned: dict[str, Tensor] = {}
    for name in ("distance_bias", "distance_scale"):
        if (table := getattr(call, name)) is not None:
            width = table_width(call, table)
            learned[name] = lengthen(table[:, :width].to(work), width)  # [H, L]
    if call.distance_vec is not None:
        width = vec_width(call)
        table = lengthen(call.distance_vec[:, :width].to(work), width) * call.scale
        learned["vec"] = q @ table.to(q.dtype).transpose(-1, -2)  # [B, H, Tq, W]
    if call.key_bias is not None:
        bias = torch.where(is_hidden(call.key_bias), 0, call.key_bias)  # mask_mod hides keys whose bias is −inf
        learned["key_bias"] = _each_key(bias.to(work), call).contiguous()
    if call.span is None and not learned:
        return None
    tensors = shared | learned
    names, ramp, geometry = tuple(tensors), call.ramp, _Geometry(call)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, *captured: Tensor) -> Tensor:
        t = dict(zip(names, captured, strict=True))
        d = geometry.distance(t, b, h, i, j)
        at = geometry.entry(t, b, h, i, j)
        if "vec" in t:
            score = score + t["vec"][b, h, i, at.clamp(0, t["vec"].shape[3] - 1)]
        if "distance_scale" in t:
            score = score.relu() * t["distance_scale"][h, at.clamp(0, t["distance_scale"].shape[1] - 1)]
        if "distance_bias" in t:
            score = score + t["distance_bias"][h, at.clamp(0, t["distance_bias"].shape[1] - 1)]
        if "key_bias" in t:
            score = score + t["key_bias"][b, h, j]
        if "span" in t:
            left = ramp_left(t["span"][b, h, i], d, ramp)
            on_ramp = (left > 0) & (left < ramp)  # strictly inside: no gradient and no log 0 outside
            score = score + torch.where(on_ramp, torch.where(on_ramp, left / ramp, 1.0).log(), 0.0)
        return score

    return Mod(score_mod, tuple(tensors.values()))


def mask_mod_of(call: Lowered, shared: dict[str, Tensor], own: Tensor | None = None) -> Mod:
    """Which pairs are visible. own: the blocks of this part of a call (`Lists.own`)."""
    (b, h, _, _) = call.q.shape
    tensors = {name: t.detach() for name, t in shared.items()}
    if own is not None:
        tensors["own"] = own.expand(b, h, -1, -1)
    if call.reach is not None:
        tensors["reach"] = reaches(call)
    if call.key_bias is not None:
        tensors["shown"] = _each_key(~is_hidden(call.key_bias.detach()), call)  # also hides padded keys
    else:
        tensors["keys"] = _number(call.k.shape[2], call)
    if call.q_documents is not None and call.k_documents is not None:
        tensors["q_doc"], tensors["k_doc"] = _ids(call.q_documents, b), _ids(call.k_documents, b)  # [B, T]
    size = 0
    if call.blocks is not None:
        size, tensors["grid"] = call.blocks.size, pattern_grid(call).expand(h, -1, -1)
        if count := call.blocks.masks.shape[0]:
            tensors["masks"] = lengthen(call.blocks.masks.to(call.q.device), bucket(count), 0)
    names, ramp, causal, geometry = tuple(tensors), call.ramp, call.causal, _Geometry(call)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor, *captured: Tensor) -> Tensor:
        t = dict(zip(names, captured, strict=True))
        seen = t["shown"][b, h, j] if "shown" in t else j < t["keys"][h]
        d = geometry.distance(t, b, h, i, j)
        if "own" in t:
            seen = seen & t["own"][b, h, i // BLOCK, j // BLOCK]
        if causal:
            seen = seen & (d >= 0)
        if "reach" in t:
            seen = seen & (d < t["reach"][h])
        if "span" in t:
            seen = seen & (ramp_left(t["span"][b, h, i], d, ramp) > 0)
        if "q_doc" in t:
            seen = seen & (t["q_doc"][b, i] == t["k_doc"][b, j])
        if "grid" in t:
            q_pos, k_pos = geometry.positions(t, b, h, i, j)
            row = (q_pos // size).clamp(0, t["grid"].shape[1] - 1)  # only padded queries are beyond
            cell = t["grid"][h, row, (k_pos // size).clamp(0, t["grid"].shape[2] - 1)]
            shown = cell == FULL
            if "masks" in t:
                shown = shown | ((cell >= 0) & t["masks"][cell.clamp(min=0), q_pos % size, k_pos % size])
            seen = seen & shown
        return seen

    return Mod(mask_mod, tuple(tensors.values()))


class _Geometry:
    """The positions of a query and a key, inside a mod."""

    def __init__(self, call: Lowered) -> None:
        self.shift, self.causal = call.shift, call.causal

    def positions(self, t: dict[str, Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        return (t["q_pos"][b, i], t["k_pos"][b, j]) if "q_pos" in t else (i + t["offset"][h], j)

    def distance(self, t: dict[str, Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = self._signed(t, b, h, i, j)
        return d if self.causal else d.abs()

    def entry(self, t: dict[str, Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The entries of distance tables to read."""
        d = self._signed(t, b, h, i, j)
        return d + t["max_future"][h] if "max_future" in t else entry(d, self.causal, 0)

    def _signed(self, t: dict[str, Tensor], b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q_pos, k_pos = self.positions(t, b, h, i, j)
        return q_pos - k_pos - self.shift


def _number(n: int, call: Lowered) -> Tensor:
    """[H], all n."""
    return torch.full((call.q.shape[1],), n, dtype=torch.int32, device=call.q.device)


def _ids(ids: Tensor, batch: int) -> Tensor:
    """[1 or B, T] as [B, T]."""
    return pad(ids, 1).expand(batch, -1)


def _each_key(t: Tensor, call: Lowered) -> Tensor:
    """[1 or B, 1 or Hkv or H, Tk] as [B, H, Tk], padded with 0 or False."""
    b, h, _, _ = call.q.shape
    return pad(t.repeat_interleave(h // t.shape[1], 1).expand(b, -1, -1), 2)


def table_width(call: Lowered, table: Tensor) -> int:
    """How many distances of a table to pass on: as many as can occur, by sizes that are compiled in anyway."""
    if call.q_positions is None and not call.max_future:
        return padded_length(max(call.q.shape[2], call.k.shape[2]))
    return padded_length(table.shape[1])


def vec_width(call: Lowered) -> int:
    """How many distances q·r[d] is stored for: a power of two, so that a growing span seldom recompiles."""
    return max(BLOCK, 1 << max(0, vec_needed(call) - 1).bit_length())


def lengthen(table: Tensor, length: int, dim: int = 1) -> Tensor:
    """Pad along `dim` with the last entry: only hidden pairs read the padding."""
    missing = length - table.shape[dim]
    if not missing:
        return table
    last = table.narrow(dim, table.shape[dim] - 1, 1)
    shape = list(table.shape)
    shape[dim] = missing
    return torch.cat([table, last.expand(shape)], dim)


def vec_needed(call: Lowered) -> int:
    """The number of distances that can have weight, from numbers on the host; spans are read only if it is too
    large."""
    assert call.distance_vec is not None
    if call.max_future:  # future distances come first, so the whole table is stored
        return call.distance_vec.shape[1]
    needed = min(call.distance_vec.shape[1], max(call.reach_list()))
    if call.q_positions is None:
        needed = min(needed, max(call.k.shape[2], call.q.shape[2]))
    if needed > VEC_DISTANCES and call.span is not None and not torch.compiler.is_compiling():
        needed = min(needed, max(call.limits()))
    return needed
