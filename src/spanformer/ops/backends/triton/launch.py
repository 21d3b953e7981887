"""From a call's tensors to the kernels' arguments, and the launches.

Nothing here reads a tensor's values, so the host never waits for the device.

Shapes: B batch, H query heads, Hkv key/value heads, Tq and Tk tokens, D and Dv head sizes, L entries of a table.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spanformer.ops.backends.triton import tiles


class Terms(NamedTuple):
    """The rule's terms that have gradients; None if absent."""

    span: Tensor | None
    """[H] or [B, H, Tq]"""
    bias: Tensor | None
    """[H, L]"""
    key_bias: Tensor | None
    """[1 or B, 1 or Hkv or H, Tk]"""
    sink_logits: Tensor | None
    """[H]"""


class Fixed(NamedTuple):
    """All else, in the order of the operator's schema."""

    scale: float
    ramp: float
    causal: bool
    shift: int
    max_future: int
    reach: Tensor | None
    """[H] int64 on the CPU"""
    q_positions: Tensor | None
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    value_size: int

    @property
    def empty(self) -> bool:
        """Nothing to launch: no query, or no key that one could see."""
        return not (self.batch and self.queries and self.keys)


def shape_of(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    (b, h, tq, d), (_, g, tk, dv) = q.shape, v.shape
    return Shape(b, h, g, tq, tk, d, dv)


def laid(t: Tensor) -> Tensor:
    """With contiguous rows, as the kernels read them."""
    return t if t.stride(3) == 1 else t.contiguous()


def strides(t: Tensor) -> tuple[int, ...]:
    """Of batch, heads and tokens. An axis of size 1 may have any stride: a fixed one needs no other compilation."""
    return tuple(16 * t.shape[3] if n == 1 else s for n, s in zip(t.shape[:3], t.stride()[:3], strict=True))


def row_stride(t: Tensor | None) -> int:
    """Of ids [1 or B, T] and key biases [1 or B, ·, Tk]: 0 if one row serves the whole batch."""
    return 0 if t is None or t.shape[0] == 1 else t.stride(0)


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


_reaches: dict[tuple, Tensor] = {}


def reach_on(device: torch.device, reach: Tensor | None) -> Tensor | None:
    """The reach on the device. Rules of many layers and steps share few of them, so each is copied once."""
    if reach is None:
        return None
    key = device, tuple(reach.tolist())
    if (found := _reaches.get(key)) is None:
        if len(_reaches) >= 256:
            _reaches.clear()
        found = _reaches[key] = reach.to(device)
    return found


class Call(NamedTuple):
    """Inputs as the kernels read them."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    fixed: Fixed
    ids: tuple[Tensor | None, ...]
    """positions of queries and keys, documents of queries and keys"""
    reach: Tensor | None

    @property
    def dynamic(self) -> bool:
        """Whether each query has a span."""
        return self.terms.span is not None and self.terms.span.ndim == 3

    def plain(self, step: str) -> bool:
        """Whether tiles can be full: some terms are known only to a mask."""
        known = self.terms.bias is None and self.terms.key_bias is None and all(t is None for t in self.ids)
        return known and not (step == "backward_kv" and self.dynamic)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """SPAN, REACH, BIAS and KEY_BIAS."""
        terms = self.terms
        return terms.span, self.reach, terms.bias, terms.key_bias

    def integers(self) -> tuple[int, ...]:
        """From B to stride_kd, in the kernels' order."""
        s, (_, bias, key_bias, _), fixed = self.shape, self.terms, self.fixed
        placed = fixed.q_positions is not None
        offset = (0 if placed else s.keys - s.queries) - fixed.shift
        last_entry = 0 if bias is None else bias.shape[1] - 1
        shared = 1 if key_bias is None else s.heads // key_bias.shape[1]
        of_ids = (row_stride(t) for t in self.ids)
        return (
            s.batch, s.heads, s.heads // s.kv_heads, s.queries, s.keys, offset, last_entry, fixed.max_future,
            row_stride(key_bias), shared, *of_ids,
        )  # fmt: skip

    def strides(self) -> tuple[int, ...]:
        return *strides(self.q), *strides(self.k), *strides(self.v)

    def constants(self, step: str) -> tuple[dict, tiles.Tile]:
        """The compile-time arguments of a pass, and its tile."""
        s = self.shape
        sizes = tiles.block(s.size), tiles.block(s.value_size)
        tile = tiles.tile(step, max(sizes), self.q.element_size(), s.queries, self.plain(step))
        return {
            "CAUSAL": self.fixed.causal, "DYNAMIC": self.dynamic,
            "D": s.size, "DV": s.value_size, "BD": sizes[0], "BDV": sizes[1], "BM": tile.queries, "BN": tile.keys,
            "PRECISION": precision(self.q.dtype), "num_warps": tile.warps, "num_stages": tile.stages,
        }, tile  # fmt: skip


def precision(dtype: torch.dtype) -> str:
    """Of float32 products: exact unless the user allows TF32, as for torch's own."""
    return "tf32" if dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest" else "ieee"


def prepare(q: Tensor, k: Tensor, v: Tensor, terms: Terms, fixed: Fixed) -> Call:
    ids = tuple(map(contiguous, (fixed.q_positions, fixed.k_positions, fixed.q_documents, fixed.k_documents)))
    terms = Terms(*map(contiguous, terms))
    return Call(
        shape_of(q, k, v), laid(q), laid(k), laid(v), terms, fixed, ids, reach_on(q.device, fixed.reach)
    )  # fmt: skip


def output(q: Tensor, v: Tensor) -> Tensor:
    """[B, H, Tq, Dv], tokens and heads in memory as in q."""
    (b, h, tq, _), dv = q.shape, v.shape[3]
    if q.stride(1) < q.stride(2):
        return q.new_empty((b, tq, h, dv)).transpose(1, 2)
    return q.new_empty((b, h, tq, dv))


def parts_of(call: Call, tile: tiles.Tile) -> tuple[int, int]:
    """(parts, least): tiles of queries that see more than `least` tiles of keys are split into parts. With few
    programs, as many as keep a GPU busy; with several waves of them, two, because the longest would end last."""
    s, busy = call.shape, 2 * processors(call.q.device)
    programs = s.batch * s.heads * -(-s.queries // tile.queries)
    parts = parts_for(call.q.device, programs, s.keys, tile.keys)
    if parts > 1:
        return parts, LEAST_TILES
    return (2 if programs <= WAVES * busy and s.keys > LONG_TILES * tile.keys else 1), LONG_TILES


def parts_for(device: torch.device, programs: int, keys: int, tile: int) -> int:
    """Into how many parts the keys are split, if there are few programs: enough to keep a GPU busy."""
    return max(1, min(2 * processors(device) // programs, MOST_PARTS, -(-keys // (LEAST_TILES * tile))))


def kernel(module: str, name: str = "") -> Any:
    """A jit function; the first one imports triton."""
    return getattr(importlib.import_module(f"spanformer.ops.backends.triton.{module}"), name or module)


MOST_PARTS, LEAST_TILES = 32, 4
WAVES, LONG_TILES = 6, 32


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def run_forward(call: Call) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv] and lse [B, H, Tq]."""
    forward, merge = kernel("forward"), kernel("forward", "merge")
    s, out = call.shape, output(call.q, call.v)
    lse = call.q.new_empty((s.batch, s.heads, s.queries), dtype=torch.float32)
    if s.empty:
        return out.zero_(), sink_lse(lse, call.terms.sink_logits)
    options, tile = call.constants("forward")
    parts, least = parts_of(call, tile)
    some = some_lse = None
    if parts > 1:
        some = lse.new_empty((parts, s.batch, s.heads, s.queries, s.value_size))
        some_lse = lse.new_empty((parts, *lse.shape))
    tensors = call.q, call.k, call.v, out, lse, some, some_lse, *call.tensors(), call.terms.sink_logits, *call.ids
    with on_device(call.q):
        forward[(s.batch * s.heads * -(-s.queries // tile.queries) * parts,)](
            *tensors, *call.integers(), parts, least, *call.strides(), *strides(out), call.fixed.scale,
            call.fixed.ramp, SPLIT=parts > 1, HEADS=tiles.power(s.heads), **options,
        )  # fmt: skip
        if parts > 1:
            rows = s.batch * s.heads * s.queries
            merge[(-(-rows // tiles.MERGED),)](
                some, some_lse, call.terms.sink_logits, out, lse, s.heads, s.queries, rows, parts, *strides(out),
                DV=s.value_size, BDV=options["BDV"], BM=tiles.MERGED,
            )  # fmt: skip
    return out, lse


def on_device(t: Tensor):
    return torch.cuda.device(t.device) if t.device.type == "cuda" else torch.no_grad()


def sink_lse(lse: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Of rows without keys."""
    if sink_logits is None:
        return lse.fill_(float("-inf"))
    return lse.copy_(sink_logits[:, None])
