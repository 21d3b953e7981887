"""The slots of a layer's KV cache: one allocation, and how keys and values are written to it and read from it.

One slot holds one key and one value of one head. Head g of a row has `sink_tokens` slots, then the capacity[g] slots of
its ring; position p is in slot first[g] + p mod capacity[g].
Shapes: B batch, Hkv key/value heads, T tokens, N slots of a row, D and Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spanformer.ops import Rings
from spanformer.ops.decode.codes import CODES, SCALES, Bits, code_bytes, decode, encode, scales_shape, slot_first
from spanformer.ops.decode.held import Recent


class Store:
    """Views of `memory`: keys [B, N, D], values [B, N, Dv], in 8 or 4 bits as codes with scales (ops/decode/codes.py),
    and the notes of each key, [B, N, notes] in float64 (a note may be a sum over the whole text; see notes.py)."""

    def __init__(
        self,
        batch: int,
        capacity: Sequence[int],
        sink_tokens: int,
        dims: tuple[int, int],
        bits: Bits,
        dtype: torch.dtype,
        device: torch.device,
        notes: int = 0,
    ) -> None:
        self.batch, self.sink_tokens, self.dtype = batch, sink_tokens, dtype
        self.bits: Bits = bits
        self.capacities = list(capacity)
        self.first = [sum(self.capacities[:g]) + sink_tokens * (g + 1) for g in range(len(self.capacities))]
        self.dims = dims
        with torch.inference_mode(False):
            self.rings_at = torch.tensor(self.first), torch.tensor(self.capacities)
        slots = sum(self.capacities) + sink_tokens * len(self.capacities)
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((batch, slots, notes), torch.float64)]
        if bits:  # the wider dtype first, for alignment
            shapes += [(scales_shape(batch, slots, size, bits), SCALES[bits]) for size in dims]
            shapes += [((batch, slots, code_bytes(size, bits)), CODES[bits]) for size in dims]
        else:
            shapes += [((batch, slots, size), dtype) for size in dims]
        sizes = [torch.Size(shape).numel() * each.itemsize for shape, each in shapes]
        with torch.inference_mode(False):  # so that both modes can write to it
            self.memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
            self.notes, *scales, self.keys, self.values = (
                part.view(each).view(shape)
                for part, (shape, each) in zip(self.memory.split(sizes), shapes, strict=True)
            )
        self.scales = (scales[0], scales[1]) if bits else None

    def rings(self, newest: Tensor, sink_tokens: int, oldest: Tensor | None, recent: Recent | None = None) -> Rings:
        where = self.capacities, newest, sink_tokens, oldest
        return Rings(self.keys, self.values, *where, self.scales, self.dims, recent)

    def rows(self, index: Tensor) -> Store:
        notes = self.notes.shape[2]
        other = Store(
            len(index), self.capacities, self.sink_tokens, self.dims, self.bits, self.dtype, self.memory.device, notes
        )  # fmt: skip
        at = index.to(self.memory.device)
        for mine, theirs in zip(self.tensors().values(), other.tensors().values(), strict=True):
            torch.index_select(mine, 0, at, out=theirs)
        return other

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name; each has a row for each slot."""
        named: dict[str, Tensor] = {"keys": self.keys, "values": self.values}
        named |= {"notes": self.notes} if self.notes.shape[2] else {}
        return named | {
            name: slot_first(t) for name, t in zip(("key_scales", "value_scales"), self.scales or (), strict=False)
        }


def read_slots(
    store: Store, place: Tensor | None, kv_heads: list[int], count: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys [B, heads, count, D] and values of the `count` positions before place [B], or of the sink tokens
    (None)."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for g in kv_heads:
        pieces = _pieces(store, g, place, count)
        for kind in (0, 1):
            found[kind].append(_restored(store, kind, pieces, dtype))
    return torch.stack(found[0], 1), torch.stack(found[1], 1)


def read_positions(store: Store, kv_heads: list[int], positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys [B, heads, n, D] and values at positions [B, heads, n]; what a ring does not hold is arbitrary."""
    first, capacity = (torch.tensor([each[g] for g in kv_heads])[:, None] for each in (store.first, store.capacities))
    at = (first + positions % capacity).flatten(1)
    keys, values = (_restored(store, kind, at, dtype).unflatten(1, (len(kv_heads), -1)) for kind in (0, 1))
    return keys, values


def read_notes(store: Store, place: Tensor | None, kv_heads: list[int], count: int) -> Tensor:
    """[B, query heads, count] the notes of the same keys, for each query head of these key/value heads."""
    found = [_pick(store.notes, _pieces(store, g, place, count)) for g in kv_heads]
    return torch.cat([each.transpose(1, 2) for each in found], 1)


def _pieces(store: Store, g: int, place: Tensor | None, count: int) -> list[tuple[int, int]] | Tensor:
    if place is None:
        return [(store.first[g] - store.sink_tokens, store.sink_tokens)]
    return _stretches(store, g, place - count, count)


def _stretches(store: Store, g: int, start: Tensor, count: int) -> list[tuple[int, int]] | Tensor:
    """The slots of positions start [B] … start + count − 1 of head g: (first slot, count) if all rows agree, else
    slots [B, count]."""
    capacity, first = store.capacities[g], store.first[g]
    if count <= capacity and len(start) and bool((start == start[0]).all()):
        slot = int(start[0]) % capacity
        before = min(count, capacity - slot)
        return [(first + slot, before), (first, count - before)]
    return first + (start[:, None] + torch.arange(count)) % capacity


def _restored(store: Store, kind: int, pieces: list[tuple[int, int]] | Tensor, dtype: torch.dtype) -> Tensor:
    """[B, n, D or Dv] the keys (kind 0) or values (1) in these slots."""
    rows = _pick((store.keys, store.values)[kind], pieces)
    if store.scales is None:
        return rows.to(dtype)
    return decode(rows, _pick(slot_first(store.scales[kind]), pieces), store.dims[kind], kind).to(dtype)


def _pick(rows: Tensor, pieces: list[tuple[int, int]] | Tensor) -> Tensor:
    """[B, n, …] of rows [B, N, …]"""
    if not isinstance(pieces, Tensor):
        return torch.cat([rows[:, a : a + n] for a, n in pieces], 1)
    at = pieces.to(rows.device)
    return rows.gather(1, at if rows.ndim == 2 else at[..., None].expand(-1, -1, rows.shape[2]))


def write_slots(
    store: Store, place: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, notes: Tensor | None = None
) -> None:
    """Write k [B, Hkv, T, D], v and notes [B, H, T] at positions place [B] and after; of row b only the first
    lengths[b]."""
    t = k.shape[2]
    new = _coded(store, k, v)
    if notes is not None:
        new["notes"] = notes.unflatten(1, (len(store.capacities), -1)).transpose(2, 3)
    held = {name: rows for name, rows in store.tensors().items() if name in new}
    if t == 1 and lengths is None:
        _write_one(store, held, new, place)
        return
    together = lengths is None and len(place) and bool((place == place[0]).all())
    for g, capacity in enumerate(store.capacities):
        if together:
            _write_together(store, held, new, g, int(place[0]), t)
            continue
        count = torch.full_like(place, t) if lengths is None else lengths
        token = torch.arange(t)
        position, real = place[:, None] + token, token < count[:, None]
        early = real & (position < store.sink_tokens)
        ring = real & (position >= store.sink_tokens) & (token >= count[:, None] - capacity)
        slot = store.first[g] + torch.where(early, position - store.sink_tokens, position % capacity)
        row, column = (ring | early).nonzero(as_tuple=True)
        to = slot[row, column]
        at = [i.to(k.device) for i in (row, column, to)]
        for name, rows in held.items():
            rows[at[0], at[2]] = new[name][at[0], g, at[1]].to(rows.dtype)


def _write_one(store: Store, held: dict[str, Tensor], new: dict[str, Tensor], place: Tensor) -> None:
    """One token of each row, of all heads at once: decoding through skipped layers calls this for every layer."""
    first, capacity = store.rings_at
    slot = first + place[:, None] % capacity  # [B, Hkv]
    if store.sink_tokens:
        early = place[:, None] < store.sink_tokens
        slot = torch.where(early, first - store.sink_tokens + place[:, None], slot)
    row, slot = torch.arange(len(place))[:, None].to(store.memory.device), slot.to(store.memory.device)
    for name, rows in held.items():
        rows[row, slot] = new[name][:, :, 0].to(rows.dtype)


def write_at(
    store: Store, row: np.ndarray, position: np.ndarray, place: np.ndarray, k: Tensor, v: Tensor
) -> None:  # fmt: skip
    """Write keys k [m, Hkv, D] and values of single tokens of rows row [m] at positions [m] before place [B], except to
    rings that hold later tokens there."""
    first, capacity = (each.numpy() for each in store.rings_at)
    early, position = (position < store.sink_tokens)[:, None], position[:, None]
    slot = np.where(early, first - store.sink_tokens + position, first + position % capacity)  # [m, Hkv]
    held, every = early | (position >= place[row][:, None] - capacity), slice(None)
    token, g = (every, every) if held.all() else held.nonzero()
    row = np.broadcast_to(row[:, None], slot.shape)[token, g]
    to = [torch.from_numpy(np.ascontiguousarray(i)).to(store.memory.device) for i in (row, slot[token, g])]
    for name, new in _coded(store, k, v).items():
        rows = store.tensors()[name]
        rows[to[0], to[1]] = new[token, g].to(rows.dtype)


def _coded(store: Store, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Keys and values as the store holds them, by the names of `Store.tensors`."""
    if not store.bits:
        return {"keys": k, "values": v}
    (keys, key_scales), (values, value_scales) = (encode(x, store.bits, kind) for kind, x in enumerate((k, v)))
    return {"keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales}


def _write_together(store: Store, held: dict[str, Tensor], new: dict[str, Tensor], g: int, place: int, t: int) -> None:
    """All rows are at one position: write slices."""
    capacity, first = store.capacities[g], store.first[g]
    pieces = []
    early = max(0, min(store.sink_tokens - place, t))
    if early:
        pieces.append((0, first - store.sink_tokens + place, early))
    start = max(early, t - capacity)
    while start < t:
        slot = (place + start) % capacity
        count = min(t - start, capacity - slot)
        pieces.append((start, first + slot, count))
        start += count
    for name, rows in held.items():
        for a, slot, count in pieces:
            rows[:, slot : slot + count] = new[name][:, g, a : a + count]


def move(old: Store, new: Store, place: Tensor, lost: Tensor) -> None:
    """Copy the tokens that fit from one store to another with other capacities. lost [B, Hkv]: positions below it were
    overwritten, though cropped rows have room for them; they are zeros in the new store."""
    early = torch.arange(-old.sink_tokens, 0).expand(len(place), -1)
    for g, (was, now) in enumerate(zip(old.capacities, new.capacities, strict=True)):
        position = place[:, None] - 1 - torch.arange(min(was, now))
        source = old.first[g] + torch.cat([position % was, early], 1)
        target = new.first[g] + torch.cat([position % now, early], 1)
        row, column = torch.cat([position >= lost[:, g, None], early < 0], 1).nonzero(as_tuple=True)
        at, to, row = (i.to(old.memory.device) for i in (source[row, column], target[row, column], row))
        for mine, theirs in zip(old.tensors().values(), new.tensors().values(), strict=True):
            theirs[row, to] = mine[row, at]
