"""Factorised attention: two sparse steps through which any token reaches any other.

Generating Long Sequences with Sparse Transformers (Child et al., 2019), https://arxiv.org/abs/1904.10509

    strided  A¹ = {j : 0 ≤ i − j ≤ l}          A² = {j : (i − j) mod l = 0}             O(n·(l + n/l)) pairs
    fixed    A¹ = {j : ⌊j/l⌋ = ⌊i/l⌋}          A² = {j : j mod l ≥ l − c}               O(n·(l + c·n/l)) pairs

each with j ≤ i if causal. The paper's three uses: layers alternate (interleaved), every head sees A¹ ∪ A²
(merged), or half of the heads each (by head). Strided tokens fold into classes; A¹ ∪ A² is one softmax.
"""

from __future__ import annotations

from spanformer.attention.pattern import Fixed, Pattern, Strided
from spanformer.attention.patterned import Patterned, check_limit
from spanformer.kinds import HeadSpec

USES = ("merged", "heads", "layers")


class StridedSparse(Patterned):
    """For text with a period, such as images and sound. use: "merged", "heads" (the first half of the heads A¹, the
    others A²), or "layers" (A¹ in even layers, A² in odd ones; `layer` says which this is)."""

    def __init__(
        self, heads: int, step: int, *, use: str = "merged", layer: int = 0, causal: bool = True,
        longest: int | None = None,
    ) -> None:  # fmt: skip
        chosen = _use(heads, Strided(step), Strided(step).factors(), use, layer)
        super().__init__(heads, chosen, causal=causal, longest=longest)

    @classmethod
    def build(cls, spec: HeadSpec, use: str = "merged") -> StridedSparse:
        check_limit("step", spec.p.step, spec.section.max_span)
        return cls(spec.heads, spec.p.step, use=use, causal=spec.causal, longest=spec.section.max_span)

    @classmethod
    def build_by_head(cls, spec: HeadSpec) -> StridedSparse:
        return cls.build(spec, "heads")


class FixedSparse(Patterned):
    """For text without a period: the last c tokens of each block of l summarise it for all later tokens. Heads may
    summarise in different places, which the paper found to help: pass your own patterns to Patterned for that."""

    def __init__(
        self, heads: int, size: int, last: int, *, use: str = "merged", layer: int = 0, causal: bool = True,
        longest: int | None = None,
    ) -> None:  # fmt: skip
        chosen = _use(heads, Fixed(size, last), Fixed(size, last).factors(), use, layer)
        super().__init__(heads, chosen, causal=causal, longest=longest)

    @classmethod
    def build(cls, spec: HeadSpec, use: str = "merged") -> FixedSparse:
        check_limit("size", spec.p.size, spec.section.max_span)
        return cls(spec.heads, spec.p.size, spec.p.last, use=use, causal=spec.causal, longest=spec.section.max_span)

    @classmethod
    def build_by_head(cls, spec: HeadSpec) -> FixedSparse:
        return cls.build(spec, "heads")


def _use(heads: int, merged: Pattern, factors: tuple[Pattern, Pattern], use: str, layer: int) -> list[Pattern]:
    if use not in USES:
        raise ValueError(f"use is {use!r}; expected one of {', '.join(USES)}")
    if use == "heads":
        if heads < 2:
            raise ValueError(f"heads is {heads} with use 'heads'; expected at least 2, one for each factor")
        return [factors[0]] * (heads - heads // 2) + [factors[1]] * (heads // 2)
    return [merged if use == "merged" else factors[layer % 2]] * heads
