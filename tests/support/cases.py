"""Awkward attention calls, and the one way every backend is compared with the float64 oracle.

Tolerance: a backend's error against the float64 oracle may be at most `FACTOR` times that of a dense run in the
backend's own dtype, plus a floor of a few units in the last place of the largest value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer import BlockIndex, HeadGroups, Rule, Union, attend
from spanformer.ops import AnyRule

TERMS = (
    "span", "dynamic", "distance_bias", "distance_vec", "head_vec", "key_bias", "padding", "documents", "sink_logits",
    "blocks",
)  # fmt: skip
TABLE_TERMS = ("distance_value", "head_value", "distance_scale")
KEYS = ("key_span", "head_key_span", "forget", "head_forget")  # spans and forget gates of keys
FACTOR, UNITS = 4.0, 16
FLOOR = 1e-3  # what is smaller may be off by as many units in the last place as this may
LEARNED = (
    "span", "distance_bias", "distance_vec", "distance_value", "distance_scale", "key_bias", "key_span", "forget",
    "sink_logits",
)  # fmt: skip


@dataclass
class Case:
    """One call: sizes, and which Rule terms it carries."""

    b: int = 1
    h: int = 2
    hkv: int = 2
    tq: int = 17
    tk: int = 17
    d: int = 16
    dv: int | None = None
    terms: tuple[str, ...] = ()
    causal: bool = True
    paper_compat: bool = False
    ramp: float = 8.0
    spans: tuple[float, ...] = (5.5, 40.0)  # cycled over heads
    reach: tuple[int, ...] | None = None  # cycled over heads
    logits: float = 1.0  # standard deviation of q (k is 1)
    sink_tokens: int = 0
    max_future: bool = False  # signed tables
    stride: tuple[int, ...] = (1,)  # cycled over heads
    skip: tuple[int, ...] = (0,)  # cycled over heads
    dropout: float = 0.0
    positions: str = "implicit"  # "implicit", "shuffled" (keys in any order), "rows" (each batch row elsewhere)
    layout: str = "bhtd"  # "bthd": heads and tokens transposed views, rows not contiguous
    union_stride: int = 0  # beyond the longest reach, every n-th key is seen too
    second_group: int = 0  # heads from this one on have a rule of their own, with twice the ramp
    seed: int = 0

    @property
    def name(self) -> str:
        return " ".join(changed(self)) or "plain"


def changed(case: object) -> list[str]:
    """The fields of a dataclass that are not as by default, as Python writes them."""
    pairs = [(f.name, getattr(case, f.name), f.default) for f in dataclasses.fields(case)]  # pyright: ignore
    return [f"{name}={value!r}" for name, value, default in pairs if value != default]


@dataclass
class Made:
    """The tensors of a case, in float64; `inputs` are the ones gradients are asked for."""

    inputs: dict[str, Tensor]
    fixed: dict
    case: Case
    g_out: Tensor
    g_lse: Tensor


def make(case: Case) -> Made:
    g = torch.Generator().manual_seed(case.seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    c, dv = case, case.dv or case.d
    inputs = {
        "q": rand(c.b, c.h, c.tq, c.d) * c.logits,
        "k": rand(c.b, c.hkv, c.tk, c.d),
        "v": rand(c.b, c.hkv, c.tk, dv),
    }
    fixed: dict = {"causal": c.causal, "ramp": c.ramp, "paper_compat": c.paper_compat, "sink_tokens": c.sink_tokens}
    length = max(c.tq, c.tk)
    q_pos = k_pos = None
    if c.positions == "shuffled":
        k_pos = torch.randperm(c.tk, generator=g)
        q_pos = torch.arange(c.tk - c.tq, c.tk)
    elif c.positions == "rows":
        k_pos = torch.arange(c.tk)[None] + 3 * torch.arange(c.b)[:, None]
        q_pos = k_pos[:, c.tk - c.tq :] + torch.arange(c.b)[:, None] % 2
        length += 3 * c.b + 1
    fixed["q_positions"], fixed["k_positions"] = q_pos, k_pos
    if c.max_future:  # as far ahead as behind, and a little more behind
        fixed["max_future"], length = length - 1, 2 * length + 1
    for term in c.terms:
        if term == "span":
            inputs["span"] = torch.tensor([c.spans[i % len(c.spans)] for i in range(c.h)], dtype=torch.float64)
        elif term == "dynamic":
            inputs["span"] = torch.rand(c.b, c.h, c.tq, generator=g, dtype=torch.float64) * max(c.spans)
        elif term == "jumpy":  # dynamic spans that differ much from one stretch of queries to the next
            long = torch.rand(c.b, c.h, c.tq // 16 + 1, generator=g) < 0.5
            jumps = torch.where(long, max(c.spans) + 0.5, 2.25).double()
            inputs["span"] = jumps.repeat_interleave(16, 2)[:, :, : c.tq].contiguous()
        elif term == "distance_bias":
            inputs["distance_bias"] = rand(c.h, length)
        elif term == "distance_vec":
            inputs["distance_vec"] = rand(1, length, c.d)
        elif term == "head_vec":
            inputs["distance_vec"] = rand(c.h, length, c.d)
        elif term == "distance_value":
            inputs["distance_value"] = rand(1, length if c.max_future else 5, dv)
        elif term == "head_value":
            inputs["distance_value"] = rand(c.h, length if c.max_future else 5, dv)
        elif term == "clipped_value":  # ends ahead and behind, and all beyond reads them
            inputs["distance_value"], fixed["max_future"] = rand(1, 5, dv), 9  # any other than 0
        elif term == "distance_scale":
            inputs["distance_scale"] = rand(c.h, length)
        elif term == "key_bias":
            inputs["key_bias"] = rand(c.b, c.hkv, c.tk)
        elif term == "padding":
            inputs["key_bias"] = torch.zeros(c.b, 1, c.tk, dtype=torch.float64)
            for row in range(c.b):
                inputs["key_bias"][row, 0, : (row + 1) * c.tk // (c.b + 2)] = -torch.inf
        elif term in ("key_span", "head_key_span"):
            heads = 1 if term == "key_span" else c.h
            inputs["key_span"] = torch.rand(c.b, heads, c.tk, generator=g, dtype=torch.float64) ** 3 * max(c.spans)
        elif term in ("forget", "head_forget"):
            gates = torch.rand(c.b, 1 if term == "forget" else c.h, c.tk, generator=g, dtype=torch.float64)
            inputs["forget"] = (0.8 + 0.2 * gates).log().cumsum(-1)
        elif term == "documents":
            fixed["documents"] = (torch.arange(c.tk) * 3 // max(c.tk, 1)).expand(c.b, c.tk) + torch.arange(c.b)[:, None]
        elif term == "sink_logits":
            inputs["sink_logits"] = rand(c.h)
        elif term == "blocks":
            side = length + 1
            mask = torch.rand(c.h, side // 8 + 1, side // 8 + 1, generator=g) < 0.5
            mask = mask.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, :side, :side]
            mask[:, torch.rand(side, side, generator=g) < 0.02] ^= True
            fixed["blocks"] = BlockIndex.from_dense(mask, 16)
        else:
            raise ValueError(f"no such term: {term}")
    fixed["stride"], fixed["skip"] = ([given[i % len(given)] for i in range(c.h)] for given in (c.stride, c.skip))
    if c.reach is not None:
        fixed["reach"] = [c.reach[i % len(c.reach)] for i in range(c.h)]
    return Made(inputs, fixed, c, rand(c.b, c.h, c.tq, dv), rand(c.b, c.h, c.tq))


def run(made: Made, backend: str, dtype: torch.dtype, call: Callable = attend) -> dict[str, Tensor]:
    """out, lse and the gradient of every input, as float64."""
    leaves = {name: t.to(dtype).requires_grad_() for name, t in made.inputs.items()}
    q, k, v = (_layout(leaves[name], made.case.layout) for name in ("q", "k", "v"))
    options = {key: value for key, value in made.fixed.items() if not key.endswith("_positions")}
    rule = _rule(made.case, options | {name: leaves[name] for name in LEARNED if name in leaves})
    out, lse = call(
        q, k, v, rule,
        backend=backend,
        dropout=made.case.dropout,
        generator=torch.Generator().manual_seed(7),
        q_positions=made.fixed["q_positions"],
        k_positions=made.fixed["k_positions"],
    )  # fmt: skip
    shown = lse != -torch.inf  # a row that saw nothing has no lse to speak of
    loss = (out * made.g_out.to(out.dtype)).sum() + (torch.where(shown, lse, 0) * made.g_lse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    result = {"out": out, "lse": torch.where(shown, lse, -1.0)}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        result["d" + name] = torch.zeros_like(leaf) if grad is None else grad
    return {name: t.detach().double() for name, t in result.items()}


def _rule(case: Case, terms: dict) -> AnyRule:
    rule = Rule(case.h, **terms)
    first = second = rule
    if case.second_group:
        first = rule.for_heads(range(case.second_group))
        second = dataclasses.replace(rule.for_heads(range(case.second_group, case.h)), ramp=2 * rule.ramp)
    groups = [_union(case, one) for one in ((first, second) if case.second_group else (rule,))]
    return groups[0] if len(groups) == 1 else HeadGroups(groups)


def _union(case: Case, rule: Rule) -> Rule | Union:
    if not case.union_stride:
        return rule
    assert case.reach is not None
    skip = max(case.reach[h % len(case.reach)] for h in range(case.h))
    return Union(rule, Rule(rule.heads, causal=case.causal, stride=case.union_stride, skip=skip))


def check(
    case: Case, backend: str, dtype: torch.dtype = torch.float32, factor: float = FACTOR, highest: float = FLOOR,
    call: Callable = attend,
) -> None:  # fmt: skip
    """Raise if the backend is further from the float64 oracle than `factor` times a dense run in its own dtype.
    highest: the floors of gradients may be raised as far as this, where a dense run cancels exactly. call: how the
    backend is called."""
    made = make(case)
    if dtype != torch.float64:  # inputs as the backend will see them: rounding them is not its error
        made.inputs = {name: t.to(dtype).double() for name, t in made.inputs.items()}
        made.g_out, made.g_lse = made.g_out.to(dtype).double(), made.g_lse.to(dtype).double()
    truth, dense, got = (
        run(made, "reference", torch.float64),
        run(made, "reference", dtype),
        run(made, backend, dtype, call),
    )
    floors = _floors(made, truth, highest, dtype) if highest > FLOOR else {}
    wrong = differences(truth, dense, got, dtype, factor, floors)
    assert not wrong, f"{backend} {dtype} on [{case.name}]: " + "; ".join(wrong)


def _floors(made: Made, truth: dict[str, Tensor], highest: float, dtype: torch.dtype) -> dict[str, float]:
    """The floors of gradients that come from scores, whose gradient is P·(dP − δ + g_lse).

    A dense run takes δ as the sum of P·dP, which is dP itself where a query sees one key: dP − δ is 0. A backend that
    recomputes P takes δ = g·out, so that the rounding of two sums of dv products is left, together about ε·Σ|g||out|.
    An error of δ acts as one of g_lse, so the oracle gives what it makes of each gradient: `FACTOR` times that is
    allowed, as of a dense run's error. A forget gate's gradient subtracts columns from rows of the scores' gradients,
    and the oracle's cancel: of it only `highest` is known.

    Such a backend also recomputes P = exp(score − lse), both rounded to ε/2 of about |lse|: a row of P, and what comes
    of it, is off by up to ε·|lse| of itself, which a dense run divides out. This ε is float32's in 16 bits too.

    With forget gates a backend adds −c_j to scores and c_i to lse at the end, where a dense run adds c_i − c_j: lse is
    off by the rounding of numbers as large as c, which cancel.
    """
    off = (made.g_out * truth["out"]).abs().sum(-1)
    left = run(dataclasses.replace(made, g_out=torch.zeros_like(made.g_out), g_lse=off), "reference", torch.float64)
    floors, own = {}, min(1.0, torch.finfo(torch.float32).eps / torch.finfo(dtype).eps)
    for name in truth.keys() - {"out", "lse", "dv", "ddistance_value"}:
        cancelled = highest if name == "dforget" else min(highest, FACTOR * _worst(left[name]) / UNITS)
        floors[name] = max(FLOOR, cancelled, own * _worst(truth["lse"]) * _worst(truth[name]) / UNITS)
    if "forget" in made.inputs:
        floors["lse"] = max(FLOOR, own * _worst(made.inputs["forget"].detach()) / UNITS)
    return floors


def differences(
    truth: dict[str, Tensor], dense: dict[str, Tensor], got: dict[str, Tensor], dtype: torch.dtype,
    factor: float = FACTOR, floors: dict[str, float] | None = None,
) -> list[str]:  # fmt: skip
    """What is further from the truth than the tolerance above allows. floors: by name, where it is not `FLOOR`."""
    eps, wrong = torch.finfo(dtype).eps, []
    for name, true in truth.items():
        if not torch.isfinite(got[name]).all():
            wrong.append(f"{name} is not finite")
            continue
        error, allowed = (
            _worst(got[name] - true),
            factor * _worst(dense[name] - true) + UNITS * eps * max(_worst(true), (floors or {}).get(name, FLOOR)),
        )
        if error > allowed:
            wrong.append(f"{name}: error {error:.3g}, allowed {allowed:.3g}")
    return wrong


def _worst(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _layout(t: Tensor, layout: str) -> Tensor:
    return t if layout == "bhtd" else t.transpose(1, 2).contiguous().transpose(1, 2)
