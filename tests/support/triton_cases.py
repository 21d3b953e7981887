"""The calls by which the Triton kernels are compared with the float64 oracle: by Triton's interpreter on the CPU, or on
a GPU, which is `DEVICE` then. In the interpreter tiles are 32 queries by 16 keys, unless a test says otherwise."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from spanformer import Rule, attend
from spanformer.ops import AnyRule, Attended
from support.cases import Case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TERMS = ("span", "dynamic", "key_bias", "padding", "documents", "sink_logits")
MOST = ("span", "key_bias", "documents", "sink_logits")

CASES = [
    Case(),
    *(Case(b=2, tq=33, tk=33, terms=(term,), reach=(40, 9)) for term in TERMS),
    Case(b=2, tq=18, tk=18, terms=("distance_bias",), reach=(40, 9)),
    # sizes around tiles; spans of 0, of less than one tile, and of everything
    *(Case(tq=n, tk=n, terms=("span",), spans=(5.5, 40.0)) for n in (1, 16, 63)),
    Case(tq=111, tk=111, h=3, hkv=1, terms=("span", "sink_logits"), spans=(0.0, 31.25, 1e6), d=24, dv=40),
    # spans that end at a tile's border, on either side of it, and between: a tile that is full, or not quite
    Case(tq=160, tk=160, h=4, hkv=4, terms=("span",), spans=(46.0, 46.75, 47.0, 62.0), ramp=32.0),
    Case(tq=70, tk=100, h=4, hkv=4, terms=("span",), spans=(14.0, 15.0, 16.0, 30.5), ramp=1.0, causal=False),
    Case(tq=40, tk=40, h=3, hkv=3, terms=("span",), spans=(-3.5, -8.0, 0.0), reach=(40, 40, 0)),
    # heads that share keys and values; more keys than queries, and fewer
    Case(b=2, h=6, hkv=2, tq=35, tk=50, terms=MOST, reach=(40, 9, 100), spans=(12.0, 3.5)),
    Case(h=4, hkv=2, tq=50, tk=20, terms=("span", "sink_logits"), causal=False, reach=(7, 30), layout="bthd"),
    Case(b=2, h=4, hkv=1, tq=40, tk=60, terms=("dynamic", "padding", "sink_logits"), causal=False),
    # spans of single queries
    Case(tq=80, tk=90, terms=("jumpy",), spans=(60.0, 60.0), h=2, hkv=1),
    Case(tq=70, tk=70, terms=("dynamic",), spans=(3.0,), ramp=32.0, h=1, hkv=1),  # a ramp wider than a tile
    Case(tq=10, tk=25, terms=("dynamic", "distance_bias", "key_bias"), paper_compat=True, reach=(8, 64), h=4),
    Case(tq=40, tk=40, terms=("span",), paper_compat=True, spans=(0.0, 7.5)),
    # tables
    Case(tq=25, tk=25, terms=("span", "distance_bias"), causal=False, spans=(20.0, 5.0)),
    Case(tq=10, tk=20, terms=("distance_bias", "documents"), causal=False, max_future=True, reach=(30, 9)),
    # documents in parts, given positions
    Case(b=2, tq=96, tk=96, terms=("documents", "span"), spans=(50.0, 5.5)),
    Case(positions="shuffled", tq=20, tk=40, terms=("span", "key_bias")),
    Case(positions="rows", b=2, tq=20, tk=40, terms=("dynamic", "documents")),
    Case(positions="rows", b=2, tq=30, tk=30, terms=("span",), causal=False, reach=(9, 4)),
    # what lowering makes of other terms
    Case(tq=20, tk=40, terms=("span", "sink_logits"), sink_tokens=3, reach=(5, 40)),
    Case(tq=30, tk=40, terms=("span",), stride=(1, 3), skip=(0, 3)),
    # few queries: keys in parts
    Case(tq=3, tk=257, terms=("span", "sink_logits"), spans=(200.0, 3.5)),
    Case(tq=1, tk=130, b=2, h=4, hkv=2, terms=("padding",), logits=9.0),
    Case(tq=0, tk=5, terms=("span", "sink_logits")),
]  # fmt: skip
HALVES = [
    Case(tq=70, tk=70, h=4, hkv=2, terms=("span", "sink_logits"), spans=(14.0, 46.75)),
    Case(b=2, tq=33, tk=50, terms=("dynamic", "key_bias"), causal=False),
    Case(tq=2, tk=200, terms=("span",), spans=(150.0, 9.0)),
]
"""those in float16 too"""


def highest(case: Case, dtype: torch.dtype) -> float:
    """For `check`, as in tests/fuzz.py: the kernels recompute weights from lse, and δ from the output."""
    return 8 * (case.dv or case.d) ** 0.5 if dtype == torch.float32 else 1.0


def attend_in_nan(q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, **options) -> Attended:
    """`attend` on `DEVICE`, on tensors that lie in buffers of NaN, so that a read beyond their ends shows."""
    q, k, v = (in_nan(t.to(DEVICE), (16, 18, 1)) for t in (q, k, v))
    options = {name: to_device(t) for name, t in options.items()}
    if isinstance(rule, Rule):
        there = {}
        for name in ("span", "distance_bias", "key_bias", "sink_logits"):
            if (t := getattr(rule, name)) is not None:
                there[name] = in_nan(t.to(DEVICE), (*[0] * (t.ndim - 1), 1))
        rule = dataclasses.replace(rule, documents=to_device(rule.documents), **there)
    return Attended(*(t.cpu() for t in attend(q, k, v, rule, **options)))


def to_device(t):
    if isinstance(t, tuple):
        return tuple(map(to_device, t))
    return t.to(DEVICE) if isinstance(t, Tensor) else t


def in_nan(t: Tensor, margins: tuple[int, ...]) -> Tensor:
    """A view of a padded copy. margins: on either side of its last axes, the last one first."""
    wide = pad(t, [n for margin in margins for n in (margin, margin)], value=math.nan)
    for axis, margin in enumerate(margins, 1):
        wide = wide.narrow(-axis, margin, t.shape[-axis])
    return wide
