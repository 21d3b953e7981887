"""The memory of heads with a recurrent state: linear attention, retention, gated delta rules, and the like.

    out, state = run(q, inputs, state)

A mechanism gives three functions (`Recurrence`) and an empty state. `Recurrent` does the rest, for training over
segments and for decoding: it carries the state, detaches it between segments, empties it where a document begins, and
takes tokens back. To take back up to `slack` tokens it holds the state before them and what they put in (`Undo`), so
slack costs tokens and not states; without slack it holds one state.

State and inputs are dicts of tensors. A state's tensors are [B, …] and in float32 or wider, for instance s [B, Hkv, m,
Dv]; inputs are [B, Hkv, T, …], for instance encoded keys, values and gates: whatever is small and suffices to advance
the state. A mechanism that also reads its newest tokens exactly keeps a ring of them in its state.
Shapes: B batch, T new tokens, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from spanformer.memory.base import LayerCall, MemoryShape
from spanformer.ops import Attended

Tensors = dict[str, Tensor]
NO_DOCUMENT = -1


class Recurrence(Protocol):
    """What `Recurrent` asks of a mechanism, beside `Attention.supports`."""

    def supports(self, *, position: object | None = None) -> list[str]: ...

    def token_inputs(self, k: Tensor, v: Tensor, view: Any) -> Tensors:
        """What new tokens put into the state, [B, Hkv, T, …] each. k [B, Hkv, T, D] has its position encoded; view:
        the `View` of the new tokens, x among it."""
        ...

    def query_inputs(self, q: Tensor) -> Tensors:
        """What queries [B, H, T, D] put into the state, such as the last inputs of a convolution; {} for most."""
        ...

    def run(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Attended, Tensors]:
        """Attention of q [B, H, T, D] to what the state holds and to the new tokens, and the state after these.

        padding [B, T] bool: True tokens change no state. documents [B, T]: each document begins with an empty state,
        but the first token's continues the given one.
        """
        ...

    def advance(self, inputs: Tensors, state: Tensors, padding: Tensor) -> Tensors:
        """The state after these tokens, as `run` returns it, without queries."""
        ...

    def reset(self, state: Tensors, rows: Tensor) -> Tensors:
        """The state with these rows [B] bool empty."""
        ...


@dataclass(frozen=True, eq=False)
class Undo:
    """What `crop` needs: the newest tokens of each row, as many as `slack`, and the state before them."""

    state: Tensors
    inputs: Tensors
    """[B, Hkv, slack, …], the newest token last"""
    absent: Tensor
    """[B, slack] bool: True before the first token of a short text"""
    ids: Tensor
    """[B, slack + 2, 2]: how many documents had begun, and the document's id; of the state's last token, of the tokens,
    and of the last token that was read"""

    @classmethod
    def start(cls, state: Tensors, inputs: Tensors, document: Tensor, slack: int) -> Undo:
        absent = torch.ones(len(document), slack, dtype=torch.bool, device=document.device)
        ids = torch.stack([torch.zeros_like(document), document], 1)[:, None].repeat(1, slack + 2, 1)
        return cls({name: t.clone() for name, t in state.items()}, inputs, absent, ids)

    @torch.no_grad()
    def add(self, mechanism: Recurrence, inputs: Tensors, padding: Tensor | None, documents: Tensor | None) -> Undo:
        """With these tokens [B, Hkv, T, …] behind; as many that are no padding move into the state. documents [B, T]"""
        new, slack = next(iter(inputs.values())).shape[2], self.absent.shape[1]
        padding = self.absent.new_zeros(len(self.absent), new) if padding is None else padding
        fresh = self.ids[:, -1:].repeat(1, new, 1)
        if documents is not None:
            begins = documents != torch.cat([self.ids[:, -1:, 1], documents[:, :-1]], 1)
            fresh = torch.stack([fresh[..., 0] + begins.cumsum(1), documents], 2)
        every = {name: torch.cat([t, inputs[name].to(t.dtype)], 2) for name, t in self.inputs.items()}
        ids = torch.cat([self.ids[:, 1:-1], fresh], 1)
        every, ids, absent = _real_last(every, ids, torch.cat([self.absent, padding], 1))
        old = {name: t[:, :, :new] for name, t in every.items()}
        state, of_state = _advance(mechanism, self.state, self.ids[:, 0], old, ids[:, :new], absent[:, :new])
        kept = {name: t[:, :, new:].clone() for name, t in every.items()}
        ids = torch.cat([of_state[:, None], ids[:, new:], fresh[:, -1:]], 1)
        assert ids.shape[1] == slack + 2
        return Undo(state, kept, absent[:, new:].clone(), ids)

    @torch.no_grad()
    def take_back(self, mechanism: Recurrence, back: Tensor) -> tuple[Tensors, Undo]:
        """The state before each row's last back [B] tokens, and what can be taken back from there."""
        slack = self.absent.shape[1]
        held = slack - self.absent.sum(1)
        if bool((short := back > held).any()):
            row = int(short.nonzero()[0, 0])
            raise ValueError(
                f"row {row} cannot be cropped by {int(back[row])} tokens: its recurrent state can take back "
                f"{int(held[row])}; make the KV cache with a larger slack"
            )
        gone = torch.arange(slack, device=back.device) >= slack - back[:, None]
        inputs, ids, absent = _real_last(self.inputs, self.ids[:, 1:-1], self.absent | gone)
        state, newest = _advance(mechanism, self.state, self.ids[:, 0], inputs, ids, absent)
        newest = torch.where((back == 0)[:, None], self.ids[:, -1], newest)
        return state, Undo(self.state, inputs, absent, torch.cat([self.ids[:, :1], ids, newest[:, None]], 1))

    @property
    def document(self) -> Tensor:
        """[B]: the id of the last token's document"""
        return self.ids[:, -1, 1]


def _advance(
    mechanism: Recurrence, state: Tensors, of_state: Tensor, inputs: Tensors, ids: Tensor, absent: Tensor
) -> tuple[Tensors, Tensor]:
    """The state after these tokens, of their last document alone, and its ids [B, 2]. What is absent comes first."""
    newest = torch.where(absent[:, -1:], of_state, ids[:, -1])
    ended = ids[..., 0] != newest[:, :1]
    state = mechanism.reset(state, of_state[:, 0] != newest[:, 0])
    return mechanism.advance(inputs, state, absent | ended), newest


class Recurrent:
    """A layer's memory (`OwnMemory`), made by `start`. document [B]: the id of each row's last token."""

    tokens = 0

    def __init__(self, mechanism: Recurrence, state: Tensors, document: Tensor, undo: Undo | None = None) -> None:
        self.mechanism, self.state, self.document, self.undo = mechanism, state, document, undo
        self._next: Recurrent | None = None

    @classmethod
    def start(cls, mechanism: Recurrence, shape: MemoryShape, state: Tensors, inputs: Tensors) -> Recurrent:
        """Of an empty state [B, …]. inputs: zeros [B, Hkv, slack, …], by the names of `token_inputs` and `query_inputs`
        that the state is advanced by."""
        document = torch.full((shape.batch,), NO_DOCUMENT, device=shape.device)
        if not shape.slack:
            return cls(mechanism, state, document)
        return cls(mechanism, state, document, Undo.start(state, inputs, document, shape.slack))

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        mechanism = call.mechanism
        if refused := mechanism.supports(position=call.position):
            raise ValueError(refused[0])
        self._check(call.q)
        view, document = _of_new_tokens(call), self.document
        q, k = call.position.encode(call.q, call.k, view)
        state, documents = self.state, view.documents
        if documents is not None:
            state, document = mechanism.reset(state, document != documents[:, 0]), documents[:, -1]
        inputs = mechanism.token_inputs(k, call.v, view) | mechanism.query_inputs(q)
        found, state = mechanism.run(q, inputs, state, view.padding, documents)
        undo = None if self.undo is None else self.undo.add(mechanism, inputs, view.padding, documents)
        self._next = Recurrent(mechanism, _detached(state), document, undo)
        return found, mechanism.penalty(mechanism.rule(view), view)

    def _check(self, q: Tensor) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        rows, device = q.shape[0], q.device
        for name, t in self.state.items():
            if t.shape[0] != rows or (t.dtype != wide and t.is_floating_point()) or t.device != device:
                raise ValueError(
                    f"the recurrent state {name} has {len(t)} rows of {t.dtype} on {t.device}, and the new tokens need "
                    f"{len(q)} rows of {wide} on {q.device}; begin with this model's start() or cache()"
                )

    def keep(self, states: Tensor) -> Recurrent:
        if self._next is None:
            raise ValueError("keep was called before attend; expected the tokens to be attended to first")
        return self._next

    def crop(self, back: Tensor) -> Recurrent:
        if not bool(back.any()):
            return self
        if self.undo is None:
            raise ValueError("a recurrent state cannot take tokens back; make the KV cache with slack")
        back = back.to(self.document.device)
        state, undo = self.undo.take_back(self.mechanism, back)
        state = {name: torch.where(_rows(back == 0, t), self.state[name], t) for name, t in state.items()}
        return Recurrent(self.mechanism, state, undo.document, undo)

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> Tensors:
        found = {"document": self.document} | {f"state.{name}": t for name, t in self.state.items()}
        if self.undo is not None:
            found |= {f"undo.{name}": t for name, t in self.undo.state.items()}
            found |= {"absent": self.undo.absent, "ids": self.undo.ids}
            found |= {f"token.{name}": t for name, t in self.undo.inputs.items()}
        return found

    def with_tensors(self, tensors: Tensors) -> Recurrent:
        def named(prefix: str, like: Tensors) -> Tensors:
            return {name: tensors[f"{prefix}.{name}"] for name in like}

        undo = self.undo
        if undo is not None:
            undo = Undo(named("undo", undo.state), named("token", undo.inputs), tensors["absent"], tensors["ids"])
        return Recurrent(self.mechanism, named("state", self.state), tensors["document"], undo)


def empty_rows(state: Tensors, rows: Tensor, **empty: float) -> Tensors:
    """The state with 0 in these rows [B] bool, or the number given for a tensor's name."""
    return {name: t.masked_fill(_rows(rows, t), empty.get(name, 0.0)) for name, t in state.items()}


def _of_new_tokens(call: LayerCall) -> Any:
    """The view of the new tokens alone, with their positions in the text: a state has no place of its own."""
    view, new = call.view, call.q.shape[2]
    if view.documents is None and view.padding is None and not getattr(call.position, "rotates", False):
        return view  # as every token that is decoded: nothing of it depends on where it is
    documents = view.documents[1] if isinstance(view.documents, tuple) else view.documents
    at = view.q_positions
    if at is None and view.start:
        at = torch.arange(view.start, view.start + new, device=call.q.device)
    return replace(
        view, documents=_last(documents, new), padding=_last(view.padding, new), q_positions=at, k_positions=at
    )


def _last(ids: Tensor | None, new: int) -> Tensor | None:
    return None if ids is None else ids[:, ids.shape[1] - new :]


def _real_last(inputs: Tensors, ids: Tensor, absent: Tensor) -> tuple[Tensors, Tensor, Tensor]:
    """Each row with what is absent [B, N] first; the order of the others stays."""
    order = absent.logical_not().to(torch.int8).argsort(dim=1, stable=True)

    def ordered(t: Tensor) -> Tensor:
        return t.gather(2, order.view(len(order), 1, -1, *[1] * (t.ndim - 3)).expand_as(t))

    ids = ids.gather(1, order[..., None].expand_as(ids))
    return {name: ordered(t) for name, t in inputs.items()}, ids, absent.gather(1, order)


def _rows(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (like.ndim - 1))


def _detached(tensors: Tensors) -> Tensors:
    return {name: t.detach() if t.requires_grad else t for name, t in tensors.items()}
