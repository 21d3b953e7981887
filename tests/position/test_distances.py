"""Encodings that are rules over distances: the scores they add, seen through attend, and what they refuse."""

from __future__ import annotations

import math
import re

import pytest
import torch

from spanformer.attention import View
from spanformer.ops import Rule, attend
from spanformer.position import Alibi, DistanceBias, Position, Table


def scores(q: torch.Tensor, k: torch.Tensor, rule: Rule) -> torch.Tensor:
    """[B, H, Tq, Tk] logs of the weights; a floor where nothing is seen."""
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:3], -1)
    return attend(q, k, eye, rule, backend="reference").out.clamp_min(1e-300).log()


def qk(h: int, t: int, d: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, h, t, d, generator=g, dtype=torch.float64) for _ in range(2))


def dense(q: torch.Tensor, k: torch.Tensor, added) -> torch.Tensor:
    """The same from the equation: `added(h, i, j)` joins q·k / sqrt(D), for i ≥ j."""
    _, h, t, d = q.shape
    out = torch.full((1, h, t, t), math.log(1e-300), dtype=q.dtype)
    for head in range(h):
        for i in range(t):
            row = torch.stack([q[0, head, i] @ k[0, head, j] / math.sqrt(d) + added(head, i, j) for j in range(i + 1)])
            out[0, head, i, : i + 1] = row.log_softmax(0)
    return out


class TestAlibi:
    def test_slopes_of_a_power_of_two_are_geometric(self):
        assert Alibi(8).slopes().tolist() == [2.0**-i for i in range(1, 9)]
        assert Alibi(1).slopes().tolist() == [2.0**-8]
        torch.testing.assert_close(Alibi(16).slopes(), 2 ** (-torch.arange(1, 17) / 2))

    def test_other_numbers_of_heads_borrow_from_twice_as_many(self):
        eight = [2.0**-i for i in range(1, 9)]
        assert Alibi(11).slopes().tolist() == pytest.approx([*eight, 2**-0.5, 2**-1.5, 2**-2.5])
        assert Alibi(3).slopes().tolist() == pytest.approx([2**-4, 2**-8, 2**-2])
        assert Alibi(6).slopes().tolist() == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])

    def test_scores_fall_with_the_distance(self):
        q, k = qk(3, 9)
        module = Alibi(3).double()
        slopes = [2**-4, 2**-8, 2**-2]
        rule = Rule(3) + module.rule(View(), 9)
        assert rule.causal and rule.distance_bias.dtype == torch.float64
        torch.testing.assert_close(scores(q, k, rule), dense(q, k, lambda h, i, j: -slopes[h] * (i - j)))

    def test_half_precision_does_not_round_slopes_or_distances(self):
        bias = Alibi(3).bfloat16().rule(View(), 1001).distance_bias
        assert bias.dtype == torch.float32 and bias[2].tolist() == [-d / 4 for d in range(1001)]
        assert Alibi(3).state_dict() == {}


class TestDistanceBias:
    def test_bias_starts_at_zero(self):
        assert DistanceBias(2, 5).rule(View(), 5).distance_bias.eq(0).all()

    @pytest.mark.parametrize("length", [1, 4, 9, 20])
    def test_last_entry_holds_beyond_the_table_and_gradients_reach_it(self, length):
        q, k = qk(2, 9)
        module = DistanceBias(2, length).double()
        with torch.no_grad():
            module.bias.normal_()
        got = scores(q, k, Rule(2) + module.rule(View(), 9))
        expected = dense(q, k, lambda h, i, j: module.bias[h, min(i - j, length - 1)])
        torch.testing.assert_close(got, expected)
        weight = torch.randn_like(got).tril()
        torch.testing.assert_close(
            torch.autograd.grad(got, module.bias, weight), torch.autograd.grad(expected, module.bias, weight)
        )


class TestTable:
    @pytest.mark.parametrize("length", [9, 12])
    def test_one_vector_for_each_distance_for_all_heads(self, length):
        q, k = qk(2, 9)
        module = Table(2, 4, length).double()
        got = scores(q, k, Rule(2) + module.rule(View(), 9))
        expected = dense(q, k, lambda h, i, j: q[0, h, i] @ module.weight[i - j] / 2)
        torch.testing.assert_close(got, expected)
        weight = torch.randn_like(got).tril()
        torch.testing.assert_close(
            torch.autograd.grad(got, module.weight, weight), torch.autograd.grad(expected, module.weight, weight)
        )

    def test_by_the_originals_conventions_row_0_is_the_previous_token(self):
        q, k = qk(1, 6)
        module = Table(1, 4, 5).double()
        rule = Rule(1, paper_compat=True, reach=5) + module.rule(View(), 5)
        got = scores(q, k, rule)[0, 0]
        for i in range(1, 6):
            row = torch.stack([q[0, 0, i] @ (k[0, 0, j] + module.weight[i - j - 1]) / 2 for j in range(i)])
            torch.testing.assert_close(got[i, :i], row.log_softmax(0))

    def test_table_that_is_too_short_is_refused(self):
        q, k = qk(2, 9)
        with pytest.raises(ValueError, match=r"distance_vec has shape .* so it needs at least 9"):
            scores(q, k, Rule(2) + Table(2, 4, 8).double().rule(View(), 9))


def test_base_class_has_no_effect():
    q, k = qk(2, 3)
    base, x = Position(), torch.randn(1, 3, 8)
    assert base.embed(x, 5) is x and base.rule(View(), 3) is None
    turned = base.encode(q, k, View())
    assert turned[0] is q and turned[1] is k
    assert base.encode_at(lambda: torch.arange(3), q.dtype) is None


@pytest.mark.parametrize("module", [Alibi(2), DistanceBias(2, 5), Table(2, 4, 5)], ids=["alibi", "bias", "table"])
def test_rule_over_distances_leaves_the_future_to_the_mechanism(module):
    rule = module.rule(View(), 5)
    assert not (Rule(2, causal=False) + rule).causal and (Rule(2) + rule).causal


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Alibi(0), "heads is 0; expected at least 1"),
        (lambda: DistanceBias(2, 0), "heads is 2 and length 0; expected at least 1 each"),
        (lambda: Table(2, 4, 0), "heads is 2, head_dim 4 and length 0; expected at least 1 each"),
    ],
)
def test_distance_encodings_bad_arguments(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
