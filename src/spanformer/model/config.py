"""The configuration of a model as plain data: the [model] section of a run file and of a checkpoint.

No torch here: the command line takes its help from these fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from spanformer.kinds import KINDS, POSITIONS, HeadSpec, Section
from spanformer.kinds.notation import LARGEST as MOST
from spanformer.kinds.notation import PATTERN, parse_layer

SPECIAL = {"lm": 0, "seq2seq": 2, "encoder": 1}
"""kinds of models, with the number of special tokens of each, the last ids of its vocabulary: seq2seq has begin and
end, encoder has mask"""

MOST_PARTS = 4096
"""limit for layers, heads and experts, which are built one by one"""


@dataclass(frozen=True)
class AttentionConfig(Section):
    kind: str = "adaptive_span"
    """kind of attention: a name such as adaptive_span, window(128) or big_bird(block=16, random=2) (`spanformer cost`
    lists them), a mixture by head such as "6 window(64) + 2 adaptive_span", or a pattern such as
    "Window(64) | Global([0])"; see docs/patterns.md"""
    stack: tuple[str, ...] = ()
    """kind of each layer, instead of `kind` for all: a list that repeats until every layer has one"""
    dropout: float = 0.0
    """dropout of attention weights"""
    backend: str = "auto"
    """backend of attention: auto, native, flex, banded or reference"""

    def __post_init__(self) -> None:
        for name in ("max_span", "window"):
            _size(f"attention.{name}", getattr(self, name), 1)
        _within(
            "attention.ramp", self.ramp, 0 < self.ramp <= MOST, f"a positive, finite number of tokens, at most {MOST:,}"
        )
        _within("attention.init", self.init, 0 <= self.init <= 1, "a share of max_span, 0 … 1")
        _within("attention.penalty", self.penalty, 0 <= self.penalty < math.inf, "0 or more")
        _dropout("attention", self.dropout)
        known = ("auto", "native", "flex", "banded", "reference")
        _within("attention.backend", repr(self.backend), self.backend in known, f"one of {', '.join(known)}")


@dataclass(frozen=True)
class PositionConfig:
    kind: str = "rotary"
    """none; absolute: sinusoidal and learned, either also with _per_layer; a vector for each distance: table (the
    adaptive-span paper's), shaw (clipped, for keys and values), transformer_xl; rotated queries and keys: rotary; a
    number for each head and distance: alibi, t5 (by buckets), distance_bias (learned), da_transformer (multiplied);
    see docs/positions.md"""
    base: float = 10000.0
    """base of rotary and sinusoidal: the longest wavelength is about 6 times this many tokens"""
    length: int = 0
    """for learned and learned_per_layer: the most tokens a text may have; for rotary with scaling yarn: the length that
    the model was trained on"""
    clip: int = 16
    """for shaw: larger distances share the vectors of this one"""
    scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    """for rotary: how to scale its angles for longer texts"""
    factor: float = 1.0
    """for rotary with scaling: length of texts divided by the trained length"""

    def __post_init__(self) -> None:
        _within("position.base", self.base, 0 < self.base < math.inf, "a positive, finite number")
        _size("position.length", self.length, 0)
        _size("position.clip", self.clip, 1)
        _within("position.kind", repr(self.kind), self.kind in POSITIONS, f"one of {', '.join(POSITIONS)}")
        known = POSITIONS[self.kind]
        if (known.needs_length or self.scaling == "yarn") and not self.length:
            what = "the length that the model was trained on" if self.scaling == "yarn" else "a number of tokens"
            raise ValueError(f"model.position.length is 0; {self.kind} needs {what}")
        if self.scaling != "none" and "scaling" not in known.options:
            raise ValueError(
                f"model.position.scaling is {self.scaling!r}, which is for rotary positions; position.kind is "
                f"{self.kind!r}, so set scaling to 'none'"
            )
        _within("position.factor", self.factor, 1 <= self.factor < math.inf, "at least 1")
        if self.factor != 1 and self.scaling == "none":
            raise ValueError(
                f"model.position.factor is {self.factor} without a scaling; set position.scaling, or leave factor at 1"
            )

    @property
    def per_layer(self) -> bool:
        """Whether each layer has its own encoding."""
        return POSITIONS[self.kind].per_layer


@dataclass(frozen=True)
class FeedForwardConfig:
    kind: Literal["relu", "gelu", "swiglu", "none"] = "swiglu"
    """none: attention only, as with persistent memory vectors"""
    dim: int = 0
    """inner size; 0: 4 times the model's (8/3 times for swiglu, the same number of weights)"""
    bias: bool = False
    """biases in its two (or three) products"""
    dropout: float = 0.0
    """dropout of the inner activations"""
    experts: int = 0
    """number of expert feed-forwards, of which each token uses some; 0: one feed-forward for all"""
    per_token: int = 2
    """how many experts each token uses"""
    balance: float = 0.01
    """weight of the load-balancing loss"""
    chunk: int = 0
    """tokens per batch that it takes at a time, and again in the backward pass, to keep no inner activations; 0: all"""

    def __post_init__(self) -> None:
        for name in ("dim", "chunk"):
            _size(f"feedforward.{name}", getattr(self, name), 0)
        _size("feedforward.experts", self.experts, 0, MOST_PARTS)
        _dropout("feedforward", self.dropout)
        _within("feedforward.balance", self.balance, 0 <= self.balance < math.inf, "0 or more")


@dataclass(frozen=True)
class EmbeddingConfig:
    tied: bool = False
    """the output uses the input's vectors"""
    cutoffs: tuple[int, ...] = ()
    """adaptive embeddings for large vocabularies: ids beyond each cutoff get smaller vectors; empty: plain"""
    divisor: int = 4
    """by how much the vectors shrink from one cutoff to the next"""
    dropout: float = 0.0
    """dropout of the embedded tokens, and of the last hidden states"""
    bias: bool = False
    """a bias for each token of the output"""
    loss_chunk: int = 0
    """tokens per batch whose logits the loss takes at a time, and again in the backward pass, to keep none; 0: all"""

    def __post_init__(self) -> None:
        _size("embedding.loss_chunk", self.loss_chunk, 0)
        _dropout("embedding", self.dropout)


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of an encoder–decoder; all other settings are shared with the decoder."""

    layers: int = 0
    """0: as many as the decoder has"""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    position: PositionConfig = field(default_factory=PositionConfig)

    def __post_init__(self) -> None:
        _size("encoder.layers", self.layers, 0, MOST_PARTS)


@dataclass(frozen=True)
class ModelConfig:
    vocab: int = 0
    """size of the vocabulary; 0: that of the data plus the special tokens of this kind of model"""
    dim: int = 256
    """size of hidden states"""
    layers: int = 4
    """blocks of attention and feed-forward, one after the other"""
    heads: int = 4
    """query heads per layer; the head size is dim / heads"""
    kv_heads: int = 0
    """key/value heads per layer, each shared by heads / kv_heads query heads; 0: one for each"""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    position: PositionConfig = field(default_factory=PositionConfig)
    feedforward: FeedForwardConfig = field(default_factory=FeedForwardConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    norm: Literal["layer", "rms"] = "rms"
    """layer: LayerNorm; rms: RMSNorm, without mean and bias"""
    order: Literal["pre", "post"] = "pre"
    """norm before each part, or after its sum (as in the paper)"""
    stack: Literal["residual", "reversible"] = "residual"
    """reversible: two streams, whose layers keep no activations and run again in the backward pass"""
    persistent: int = 0
    """learned key/value vectors that each head sees beside the text ("all-attention" with feedforward.kind none)"""
    paper_compat: bool = False
    """the conventions of the paper's code: a token does not see itself, memory starts as zeros that heads can see"""
    kind: Literal["lm", "seq2seq", "encoder"] = "lm"
    """lm: a language model, trained to predict the next token; seq2seq: an encoder–decoder, trained on pairs of texts;
    encoder: sees both directions, trained to predict masked tokens"""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    cross: str = "scaled"
    """for seq2seq: score function of cross-attention: scaled (q·k/√D), or that of the attention kinds
    dot, general, bilinear or additive"""

    def __post_init__(self) -> None:
        _within("kind", repr(self.kind), self.kind in SPECIAL, f"one of {', '.join(SPECIAL)}")
        if self.kind != "seq2seq" and self.encoder != EncoderConfig():
            raise ValueError(f"model.encoder is set, and model.kind is {self.kind!r}; expected kind 'seq2seq'")
        scorings = cross_scorings()
        _within("cross", repr(self.cross), self.cross in scorings, f"one of {', '.join(scorings)}")
        if self.kind != "seq2seq" and self.cross != "scaled":
            raise ValueError(f"model.cross is set, and model.kind is {self.kind!r}; expected kind 'seq2seq'")
        if self.kind != "lm" and self.paper_compat:
            raise ValueError(
                f"model.paper_compat is set, and model.kind is {self.kind!r}; the paper's code has language models "
                "only, so unset it"
            )
        if self.stack == "reversible" and self.order == "post":
            raise ValueError("model.stack is 'reversible', and a norm of a sum cannot be undone; expected order 'pre'")
        _size("dim", self.dim, 1)
        for name in ("layers", "heads"):
            _size(name, getattr(self, name), 1, MOST_PARTS)
        _size("kv_heads", self.kv_heads, 0, MOST_PARTS)
        for name in ("vocab", "persistent"):
            _size(name, getattr(self, name), 0)
        if self.dim % self.heads:
            raise ValueError(f"model.dim is {self.dim}; expected a multiple of model.heads, {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"model.kv_heads is {self.kv_heads}; expected a divisor of model.heads, {self.heads}")
        cutoffs = self.embedding.cutoffs
        if self.vocab and cutoffs and cutoffs[-1] >= self.vocab:
            raise ValueError(
                f"model.embedding.cutoffs ends at {cutoffs[-1]}; expected less than the vocabulary, {self.vocab}"
            )
        kinds = {spec.kind for layer in self.layer_specs() for spec in layer}
        strange = sorted(kind for kind in kinds if kind == PATTERN or not KINDS[kind].paper_compat)
        if self.paper_compat and strange:
            raise ValueError(
                f"model.paper_compat is set, and the paper's code has no {', '.join(strange)}; unset one of them"
            )

    @property
    def causal(self) -> bool:
        """Whether self-attention never sees the future."""
        return self.kind != "encoder"

    def reading_half(self) -> ModelConfig:
        """The encoder of an encoder–decoder, as a separate configuration."""
        e = self.encoder
        return replace(
            self, kind="encoder", layers=e.layers or self.layers, attention=e.attention, position=e.position,
            encoder=EncoderConfig(), cross="scaled",
        )  # fmt: skip

    @property
    def max_span(self) -> int:
        """The largest span of any layer, in tokens."""
        return max(self.attention.max_span, self.encoder.attention.max_span if self.kind == "seq2seq" else 0)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def groups(self) -> int:
        """The number of key/value heads, never 0."""
        return self.kv_heads or self.heads

    def layer_specs(self) -> list[list[HeadSpec]]:
        """The heads of each layer: one spec for a uniform layer, several for a mixture."""
        a = self.attention
        entries, where = (a.stack, "model.attention.stack") if a.stack else ((a.kind,), "model.attention.kind")
        section = Section(**{f.name: getattr(a, f.name) for f in fields(Section)})
        common: dict[str, object] = {}
        once = {
            entry: self._layer(parse_layer(entry, self.heads, where, section), where, common)
            for entry in set(entries[: self.layers])
        }
        return [once[entries[n % len(entries)]] for n in range(self.layers)]

    def _layer(self, specs: list[HeadSpec], where: str, common: dict[str, object]) -> list[HeadSpec]:
        """The specs of a layer, filled in from the model's settings; common: what all layers share."""
        shared = self.heads // self.groups
        if any(spec.heads % shared for spec in specs):
            raise ValueError(
                f"{where} has parts of {[spec.heads for spec in specs]} heads; expected multiples of {shared}, the "
                "number of query heads per key/value head"
            )
        return [
            replace(
                spec, dim=self.dim, head_dim=self.head_dim, kv_heads=spec.heads // shared, causal=self.causal,
                paper_compat=self.paper_compat, shared=common,
            )
            for spec in specs
        ]  # fmt: skip


def cross_scorings() -> list[str]:
    """The score functions of cross-attention."""
    return ["scaled", *(name for name, kind in KINDS.items() if kind.scoring)]


def _size(name: str, value: int, least: int, most: int = MOST) -> None:
    if value < least:
        raise ValueError(f"model.{name} is {value}; expected at least {least}")
    if value > most:
        raise ValueError(f"model.{name} is {value}; expected at most {most:,}")


def _within(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(f"model.{name} is {value}; expected {expected}")


def _dropout(section: str, value: float) -> None:
    _within(f"{section}.dropout", value, 0 <= value < 1, "a share, 0 … 1 without 1")
