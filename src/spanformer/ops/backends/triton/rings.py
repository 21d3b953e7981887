"""Decoding's launches: a kernel over the rings, which also writes the new keys and values, and the merge of its parts.

Shapes: B batch, H query heads, Hkv key/value heads, D and Dv head sizes; N slots in all.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import unserved_terms, unserved_transforms
from spanformer.ops.backends.triton import tiles
from spanformer.ops.backends.triton.checks import DTYPES, refuses_device, unusable
from spanformer.ops.backends.triton.launch import (
    contiguous,
    kernel,
    laid,
    on_device,
    parts_for,
    precision,
    reach_on,
    strides,
)
from spanformer.ops.rule import Rule

if TYPE_CHECKING:
    from spanformer.ops.decode.held import Rings

_SERVED = ("heads", "causal", "reach", "span", "ramp", "distance_bias", "sink_logits", "sink_tokens", "paper_compat")
_unserved = unserved_terms(Rule, "triton", _SERVED)


def refuses_rings(q: Tensor, rings: Rings, rule: Rule) -> list[str]:
    reasons = [*unusable(), *_unserved(rule), *unserved_transforms("triton"), *refuses_device(q.device)]
    if q.dtype not in DTYPES:
        reasons.append(f"q has dtype {q.dtype}; triton takes float32, float16 and bfloat16")
    if rings.bits == 4:
        return [*reasons, "the rings hold 4 bits; triton reads 8 bits and full precision"]
    size = max(q.shape[3], rings.values.shape[2])
    if size > tiles.LARGEST_HEAD:
        reasons.append(f"the head size is {size}; triton takes up to {tiles.LARGEST_HEAD}")
    for name, t in (("keys", rings.keys), ("values", rings.values)):  # a copy would miss later writes
        if t.stride(2) != 1 or t.is_neg():
            reasons.append(f"{name} has strides {list(t.stride())}; triton takes contiguous rows")
    return reasons


class TritonDecode:
    """One query per row over the slots that each head sees."""

    def __init__(self, q: Tensor, rings: Rings, rule: Rule, scale: float) -> None:
        self.rings, self.scale, self.ramp = rings, scale, rule.ramp
        self.shift = 1 if rule.paper_compat else 0
        self.span, self.bias, self.sink_logits = map(contiguous, (rule.span, rule.distance_bias, rule.sink_logits))
        assert isinstance(rings.capacity, Tensor)  # Rings.__post_init__ converted it
        assert rule.reach is None or isinstance(rule.reach, Tensor)
        self.reach = reach_on(q.device, rule.reach)
        self.first, self.capacity = rings.first.to(q.device), rings.capacity.to(q.device)

    def attend(self, q: Tensor, new: tuple[Tensor, Tensor] | None = None) -> Attended:
        rings = self.rings
        if new is not None and rings.scales is not None:  # 8-bit rows are quantised by torch
            from spanformer.ops.decode.banded import write_newest

            write_newest(rings, *new)
            new = None
        (b, h, _, d), dv, groups = q.shape, rings.values.shape[2], len(rings.capacities)
        out, lse = q.new_empty((b, h, 1, dv)), q.new_empty((b, h, 1), dtype=torch.float32)
        if not b:
            return Attended(out, lse)
        tile = tiles.tile("decode", tiles.block(max(d, dv)), q.element_size(), h // groups)
        parts = parts_for(q.device, b * groups, max(rings.capacities), tile.keys)
        self._launch(laid(q), new, out, lse, parts, tile)
        return Attended(out, lse)

    def _launch(self, q: Tensor, new, out: Tensor, lse: Tensor, parts: int, tile: tiles.Tile) -> None:
        rings, (b, h, _, d), dv, groups = self.rings, q.shape, out.shape[3], len(self.rings.capacities)
        part_out = lse.new_empty((parts, b * h, dv))
        part_lse = lse.new_empty((parts, b * h))
        k, v = (None, None) if new is None else map(laid, new)
        fresh = (strides(t)[:2] if t is not None else (0, 0) for t in (k, v))
        ints = (
            b, h, h // groups, rings.keys.shape[1], rings.sink_tokens, self.shift,
            0 if self.bias is None else self.bias.shape[1] - 1, parts,
            h if self.span is not None and self.span.ndim == 3 else 0,
        )  # fmt: skip
        of_rings = (
            n for t in (rings.keys, rings.values) for n in (t.stride(0) if b > 1 else t.shape[1] * 16, t.stride(1))
        )
        where = self.first, self.capacity, on(q.device, rings.newest), on(q.device, rings.oldest)
        blocks = tiles.block(d), tiles.block(dv)
        with on_device(q):
            kernel("decode")[(b * groups, parts)](
                q, rings.keys, rings.values, *(rings.scales or (None, None)), *where, k, v, part_out, part_lse,
                self.span, self.reach, self.bias, *ints, *strides(q)[:2], *of_rings,
                *(n for pair in fresh for n in pair), self.scale, self.ramp, D=d, DV=dv, BD=blocks[0], BDV=blocks[1],
                BM=tile.queries, BN=tile.keys, PRECISION=precision(q.dtype), num_warps=tile.warps,
                num_stages=tile.stages,
            )  # fmt: skip
            kernel("forward", "merge")[(-(-b * h // tiles.MERGED),)](
                part_out, part_lse, self.sink_logits, out, lse, h, 1, b * h, parts, *strides(out), DV=dv, BDV=blocks[1],
                BM=tiles.MERGED,
            )  # fmt: skip


_copies: dict[int, tuple[weakref.ref, int, Tensor]] = {}


def on(device: torch.device, t: Tensor | None) -> Tensor | None:
    """A small CPU tensor on the device, copied once for all layers that share it until it changes."""
    if t is None or t.device == device:
        return t
    if t.is_inference():  # without a version counter
        return t.to(device, non_blocking=True)
    found = _copies.get(id(t))
    if found is None or found[0]() is not t or found[1] != t._version or found[2].device != device:
        for key in [key for key, (held, *_) in _copies.items() if held() is None]:
            del _copies[key]
        found = _copies[id(t)] = weakref.ref(t), t._version, t.to(device)
    return found[2]
