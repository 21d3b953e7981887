"""Cases of operations with a state, and what their tests share: inputs, comparison with a float64 run, threads.

Shapes: B batch, H query heads, Hkv key/value heads, T tokens, Dv size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from support.cases import FACTOR, UNITS

Results = dict[str, Tensor]


@dataclass
class StateCase:
    b: int = 2
    h: int = 2
    hkv: int = 2
    t: int = 17
    dv: int = 16
    decay: float = 0.0
    """the largest −decay of a token; 0: none"""
    state: bool = False
    documents: bool = False
    padding: bool = False
    layout: str = "bhtd"
    seed: int = 0

    def normal(self, g: torch.Generator, *shape: int) -> Tensor:
        """Random numbers; of four axes, in memory as `layout` orders them."""
        if self.layout == "bthd" and len(shape) == 4:
            return torch.randn(shape[0], shape[2], shape[1], shape[3], generator=g, dtype=torch.float64).transpose(1, 2)
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    def hidden(self, g: torch.Generator) -> dict[str, Tensor]:
        """`documents` and `padding`, [B, T], if the case has them."""
        fixed = {}
        if self.documents:
            fixed["documents"] = (torch.rand(self.b, self.t, generator=g) < 0.05).cumsum(1)
        if self.padding:
            fixed["padding"] = torch.rand(self.b, self.t, generator=g) < 0.2
        return fixed


def leaves_of(inputs: Results, dtype: torch.dtype, narrow: Collection[str]) -> Results:
    """Leaves that require a gradient: those named in `dtype`, the others in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: t.detach().to(dtype if name in narrow else wide).requires_grad_() for name, t in inputs.items()}


def rounded(inputs: Results, dtype: torch.dtype, narrow: Collection[str]) -> Results:
    """In float64, with values that `dtype` (for those named) or float32 holds exactly."""
    return {name: t.to(dtype).double() if name in narrow else t.float().double() for name, t in inputs.items()}


def check_close(
    truth: Results, plain: Results, found: Results, dtype: torch.dtype, narrow: Collection[str],
    sizes: Mapping[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """At most FACTOR times the error of `plain`, the recurrence in `dtype`, plus a few units in the last place of the
    largest value (sizes: of another size). Results named in `narrow` are in `dtype`, the others in float32."""
    for name, true in truth.items():
        same = torch.isfinite(true)
        assert torch.equal(same, torch.isfinite(found[name])), name
        true, mine, usual = (torch.where(same, t[name], 0) for t in (truth, found, plain))
        unit = torch.finfo(dtype if name in narrow else torch.float32).eps
        size = max(true.abs().max(), (sizes or {}).get(name, torch.zeros(())))
        allowed = FACTOR * (usual - true).abs().max() + UNITS * unit * size
        worst = (mine - true).abs().max()
        assert worst <= allowed, f"{name}: {worst:.3g} > {allowed:.3g}"


def check_threads(run: Callable[[], Results]) -> None:
    """One, two and three threads give the same bits."""
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)
