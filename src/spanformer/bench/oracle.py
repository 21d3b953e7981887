"""Checks a contender on a shape against the float64 oracle, before it is timed.

At 8 heads of 16k × 16k the dense oracle does not fit into memory, so it is evaluated head by head on a sample of query
rows. Rows of attention are independent, so the sampled rows of out are exact. With an upstream gradient that is zero on
all other rows, the gradients of q on these rows, and of every key, value, span and table, are exact too, and dq is 0 on
the other rows.

Shapes: B batch, H heads, Tq queries, Tk keys, D head size, N sampled rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spanformer.bench.profiles import RAMP
from spanformer.bench.work import Inputs
from spanformer.ops import Rule, attend

FACTOR = 4.0  # allowed error, as a multiple of that of a dense run in the same dtype
# Additional allowed error, in units in the last place of the largest value. A row that sees one key has gradient 0, a
# difference of two equal sums over the head size; dense runs cancel exactly there, fused ones (such as SDPA) nearly.
FLOOR = 64.0
HALF_FLOOR = 2.0  # the same for half-precision dtypes


@dataclass
class Verdict:
    """errors and allowed: the largest absolute error of out and of each gradient ("dq", …), and its limit."""

    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return not self.wrong


def sample_rows(queries: int, count: int = 32, seed: int = 1) -> Tensor:
    """[N] ascending: both ends, starts of blocks and ramps, and random others."""
    if queries <= count:
        return torch.arange(queries)
    edges = [0, 1, RAMP - 1, RAMP, 63, 64, 65, queries // 2, queries - 2, queries - 1]
    chosen = {row for row in edges if 0 <= row < queries}
    for row in torch.randperm(queries, generator=torch.Generator().manual_seed(seed)).tolist():
        if len(chosen) >= count:
            break
        chosen.add(row)
    return torch.tensor(sorted(chosen))


def oracle(inputs: Inputs, rule: Rule, rows: Tensor, dtype: torch.dtype, *, backward: bool) -> dict[str, Tensor]:
    """out [B, H, N, D] and the gradients of what `rule` uses, with the upstream gradient non-zero on `rows` only.

    dq is [B, H, N, D]; the others have their input's shape. All are computed in `dtype` and returned in float64.
    """
    work, parts = inputs.work, []
    positions = torch.arange(work.keys)
    for h in range(work.heads):
        leaves = {
            "q": inputs.q[:, h : h + 1, rows],
            "k": inputs.k[:, h : h + 1],
            "v": inputs.v[:, h : h + 1],
            "span": None if rule.span is None else rule.span[h : h + 1],
            "distance_bias": None if rule.distance_bias is None else rule.distance_bias[h : h + 1],
            "distance_vec": rule.distance_vec,
        }
        leaves = {name: t.detach().to(dtype).requires_grad_(backward) for name, t in leaves.items() if t is not None}
        one = dataclasses.replace(
            rule,
            heads=1,
            reach=None if rule.reach is None else rule.reach_list()[h],
            span=leaves.get("span"),
            distance_bias=leaves.get("distance_bias"),
            distance_vec=leaves.get("distance_vec"),
        )
        where = rows + (work.keys - work.queries)
        out = attend(
            leaves["q"], leaves["k"], leaves["v"], one, backend="reference", q_positions=where, k_positions=positions
        ).out
        part = {"out": out.detach().double()}
        if backward:
            grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad[:, h : h + 1, rows].to(dtype))
            part |= {"d" + name: grad.double() for name, grad in zip(leaves, grads, strict=True)}
        parts.append(part)
    return {name: _join(name, [part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class Truth:
    """The correct result on the sampled rows in float64, and the result of a dense run in the work's dtype."""

    rows: Tensor
    exact: dict[str, Tensor]
    dense: dict[str, Tensor]


def find_truth(inputs: Inputs, rule: Rule, rows: Tensor | None = None) -> Truth:
    """Evaluate the oracle of `rule` once, for all contenders that compute it."""
    rows = sample_rows(inputs.work.queries) if rows is None else rows
    backward = inputs.work.mode == "forward+backward"
    exact, dense = (
        oracle(inputs, rule, rows, dtype, backward=backward) for dtype in (torch.float64, inputs.work.torch_dtype)
    )
    return Truth(rows, exact, dense)


def check(forward: Callable[[], Tensor], inputs: Inputs, truth: Truth, *, floor: float = 0.0) -> Verdict:
    """Run a contender once and compare it with the truth, which is on the CPU.

    forward: computes out [B, H, Tq, D] of `inputs`, on any device. floor: relative error that is allowed in any dtype.
    """
    got = _run(forward, inputs, truth)
    verdict = judge(got, truth.exact, truth.dense, inputs.work.torch_dtype, floor=floor)
    if "elsewhere" in got and _worst(got["elsewhere"]) != 0:
        verdict.wrong.append("dq is not zero on rows whose output had no gradient")
    return verdict


def judge(
    got: Mapping[str, Tensor], exact: Mapping[str, Tensor], dense: Mapping[str, Tensor], dtype: torch.dtype, *,
    floor: float = 0.0,
) -> Verdict:  # fmt: skip
    """Compare each tensor of `exact`, in float64, with the contender's in `dtype`. dense: a plain run in `dtype`, whose
    error is that of the dtype."""
    verdict = Verdict()
    units = (FLOOR if dtype.itemsize >= 4 else HALF_FLOOR) * torch.finfo(dtype).eps
    for name, right in exact.items():
        scale = max(_worst(right), 1e-3)
        allowed = FACTOR * _worst(dense[name] - right) + max(units, floor) * scale
        error = _worst(got[name] - right) if bool(torch.isfinite(got[name]).all()) else float("nan")
        verdict.errors[name], verdict.allowed[name] = error, allowed
        if not error <= allowed:
            verdict.wrong.append(f"{name} differs by {error:.2g}; expected at most {allowed:.2g}")
    return verdict


def _run(forward: Callable[[], Tensor], inputs: Inputs, truth: Truth) -> dict[str, Tensor]:
    """out and gradients by the truth's names, and `elsewhere`: dq on the rows that were not sampled."""
    rows = truth.rows
    if "dq" not in truth.exact:
        with torch.no_grad():
            return {"out": forward()[:, :, rows].double().cpu()}
    names = [name[1:] for name in truth.exact if name != "out"]
    upstream = torch.zeros_like(inputs.grad)
    upstream[:, :, rows] = inputs.grad[:, :, rows]
    out = forward()
    grads = torch.autograd.grad(out, [inputs.leaves()[name] for name in names], upstream)
    got = {"d" + name: grad for name, grad in zip(names, grads, strict=True)}
    others = torch.ones(inputs.work.queries, dtype=torch.bool)
    others[rows] = False
    got["out"], got["elsewhere"], got["dq"] = out.detach()[:, :, rows], got["dq"][:, :, others], got["dq"][:, :, rows]
    return {name: t if name == "elsewhere" else t.double().cpu() for name, t in got.items()}


def _join(name: str, heads: list[Tensor]) -> Tensor:
    """Combine the results of all heads: concatenate them, or sum them if heads share a table."""
    if name == "ddistance_vec":
        return torch.stack(heads).sum(0)
    return torch.cat(heads, 0 if name in ("dspan", "ddistance_bias") else 1)


def _worst(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0
