"""`causal=False`: spans and windows in both directions, compared with their equation."""

from __future__ import annotations

import pytest
import torch

from spanformer.attention import AdaptiveSpan, Attention, DynamicSpan, Mixed, View, Window

B, H, T, D, DIM = 2, 2, 37, 8, 12


def mechanisms() -> dict[str, tuple[Attention, torch.Tensor]]:
    """Each with its weights m [B, H, T, T] before renormalising, from the definition."""
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs().double()
    x = torch.randn(B, T, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spans, dynamic = AdaptiveSpan(H, 20, ramp=4, causal=False), DynamicSpan(DIM, H, 20, ramp=4, causal=False)
    with torch.no_grad():
        spans.ratio.copy_(torch.tensor([0.1, 0.55]))
        dynamic.weight.normal_()
        dynamic.bias.fill_(-1)
    soft = lambda z: ((4 + z - distance) / 4).clamp(0, 1)  # noqa: E731
    static = soft(20 * torch.tensor([0.1, 0.55]).double()[:, None, None]).expand(B, -1, -1, -1)
    z = 20 * (x @ dynamic.weight.double().T + dynamic.bias.double()).sigmoid()  # [B, T, H]
    window = (distance < 5).double().expand(B, 1, -1, -1)
    return {
        "adaptive_span": (spans, static),
        "dynamic_span": (dynamic, soft(z.transpose(1, 2)[..., None])),
        "window": (Window(H, 5, causal=False), window.expand(-1, H, -1, -1)),
        "mixed": (
            Mixed([Window(1, 5, causal=False), AdaptiveSpan(1, 20, ramp=4, init=0.55, causal=False)]),
            torch.cat([window, static[:, 1:]], 1),
        ),
    }


@pytest.mark.parametrize("name", ["adaptive_span", "dynamic_span", "window", "mixed"])
def test_both_directions_equal_the_equation(name: str) -> None:
    mechanism, m = mechanisms()[name]
    mechanism.double()
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(B, H, T, D, generator=g, dtype=torch.float64) for _ in range(3))
    x = torch.randn(B, T, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[1, -9:] = True
    view = View(x=x, padding=padding)
    weights = m * (q @ k.mT / D**0.5).exp() * ~padding[:, None, None]
    expected = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v
    torch.testing.assert_close(mechanism(q, k, v, mechanism.rule(view), view).out, expected, rtol=1e-6, atol=1e-6)


def test_paper_compat_needs_causal() -> None:
    with pytest.raises(
        ValueError, match="paper_compat is True with causal=False; its heads only look back, so pass causal=True"
    ):
        Window(H, 5, paper_compat=True, causal=False).rule()
