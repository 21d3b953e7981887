"""The sections of [model] in a run file, as plain data. No torch here: the command line takes its help from these
fields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from spanformer.kinds import POSITIONS, Section
from spanformer.kinds.notation import LARGEST as MOST

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
    budget: float = 0.0
    """share of the cost of full attention to max_span that all heads of a language model together may have: learned
    spans are held there, and a price that is found in training replaces penalty; 0: no budget, and the penalty"""
    dropout: float = 0.0
    """dropout of attention weights"""
    bias: bool = False
    """biases of the queries, keys, values and output of self-attention"""
    backend: str = "auto"
    """backend of attention: auto, native, triton, flex, banded or reference"""

    def __post_init__(self) -> None:
        for name in ("max_span", "window"):
            size(f"attention.{name}", getattr(self, name), 1)
        within(
            "attention.ramp", self.ramp, 0 < self.ramp <= MOST, f"a positive, finite number of tokens, at most {MOST:,}"
        )
        within("attention.init", self.init, 0 <= self.init <= 1, "a share of max_span, 0 … 1")
        within("attention.penalty", self.penalty, 0 <= self.penalty < math.inf, "0 or more")
        within("attention.budget", self.budget, 0 <= self.budget <= 1, "a share of full attention's cost, 0 … 1")
        dropout("attention", self.dropout)
        known = ("auto", "native", "triton", "flex", "banded", "reference")
        within("attention.backend", repr(self.backend), self.backend in known, f"one of {', '.join(known)}")


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
    random_start: int = 0
    """for absolute positions: in training each text begins at a random position below this number, so that a model
    knows positions that only longer texts reach (Universal Transformers); 0: every text begins at 0"""
    log_scale: int = 0
    """scale the scores of the query at position i by ln(i + 2) / ln(log_scale), so that heads which find one token in
    texts of this length find it in longer ones, too; 0: off"""

    def __post_init__(self) -> None:
        within("position.base", self.base, 0 < self.base < math.inf, "a positive, finite number")
        size("position.length", self.length, 0)
        size("position.clip", self.clip, 1)
        within("position.kind", repr(self.kind), self.kind in POSITIONS, f"one of {', '.join(POSITIONS)}")
        known = POSITIONS[self.kind]
        if (known.needs_length or self.scaling == "yarn") and not self.length:
            what = "the length that the model was trained on" if self.scaling == "yarn" else "a number of tokens"
            raise ValueError(f"model.position.length is 0; {self.kind} needs {what}")
        if self.scaling != "none" and "scaling" not in known.options:
            raise ValueError(
                f"model.position.scaling is {self.scaling!r}, which is for rotary positions; position.kind is "
                f"{self.kind!r}, so set scaling to 'none'"
            )
        size("position.random_start", self.random_start, 0)
        if self.random_start and not known.absolute:
            raise ValueError(
                f"model.position.random_start is {self.random_start}, and {self.kind} positions are distances, which "
                "do not depend on where a text begins; expected 0, or an absolute kind such as sinusoidal"
            )
        if self.log_scale:
            size("position.log_scale", self.log_scale, 2)
        within("position.factor", self.factor, 1 <= self.factor < math.inf, "at least 1")
        if self.factor != 1 and self.scaling == "none":
            raise ValueError(
                f"model.position.factor is {self.factor} without a scaling; set position.scaling, or leave factor at 1"
            )

    @property
    def per_layer(self) -> bool:
        """Whether each layer has its own encoding."""
        return POSITIONS[self.kind].per_layer

    @property
    def absolute(self) -> bool:
        """Whether positions are counted from the beginning of the text, not distances."""
        return POSITIONS[self.kind].absolute


@dataclass(frozen=True)
class FeedForwardConfig:
    kind: Literal["relu", "gelu", "swiglu", "separable_conv", "none"] = "swiglu"
    """separable_conv: relu after a depthwise convolution over neighbouring tokens (Universal Transformers), only
    earlier ones unless the model is an encoder; none: attention only, as with persistent memory vectors"""
    kernel: int = 3
    """for separable_conv: tokens that it reads, in an encoder an odd number"""
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
            size(f"feedforward.{name}", getattr(self, name), 0)
        size("feedforward.experts", self.experts, 0, MOST_PARTS)
        size("feedforward.kernel", self.kernel, 1, MOST_PARTS)
        if self.kind == "separable_conv" and self.experts:
            raise ValueError(
                f"model.feedforward.experts is {self.experts} with kind 'separable_conv', which reads a token's "
                "neighbours, and an expert sees only its own tokens; expected 0, or another kind"
            )
        dropout("feedforward", self.dropout)
        within("feedforward.balance", self.balance, 0 <= self.balance < math.inf, "0 or more")


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
        size("embedding.loss_chunk", self.loss_chunk, 0)
        dropout("embedding", self.dropout)


CHOICES = {
    "kind": ("fixed", "act", "exits"),
    "form": ("sum", "blend"),
    "training": ("aligned", "mixed"),
    "classifier": ("none", "sequence", "multinomial", "geometric", "calm"),
    "oracle": ("likelihood", "correctness"),
}


@dataclass(frozen=True)
class DepthConfig:
    """How many layers each token runs through."""

    kind: Literal["fixed", "act", "exits"] = "fixed"
    """fixed: all layers for every token; act: adaptive computation time, each token halts when its halting
    probabilities sum to 1 (most often with model.stack universal); exits: a language model whose tokens may leave after
    any layer"""
    epsilon: float = 0.01
    """for act: a token halts when its probabilities sum to 1 − epsilon"""
    bias: float = -3.0
    """for act: the initial bias of the halting probability; −3 starts deep (0.05 a step), 1 is tensor2tensor's"""
    cost: float = 0.01
    """for act: weight of the ponder time, steps and remainder, in the loss"""
    warmup: int = 0
    """for act: updates over which the cost grows from 0"""
    form: Literal["sum", "blend"] = "sum"
    """for act: the output is the weighted sum of a token's states (Graves), or their running blend (tensor2tensor)"""
    training: Literal["aligned", "mixed"] = "aligned"
    """for exits: aligned trains every layer's prediction in one pass; mixed lets each token leave at a random layer"""
    rising: bool = False
    """for exits: weigh layer n's loss by n instead of 1"""
    maps: bool = False
    """for exits: read each layer but the last through a matrix of its own, before the output layer that all share"""
    classifier: Literal["none", "sequence", "multinomial", "geometric", "calm"] = "none"
    """for exits: what learns when to leave: one exit per text, one decided after the first layer, a decision after each
    layer, or (calm) whether a layer agrees with the last, without a gradient into the layers"""
    oracle: Literal["likelihood", "correctness"] = "correctness"
    """for exits: what a classifier other than calm imitates: the best layer by likelihood, or the first correct one"""
    price: float = 0.05
    """for exits: what a layer costs the oracle, in nats or correct tokens"""
    smoothing: float = 0.0
    """for exits: how far the oracle averages over neighbouring tokens, σ of exp(−distance² / σ); 0: not at all"""
    weight: float = 1.0
    """for exits: weight of the classifier's loss"""

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            within(f"depth.{name}", repr(value), value in known, f"one of {', '.join(known)}")
        within("depth.epsilon", self.epsilon, 0 < self.epsilon < 1, "a number between 0 and 1")
        within("depth.bias", self.bias, math.isfinite(self.bias), "a finite number")
        within("depth.cost", self.cost, 0 <= self.cost < math.inf, "0 or more")
        within("depth.warmup", self.warmup, self.warmup >= 0, "0 or more updates")
        for name in ("price", "smoothing", "weight"):
            within(f"depth.{name}", getattr(self, name), 0 <= getattr(self, name) < math.inf, "0 or more")


def size(name: str, value: int, least: int, most: int = MOST) -> None:
    if value < least:
        raise ValueError(f"model.{name} is {value}; expected at least {least}")
    if value > most:
        raise ValueError(f"model.{name} is {value}; expected at most {most:,}")


def within(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ValueError(f"model.{name} is {value}; expected {expected}")


def dropout(section: str, value: float) -> None:
    within(f"{section}.dropout", value, 0 <= value < 1, "a share, 0 … 1 without 1")
