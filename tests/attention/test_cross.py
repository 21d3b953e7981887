"""Cross-attention against torch's own, and masks of padding, causality and both; attention dropout."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer import Rule
from spanformer.attention import Cross, View, Window

F64 = torch.float64


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


PADDING = torch.tensor([[False] * 11, [False] * 7 + [True] * 4])


@pytest.mark.parametrize(("hkv", "tq"), [(4, 5), (2, 11), (1, 17), (4, 1)])
def test_cross_equals_torch_attention_with_a_mask(hkv, tq) -> None:
    q, k, v = (
        t.requires_grad_() for t in (rand(2, 4, tq, 6), rand(2, hkv, 11, 6, seed=1), rand(2, hkv, 11, 3, seed=2))
    )
    mechanism = Cross(4)
    out = mechanism(q, k, v, mechanism.rule(), View(padding=PADDING)).out
    true = F.scaled_dot_product_attention(q, k, v, attn_mask=~PADDING[:, None, None], enable_gqa=True)
    torch.testing.assert_close(out, true)
    g = rand(*out.shape, seed=3)
    for mine, theirs in zip(*(torch.autograd.grad((x * g).sum(), [q, k, v]) for x in (out, true)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_distance_terms_are_refused() -> None:
    q, k = rand(1, 2, 3, 4), rand(1, 2, 5, 4)
    mechanism = Cross(2)
    for rule, name in (
        (Rule(2, causal=False, reach=3), "reach"),
        (Rule(2, causal=False, span=rand(2).abs()), "span"),
        (Rule(2, causal=False, distance_bias=rand(2, 9)), "distance_bias"),
        (Rule(2, causal=False, stride=2), "stride"),
        (Rule(2), "causal=True"),
    ):
        with pytest.raises(ValueError, match=f"{name} depends on distances, which cross-attention does not have"):
            mechanism(q, k, k, rule, View())
    with pytest.raises(ValueError, match="positions depends on distances"):
        mechanism(q, k, k, mechanism.rule(), View(q_positions=torch.arange(3), k_positions=torch.arange(5)))
    with pytest.raises(ValueError, match="cross-attention has no context length"):
        mechanism.context_length()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", ["none", "left", "right", "all"])
def test_masks_combine(causal, padded) -> None:
    """Against a softmax over a mask written out; rows that see nothing give zeros."""
    t = 9
    q, k = rand(2, 2, t, 4), rand(2, 2, t, 4, seed=1)
    hidden = {"none": [], "left": [0, 1, 2], "right": [6, 7, 8], "all": list(range(9))}[padded]
    padding = torch.zeros(2, t, dtype=torch.bool)
    padding[1, hidden] = True
    mechanism = Window(2, 100)
    out = mechanism(q, k, k, Rule(2, causal=causal), View(padding=padding)).out
    seen = torch.tensor(
        [[[not padding[b, j] and (j <= i or not causal) for j in range(t)] for i in range(t)] for b in (0, 1)]
    )
    score = (q @ k.transpose(-1, -2) / 2).masked_fill(~seen[:, None], -math.inf)
    true = score.softmax(-1).nan_to_num(0) @ k
    torch.testing.assert_close(out, true)


def test_attention_dropout() -> None:
    """Drops while training only, keeps the mean, and is the same for the same seed."""
    mechanism, q = Cross(2), torch.zeros(1, 2, 400, 4)
    v = torch.ones(1, 2, 50, 4)
    mechanism.dropout = 0.3
    torch.manual_seed(0)
    out = mechanism(q, q[:, :, :50], v, mechanism.rule(), View()).out
    totals = out[..., 0]
    assert float(totals.mean()) == pytest.approx(1, abs=0.01)
    assert float(totals.std()) == pytest.approx(math.sqrt(0.3 / 0.7 / 50), rel=0.15)
    torch.manual_seed(0)
    assert torch.equal(out, mechanism(q, q[:, :, :50], v, mechanism.rule(), View()).out)
    mechanism.eval()
    assert torch.allclose(mechanism(q, q[:, :, :50], v, mechanism.rule(), View()).out, torch.ones(()))
