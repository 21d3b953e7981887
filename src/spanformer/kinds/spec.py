"""The description of a mechanism as plain data: name, parameters with defaults, cost, examples, and the path of its
class. Without torch, since the command line reads it for its help.

    KIND = Kind("window", "the last `window` tokens", "spanformer.attention.window:Window.build",
                params={"window": INHERIT}, cost=Cost(…), drawn="window(8)", timed="window(256)")
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal

from spanformer.cost.mechanisms import Cost

INHERIT = None
"""the default of a parameter that the [model.attention] section sets for all heads"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The parameters that all kinds of a model share, with their defaults: the [model.attention] section."""

    max_span: int = 1024
    """S: no head looks further back than this many tokens"""
    window: int = 128
    """tokens in a window, the token itself included"""
    ramp: float = 32.0
    """R: width of the soft edge of a span, in tokens"""
    init: float = 0.0
    """initial span as a share of max_span (dynamic spans start at 1.8 % at least)"""
    penalty: float = 2e-6
    """added to the loss for each token of a layer's mean span"""
    tied: bool = False
    """one span per KV head instead of per query head, so that a grouped KV cache can shrink"""


@dataclass(frozen=True)
class Kind:
    """One attention mechanism."""

    name: str
    help: str
    """what its heads see, in a few words"""
    build: str
    """"module:function" that makes an Attention from a `HeadSpec`"""
    cost: Cost
    params: Mapping[str, int | float | bool | str | None] = field(default_factory=dict)
    """by name, with defaults, in the order in which they may be given without a name; INHERIT: as `Section` says"""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """the words that a parameter may be, for those that are words"""
    zero: tuple[str, ...] = ()
    """parameters that may be 0; any other number is at least 1"""
    drawn: str = ""
    """a small example, for the gallery's picture over 48 tokens"""
    timed: str = ""
    """an example for the gallery's timing over 4,096 tokens; "": not timed, since its speed is that of a memory"""
    tested: tuple[str, ...] = ()
    """small examples for the product test, over 37 tokens"""
    paper_compat: bool = False
    """whether the adaptive-span paper's code has it"""
    absolute_positions: bool = False
    """whether it supports only positions that are added to the embeddings"""
    scoring: str = ""
    """of a way to score: "module:function" that puts it around another mechanism, (inner, head_dim) → Attention"""

    def make(self) -> Callable[[HeadSpec], Any]:
        """The function that `build` names; this imports torch."""
        return resolve(self.build)


@dataclass(frozen=True)
class HeadSpec:
    """Some heads of one layer, all of one kind, and the sizes of the model: the argument of a kind's `build`."""

    kind: str
    heads: int
    params: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    """by name, every one that the kind has, with the section's value where none was given"""
    text: str = ""
    """the expression of a pattern"""
    section: Section = field(default_factory=Section)
    dim: int = 0
    """of hidden states"""
    head_dim: int = 0
    kv_heads: int = 0
    """KV heads of these heads"""
    causal: bool = True
    paper_compat: bool = False
    """the conventions of the adaptive-span paper's code"""
    shared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """what the layers of one model share: a `build` puts it there, and those of later layers find it"""

    @property
    def p(self) -> SimpleNamespace:
        """The parameters as attributes."""
        return SimpleNamespace(**self.params)

    @property
    def tied_spans(self) -> int | None:
        """Number of spans if there is one per KV head; None: one per query head."""
        return self.kv_heads if self.section.tied else None


@dataclass(frozen=True)
class PositionKind:
    """One position encoding."""

    name: str
    help: str
    build: str
    """"module:function" that makes a Position from a `PositionSpec`"""
    cost: str
    """what it adds to attention, for n tokens, head size D and width E"""
    per_layer: bool = False
    """whether every layer has an encoding of its own"""
    absolute: bool = False
    """whether it only adds to the embeddings and does not change attention"""
    options: tuple[str, ...] = ()
    """options of the [model.position] section that it uses"""
    needs_length: bool = False
    """whether it needs the maximum length of a text (position.length)"""

    def make(self) -> Callable[[PositionSpec], Any]:
        return resolve(self.build)


@dataclass(frozen=True)
class PositionSpec:
    """What a position encoding needs to know of the model: the argument of a position's `build`."""

    dim: int
    heads: int
    head_dim: int
    causal: bool
    max_distance: int
    """the farthest distance that a head can see"""
    layer: int
    """from 0; of an encoding that all layers share, 0"""
    base: float
    length: int
    clip: int
    scaling: Literal["none", "linear", "ntk", "yarn"]
    factor: float


def resolve(path: str) -> Any:
    """The object at "module:name.name"."""
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))
