"""The keys and values that one layer's heads still see: a ring for each key/value head, as long as its own reach.

A token is written over the one that the head has just lost sight of, so memory does not grow with the text. Keys are
kept as they are attended to (rotary ones turned), and their positions follow from their slots; distances are counted
back from each row's newest token, so nothing moves when a ring wraps around.
Shapes: B batch, H query heads, Hkv key/value heads, T new tokens, D and Dv head sizes, N slots of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from spanformer.memory.checks import check_call, check_lengths, check_reach
from spanformer.memory.groups import group_heads
from spanformer.memory.notes import take_notes, with_notes
from spanformer.memory.slots import Store, move, read_notes, read_slots, write_slots
from spanformer.ops import Attended, Rings, Rule, attend, attend_rings
from spanformer.ops.rings import Decoder

RuleFor = Callable[[Tensor, int, int], Rule]


class HeadCache:
    """One layer's keys and values, for rows that may stand at different places.

    `attend` is all that a layer needs: it sees what the rings hold and the new tokens, and keeps the new ones.
    """

    def __init__(
        self,
        batch: int,
        reach: Sequence[int],
        head_dim: int,
        value_dim: int = 0,
        *,
        kept: int = 0,
        slack: int = 0,
        bits: Literal[0, 8] = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        zeros: int = 0,
        place: Tensor | None = None,
        notes: int = 0,
    ) -> None:
        """reach [Hkv]: how many positions each key/value head sees, its newest included; for grouped heads the longest
        of the group. value_dim: Dv, 0 for head_dim. kept: so many first tokens stay beside each ring. slack: how many
        tokens `crop` can take back after a ring has wrapped. bits: 8 stores keys and values in 8 bits, 0 in dtype.
        zeros: so many tokens of zero keys and values stand before the first, and are seen. place [B]: shared by several
        layers, that are then moved on together. notes: 1 for each query head of a key/value head if rules are made of
        the keys (`read_placed`), else 0."""
        if bits not in (0, 8):
            raise ValueError(f"bits is {bits}; expected 0, for the model's own dtype, or 8")
        for name, number in (("batch", batch), ("slack", slack), ("kept", kept), ("zeros", zeros)):
            if number < 0:
                raise ValueError(f"{name} is {number}; expected 0 or more")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}; expected a floating-point dtype")
        self.kept, self.slack, self.zeros, self.notes = kept, slack, zeros, notes
        self.bits: Literal[0, 8] = bits
        self.dtype, self.device = dtype, torch.device(device)
        self.dims = (head_dim, value_dim or head_dim)
        self.reach = check_reach(reach)
        with torch.inference_mode(False):  # to be written to in or out of it
            self.place = torch.full((batch,), zeros) if place is None else place
            """[B] the position of each row's next token, on the CPU"""
            self.written = self.place.clone()
            """[B] one beyond the highest position ever written: lower than place unless rows were cropped"""
        self.oldest: Tensor | None = None
        """[B, Hkv] positions below are lost, though the ring would have room: it has grown"""
        self.store = self._allocate(batch)
        self._decoder: tuple[Rule, tuple, Decoder] | None = None
        """made for this rule and calls like this"""

    @property
    def batch(self) -> int:
        return len(self.place)

    @property
    def seen(self) -> Tensor:
        """[B] how many tokens each row has read."""
        return self.place - self.zeros

    def bytes(self) -> int:
        """What is allocated for keys and values, exactly."""
        return self.store.memory.numel()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: Rule,
        *,
        lengths: Tensor | None = None,
        backend: str = "auto",
        scale: float | None = None,
    ) -> Attended:
        """q [B, H, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv] of the next T tokens of each row → what each of them
        sees, out [B, H, T, Dv] and lse [B, H, T]. lengths [B]: only so many of a row's T tokens are real, the others
        padding behind them, whose outputs mean nothing. Without gradients."""
        found = self.read(q, k, v, rule, lengths=lengths, backend=backend, scale=scale)
        self.advance(q.shape[2], lengths)
        return found

    def advance(self, tokens: int, lengths: Tensor | None = None) -> None:
        """Move every row on, by `tokens` or by lengths [B]."""
        self.place += tokens if lengths is None else lengths.to("cpu", torch.int64)

    @torch.no_grad()
    def read(
        self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, *, lengths: Tensor | None = None, backend: str = "auto",
        scale: float | None = None,
    ) -> Attended:  # fmt: skip
        """`attend` without moving on: layers that share their places are moved on once, by their owner."""
        if q.shape[2] == 1 and lengths is None and not rule.apart:
            return self._decode(q, k, v, rule, backend, scale)
        check_call(q, k, v, rule, self.batch, self.reach, self.dims, self.kept)
        lengths = check_lengths(lengths, self.batch, q.shape[2])
        found = self._look_back(q, k, v, rule, backend, scale)
        self._write(k, v, lengths)
        return found

    @torch.no_grad()
    def read_placed(
        self, q: Tensor, k: Tensor, v: Tensor, rule_for: RuleFor, *, lengths: Tensor | None = None,
        backend: str = "auto", scale: float | None = None,
    ) -> Attended:  # fmt: skip
        """`read` under a rule that depends on which keys there are. rule_for(rows, start, length) gives it for some
        rows [n] of the batch whose keys stand at start … start + length − 1, the new tokens last; its key_span and
        forget are those of the new tokens, and are noted. Rows that stand at different places are served one place
        after the other."""
        lengths = check_lengths(lengths, self.batch, q.shape[2])
        parts, order, notes = [], [], []
        for place in sorted(set(self.place.tolist())):
            rows = (self.place == place).nonzero()[:, 0]
            qs, ks, vs = (t if len(rows) == self.batch else t[rows.to(t.device)] for t in (q, k, v))
            found, noted = self._look_back_placed(qs, ks, vs, rule_for, rows, place, backend, scale)
            parts.append(found)
            notes += [] if noted is None else [noted]
            order += rows.tolist()
        turn = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=q.device)
        self._write(k, v, lengths, torch.cat(notes).index_select(0, turn) if notes else None)
        if len(parts) == 1:
            return parts[0]
        return Attended(*(torch.cat(t).index_select(0, turn) for t in zip(*parts, strict=True)))

    def _look_back_placed(
        self, q, k, v, rule_for: RuleFor, rows: Tensor, place: int, backend, scale
    ) -> tuple[Attended, Tensor | None]:
        """Rows that all stand at `place`, and what is to be noted of their new tokens, [n, H, T]."""
        shared, t = q.shape[1] // len(self.reach), q.shape[2]
        groups = group_heads([n - 1 for n in self.reach], place, q.device)
        mine = self if len(rows) == self.batch else self.rows(rows)
        parts, order, noted = [], [], None
        every = list(range(len(self.reach)))
        last = read_notes(mine.store, mine.place, every, min(place, 1)).sum(-1) if self.notes else None
        for kv_heads, past in groups:
            heads = [g * shared + n for g in kv_heads for n in range(shared)]
            held = [n for n in self.reach for _ in range(shared)]  # of a shorter ring, older slots hold other tokens
            rule = rule_for(rows, place - past, past + t) + Rule(q.shape[1], causal=False, reach=held)
            if last is not None and noted is None:
                noted = take_notes(rule, len(rows), t, last)
            some = q[:, heads], k[:, kv_heads], v[:, kv_heads], rule.for_heads(heads, kv_heads)
            of_heads = None if noted is None else noted[:, heads]
            parts.append(mine._attend_group(*some, kv_heads, past, backend, scale, of_heads))
            order += heads
        turn = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=q.device)
        return Attended(*(torch.cat(p, 1).index_select(1, turn) for p in zip(*parts, strict=True))), noted

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> None:
        """Keep k [B, Hkv, T, D] and v [B, Hkv, T, Dv] without attending to anything."""
        self._write(k, v, check_lengths(lengths, self.batch, k.shape[2]))
        self.advance(k.shape[2], lengths)

    # ---- one token

    def rings(self) -> Rings:
        """Its own keys and values, with `place` as the newest position: where the next token is written and stands."""
        return self.store.rings(self.place, self.kept, self.oldest)

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, backend: str, scale: float | None) -> Attended:
        if torch.compiler.is_compiling():
            return attend_rings(q, self.rings(), rule, new=(k, v), backend=_of_rings(backend), scale=scale)
        prepared, like = self._decoder, (backend, scale, *((t.shape, t.dtype, t.device) for t in (q, k, v)))
        if prepared is None or prepared[0] is not rule or prepared[1] != like:
            check_call(q, k, v, rule, self.batch, self.reach, self.dims, self.kept)
            decoder = Decoder(q, self.rings(), rule, backend=_of_rings(backend), scale=scale)
            prepared = self._decoder = (rule, like, decoder)
        return prepared[2].attend(q, (k, v))

    # ---- many tokens

    def _look_back(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, backend: str, scale: float | None) -> Attended:
        """Attention of new tokens over what the rings hold and over themselves, in groups of similar reach."""
        shared, shift = rule.heads // len(self.reach), 1 if rule.original else 0
        back = [max(n - 1 + shift, 0) for n in rule.limits()]
        need = [min(max(back[g * shared : (g + 1) * shared]), self.reach[g]) for g in range(len(self.reach))]
        groups = group_heads(need, int(self.place.max()) if self.batch else 0, q.device)
        parts, order = [], []
        for kv_heads, past in groups:
            heads = [g * shared + n for g in kv_heads for n in range(shared)]
            some = (q, k, v, rule)
            if len(groups) > 1:
                some = q[:, heads], k[:, kv_heads], v[:, kv_heads], rule.for_heads(heads, kv_heads)
            parts.append(self._attend_group(*some, kv_heads, past, backend, scale))
            order += heads
        if len(parts) == 1:
            return parts[0]
        turn = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=q.device)
        return Attended(*(torch.cat(t, 1).index_select(1, turn) for t in zip(*parts, strict=True)))

    def _attend_group(
        self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, kv_heads: list[int], past: int, backend: str,
        scale: float | None, notes: Tensor | None = None,
    ) -> Attended:  # fmt: skip
        """Heads that get `past` earlier tokens each. Only distances matter to them, so that rows at different places
        stand side by side, each row's newest tokens last. notes [B, heads, T]: of the new tokens, if any are taken."""
        t = k.shape[2]
        if notes is not None:
            held = [read_notes(self.store, None, kv_heads, self.kept)] if self.kept else []
            held += [read_notes(self.store, self.place, kv_heads, past)] if past else []
            rule = with_notes(rule, torch.cat([*held, notes], 2), torch.promote_types(q.dtype, torch.float32))
        if past:
            old = read_slots(self.store, self.place, kv_heads, past, self.dtype)
            k, v = (torch.cat([held.to(new.dtype), new], 2) for held, new in zip(old, (k, v), strict=True))
        hidden = self._hidden(kv_heads, past, t)
        if self.kept:
            return self._with_kept(q, k, v, rule, kv_heads, hidden, backend, scale)
        if hidden is not None:
            rule = rule + Rule(rule.heads, causal=False, key_bias=hidden)
        return attend(q, k, v, rule, backend=backend, scale=scale)

    def _hidden(self, kv_heads: list[int], past: int, new: int) -> Tensor | None:
        """[B, heads, past + new] −inf for positions that a row has not read yet, or a ring no longer holds."""
        oldest = torch.zeros(self.batch, len(kv_heads), dtype=torch.int64)
        if self.oldest is not None:
            oldest = self.oldest[:, kv_heads]
        missing = past - (self.place[:, None] - oldest)  # [B, heads]
        if not self.batch or int(missing.max()) <= 0:
            return None
        column = torch.arange(past + new)
        bias = torch.zeros(*missing.shape, past + new).masked_fill(column < missing[..., None], -math.inf)
        return bias.to(self.device)

    def _with_kept(
        self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, kv_heads: list[int], hidden: Tensor | None, backend: str,
        scale: float | None,
    ) -> Attended:  # fmt: skip
        """Kept keys stand before the others, at their own positions; what else lies there is left to them."""
        places, t, b = self.place.to(q.device)[:, None], q.shape[2], self.batch
        early = read_slots(self.store, None, kv_heads, self.kept, self.dtype)
        k, v = (torch.cat([old.to(new.dtype), new], 2) for old, new in zip(early, (k, v), strict=True))
        first = torch.arange(self.kept, device=q.device).expand(b, -1)
        others = places + t - k.shape[2] + self.kept + torch.arange(k.shape[2] - self.kept, device=q.device)
        # a first token is either held (read before) or among the new ones, and never both; in a ring it does not count
        absent = torch.cat([first >= places, (others < self.kept) & (others < places)], 1)  # [B, Tk]
        bias = torch.zeros(b, len(kv_heads), k.shape[2], device=q.device)
        if hidden is not None:
            bias[..., self.kept :] += hidden
        rule = rule + Rule(rule.heads, causal=False, key_bias=bias.masked_fill_(absent[:, None], -math.inf))
        where = torch.cat([first, others], 1).masked_fill_(absent, -1)
        at = places + torch.arange(t, device=q.device)
        return attend(q, k, v, rule, backend=backend, scale=scale, q_positions=at, k_positions=where)

    def _write(self, k: Tensor, v: Tensor, lengths: Tensor | None, notes: Tensor | None = None) -> None:
        write_slots(self.store, self.place, k.detach(), v.detach(), lengths, notes)

    # ---- changing it

    @torch.inference_mode(False)
    def resize(self, reach: Sequence[int], slack: int | None = None) -> None:
        """Rings for other reaches, because spans have changed, or for another slack: what still fits is kept. What a
        ring has forgotten does not come back when it grows: it is not seen, or is zeros again if the text began with
        zeros."""
        slack = self.slack if slack is None else slack
        if (new := check_reach(reach)) == self.reach and slack == self.slack:
            return
        if len(new) != len(self.reach):
            raise ValueError(f"reach names {len(new)} key/value heads; expected {len(self.reach)}")
        old, capacity = self.store, self.store.capacities
        lost = torch.maximum(self.written, self.place)[:, None] - torch.tensor(capacity)
        lost = torch.minimum(lost, self.place[:, None])  # what a cropped row has yet to read again is not lost
        self.reach, self.slack, self.written = new, slack, self.place.clone()
        self.store = self._allocate(self.batch)
        move(old, self.store, self.place, lost)
        if not self.zeros:
            oldest = lost.clamp(min=0) if self.oldest is None else torch.maximum(self.oldest, lost)
            self.oldest = oldest if bool(oldest.any()) else None
        self._decoder = None

    def check_crop(self, lengths: Tensor) -> None:
        """Refuse what `crop` could not take back."""
        if lengths.shape != self.place.shape or lengths.is_floating_point():
            raise ValueError(f"lengths has shape {list(lengths.shape)}; expected whole numbers [{self.batch}]")
        seen = self.seen
        for row in range(self.batch):
            length, read = int(lengths[row]), int(seen[row])
            if not 0 <= length <= read:
                raise ValueError(f"row {row} has read {read} tokens; it cannot be cropped to {length}")
        for g, (reach, capacity) in enumerate(zip(self.reach, self.store.capacities, strict=True)):
            held = torch.maximum(self.written, self.place) - capacity
            if self.oldest is not None:
                held = torch.maximum(held, self.oldest[:, g])
            first = (lengths + self.zeros - reach + 1).clamp(min=self.kept)  # the first a next token could see
            lost = (held > first) & (lengths < seen)
            if bool(lost.any()):
                row = int(lost.nonzero()[0])
                raise ValueError(
                    f"row {row} cannot be cropped from {int(seen[row])} to {int(lengths[row])} tokens: its rings have "
                    f"overwritten what it would see there; make the cache with more slack than {self.slack}"
                )

    def crop(self, lengths: Tensor) -> None:
        """Back to lengths [B] tokens: at most `slack` fewer, once a ring has wrapped."""
        lengths = lengths.to("cpu", torch.int64)
        self.check_crop(lengths)
        self.note_crop(lengths)
        self.place.copy_(lengths + self.zeros)

    def note_crop(self, lengths: Tensor) -> None:
        """Remember how far rows have been written, before they are moved back to lengths [B]. What they read from there
        on is not lost, though a ring had forgotten it: kept tokens let a row go back further than its rings."""
        torch.maximum(self.written, self.place, out=self.written)
        if self.oldest is not None and bool((self.oldest > (lengths + self.zeros)[:, None]).any()):
            self.oldest, self._decoder = torch.minimum(self.oldest, (lengths + self.zeros)[:, None]), None

    @torch.inference_mode(False)
    def rows(self, index: Tensor, place: Tensor | None = None) -> HeadCache:
        """A cache of its own: row b is this one's row index[b]. place: as for a new cache."""
        index = index.to("cpu", torch.int64)
        other = object.__new__(HeadCache)
        other.__dict__.update(self.__dict__)
        other.place = self.place[index] if place is None else place
        other.written = torch.maximum(self.written, self.place)[index]
        other.oldest = None if self.oldest is None else self.oldest[index]
        other.store = self.store.rows(index)
        other._decoder = None
        return other

    # ---- helpers

    def _allocate(self, batch: int) -> Store:
        capacity = [n + self.slack for n in self.reach]
        return Store(batch, capacity, self.kept, self.dims, self.bits, self.dtype, self.device, self.notes)


def _of_rings(backend: str) -> str:
    """What serves one token where `backend` serves many."""
    return backend if backend in ("native", "banded") else "auto"
