"""A layer's memory of heads whose tokens see their buckets (LSH, routing): a ring of the last tokens for each bucket.

Token t of bucket b in round r has rank n (tokens of b before it) and lies in slot b·C + n mod C of that round, C the
capacity: what a token can see, and the slack of `crop`. `marks` holds the token's place b·gap + n in every round, so
that a pair which an earlier round shows is hidden, and its document. Segments and decoding share this class; decoding
writes in place.

Shapes: B batch, H heads, N = B·H, R rounds, T new tokens, S = buckets·C + 1 slots (the last takes what is not kept).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spanformer.core.recompute import recompute
from spanformer.memory.base import LayerCall, MemoryShape, empty_tensors
from spanformer.ops import Attended, Rule, attend, merge
from spanformer.ops.bucket_rounds import attend_buckets
from spanformer.ops.buckets import Placed, Seen, near, pick_rows, sort_tokens
from spanformer.ops.decode.buckets import BucketRings, attend_one, served, write_one

EMPTY = -(1 << 38)
"""the mark of a slot without a token: farther from any token than a head sees"""


@dataclass(frozen=True)
class BucketSizes:
    heads: int
    rounds: int
    buckets: int
    reach: int
    """ranks that a token sees at most"""

    @property
    def gap(self) -> int:
        """between the places of two buckets; places stay below 2^39, as positions must"""
        return (1 << 38) // (self.buckets + 2)


class Buckets:
    """Empty, with what it holds (`held`), or with new tokens that it has yet to write (`waiting`)."""

    tokens = 0

    def __init__(
        self,
        shape: MemoryShape,
        sizes: BucketSizes,
        held: dict[str, Tensor] | None = None,
        waiting: Callable[[], Placed] | None = None,
    ) -> None:
        self.shape, self.sizes, self._held, self._waiting = shape, sizes, held, waiting
        self._pending: Callable[[], Placed] | None = None

    @property
    def capacity(self) -> int:
        return self.sizes.reach + self.shape.slack

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, int]]:
        """Shape, dtype and initial value of every tensor, the batch first."""
        b, h, r, n = self.shape.batch, self.sizes.heads, self.sizes.rounds, self.sizes.buckets
        slots, d, dtype = n * self.capacity + 1, self.shape.head_dim, self.shape.dtype
        return {
            "keys": ((b, h, r, slots, d), dtype, 0),
            "values": ((b, h, r, slots, d), dtype, 0),
            "marks": ((b, h, r, slots, r + 1), torch.int64, EMPTY),
            "counts": ((b, h, r, n), torch.int64, 0),
            "recent": ((b, self.shape.slack, h, r), torch.int64, n),  # buckets of the last tokens, the newest last
            "room": ((b,), torch.int64, 0),  # tokens that can be taken back
        }

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        mechanism, view = call.mechanism, call.view
        if refused := mechanism.supports(position=call.position):
            raise ValueError(refused[0])
        rule = mechanism.rule(view)
        if self._held is None and self._waiting is None:
            found = mechanism(call.q, call.q, call.v, rule, view)  # its keys are its queries
            self._pending = lambda: self._place_again(mechanism, call)
            return found, mechanism.penalty(rule, view)
        held, seen = self.tensors(), mechanism.seen(len(call.q))
        new = mechanism.place(call.q, call.v, call.view)
        new = replace(new, k=mechanism.keys(new.q))
        if self.shape.in_place and served(new, self._rings(held), seen):
            placed, found = new, attend_one(new, self._rings(held), seen)
        else:
            placed = self._ranked(new, held["counts"])
            found = self._one(placed, seen) if placed.q.shape[1] == 1 else self._many(placed, seen)
        self._pending = lambda: placed
        found = mechanism.finish(found, placed.q, placed.k, placed.v)
        shape = call.q.shape[:3]
        return Attended(found.out.view(*shape, -1), found.lse.view(shape)), mechanism.penalty(rule, view)

    def _place_again(self, mechanism: Any, call: LayerCall) -> Placed:
        """Tokens from which the mechanism has learned already."""
        with torch.no_grad(), recompute():
            new = mechanism.place(call.q, call.v, call.view)
            return self._ranked(replace(new, k=mechanism.keys(new.q)), self.tensors()["counts"])

    def _rings(self, held: dict[str, Tensor]) -> BucketRings:
        return BucketRings(held["keys"], held["values"], held["marks"], held["counts"], self.capacity, self.sizes.gap)

    def _ranked(self, new: Placed, counts: Tensor) -> Placed:
        """New tokens with their ranks among those of their buckets."""
        among, n = sort_tokens(new.ids, new.documents), self.sizes.buckets
        many = torch.zeros(*new.ids.shape[:2], n + 2, dtype=torch.int64, device=new.ids.device)
        many.scatter_add_(2, new.ids, torch.ones_like(new.ids))
        known = torch.nn.functional.pad(counts.flatten(0, 1), (0, 2))
        first = known - (many.cumsum(2) - many)  # of a bucket: the rank of its first new token less its sorted place
        ranks = among.inverse + first.gather(2, new.ids)
        places = (new.ids * self.sizes.gap + ranks).transpose(0, 1)
        return replace(new, among=among, ranks=ranks, places=places, added=many[..., :n])

    def _many(self, new: Placed, seen: Seen) -> Attended:
        """New tokens among themselves and, round by round, over the rings."""
        assert new.among is not None and new.places is not None and new.k is not None
        parts = [attend_buckets(new.q, new.k, new.v, new.among, seen)]
        held = {name: t.flatten(0, 1) for name, t in self.tensors().items() if name in ("keys", "values", "marks")}
        for r in range(self.sizes.rounds):
            order, back, marks = new.among.order[:, r], new.among.inverse[:, r], held["marks"][:, r]
            before = None
            if r:
                mine = torch.stack([place.gather(1, order) for place in new.places[:r]])
                before = mine, marks[..., :r].movedim(2, 0).contiguous()
            documents = None if new.documents is None else (new.documents.gather(1, order), marks[..., -1])
            rule = seen.rule(order.shape[1], documents=documents, orders=before)
            found = attend(
                pick_rows(new.q, order)[:, None], held["keys"][:, r, None], held["values"][:, r, None], rule,
                q_positions=new.places[r].gather(1, order), k_positions=marks[..., r], scale=seen.scale,
                dropout=seen.dropout, backend=seen.backend,
            )  # fmt: skip
            parts.append(Attended(pick_rows(found.out[:, 0], back), found.lse[:, 0].gather(1, back)))
        return merge(parts)

    def _one(self, new: Placed, seen: Seen) -> Attended:
        """A single token over the rings of its own buckets."""
        assert new.places is not None and new.k is not None
        (n, rounds, _), c = new.ids.shape, self.capacity
        held = {name: t.flatten(0, 2) for name, t in self.tensors().items() if name in ("keys", "values", "marks")}
        slots = held["keys"].shape[1]
        rings = torch.arange(n * rounds, device=new.ids.device).view(n, rounds) * slots
        first = rings + new.ids[..., 0].clamp(max=self.sizes.buckets - 1) * c
        at = (first[..., None] + torch.arange(c, device=first.device)).flatten()
        keys, values, marks = (held[name].flatten(0, 1).index_select(0, at) for name in ("keys", "values", "marks"))
        marks = marks.view(n, rounds, c, rounds + 1)
        apart = new.places[..., 0].T[:, None, None] - marks[..., :rounds]  # [N, R, C, R], in the order of each round
        weight = near(apart, seen)
        shown = weight.diagonal(dim1=1, dim2=3).transpose(1, 2)  # in its own round
        earlier = torch.ones(rounds, rounds, device=apart.device).tril(-1).bool()[None, :, None]
        hidden = ((weight > 0) & earlier).any(3)
        if new.documents is not None:
            hidden = hidden | (marks[..., rounds] != new.documents[:, :, None])
        bias = torch.where(hidden, 0.0, shown).log().view(n, 1, rounds * c)
        keys, values = keys.view(n, rounds * c, -1), values.view(n, rounds * c, -1)
        if seen.itself:
            keys, values = torch.cat([keys, new.k], 1), torch.cat([values, new.v], 1)
            bias = torch.nn.functional.pad(bias, (0, 1))
        found = attend(
            new.q[:, None], keys[:, None], values[:, None], Rule(1, causal=False, key_bias=bias), scale=seen.scale,
            dropout=seen.dropout, backend=seen.backend,
        )  # fmt: skip
        return Attended(found.out[:, 0], found.lse[:, 0])

    def keep(self, states: Tensor) -> Buckets:
        assert self._pending is not None
        after = Buckets(self.shape, self.sizes, self._held, self._pending)
        return after._settled() if self.shape.in_place else after

    def _settled(self) -> Buckets:
        self.tensors()
        return self

    def tensors(self) -> dict[str, Tensor]:
        if self._held is None:
            self._held = empty_tensors(self.layout(), self.shape.device)
        if self._waiting is not None:
            self._held, self._waiting = self._write(self._held, self._waiting()), None
        return self._held

    @torch.no_grad()
    def _write(self, held: dict[str, Tensor], new: Placed) -> dict[str, Tensor]:
        if new.ranks is None:  # one token of each row, which the kernel has read
            write_one(new, self._rings(held))
            return self._counted(held, new)
        assert new.ranks is not None and new.places is not None and new.added is not None and new.k is not None
        held = held if self.shape.in_place else {name: t.clone() for name, t in held.items()}
        (n, rounds, t), c = new.ids.shape, self.capacity
        slots = held["keys"].shape[3]
        held["counts"] += new.added.view(held["counts"].shape)
        total = torch.nn.functional.pad(held["counts"].flatten(0, 1), (0, 2)).gather(2, new.ids)
        kept = (new.ids < self.sizes.buckets) & (new.ranks >= total - c)
        slot = torch.where(kept, new.ids * c + new.ranks % c, slots - 1)
        at = (slot + torch.arange(n * rounds, device=slot.device).view(n, rounds, 1) * slots).flatten()
        document = torch.zeros(n, t, dtype=torch.int64, device=slot.device)
        document = document if new.documents is None else new.documents
        marks = torch.cat([new.places.permute(1, 2, 0), document[..., None]], 2)  # [N, T, R + 1]
        for name, each in (("keys", new.k), ("values", new.v), ("marks", marks)):
            flat = held[name].flatten(0, 3)
            every = each[:, None].expand(-1, rounds, -1, -1).reshape(-1, each.shape[2])
            flat.index_copy_(0, at, every.to(flat.dtype))
            held[name][:, :, :, slots - 1] = EMPTY if name == "marks" else 0
        return self._counted(held, new)

    def _counted(self, held: dict[str, Tensor], new: Placed) -> dict[str, Tensor]:
        """With what `crop` needs to take new tokens back."""
        if self.shape.slack:
            held["recent"] = self._history(held["recent"], new)
            held["room"] = (held["room"] + new.real).clamp(max=self.shape.slack)
        return held

    def _history(self, recent: Tensor, new: Placed) -> Tensor:
        """Buckets of each row's last real tokens; padding is behind them."""
        b, _, h, _ = recent.shape
        every = torch.cat([recent, new.ids.view(b, h, *new.ids.shape[1:]).permute(0, 3, 1, 2)], 1)
        at = new.real[:, None] + torch.arange(recent.shape[1], device=recent.device)
        return every.gather(1, at[..., None, None].expand(recent.shape))

    def crop(self, back: Tensor) -> Buckets:
        held, slack = self.tensors(), self.shape.slack
        back = back.to(self.shape.device)
        if bool((back > held["room"]).any()):
            row = int((back > held["room"]).nonzero()[0, 0])
            raise ValueError(
                f"row {row} cannot be cropped by {int(back[row])} tokens: at most {slack} tokens can be taken back, "
                f"and {int(held['room'][row])} are left; make the cache with more slack"
            )
        if not slack:
            return self
        step = torch.arange(slack, device=back.device)
        taken = (step >= slack - back[:, None])[..., None, None]  # [B, slack, 1, 1]
        ids = torch.where(taken, held["recent"], self.sizes.buckets).permute(0, 2, 3, 1)
        fewer = torch.nn.functional.pad(held["counts"], (0, 2)).scatter_add(3, ids, -torch.ones_like(ids))
        before = (step - back[:, None])[..., None, None].expand(held["recent"].shape)
        recent = torch.where(before < 0, self.sizes.buckets, held["recent"].gather(1, before.clamp(min=0)))
        counts = fewer[..., : self.sizes.buckets].contiguous()
        changed = {"counts": counts, "recent": recent, "marks": self._without_stale(held["marks"], counts)}
        return self.with_tensors(held | changed | {"room": held["room"] - back})

    def _without_stale(self, marks: Tensor, counts: Tensor) -> Tensor:
        """Marks without those of tokens that were taken back: later tokens would see them."""
        own = marks[..., :-1].diagonal(dim1=2, dim2=4).transpose(2, 3)[..., :-1]  # [B, H, R, slots]: of each round
        first = torch.arange(self.sizes.buckets, device=marks.device) * self.sizes.gap
        stale = own >= (first + counts).repeat_interleave(self.capacity, 3)
        return marks.masked_fill(torch.nn.functional.pad(stale, (0, 1))[..., None], EMPTY)

    def bytes(self) -> int:
        rows = len(self._held["room"]) if self._held else self.shape.batch
        each = replace(self.shape, batch=rows)
        return sum(
            torch.Size(size).numel() * dtype.itemsize for size, dtype, _ in Buckets(each, self.sizes).layout().values()
        )

    def with_tensors(self, tensors: dict[str, Tensor]) -> Buckets:
        rows = len(tensors["room"])
        return Buckets(replace(self.shape, batch=rows), self.sizes, dict(tensors))
