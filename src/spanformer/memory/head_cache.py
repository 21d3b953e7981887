"""The keys and values that one layer's heads still see: a ring for each key/value head, as long as its reach.

One slot of a ring holds one key and one value (slots.py, `Store`). A new token overwrites the oldest one, which the
head no longer sees, so memory does not grow with the text. Keys are stored with their positions encoded (rotary keys
rotated). Position p is always in slot p mod capacity, and distances count back from each row's newest token, so nothing
moves when a ring wraps around.
Shapes: B batch, H query heads, Hkv key/value heads, T new tokens, D and Dv head sizes, N slots of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spanformer.memory.checks import check_call, check_in_sight, check_lengths, check_lengths_back, check_reach
from spanformer.memory.lost import LOST, Lost, add_lost
from spanformer.memory.many_tokens import RuleFor, attend_many, attend_many_placed
from spanformer.memory.recent import RecentTokens
from spanformer.memory.slots import Store, move, write_slots
from spanformer.ops import AnyRule, Attended, Rings, Rule, attend_rings
from spanformer.ops.decode.codes import Bits, check_bits
from spanformer.ops.decode.rings import Decoder


class HeadCache:
    """One layer's keys and values, for rows that may be at different positions.

    A layer calls only `attend`: it attends to the rings and to the new tokens, and stores the new ones.
    """

    def __init__(
        self,
        batch: int,
        reach: Sequence[int],
        head_dim: int,
        value_dim: int = 0,
        *,
        sink_tokens: int = 0,
        slack: int = 0,
        bits: Bits = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        zeros: int = 0,
        place: Tensor | None = None,
        notes: int = 0,
    ) -> None:
        """reach [Hkv]: how many positions each key/value head sees, the newest included; for grouped heads the longest
        of the group. value_dim: Dv; 0: head_dim. sink_tokens: each head keeps this many first tokens beside its ring.
        slack: how many tokens `crop` can remove after a ring has wrapped. bits: 8 or 4 of each stored number
        (ops/decode/codes.py); 0 stores dtype. zeros: this many tokens of zero keys and values come before the first
        token and are visible. place [B]: shared by several layers, which then advance together. notes: query heads per
        key/value head if rules depend on the keys (`read_placed`), else 0."""
        check_bits(bits)
        for name, number in (("batch", batch), ("slack", slack), ("sink_tokens", sink_tokens), ("zeros", zeros)):
            if number < 0:
                raise ValueError(f"{name} is {number}; expected at least 0")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}; expected a floating-point dtype")
        self.sink_tokens, self.slack, self.zeros, self.notes = sink_tokens, slack, zeros, notes
        self.bits: Bits = bits
        self.dtype, self.device = dtype, torch.device(device)
        self.dims = (head_dim, value_dim or head_dim)
        self.reach = check_reach(reach)
        with torch.inference_mode(False):  # so that both modes can write to it
            self.place = torch.full((batch,), zeros) if place is None else place
            """[B] the position of each row's next token, on the CPU"""
            self.written = self.place.clone()
            """[B] one beyond the highest position ever written; below place unless rows were cropped"""
        self.lost: Lost | None = None
        """positions that the rings had overwritten when they were resized"""
        self.store = self._allocate(batch)
        self.recent = RecentTokens.empty(self.store, slack) if bits == 4 else None
        self._decoder: tuple[Rule, tuple, Decoder] | None = None
        """prepared for this rule and calls of this form"""

    @property
    def batch(self) -> int:
        return len(self.place)

    @property
    def seen(self) -> Tensor:
        """[B] the number of tokens that each row has read."""
        return self.place - self.zeros

    def bytes(self) -> int:
        """The exact number of bytes allocated for keys and values."""
        return sum(store.memory.numel() for store in self.stores())

    def stores(self) -> list[Store]:
        """Where each token is stored."""
        return [self.store] if self.recent is None else [self.store, self.recent.store]

    def stored(self) -> dict[str, Tensor]:
        """The tensors of keys and values by name, with a row for each of the batch."""
        return self.store.tensors() | ({} if self.recent is None else self.recent.tensors())

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AnyRule,
        *,
        lengths: Tensor | None = None,
        backend: str = "auto",
        scale: float | None = None,
    ) -> Attended:
        """q [B, H, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv] of the next T tokens of each row → their
        attention, out [B, H, T, Dv] and lse [B, H, T]. lengths [B]: only this many of a row's T tokens are real; the
        others are padding after them, whose outputs are undefined. Without gradients."""
        found = self.read(q, k, v, rule, lengths=lengths, backend=backend, scale=scale)
        self.advance(q.shape[2], lengths)
        return found

    def advance(self, tokens: int, lengths: Tensor | None = None) -> None:
        """Advance every row by `tokens`, or by lengths [B]."""
        self.place += tokens if lengths is None else lengths.to("cpu", torch.int64)

    @torch.no_grad()
    def read(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, *, lengths: Tensor | None = None, backend: str = "auto",
        scale: float | None = None,
    ) -> Attended:  # fmt: skip
        """`attend` without advancing: the owner of layers that share `place` advances them once."""
        if q.shape[2] == 1 and lengths is None and isinstance(rule, Rule):
            return self._decode(q, k, v, rule, backend, scale)
        check_call(q, k, v, rule, self.batch, self.reach, self.dims, self.sink_tokens)
        lengths = check_lengths(lengths, self.batch, q.shape[2])
        found = attend_many(self, q, k, v, rule, backend, scale)
        self._write(k, v, lengths)
        return found

    @torch.no_grad()
    def read_placed(
        self, q: Tensor, k: Tensor, v: Tensor, rule_for: RuleFor, *, lengths: Tensor | None = None,
        backend: str = "auto", scale: float | None = None,
    ) -> Attended:  # fmt: skip
        """`read` with a rule that depends on the positions of the keys. rule_for(rows, start, length) returns it for
        some rows [n] of the batch whose keys are at positions start … start + length − 1, new tokens last; its key_span
        and forget belong to the new tokens, and are stored. Rows at different positions run in turn, one position after
        the other."""
        lengths = check_lengths(lengths, self.batch, q.shape[2])
        parts, order, notes = [], [], []
        for place in sorted(set(self.place.tolist())):
            rows = (self.place == place).nonzero()[:, 0]
            qs, ks, vs = (t if len(rows) == self.batch else t[rows.to(t.device)] for t in (q, k, v))
            found, noted = attend_many_placed(self, qs, ks, vs, rule_for, rows, place, backend, scale)
            parts.append(found)
            notes += [] if noted is None else [noted]
            order += rows.tolist()
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=q.device)
        self._write(k, v, lengths, torch.cat(notes).index_select(0, back) if notes else None)
        if len(parts) == 1:
            return parts[0]
        return Attended(*(torch.cat(t).index_select(0, back) for t in zip(*parts, strict=True)))

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> None:
        """Store k [B, Hkv, T, D] and v [B, Hkv, T, Dv] without attention."""
        self.store_tokens(k, v, lengths)
        self.advance(k.shape[2], lengths)

    @torch.no_grad()
    def store_tokens(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> None:
        """`append` without advancing; see `read`."""
        self._write(k, v, check_lengths(lengths, self.batch, k.shape[2]))

    # ---- one token

    def rings(self) -> Rings:
        """The stored keys and values as `Rings` whose newest position is `place`, that of the next token."""
        recent = None if self.recent is None else self.recent.rings(self.place)
        return self.store.rings(self.place, self.sink_tokens, self.oldest(), recent)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, backend: str, scale: float | None) -> Attended:
        if torch.compiler.is_compiling():
            return attend_rings(q, self.rings(), rule, new=(k, v), backend=_of_rings(backend), scale=scale)
        prepared, like = self._decoder, (backend, scale, *((t.shape, t.dtype, t.device) for t in (q, k, v)))
        if prepared is None or prepared[0] is not rule or prepared[1] != like:
            check_call(q, k, v, rule, self.batch, self.reach, self.dims, self.sink_tokens)
            decoder = Decoder(q, self.rings(), rule, backend=_of_rings(backend), scale=scale)
            prepared = self._decoder = (rule, like, decoder)
        return prepared[2].attend(q, (k, v))

    def oldest(self) -> Tensor | None:
        """[B, Hkv] positions below it are hidden. If a text begins with zeros, lost positions are zeros and visible."""
        return None if self.lost is None or self.zeros else self.lost.oldest

    def _write(self, k: Tensor, v: Tensor, lengths: Tensor | None, notes: Tensor | None = None) -> None:
        write_slots(self.store, self.place, k.detach(), v.detach(), lengths, notes)
        if self.recent is not None:
            write_slots(self.recent.store, self.place, k.detach(), v.detach(), lengths)

    # ---- changing it

    @torch.inference_mode(False)
    def resize(self, reach: Sequence[int], slack: int | None = None) -> None:
        """Rings for other reaches, because spans have changed, or for another slack; tokens that still fit are kept.

        A ring that grows does not restore the tokens it has overwritten: they are hidden, or zeros again if the text
        began with zeros. Tokens read afterwards can be cropped as before. A crop to before the resize is
        refused if a lost token would be visible: without the removed tokens, the ring would still
        hold it."""
        slack = self.slack if slack is None else slack
        if (new := check_reach(reach)) == self.reach and slack == self.slack:
            return
        if len(new) != len(self.reach):
            raise ValueError(
                f"reach has {len(new)} numbers; expected one for each of {len(self.reach)} key/value heads"
            )
        old, capacity = self.store, self.store.capacities
        lost = torch.maximum(self.written, self.place)[:, None] - torch.tensor(capacity)
        lost = torch.minimum(lost, self.place[:, None])  # tokens that a cropped row will read again are not lost
        changed, self.slack = slack != self.slack, slack
        self.reach, self.written = new, self.place.clone()
        self.store = self._allocate(self.batch)
        if self.recent is not None and changed:
            self.recent = self.recent.resized(self.store, slack, self.place)
        if self.recent is not None and self.zeros:  # lost positions are zeros there too
            self.recent.since = torch.maximum(self.recent.since, lost.amax(1))
        move(old, self.store, self.place, lost)
        self.lost = add_lost(self.lost, lost, self.place, self.zeros)
        self._decoder = None

    def check_crop(self, lengths: Tensor) -> None:
        """Raise a ValueError if `crop` could not remove so much."""
        check_lengths_back(lengths, self.seen)
        place, back = lengths + self.zeros, (lengths < self.seen)[:, None]
        # the first position in a ring that the next token could see
        first = (place[:, None] - torch.tensor(self.reach) + 1).clamp(min=self.sink_tokens)
        held = torch.maximum(self.written, self.place)[:, None] - torch.tensor(self.store.capacities)
        why = f"its rings have overwritten tokens that it would see. Make the KV cache with a slack above {self.slack}"
        check_in_sight(back & (held > first), lengths, self.seen, why)
        if self.lost is not None:
            why = "when its rings were resized, they had overwritten tokens that it would see. Decode the text again"
            check_in_sight(back & (self.lost.since(place) > first), lengths, self.seen, why)

    def crop(self, lengths: Tensor) -> None:
        """Shorten rows to lengths [B] tokens: at most `slack` fewer, once a ring has wrapped."""
        lengths = lengths.to("cpu", torch.int64)
        self.check_crop(lengths)
        self.note_crop(lengths)
        self.place.copy_(lengths + self.zeros)

    def note_crop(self, lengths: Tensor) -> None:
        """Remember how far rows have been written, before they are cropped to lengths [B]. Tokens that they read after
        that are not lost, though a ring had dropped them: with sink tokens a row can be cropped to before its rings."""
        torch.maximum(self.written, self.place, out=self.written)
        if self.recent is not None:
            self.recent.note_crop(self.written)
        if self.lost is not None:
            before, self.lost = self.lost, self.lost.crop(lengths + self.zeros)
            if not before.oldest.equal(self.lost.oldest):
                self._decoder = None

    @torch.inference_mode(False)
    def rows(self, index: Tensor, place: Tensor | None = None) -> HeadCache:
        """A new cache whose row b is a copy of row index[b]. place: as for a new cache."""
        index = index.to("cpu", torch.int64)
        other = object.__new__(HeadCache)
        other.__dict__.update(self.__dict__)
        other.place = self.place[index] if place is None else place
        other.written = torch.maximum(self.written, self.place)[index]
        other.lost = None if self.lost is None else self.lost.rows(index)
        other.store = self.store.rows(index)
        other.recent = None if self.recent is None else self.recent.rows(index)
        other._decoder = None
        return other

    def tensors(self) -> dict[str, Tensor]:
        """All tensors needed to continue, except `place`, which layers share."""
        lost = {} if self.lost is None else dict(zip(LOST, self.lost, strict=True))
        return self.stored() | {"reach": torch.tensor(self.reach), "written": self.written} | lost

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy the result of `tensors` from a cache with the same number of rows."""
        self.resize(tensors["reach"].tolist())
        for name, held in self.stored().items():
            held.copy_(tensors[name])
        self.written.copy_(tensors["written"])
        lost = [tensors[name] for name in LOST if name in tensors]
        self.lost = Lost(*lost) if lost else None

    # ---- helpers

    def _allocate(self, batch: int) -> Store:
        capacity = [n + self.slack for n in self.reach]
        return Store(batch, capacity, self.sink_tokens, self.dims, self.bits, self.dtype, self.device, self.notes)


def _of_rings(backend: str) -> str:
    """The decoding backend that goes with `backend`."""
    return backend if backend in ("native", "triton", "banded") else "auto"
