"""A layer's memory of heads that choose among all keys in reach (hard, indexed): one ring of keys, values and codes.

The key at position p is in slot p mod C, C = reach + slack; one slot more takes what is not kept. `marks` holds a key's
position, or EMPTY, and its document. All heads share the ring, and the mechanism receives it as it lies, with the
positions of its slots. `codes` are what an index knows of a key. Segments and decoding share this class. Decoding
writes in place, a single token before it is attended: the slot that it takes held a key out of its reach.

Shapes: B batch, T new tokens, Hkv key/value heads, D head size, E numbers of a code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from spanformer.memory.base import LayerCall, MemoryShape, empty_tensors
from spanformer.ops import AnyRule, Attended

EMPTY = -(1 << 38)
"""the mark of a slot without a key: farther from any token than a head sees"""


class Chooser(Protocol):
    """What `KeyRing` asks of a mechanism, beside `Attention.rule`, `supports` and `penalty`."""

    def codes(self, x: Tensor) -> Tensor:
        """Hidden states [B, T, dim] → codes [B, T, E]"""
        ...

    def among(self, q: Tensor, k: Tensor, v: Tensor, codes: Tensor, rule: AnyRule, view: Any) -> Attended:
        """Attention of q [B, H, T, D] over the keys k [B, Hkv, N, D] with codes [B, N, E]; view: positions and
        documents of both."""
        ...


class NewKeys(NamedTuple):
    k: Tensor
    """[B, Hkv, T, D], with its position encoded"""
    v: Tensor
    codes: Tensor
    """[B, T, E]"""
    marks: Tensor
    """[B, T, 2]"""


@dataclass(frozen=True)
class RingSizes:
    reach: int
    """positions that a query sees, its own among them"""
    code: int
    """E"""


class KeyRing:
    """Empty, with what it holds (`held`), or with new keys that it has yet to write (`waiting`)."""

    tokens = 0

    def __init__(
        self, shape: MemoryShape, sizes: RingSizes, held: dict[str, Tensor] | None = None,
        waiting: Callable[[], NewKeys] | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.sizes, self._held, self._waiting = shape, sizes, held, waiting
        self._pending: Callable[[], NewKeys] | None = None

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, int]]:
        """Shape, dtype and initial value of every tensor, the batch first."""
        s, slots = self.shape, self.sizes.reach + self.shape.slack + 1
        return {
            "keys": ((s.batch, slots, s.kv_heads, s.head_dim), s.dtype, 0),
            "values": ((s.batch, slots, s.kv_heads, s.head_dim), s.dtype, 0),
            "codes": ((s.batch, slots, self.sizes.code), torch.promote_types(s.dtype, torch.float32), 0),
            "marks": ((s.batch, slots, 2), torch.int64, EMPTY),
            "room": ((s.batch, 2), torch.int64, 0),  # the next position, and how many tokens can be taken back
        }

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        mechanism, new = call.mechanism, call.q.shape[2]
        if refused := mechanism.supports(position=call.position):
            raise ValueError(refused[0])
        view = _of_new_tokens(call)
        rule, fresh = mechanism.rule(view), self._held is None and self._waiting is None
        far = min(self.sizes.reach, new) if fresh else self.sizes.reach
        added = call.position.rule(view, far)
        ruled = rule if added is None else rule + added
        at = view.q_positions
        q, k = call.position.encode(call.q, call.k, view)
        codes = mechanism.codes(call.view.x)
        self._pending = lambda: NewKeys(k, call.v, codes, _marks(at, view.documents, view.padding, len(q)))
        if fresh:
            whole = replace(view, q_positions=None, k_positions=None)
            found = mechanism(q, k, call.v, ruled, whole)
        else:
            found = self._beside(call, q, ruled, view)
        return found, mechanism.penalty(rule, view)

    def _beside(self, call: LayerCall, q: Tensor, rule: AnyRule, view: Any) -> Attended:
        """Attention over the ring and the new tokens."""
        assert self._pending is not None
        new = self._pending()
        self._pending = lambda: new
        held = self.tensors()
        if self.shape.in_place and q.shape[2] == 1:
            held = self._held = self._write(held, new)
            self._pending = None
            k, v, codes, marks = (held[name] for name in ("keys", "values", "codes", "marks"))
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            k, v = (
                torch.cat([held[name].transpose(1, 2).to(t.dtype), t], 2)
                for name, t in (("keys", new.k), ("values", new.v))
            )
            codes = torch.cat([held["codes"].to(new.codes.dtype), new.codes], 1)
            marks = torch.cat([held["marks"], new.marks], 1)
        at = view.q_positions.expand(len(q), -1)
        own = view.documents
        documents = None if own is None else (own, marks[..., 1])
        return call.mechanism.among(
            q, k, v, codes, rule,
            replace(view, q_positions=at, k_positions=marks[..., 0], documents=documents, padding=None),
        )  # fmt: skip

    def keep(self, states: Tensor) -> KeyRing:
        if self._pending is None:  # written already
            return KeyRing(self.shape, self.sizes, self._held)
        after = KeyRing(self.shape, self.sizes, self._held, self._pending)
        if self.shape.in_place:
            after.tensors()
        return after

    def tensors(self) -> dict[str, Tensor]:
        if self._held is None:
            self._held = empty_tensors(self.layout(), self.shape.device)
        if self._waiting is not None:
            self._held, self._waiting = self._write(self._held, self._waiting()), None
        return self._held

    @torch.no_grad()
    def _write(self, held: dict[str, Tensor], new: NewKeys) -> dict[str, Tensor]:
        held = held if self.shape.in_place else {name: t.clone() for name, t in held.items()}
        slots, at = held["marks"].shape[1], new.marks[..., 0]
        room = _moved(held["room"], at, self.shape.slack)
        kept = (at != EMPTY) & (at > room[:, :1] - slots)  # of tokens that would share a slot, the last
        rows = torch.arange(len(at), device=at.device)[:, None] * slots
        flat = (rows + torch.where(kept, at % (slots - 1), slots - 1)).flatten()
        for name, each in (("keys", new.k.transpose(1, 2)), ("values", new.v.transpose(1, 2)), ("codes", new.codes),
                           ("marks", new.marks)):  # fmt: skip
            held[name].flatten(0, 1).index_copy_(0, flat, each.flatten(0, 1).to(held[name].dtype))
            held[name][:, -1] = EMPTY if name == "marks" else 0
        return held | {"room": room}

    def crop(self, back: Tensor) -> KeyRing:
        held, back = self.tensors(), back.to(self.shape.device)
        left = held["room"][:, 1]
        if bool((short := back > left).any()):
            row = int(short.nonzero()[0, 0])
            raise ValueError(
                f"row {row} cannot be cropped by {int(back[row])} tokens: at most {self.shape.slack} tokens can be "
                f"taken back, and {int(left[row])} are left; make the KV cache with more slack"
            )
        room = held["room"] - back[:, None]
        stale = held["marks"][..., 0] >= room[:, :1]
        return self.with_tensors(held | {"room": room, "marks": held["marks"].masked_fill(stale[..., None], EMPTY)})

    def bytes(self) -> int:
        rows = len(self._held["room"]) if self._held else self.shape.batch
        each = KeyRing(replace(self.shape, batch=rows), self.sizes).layout().values()
        return sum(torch.Size(size).numel() * dtype.itemsize for size, dtype, _ in each)

    def with_tensors(self, tensors: dict[str, Tensor]) -> KeyRing:
        return KeyRing(replace(self.shape, batch=len(tensors["room"])), self.sizes, dict(tensors))


def _moved(room: Tensor, at: Tensor, slack: int) -> Tensor:
    """[B, 2] after tokens at positions [B, T]; padding takes none."""
    place = torch.maximum(room[:, 0], at.amax(1) + 1)
    return torch.stack([place, (room[:, 1] + place - room[:, 0]).clamp(max=slack)], 1)


def _marks(at: Tensor, documents: Tensor | None, padding: Tensor | None, batch: int) -> Tensor:
    at = at.expand(batch, -1)
    at = at if padding is None else at.masked_fill(padding, EMPTY)
    return torch.stack([at, torch.zeros_like(at) if documents is None else documents.to(at.dtype)], 2)


def _of_new_tokens(call: LayerCall) -> Any:
    """The view of the new tokens alone, with their positions [T] or [B, T]."""
    view, new = call.view, call.q.shape[2]
    documents = view.documents[0] if isinstance(view.documents, tuple) else view.documents
    at = view.q_positions
    if at is None:
        at = torch.arange(view.start, view.start + new, device=call.q.device)
    return replace(
        view, documents=_last(documents, new), padding=_last(view.padding, new), q_positions=at, k_positions=at
    )


def _last(ids: Tensor | None, new: int) -> Tensor | None:
    return None if ids is None else ids[:, ids.shape[1] - new :]
