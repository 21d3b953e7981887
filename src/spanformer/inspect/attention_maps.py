"""Attention maps: the attention weights of every head of a model over a short text, or over a pair of texts.

    attention is linear in the values, out_i = Σ_j a_ij·v_j, so one-hot values v_j = e_j give out_i = a_i

A forward hook runs each mechanism again with one-hot values on the dense reference, so this works for any mechanism.
Linear attention returns its own weights, which may be negative. Spans, biases and patterns apply as in the model.
Shapes: H heads, Hkv key/value heads, T tokens, S tokens of a source, M remembered tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spanformer.attention import (
    Attention,
    Compressive,
    GlobalLocal,
    Memorizing,
    MixedMemory,
    RecurrentAttention,
    Retrieval,
)
from spanformer.inspect.block_maps import PieceSeen, block_map
from spanformer.memory.groups import group_heads
from spanformer.model.cross_attention import CrossAttention
from spanformer.model.encoder import Encoder
from spanformer.model.layer import SelfAttention
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq
from spanformer.ops import Attended

LONGEST = 1024
"""maximum tokens: the matrices of all layers and heads are in memory at once"""


def attention_maps(lm: LM | Encoder, ids: Tensor) -> list[Tensor]:
    """[layers] of [H, T, T]: the attention weight of query i for key j, for the text ids [T]. Tokens of an encoder see
    the future too; ETC's global tokens come before the text.

    A row sums to 1, or to less if sink logits, persistent vectors, or the zeros that the paper's code attends to before
    the text also receive weight.
    """
    (maps,) = _maps(lm, [[block.attention for block in lm.layers()]], ids=ids)
    return maps


def seen_pairs(lm: LM | Encoder, length: int) -> Tensor:
    """[H, n, n] bool: the pairs with non-zero weight in a model's first layer, on a text of random tokens. Random
    numbers are added to learned parameters, because untrained heads have equal spans and gates."""
    with torch.no_grad():
        for p in lm.mechanisms()[0].parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    lm.after_step()
    return attention_maps(lm.double(), torch.randint(0, lm.config.vocab, (length,)))[0] != 0


class PairMaps(NamedTuple):
    """Attention maps of an encoder–decoder, [layers] each."""

    encoder: list[Tensor]
    """[H, S, S] over the source"""
    decoder: list[Tensor]
    """[H, T, T] over the answer"""
    cross: list[Tensor]
    """[H, T, S]: cross-attention from the answer to the source"""


def pair_maps(model: Seq2Seq, source: Tensor, x: Tensor) -> PairMaps:
    """source [S] and x [T] are the inputs of `model`: the source ends with `end`, x begins with `begin`. Row t holds
    the weights of query x_t, which predicts the next token."""
    decoder = [block for block in model.layers() if block.cross is not None]
    reading, writing = ([block.attention for block in half] for half in (model.encoder.layers(), decoder))
    crossing = [block.cross for block in decoder if block.cross is not None]
    return PairMaps(*_maps(model, [reading, writing, crossing], source=source, x=x))


def _maps(
    model: LM | Encoder | Seq2Seq, parts: Sequence[Sequence[SelfAttention | CrossAttention]], **texts: Tensor
) -> list[list[Tensor]]:
    """The attention maps of each part of the model, while it processes the texts."""
    for name, ids in texts.items():
        if ids.ndim != 1 or ids.is_floating_point() or not 1 <= len(ids) <= LONGEST:
            raise ValueError(
                f"{name} has shape {list(ids.shape)} and dtype {ids.dtype}; expected 1 … {LONGEST} token ids"
            )
    return watched_maps(model, parts, lambda: model(*(ids[None] for ids in texts.values())))


@torch.no_grad()
def watched_maps(
    model: nn.Module, parts: Sequence[Sequence[SelfAttention | CrossAttention]], run: Callable[[], object]
) -> list[list[Tensor]]:
    """The attention maps of each part of the model while `run` reads one text with it, without memory."""
    watched = [[_watch_heads(attention) for attention in part] for part in parts]
    watches = [watch for part in watched for layer in part for watch in layer]
    training = model.training
    model.eval()  # dropout would zero some weights
    try:
        for watch in watches:
            watch.begin()
        run()
    finally:
        for watch in watches:
            watch.end()
        model.train(training)
    numbered = [enumerate(part, 1) for part in watched]
    return [[torch.cat([watch.map(n) for watch in layer]) for n, layer in part] for part in numbered]


def _watch_heads(attention: SelfAttention | CrossAttention) -> list[_Watch]:
    """One watch per part of a layer, if its heads have different memories."""
    whole, first, found = attention.mechanism, 0, []
    for mechanism in whole.each() if isinstance(whole, MixedMemory) else [whole]:
        watch = _WatchState if isinstance(mechanism, RecurrentAttention) else _Watch
        watch = _WatchBlocks if isinstance(mechanism, Compressive | Retrieval) else watch
        found.append(watch(attention, mechanism, first))
        first += mechanism.heads
    return found


def _one_hot_hook(kv_heads: int, keys: int, first: int):
    """A forward hook that replaces the output of a mechanism's own value projection by one-hot vectors over `keys`, for
    each KV head. first: index of the first token that the mechanism projects."""

    def hook(_projection: nn.Module, arguments: tuple[Tensor], _values: Tensor) -> Tensor:
        (x,) = arguments
        places = torch.eye(first + x.shape[1], keys, dtype=x.dtype, device=x.device)[first:]
        return places.repeat(1, kv_heads).expand(x.shape[0], -1, -1)

    return hook


def _own_values(mechanism: Attention, above: int) -> list[tuple[nn.Module, int]]:
    """The mechanism's own value projections, such as Longformer's for global tokens, each with the index of the first
    token that it projects. above: number of global tokens before the text."""
    found: list[tuple[nn.Module, int]] = [
        (value, 0) for part in mechanism.modules() if isinstance(value := getattr(part, "value", None), nn.Linear)
    ]
    if isinstance(mechanism, GlobalLocal):
        names = [name for name in mechanism.own if name.startswith("value")]
        found += [(mechanism.own[name], above if name.endswith("2l") else 0) for name in names]
    return found


class _Watch:
    """Records the output of a layer's mechanism for one-hot values in addition to the real ones."""

    def __init__(self, attention: SelfAttention | CrossAttention, mechanism: Attention, first: int) -> None:
        """first: index of the mechanism's first head in the layer."""
        self.attention, self.mechanism, self.first = attention, mechanism, first
        self.persistent = attention.persistent if isinstance(attention, SelfAttention) else None
        self.found: list[tuple[Attended, float]] = []
        self.beside: Tensor | None = None
        """[1, H, T] lse of persistent vectors"""
        self.past = self.keys = 0
        """number of remembered tokens, and of tokens of the text"""
        self.hooks: list[RemovableHandle] = []
        self.backends = [(part, part.backend) for part in self.mechanism.modules() if isinstance(part, Attention)]

    def begin(self) -> None:
        for part, _ in self.backends:
            part.backend = "reference"
        self.hooks = [self.mechanism.register_forward_hook(self._observe)]
        if self.persistent is not None:
            self.hooks.append(self.persistent.register_forward_hook(self._observe_persistent))

    def _observe(self, mechanism: Attention, arguments: tuple, real: Attended) -> None:
        q, k, v, rule, view = arguments
        one_hot = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:3], -1)
        plain, relative = rule, getattr(rule, "distance_value", None)
        if relative is not None:  # values per distance are added to the output and belong to no key
            plain = replace(rule, distance_value=None)
        above = 0 if view.segments is None else k.shape[2] - view.segments.shape[1]
        own = _own_values(mechanism, above)
        hooks = [part.register_forward_hook(_one_hot_hook(k.shape[1], k.shape[2], first)) for part, first in own]
        try:
            weights = mechanism.forward(q, k, one_hot, plain, view)  # a call would run this hook again
        finally:
            for hook in hooks:
                hook.remove()
        off = 0.0
        if relative is None and not own:
            again = weights.out @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
            off = float((again - real.out).abs().max()) / (1e-12 + float(real.out.abs().max()))
        self.found.append((weights, off))
        self.keys = q.shape[2] if isinstance(self.attention, SelfAttention) else k.shape[2]
        self.past = max(self.past, k.shape[2] - self.keys)

    def _observe_persistent(self, persistent: nn.Module, arguments: tuple, found: Attended) -> None:
        self.beside = found.lse[:, self.first : self.first + self.mechanism.heads]

    def end(self) -> None:
        for part, backend in self.backends:
            part.backend = backend
        for hook in self.hooks:
            hook.remove()

    def map(self, layer: int) -> Tensor:
        """[H, T, T], or [H, T, S]"""
        name = type(self.mechanism).__name__
        if not self.found or max(off for _, off in self.found) > 1e-3:
            raise ValueError(
                f"layer {layer} ({name}) does not compute its output by attention weights alone, so it has no map"
            )
        weights = torch.cat([found.out[0, :, :, -self.keys :] for found, _ in self.found])
        lse = torch.cat([found.lse[0] for found, _ in self.found])
        if len(self.found) > 1 and isinstance(self.attention, SelfAttention):  # groups of heads, longest first
            shared = self.attention.heads // self.attention.kv_heads
            context = self.mechanism.context_length()
            each = [max(context[h : h + shared]) for h in range(0, len(context), shared)]
            groups = group_heads(each, self.past, lse.device)
            order = [h * shared + n for heads, _ in groups for h in heads for n in range(shared)]
            back = torch.tensor(sorted(range(len(order)), key=order.__getitem__))
            weights, lse = weights[back], lse[back]
        if self.beside is not None:
            weights = weights * (lse - torch.logaddexp(lse, self.beside[0])).exp()[..., None]
        return weights


class _WatchState(_Watch):
    """The same for heads with a recurrent state: their memory calls `run`, not `forward`, so hooks do not apply."""

    def begin(self) -> None:
        mechanism = self.mechanism
        assert isinstance(mechanism, RecurrentAttention)

        def run(q: Tensor, inputs: dict[str, Tensor], *others: Any) -> tuple[Attended, dict[str, Tensor]]:
            found, state = type(mechanism).run(mechanism, q, inputs, *others)
            weights = mechanism.pair_weights(q, inputs, *others[1:])
            self.found, self.keys = [(Attended(weights, found.lse), 0.0)], q.shape[2]
            return found, state

        mechanism.run = run  # pyright: ignore[reportAttributeAccessIssue]
        if self.persistent is not None:
            self.hooks = [self.persistent.register_forward_hook(self._observe_persistent)]

    def end(self) -> None:
        super().end()
        self.mechanism.__dict__.pop("run", None)


class _WatchBlocks(_Watch):
    """The same of heads whose memory calls `forward` for each block of a text."""

    def begin(self) -> None:
        super().begin()
        self.pieces: list[PieceSeen] = []
        self.raw: dict[str, Tensor] = {}
        if isinstance(self.mechanism, Memorizing):  # what it retrieves has no positions
            for name, take in (("q", "query_vectors"), ("k", "key_vectors")):
                setattr(self.mechanism, take, self._noted(name, getattr(self.mechanism, take)))

    def _noted(self, name: str, take: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def noted(t: Tensor) -> Tensor:
            self.raw.setdefault(name, found := take(t))  # later calls project blocks that leave the ring
            return found

        return noted

    def _observe(self, mechanism: Attention, arguments: tuple, real: Attended) -> None:
        super()._observe(mechanism, arguments, real)
        q, k, _, _, view = arguments
        self.pieces.append(PieceSeen(q, k, view, self.found[-1][0]))

    def end(self) -> None:
        super().end()
        for take in ("query_vectors", "key_vectors"):
            self.mechanism.__dict__.pop(take, None)

    def map(self, layer: int) -> Tensor:
        assert isinstance(self.attention, SelfAttention)
        shared = self.attention.heads // self.attention.kv_heads
        whole = block_map(self.mechanism, self.pieces, self.mechanism.heads // shared, self.raw)
        self.found, self.keys, self.past = [(whole, max(off for _, off in self.found))], whole.out.shape[3], 0
        return super().map(layer)
