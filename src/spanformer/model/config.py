"""The configuration of a model as plain data: the [model] section of a run file and of a checkpoint.

No torch here: the command line takes its help from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Literal

from spanformer.kinds import KINDS, HeadSpec, Section
from spanformer.kinds.notation import PATTERN, parse_layer
from spanformer.model.config_sections import (
    MOST_PARTS,
    AttentionConfig,
    DepthConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    PositionConfig,
    size,
    within,
)

SPECIAL = {"lm": 0, "seq2seq": 2, "encoder": 1}
"""kinds of models, with the number of special tokens of each, the last ids of its vocabulary: seq2seq has begin and
end, encoder has mask"""


@dataclass(frozen=True)
class EncoderConfig:
    """The encoder of an encoder–decoder; all other settings are shared with the decoder."""

    layers: int = 0
    """0: as many as the decoder has"""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    position: PositionConfig = field(default_factory=PositionConfig)

    def __post_init__(self) -> None:
        size("encoder.layers", self.layers, 0, MOST_PARTS)


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
    block: Literal["plain", "gated"] = "plain"
    """gated: gates instead of sums, and a ReLU after attention and feed-forward (Gated Transformer-XL)"""
    gate: Literal["gru", "input", "output", "highway", "sigtanh"] = "gru"
    """for gated blocks: the kind of gate"""
    stack: Literal["residual", "reversible", "universal"] = "residual"
    """reversible: two streams, whose layers keep no activations and run again in the backward pass; universal: all
    layers are one block, which is told the number of the step"""
    depth: DepthConfig = field(default_factory=DepthConfig)
    neighbours: int = 0
    """retrieved tokens that a gate mixes into the last hidden state (SPALM), with [retrieve] to find them; 0: none"""
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
        within("kind", repr(self.kind), self.kind in SPECIAL, f"one of {', '.join(SPECIAL)}")
        if self.kind != "seq2seq" and self.encoder != EncoderConfig():
            raise ValueError(f"model.encoder is set, and model.kind is {self.kind!r}; expected kind 'seq2seq'")
        scorings = cross_scorings()
        within("cross", repr(self.cross), self.cross in scorings, f"one of {', '.join(scorings)}")
        if self.kind != "seq2seq" and self.cross != "scaled":
            raise ValueError(f"model.cross is set, and model.kind is {self.kind!r}; expected kind 'seq2seq'")
        if self.kind != "lm" and self.paper_compat:
            raise ValueError(
                f"model.paper_compat is set, and model.kind is {self.kind!r}; the paper's code has language models "
                "only, so unset it"
            )
        gates = ("gru", "input", "output", "highway", "sigtanh")
        within("block", repr(self.block), self.block in ("plain", "gated"), "'plain' or 'gated'")
        within("gate", repr(self.gate), self.gate in gates, f"one of {', '.join(gates)}")
        one_embedding = self.embedding.tied and not self.embedding.cutoffs
        if self.neighbours and (self.kind != "lm" or self.depth.kind == "exits" or not one_embedding):
            raise ValueError(
                f"model.neighbours is {self.neighbours}, and their embeddings are mixed into the state that the output "
                "layer reads; expected a language model with embedding.tied, without cutoffs and exits"
            )
        if self.block == "gated" and (self.order == "post" or self.stack == "reversible"):
            raise ValueError(
                f"model.block is 'gated' with order {self.order!r} and a {self.stack} stack; expected order 'pre' and "
                "a residual or universal stack"
            )
        if self.stack == "universal" and len(set(self.attention.stack)) > 1:
            raise ValueError("model.stack is 'universal', one block for all layers; expected no model.attention.stack")
        if self.depth.kind != "fixed" and (self.stack == "reversible" or self.paper_compat):
            raise ValueError(
                f"model.depth.kind is {self.depth.kind!r}; expected 'fixed' with a reversible stack or paper_compat, "
                "whose tokens all run through every layer"
            )
        if self.depth.kind == "exits" and (self.kind != "lm" or self.order == "post" or self.layers < 2):
            raise ValueError(
                f"model.depth.kind is 'exits' with model.kind {self.kind!r}, order {self.order!r} and {self.layers} "
                "layers; expected a language model with pre-norm and at least 2 layers"
            )
        if self.feedforward.kind == "separable_conv":
            self._check_convolution()
        if self.stack == "reversible" and self.order == "post":
            raise ValueError("model.stack is 'reversible', and a norm of a sum cannot be undone; expected order 'pre'")
        size("dim", self.dim, 1)
        size("neighbours", self.neighbours, 0, MOST_PARTS)
        for name in ("layers", "heads"):
            size(name, getattr(self, name), 1, MOST_PARTS)
        size("kv_heads", self.kv_heads, 0, MOST_PARTS)
        for name in ("vocab", "persistent"):
            size(name, getattr(self, name), 0)
        if self.dim % self.heads:
            raise ValueError(f"model.dim is {self.dim}; expected a multiple of model.heads, {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"model.kv_heads is {self.kv_heads}; expected a divisor of model.heads, {self.heads}")
        cutoffs = self.embedding.cutoffs
        if self.vocab and cutoffs and cutoffs[-1] >= self.vocab:
            raise ValueError(
                f"model.embedding.cutoffs ends at {cutoffs[-1]}; expected less than the vocabulary, {self.vocab}"
            )
        self._check_parts()

    def _check_parts(self) -> None:
        """Refuse what does not go together."""
        if self.kind != "lm" and self.position.log_scale:
            raise ValueError(
                f"model.position.log_scale is {self.position.log_scale}, which counts the tokens before a query, and "
                f"model.kind is {self.kind!r}; expected 0, or kind 'lm'"
            )
        if self.attention.bias and self.depth.kind != "fixed":
            raise ValueError(
                f"model.attention.bias is set, and model.depth.kind is {self.depth.kind!r}, whose skipped layers "
                "project keys without biases; expected depth 'fixed' or no bias"
            )
        kinds = {spec.kind for layer in self.layer_specs() for spec in layer}
        strange = sorted(kind for kind in kinds if kind == PATTERN or not KINDS[kind].paper_compat)
        if self.paper_compat and strange:
            raise ValueError(
                f"model.paper_compat is set, and the paper's code has no {', '.join(strange)}; unset one of them"
            )

    def _check_convolution(self) -> None:
        f, etc = self.feedforward, any(spec.kind.startswith("etc") for layer in self.layer_specs() for spec in layer)
        if self.stack == "reversible" or self.paper_compat or etc:
            what = "paper_compat" if self.paper_compat else "etc" if etc else "a reversible stack"
            raise ValueError(
                f"model.feedforward.kind is 'separable_conv' with {what}, whose layers feed each token alone; expected "
                "relu, gelu, swiglu or none"
            )
        if self.kind != "lm" and f.kernel % 2 == 0:
            raise ValueError(
                f"model.feedforward.kernel is {f.kernel}; an encoder's separable_conv reads as many tokens to either "
                "side, so expected an odd number"
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
    def own_blocks(self) -> int:
        """The number of blocks with weights of their own."""
        return 1 if self.stack == "universal" else self.layers

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
