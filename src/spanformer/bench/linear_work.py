"""What `bench linear` measures: attention over a whole text, forward and with all gradients, and how it is checked.

`python -m spanformer.bench.linear_work JOB` measures peak memory in a process of its own (see `memory`).
Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import Attention, View
from spanformer.bench.gallery import DIM, HEADS, attended, make
from spanformer.bench.memory import MIB, Peak, in_fresh_process
from spanformer.bench.oracle import Verdict, judge
from spanformer.core.peak import peak_of

Inputs = Mapping[str, Tensor]
"""q, k, v, toward (the gradient that arrives at the output) [B, H, T, D], and what else a function needs"""
Forward = Callable[[Inputs], Tensor]
"""out [B, H, T, D]"""
SHORT = 2 * 64 + 5
"""tokens over which the chunked form is compared with the recurrence: two chunks and a part"""
SAME = 1e-10
"""relative difference of two orders of summation in float64"""


@dataclass(frozen=True, eq=False)
class Contender:
    forward: Forward
    parameters: Inputs = field(default_factory=dict)
    """what it learns, by name"""

    def step(self, inputs: Inputs) -> dict[str, Tensor]:
        """out, and the gradient of everything that requires one and was used ("dq", …)."""
        leaves = {name: t for name, t in {**inputs, **self.parameters}.items() if t.requires_grad}
        out = self.forward(inputs)
        found = torch.autograd.grad(out, list(leaves.values()), inputs["toward"], allow_unused=True)
        grads = {"d" + name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}
        return {"out": out.detach(), **grads}


def make_text(length: int, seed: int = 0) -> dict[str, Tensor]:
    """Normal random inputs of a layer; x [B, T, H·D] are hidden states, for mechanisms with gates."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, toward = (torch.randn(1, HEADS, length, DIM, generator=g) for _ in range(4))
    x = torch.randn(1, length, HEADS * DIM, generator=g)
    return {name: t.requires_grad_() for name, t in {"q": q, "k": k, "v": v, "x": x}.items()} | {"toward": toward}


def to_dtype(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.detach().to(dtype).requires_grad_(t.requires_grad) for name, t in inputs.items()}


def make_kind(text: str, length: int) -> Attention:
    """A kind of attention by its notation, with the same parameters in each call."""
    torch.manual_seed(0)
    return make(text, length)


def of_mechanism(mechanism: Attention) -> Contender:
    def forward(inputs: Inputs) -> Tensor:
        x = inputs["x"]
        view = View(x=x, keys=x, start=0, length=x.shape[1])
        return attended(mechanism, inputs["q"], inputs["k"], inputs["v"], view)

    return Contender(forward, dict(mechanism.named_parameters()))


def sdpa(inputs: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"], is_causal=True)


SDPA = Contender(sdpa)


@dataclass(frozen=True)
class Checked:
    verdict: Verdict
    off: float
    """the largest error, relative to the largest value of its tensor"""

    @property
    def wrong(self) -> str:
        return "; ".join(self.verdict.wrong)


def check(got: Inputs, exact: Inputs, plain: Inputs) -> Checked:
    """Compare with float64. plain: an obvious float32 run, whose error is what float32 costs. A gradient that was not
    found counts as 0."""
    got = {name: got.get(name, torch.zeros_like(right)) for name, right in exact.items()}
    off = [float((got[name] - right).abs().max() / right.abs().max().clamp(min=1e-30)) for name, right in exact.items()]
    return Checked(judge(got, exact, plain, torch.float32), max(off))


def check_mechanism(mechanism: Attention, inputs: Inputs, *, gradients: bool = True) -> Checked:
    """Compare what will be timed with the same mechanism's chunked PyTorch form in float64, which `prove_chunks`
    compares with the recurrence: the recurrence itself would take minutes on long texts."""
    wide = copy.deepcopy(mechanism).double()

    def found(mechanism: Attention, backend: str, inputs: Inputs) -> dict[str, Tensor]:
        contender = of_mechanism(_on(mechanism, backend))
        if gradients:
            return contender.step(inputs)
        with torch.no_grad():
            return {"out": contender.forward(inputs)}

    exact = found(wide, "banded", to_dtype(inputs, torch.float64))
    plain = found(copy.deepcopy(mechanism), "banded", inputs)
    return check(found(mechanism, mechanism.backend, inputs), exact, plain)


@functools.cache
def prove_chunks(kind: str) -> None:
    """A ValueError if a kind's chunked PyTorch form differs from its recurrence, token after token, in float64."""
    mechanism, inputs = make_kind(kind, SHORT), to_dtype(make_text(SHORT), torch.float64)
    wide = mechanism.double()
    chunked, exact = (of_mechanism(_on(wide, backend)).step(inputs) for backend in ("banded", "reference"))
    for name, right in exact.items():
        off = float((chunked[name] - right).abs().max() / right.abs().max().clamp(min=1e-3))
        if not off < SAME:
            raise ValueError(
                f"{name} of {kind} in chunks differs from its recurrence by {off:.2g} of the "
                f"largest value, in float64; expected below {SAME:g}"
            )


def _on(mechanism: Attention, backend: str) -> Attention:
    mechanism.backend = backend
    return mechanism


def changed_rows(forward: Forward, inputs: Inputs, same: float = 0.0) -> float:
    """The share of earlier rows whose output changes by more than `same` when the last token is replaced by one whose
    numbers are ten times as large. 0 for a causal function."""
    g = torch.Generator().manual_seed(1)
    other = {name: t.detach().clone() for name, t in inputs.items()}
    for name in [name for name in ("q", "k", "v") if name in other]:
        other[name][:, :, -1] = 10 * torch.randn(other[name][:, :, -1].shape, generator=g)
    with torch.no_grad():
        before, after = forward(inputs)[:, :, :-1], forward(other)[:, :, :-1]
    return float(((before - after).abs() > same).any(3).double().mean())


# ---- peak memory


def peak_memory(kind: str, length: int, threads: int) -> Peak:
    """Of forward and backward beyond the inputs."""
    return in_fresh_process(
        "spanformer.bench.linear_work", {"kind": kind, "length": length, "threads": threads}, threads
    )


def _measure(kind: str, length: int, threads: int) -> Peak:
    torch.set_num_threads(threads)
    contender = of_mechanism(make_kind(kind, length))
    contender.step(make_text(128))  # loads what is loaded at first use, and starts the threads
    inputs = make_text(length)
    peak, seconds = peak_of(lambda: contender.step(inputs))
    return Peak(peak / MIB, seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(**json.loads(sys.argv[1])))))
