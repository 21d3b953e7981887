"""What the peers of `bench linear` compute, from the equations, in any dtype: their oracles in float64.

Each takes the inputs and returns out [B, H, T, D]. Dense ones compute all T × T weights, one head after the other, and
again in the backward pass, so that only one head's weights exist at a time.
Shapes: B batch, H heads, T tokens, D head size, m features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spanformer.bench.linear_work import Forward, Inputs

SEGMENT = 64
"""tokens of the recurrence between two states that are stored"""


def by_head(one: Forward) -> Forward:
    """All heads, of a function of one."""

    def all_heads(inputs: Inputs) -> Tensor:
        heads = range(inputs["v"].shape[1])
        found = [checkpoint(one, {name: t[:, [h]] for name, t in inputs.items()}, use_reentrant=False) for h in heads]
        return torch.cat(found, 1)  # pyright: ignore[reportArgumentType, reportCallIssue]

    return all_heads


def linear(inputs: Inputs) -> Tensor:
    """Linear Transformer: weights (elu(q) + 1)·(elu(k) + 1), divided by their sum."""
    return _normalized(F.elu(inputs["q"]) + 1, F.elu(inputs["k"]) + 1, inputs["v"])


def _normalized(a: Tensor, b: Tensor, v: Tensor, more: float = 0.0) -> Tensor:
    """more: added to each sum of features of keys."""
    w = (a @ b.transpose(2, 3)).tril()
    return w @ v / (w.sum(3, keepdim=True) + more * a.sum(3, keepdim=True))


def decayed(inputs: Inputs) -> Tensor:
    """Weights q·k/√D e^(G_i − G_j), G the running sum of decay [B, H, T]; not divided by their sum."""
    q, total = inputs["q"], inputs["decay"].cumsum(2)
    fading = (total[..., None] - total[:, :, None]).tril().exp()
    return (q @ inputs["k"].transpose(2, 3) * q.shape[3] ** -0.5 * fading).tril() @ inputs["v"]


def favor(inputs: Inputs, omega: Tensor) -> Tensor:
    """Performer: φ(x) = exp(ω x' − |x'|²/2), x' = x D^−¼; factors that cancel are left out. omega [m, D]"""

    def features(x: Tensor) -> Tensor:
        x = x * x.shape[3] ** -0.25
        return (x @ omega.to(x.dtype).T - x.square().sum(3, keepdim=True) / 2).exp()

    return _normalized(features(inputs["q"]), features(inputs["k"]), inputs["v"])


def performer_pytorch(inputs: Inputs, omega: Tensor) -> Tensor:
    """The same, as performer-pytorch has it: exponents below their largest, for keys that of the whole text; 10⁻⁴ is
    added to each feature, then m^−½ is a factor of it, and 10⁻⁶ is added to each sum of keys."""

    def features(x: Tensor, axes: tuple[int, ...]) -> Tensor:
        x = x * x.shape[3] ** -0.25
        found = x @ omega.to(x.dtype).T
        most = found.detach().amax(axes, keepdim=True)
        return ((found - x.square().sum(3, keepdim=True) / 2 - most).exp() + 1e-4) * len(omega) ** -0.5

    return _normalized(features(inputs["q"], (3,)), features(inputs["k"], (2, 3)), inputs["v"], more=1e-6)


def delta_rule(inputs: Inputs) -> Tensor:
    """S_t = e^(decay_t) S_{t−1} + β_t k_t (v_t − (e^(decay_t) S_{t−1})ᵀ k_t)ᵀ, out_t = S_tᵀ q_t/√D; beta and decay are
    [B, H, T]."""
    q, k, v, beta = (inputs[name] for name in ("q", "k", "v", "beta"))
    kept, (b, h, length, d) = inputs["decay"].exp(), q.shape

    def some(state: Tensor, first: int) -> tuple[Tensor, Tensor]:
        found = []
        for t in range(first, min(first + SEGMENT, length)):
            state = state * kept[:, :, t, None, None]
            held = (state * k[:, :, t, :, None]).sum(2)
            new = beta[:, :, t, None] * (v[:, :, t] - held)
            state = state + k[:, :, t, :, None] * new[:, :, None]
            found.append((state * q[:, :, t, :, None]).sum(2) * d**-0.5)
        return state, torch.stack(found, 2)

    state, outs = q.new_zeros(b, h, d, v.shape[3]), []
    for first in range(0, length, SEGMENT):
        state, out = checkpoint(some, state, first, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
        outs.append(out)
    return torch.cat(outs, 2)
