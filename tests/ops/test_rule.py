"""Rules, their composition, block patterns, dropout, the choice of backend, and what is said about every bad input."""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import re
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from spanformer import Attended, BlockIndex, Rule, attend, backends, choose_backend
from spanformer.ops.backends.base import Backend
from spanformer.ops.dropout import draw_seed, keep
from spanformer.ops.rule import UNLIMITED

dispatch = importlib.import_module("spanformer.ops.attend")  # the name in the package is the function


def refused(*words: str):
    """A ValueError whose message holds every one of these, in this order."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(re.escape(word) for word in words))


def qkv(b: int = 2, h: int = 4, hkv: int = 2, tq: int = 6, tk: int = 6, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(b, heads, t, d, generator=g) for heads, t in ((h, tq), (hkv, tk), (hkv, tk)))


class TestSum:
    def test_of_empty_rules(self):
        rule = Rule(3) + Rule(3)
        assert rule.heads == 3 and rule.causal and not rule.paper_compat and rule.ramp == 32.0
        terms = (
            "reach",
            "span",
            "distance_bias",
            "distance_vec",
            "key_bias",
            "documents",
            "sink_logits",
            "blocks",
        )
        assert all(getattr(rule, name) is None for name in terms)

    def test_term_on_either_side_is_kept(self):
        terms = {
            "span": torch.ones(2),
            "distance_bias": torch.ones(2, 5),
            "distance_vec": torch.ones(1, 5, 3),
            "key_bias": torch.ones(1, 1, 4),
            "documents": torch.arange(4),
            "sink_logits": torch.ones(2),
            "blocks": BlockIndex.from_dense(torch.ones(4, 4, dtype=torch.bool), 2),
        }
        for name, value in terms.items():
            one = Rule(2, **{name: value})
            for both in (one + Rule(2), Rule(2) + one):
                assert getattr(both, name) is getattr(one, name), name
        assert (
            (Rule(2, reach=[1, 2]) + Rule(2)).reach.tolist()
            == (Rule(2) + Rule(2, reach=[1, 2])).reach.tolist()
            == [1, 2]
        )

    def test_causal_and_paper_compat_hold_if_either_has_them(self):
        flags = [False, True]
        for a, b in itertools.product(flags, flags):
            assert (Rule(1, causal=a) + Rule(1, causal=b)).causal == (a or b)
            assert (Rule(1, paper_compat=a) + Rule(1, paper_compat=b)).paper_compat == (a or b)

    def test_shorter_reach_per_head(self):
        assert (Rule(3, reach=[5, 2, 9]) + Rule(3, reach=4)).reach.tolist() == [4, 2, 4]

    def test_span_brings_its_ramp(self):
        spanned = Rule(1, span=torch.ones(1), ramp=7.0)
        for both in (spanned + Rule(1, ramp=3.0), Rule(1, ramp=3.0) + spanned):
            assert both.ramp == 7.0 and both.span is spanned.span

    def test_two_spans_are_refused(self):
        with refused("both rules have a span", "drop it from one of them"):
            Rule(1, span=torch.ones(1)) + Rule(1, span=torch.ones(1))

    def test_tables_add_up_to_the_shorter_length(self):
        a, b = torch.arange(10.0).view(2, 5), torch.ones(2, 3)
        assert torch.equal((Rule(2, distance_bias=a) + Rule(2, distance_bias=b)).distance_bias, a[:, :3] + 1)
        shared, own = torch.ones(1, 4, 3), torch.arange(30.0).view(2, 5, 3)
        both = Rule(2, distance_vec=shared) + Rule(2, distance_vec=own)
        assert torch.equal(both.distance_vec, own[:, :4] + 1)

    def test_key_biases_add(self):
        a, b = torch.randn(3, 1, 5), torch.randn(1, 4, 5)
        assert torch.equal((Rule(4, key_bias=a) + Rule(4, key_bias=b)).key_bias, a + b)

    def test_key_biases_of_key_value_heads_and_of_query_heads_add(self):
        q, k, v = qkv()
        grouped, own, shared = torch.randn(2, 2, 6), torch.randn(2, 4, 6), torch.randn(1, 1, 6)
        both = Rule(4, key_bias=grouped) + Rule(4, key_bias=own) + Rule(4, key_bias=shared)
        assert torch.equal(both.key_bias, grouped[:, [0, 0, 1, 1]] + own + shared)
        whole = Rule(4, key_bias=own + grouped[:, [0, 0, 1, 1]] + shared)
        mine, other = (attend(q, k, v, rule, backend="reference").out for rule in (both, whole))
        assert torch.allclose(mine, other, atol=1e-6)

    def test_terms_that_do_not_fit_each_other(self):
        for a, b in (((1, 1, 6), (1, 1, 5)), ((2, 1, 6), (3, 1, 6)), ((1, 2, 6), (1, 3, 6))):
            with refused(f"key_bias of shapes {list(a)} and {list(b)} cannot be added", "one number of keys"):
                Rule(6, key_bias=torch.zeros(a)) + Rule(6, key_bias=torch.zeros(b))
        with refused("distance_vec of shapes [1, 6, 3] and [1, 6, 4] cannot be added", "one head size"):
            Rule(2, distance_vec=torch.zeros(1, 6, 3)) + Rule(2, distance_vec=torch.zeros(1, 6, 4))

    def test_documents_must_be_the_same(self):
        ids, pair = torch.tensor([0, 0, 1]), (torch.tensor([1]), torch.tensor([0, 0, 1]))
        assert torch.equal((Rule(1, documents=ids) + Rule(1, documents=ids.clone())).documents, ids)
        assert (Rule(1, documents=pair) + Rule(1, documents=(pair[0].clone(), pair[1]))).documents[0].tolist() == [1]
        for other in (ids + 1, pair):
            with refused("both rules have document ids, and they differ; give both the same ids"):
                Rule(1, documents=ids) + Rule(1, documents=other)

    def test_sink_logits_add_by_logaddexp(self):
        a, b = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0])
        both = (Rule(2, sink_logits=a) + Rule(2, sink_logits=b)).sink_logits
        assert torch.allclose(both.exp(), a.exp() + b.exp())

    def test_blocks_intersect(self):
        g = torch.Generator().manual_seed(0)
        a, b = (torch.rand(17, 17, generator=g) < 0.5 for _ in range(2))
        both = Rule(1, blocks=BlockIndex.from_dense(a, 8)) + Rule(1, blocks=BlockIndex.from_dense(b, 8))
        at = torch.arange(17)
        assert torch.equal(both.blocks.visible(at, at)[0], a & b)

    def test_unsupported_sums_are_refused(self):
        with refused("rules of 2 and 3 heads cannot be added"):
            Rule(2) + Rule(3)
        with pytest.raises(TypeError):
            Rule(2) + 1

    def test_sum_of_rules_equals_both_rules(self):
        """The sum of rules equals one rule with all the terms."""
        q, k, v = qkv()
        bias, sinks = torch.randn(4, 6), torch.randn(4)
        span = torch.tensor([1.0, 2.5, 0.0, 9.0])
        parts = (
            Rule(4, span=span, ramp=2.0) + Rule(4, distance_bias=bias) + Rule(4, reach=3) + Rule(4, sink_logits=sinks)
        )
        whole = Rule(4, span=span, ramp=2.0, distance_bias=bias, reach=3, sink_logits=sinks)
        mine, other = (attend(q, k, v, rule, backend="reference") for rule in (parts, whole))
        assert torch.equal(mine.out, other.out) and torch.equal(mine.lse, other.lse)


class TestReading:
    def test_limits_are_how_many_distances_can_have_weight(self):
        assert Rule(2).limits() == [UNLIMITED] * 2 == Rule(2).reach_list()
        assert Rule(2, reach=[0, 7]).limits() == [0, 7]
        assert Rule(3, span=torch.tensor([0.0, 2.5, 10.0]), ramp=4.0).limits() == [4, 7, 14]
        assert Rule(2, span=torch.tensor([2.5, 10.0]), ramp=4.0, reach=8).limits() == [7, 8]
        assert Rule(1, span=torch.tensor([math.inf])).limits() == [UNLIMITED]
        dynamic = torch.tensor([[[1.0, 5.5]], [[3.0, 0.0]]])  # [B, H, Tq] of two rows, one head, two queries
        rule = Rule(1, span=dynamic, ramp=2.0)
        assert rule.dynamic and rule.limits() == [8]
        assert Rule(2, span=torch.ones(1, 2, 0)).limits() == [0, 0]  # no query, nothing seen

    @pytest.mark.parametrize("z", [0.0, 0.5, 3.0, 3.999])
    @pytest.mark.parametrize("ramp", [1.0, 2.5, 4.0])
    def test_limits_agree_with_the_oracle(self, z, ramp):
        span = torch.tensor([z])
        q, k = torch.zeros(1, 1, 12, 12), torch.zeros(1, 1, 12, 12)
        out = attend(q, k, torch.eye(12)[None, None], Rule(1, span=span, ramp=ramp), backend="reference").out
        assert int((out[0, 0, -1] > 0).sum()) == Rule(1, span=span, ramp=ramp).limits()[0]

    def test_reach_takes_numbers_lists_and_tensors(self):
        for reach in (3, [3, 3], (3, 3), torch.tensor([3, 3]), torch.tensor([3, 3], dtype=torch.int32)):
            kept = Rule(2, reach=reach).reach
            assert kept.tolist() == [3, 3] and kept.dtype == torch.int64 and kept.device.type == "cpu"


class TestBadRules:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"heads": 0}, ["heads is 0", "expected a whole number of heads, 1 or more"]),
            ({"reach": [1, 2, 3]}, ["reach has shape [3]", "expected [4]"]),
            ({"reach": 2.5}, ["reach is 2.5", "expected a whole number"]),
            ({"blocks": torch.ones(4, 4)}, ["blocks is a Tensor", "expected a BlockIndex"]),
            ({"reach": torch.ones(4)}, ["reach has dtype torch.float32", "expected whole numbers"]),
            ({"reach": [1, 2, -3, 4]}, ["reach holds -3", "at least 0"]),
            ({"ramp": 0.0}, ["ramp is 0.0", "expected a positive, finite"]),
            ({"ramp": -2.0}, ["ramp is -2.0", "expected a positive, finite"]),
            ({"ramp": math.inf}, ["ramp is inf", "expected a positive, finite"]),
            ({"ramp": math.nan}, ["ramp is nan", "expected a positive, finite"]),
            ({"span": torch.ones(3)}, ["span has shape [3]", "expected [4] (static) or [B, 4, Tq] (dynamic)"]),
            ({"span": torch.ones(2, 3, 5)}, ["span has shape [2, 3, 5]", "[B, 4, Tq]"]),
            ({"span": torch.ones(4, dtype=torch.int64)}, ["span", "torch.int64", "expected a floating-point dtype"]),
            ({"span": torch.tensor([1.0, -32.5, 2.0, 3.0])}, ["span of shape [4] holds -32.5", "at least -32"]),
            ({"span": torch.tensor([1.0, math.nan, 2.0, 3.0])}, ["span of shape [4] holds nan", "at least -32"]),
            ({"span": torch.full((1, 4, 2), -33.0)}, ["span of shape [1, 4, 2] holds -33.0", "at least -32"]),
            ({"distance_bias": torch.ones(3, 5)}, ["distance_bias has shape [3, 5]", "expected [4, L]"]),
            ({"distance_bias": torch.ones(4)}, ["distance_bias has shape [4]", "expected [4, L]"]),
            ({"distance_bias": torch.ones(4, 5).long()}, ["distance_bias", "torch.int64", "floating-point"]),
            ({"distance_vec": torch.ones(2, 5, 8)}, ["distance_vec has shape [2, 5, 8]", "expected [1 or 4, L, D]"]),
            ({"distance_vec": torch.ones(5, 8)}, ["distance_vec has shape [5, 8]", "expected [1 or 4, L, D]"]),
            ({"distance_vec": torch.ones(1, 5, 8).long()}, ["distance_vec", "torch.int64", "floating-point"]),
            ({"key_bias": torch.ones(2, 6)}, ["key_bias has shape [2, 6]", "expected [1 or B, 1 or Hkv or H, Tk]"]),
            ({"key_bias": torch.ones(2, 3, 6)}, ["key_bias has shape [2, 3, 6]", "1 or Hkv or H"]),
            ({"key_bias": torch.ones(2, 1, 6).bool()}, ["key_bias", "torch.bool", "floating-point", "−inf hides"]),
            ({"sink_logits": torch.ones(2)}, ["sink_logits has shape [2]", "expected [4]"]),
            ({"sink_logits": torch.ones(4).long()}, ["sink_logits", "torch.int64", "floating-point"]),
            ({"documents": torch.ones(6)}, ["documents", "torch.float32", "expected integer ids"]),
            ({"documents": torch.ones(1, 2, 6).long()}, ["documents has shape [1, 2, 6]", "expected [T] or [B, T]"]),
            ({"reach": []}, ["reach has shape [0]", "expected [4]"]),
            (
                {"reach": torch.ones(4, device="meta").long()},
                ["reach is on the meta device", "expected a tensor on a real device"],
            ),
            ({"span": 64.0}, ["span is a float", "expected a tensor"]),
            ({"distance_bias": torch.ones(4, 0)}, ["distance_bias has shape [4, 0]", "L at least 1"]),
            ({"distance_vec": torch.ones(1, 0, 8)}, ["distance_vec has shape [1, 0, 8]", "L at least 1"]),
            ({"key_bias": torch.ones(2, 0, 6)}, ["key_bias has shape [2, 0, 6]", "1 or Hkv or H"]),
            ({"documents": [0, 0, 1]}, ["documents is a list", "or a pair of tensors"]),
            ({"documents": (torch.arange(6),) * 3}, ["documents is a tuple", "or a pair of tensors"]),
            ({"documents": (torch.arange(6), None)}, ["documents is a tuple", "or a pair of tensors"]),
            (
                {"paper_compat": True, "causal": False},
                ["paper_compat is True with causal=False", "so pass causal=True"],
            ),
            (
                {"blocks": BlockIndex.from_dense(torch.ones(3, 8, 8, dtype=torch.bool), 8)},
                ["blocks.offsets has shape [3, 2]", "expected [1 or 4, rows + 1]"],
            ),
        ],
    )
    def test_each_is_named_with_its_shape_and_what_was_expected(self, options, words):
        with refused(*words):
            Rule(**{"heads": 4, **options})

    def test_terms_go_by_name(self):
        with pytest.raises(TypeError):
            Rule(4, True)
        with pytest.raises(TypeError, match="window"):
            Rule(4, window=3)


class TestBadCalls:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"rule": torch.nn.Linear(1, 1)}, ["rule is of type Linear", "expected a Rule"]),
            ({"v": [1.0]}, ["v is of type list", "expected a tensor"]),
            ({"q": torch.ones(2, 4, 6)}, ["q has shape [2, 4, 6]", "expected 4 axes"]),
            ({"v": torch.ones(2, 2, 6, 8, 1)}, ["v has shape [2, 2, 6, 8, 1]", "expected 4 axes"]),
            ({"k": torch.ones(2, 2, 6, 8).long()}, ["k has dtype torch.int64", "expected a floating-point dtype"]),
            ({"k": torch.ones(2, 2, 6, 8).double()}, ["q, k and v have dtypes", "torch.float64", "expected one dtype"]),
            ({"k": torch.ones(2, 2, 6, 8, device="meta")}, ["q, k and v are on cpu, meta and cpu", "one device"]),
            ({"q": torch.ones(2, 3, 6, 8)}, ["q has shape [2, 3, 6, 8], 3 heads", "expected 4, as the rule has"]),
            ({"k": torch.ones(1, 2, 6, 8)}, ["k has shape [1, 2, 6, 8]", "expected [2, Hkv, Tk, 8]"]),
            ({"k": torch.ones(2, 2, 6, 7)}, ["k has shape [2, 2, 6, 7]", "expected [2, Hkv, Tk, 8]"]),
            ({"v": torch.ones(2, 2, 5, 8)}, ["v has shape [2, 2, 5, 8]", "expected [2, 2, 6] and a head size"]),
            (
                {"k": torch.ones(2, 3, 6, 8), "v": torch.ones(2, 3, 6, 8)},
                ["k has shape [2, 3, 6, 8], 3 heads", "divides q's 4"],
            ),
            (
                {"k": torch.ones(2, 0, 6, 8), "v": torch.ones(2, 0, 6, 8)},
                ["k has shape [2, 0, 6, 8], 0 heads", "divides q's 4"],
            ),
            ({"v": torch.ones(2, 2, 6, 0)}, ["head size 8 and v 0", "expected at least 1"]),
            ({"k": torch.ones(2, 2, 5, 8), "v": torch.ones(2, 2, 5, 8)}, ["k has 5 keys for 6 queries", "k_positions"]),
            ({"q_positions": torch.arange(6)}, ["q_positions was given without k_positions"]),
            ({"k_positions": torch.arange(6)}, ["k_positions was given without q_positions"]),
            ({"dropout": 1.0}, ["dropout is 1.0", "expected 0 ≤ dropout < 1"]),
            ({"dropout": -0.1}, ["dropout is -0.1", "expected 0 ≤ dropout < 1"]),
            ({"dropout": math.nan}, ["dropout is nan", "expected 0 ≤ dropout < 1"]),
            (
                {"backend": "dense"},
                ["backend is 'dense'", "expected 'auto' or one of native, triton, flex, banded, reference"],
            ),
        ],
    )
    def test_each_argument_is_named(self, change, words):
        q, k, v = qkv()
        call = {"q": q, "k": k, "v": v, "rule": Rule(4), "backend": "reference", **change}
        with refused(*words):
            attend(**call)

    @pytest.mark.parametrize(
        ("q_positions", "k_positions", "words"),
        [
            (torch.arange(5), torch.arange(6), ["q_positions has shape [5]", "expected [6] or [2, 6]"]),
            (torch.arange(6), torch.arange(18).view(3, 6), ["k_positions has shape [3, 6]", "expected [6] or [2, 6]"]),
            (torch.arange(6.0), torch.arange(6), ["q_positions has dtype torch.float32", "expected integers"]),
            (torch.arange(6), torch.ones(6).bool(), ["k_positions has dtype torch.bool", "expected integers"]),
            (torch.arange(6, device="meta"), torch.arange(6), ["q_positions is on meta", "expected cpu, where q is"]),
            (
                torch.zeros(1, 1, 6).long(),
                torch.arange(6),
                ["q_positions has shape [1, 1, 6]", "expected [6] or [2, 6]"],
            ),
        ],
    )
    def test_positions(self, q_positions, k_positions, words):
        with refused(*words):
            attend(*qkv(), Rule(4), backend="reference", q_positions=q_positions, k_positions=k_positions)

    @pytest.mark.parametrize(
        ("terms", "words"),
        [
            ({"span": torch.ones(3, 4, 6)}, ["span has shape [3, 4, 6]", "expected [2, 4, 6], one for each query"]),
            ({"span": torch.ones(2, 4, 5)}, ["span has shape [2, 4, 5]", "expected [2, 4, 6]"]),
            ({"key_bias": torch.ones(3, 1, 6)}, ["key_bias has shape [3, 1, 6]", "expected [1 or 2, 1 or 2 or 4, 6]"]),
            ({"key_bias": torch.ones(2, 1, 5)}, ["key_bias has shape [2, 1, 5]", "expected [1 or 2, 1 or 2 or 4, 6]"]),
            ({"distance_vec": torch.ones(1, 6, 7)}, ["distance_vec has shape [1, 6, 7]", "expected head size 8"]),
            ({"distance_vec": torch.ones(1, 5, 8)}, ["distance_vec has shape [1, 5, 8]", "0 … 4", "at least 6"]),
            ({"distance_bias": torch.ones(4, 5)}, ["distance_bias has shape [4, 5]", "0 … 4", "at least 6"]),
            ({"distance_bias": torch.ones(4, 3), "reach": [1, 2, 4, 3]}, ["distance_bias", "reach 4", "at least 4"]),
            ({"distance_bias": torch.ones(4, 3), "span": torch.ones(4), "ramp": 2.5}, ["distance_bias", "at least 4"]),
            ({"documents": torch.zeros(5).long()}, ["documents has shape [5]", "expected [6] or [2, 6]"]),
            ({"documents": torch.zeros(3, 6).long()}, ["documents has shape [3, 6]", "expected [6] or [2, 6]"]),
            (
                {"documents": (torch.zeros(6).long(), torch.zeros(4).long())},
                ["documents[1] has shape [4]", "expected [6] or [2, 6]"],
            ),
            (
                {"blocks": BlockIndex.from_dense(torch.ones(4, 4, dtype=torch.bool), 4)},
                ["blocks describes positions 0 … 3", "a query is at 5"],
            ),
        ],
    )
    def test_terms_against_the_call(self, terms, words):
        with refused(*words):
            attend(*qkv(), Rule(4, **terms), backend="reference")

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("span", (4,)),
            ("distance_bias", (4, 6)),
            ("distance_vec", (1, 6, 8)),
            ("key_bias", (1, 1, 6)),
            ("sink_logits", (4,)),
        ],
    )
    def test_terms_on_another_device(self, name, shape):
        with refused(f"{name} is on meta", "expected cpu, where q is"):
            attend(*qkv(), Rule(4, **{name: torch.ones(shape, device="meta")}), backend="reference")

    def test_documents_on_another_device(self):
        with refused("documents is on meta", "expected cpu, where q is"):
            attend(*qkv(), Rule(4, documents=torch.zeros(6, dtype=torch.int64, device="meta")), backend="reference")

    def test_documents_of_fewer_keys_than_queries(self):
        with refused("documents has ids for 3 keys, and there are 6 queries", "pass a pair"):
            attend(*qkv(tk=3), Rule(4, causal=False, documents=torch.zeros(3).long()), backend="reference")

    def test_positions_before_the_first_do_not_wrap_around_a_block_pattern(self):
        blocks = BlockIndex.from_dense(torch.ones(8, 8, dtype=torch.bool), 4)
        at, before = torch.arange(6), torch.arange(6) - 3
        for q_positions, k_positions, what in ((at, before, "key"), (before, at, "query")):
            with refused("blocks describes positions 0 … 7", f"a {what} is at -3"):
                attend(
                    *qkv(),
                    Rule(4, blocks=blocks),
                    backend="reference",
                    q_positions=q_positions,
                    k_positions=k_positions,
                )
        with refused("blocks describes positions 0 … 7", "a query is at -3"):
            attend(*qkv(tk=3), Rule(4, causal=False, blocks=blocks), backend="reference")

    def test_blocks_without_any_key(self):
        blocks = BlockIndex.from_dense(torch.ones(8, 8, dtype=torch.bool), 4)
        at = torch.arange(6)
        call = {"backend": "reference", "q_positions": at, "k_positions": at[:0]}
        assert attend(*qkv(tk=0), Rule(4, blocks=blocks), **call).out.eq(0).all()

    def test_blocks_on_another_device(self):
        blocks = BlockIndex.from_dense(torch.ones(8, 8, dtype=torch.bool), 4).to("meta")
        with refused("blocks is on meta", "expected cpu, where q is"):
            attend(*qkv(), Rule(4, blocks=blocks), backend="reference")

    def test_table_may_be_as_short_as_the_reach(self):
        attend(*qkv(), Rule(4, distance_bias=torch.ones(4, 4), reach=[1, 2, 4, 3]), backend="reference")
        attend(*qkv(), Rule(4, distance_bias=torch.ones(4, 4), span=torch.ones(4), ramp=2.5), backend="reference")
        attend(*qkv(), Rule(4, distance_bias=torch.ones(4, 5), paper_compat=True), backend="reference")

    def test_table_need_not_span_the_gap_between_rows_of_a_batch(self):
        far = torch.stack([torch.arange(6), torch.arange(6) + 1000])
        rule = Rule(4, distance_bias=torch.randn(4, 6))
        q, k, v = qkv()
        apart = attend(q, k, v, rule, backend="reference", q_positions=far, k_positions=far)
        assert torch.equal(apart.out, attend(q, k, v, rule, backend="reference").out)

    def test_table_as_long_as_the_queries_serves_fewer_keys(self):
        rule = Rule(4, causal=False, distance_bias=torch.randn(4, 6))
        attend(*qkv(tk=3), rule, backend="reference")  # queries at −3 … 2, keys at 0 … 2: distances 0 … 5
        with refused("distance_bias has shape [4, 5]", "at least 6"):
            attend(*qkv(tk=3), Rule(4, causal=False, distance_bias=torch.randn(4, 5)), backend="reference")

    def test_empty_batch(self):
        nowhere = torch.zeros(0, 6, dtype=torch.int64)
        rule = Rule(4, distance_bias=torch.randn(4, 6))
        out, lse = attend(*qkv(b=0), rule, backend="reference", q_positions=nowhere, k_positions=nowhere)
        assert out.shape == (0, 4, 6, 8) and lse.shape == (0, 4, 6)


def dense_mask(heads: int, length: int, seed: int, size: int) -> Tensor:
    """Whole blocks on and off, and some with a few pairs flipped: full, empty and partial blocks all occur."""
    g = torch.Generator().manual_seed(seed)
    n = -(-length // size)
    mask = (torch.rand(heads, n, n, generator=g) < 0.6).repeat_interleave(size, 1).repeat_interleave(size, 2)
    flip = (torch.rand(heads, n, n, generator=g) < 0.3).repeat_interleave(size, 1).repeat_interleave(size, 2)
    mask = mask ^ (flip & (torch.rand(mask.shape, generator=g) < 0.1))
    return mask[:, :length, :length]


class TestBlockIndex:
    @pytest.mark.parametrize("heads", [1, 3])
    @pytest.mark.parametrize("size", [8, 16])
    @pytest.mark.parametrize("length", [17, 63, 111])
    def test_dense_and_back(self, length, size, heads):
        mask, at = dense_mask(heads, length, length, size), torch.arange(length)
        blocks = BlockIndex.from_dense(mask, size)
        assert torch.equal(blocks.visible(at, at), mask)
        assert blocks.rows == -(-length // size) and blocks.offsets.shape == (heads, blocks.rows + 1)
        assert (blocks.mask_ids == -1).any() and (blocks.mask_ids >= 0).any()
        stored = blocks.mask_ids[blocks.mask_ids >= 0]
        assert sorted(stored.tolist()) == list(range(blocks.masks.shape[0]))  # masks of partly covered blocks only
        assert blocks.masks.flatten(1).any(1).all()

    @pytest.mark.parametrize("size", [8, 16])
    @pytest.mark.parametrize("length", [17, 63, 111])
    def test_and(self, length, size):
        at = torch.arange(length)
        for heads, others in ((1, 1), (1, 3), (3, 1), (3, 3)):
            a, b = dense_mask(heads, length, 1, size), dense_mask(others, length, 2, size)
            both = BlockIndex.from_dense(a, size) & BlockIndex.from_dense(b, size)
            assert torch.equal(both.visible(at, at), (a & b).expand(max(heads, others), -1, -1))
            assert both.masks.flatten(1).any(1).all()

    def test_intersection_may_be_empty(self):
        a = torch.eye(17, dtype=torch.bool)
        both = BlockIndex.from_dense(a, 8) & BlockIndex.from_dense(~a, 8)
        assert both.columns.numel() == 0 and not both.visible(torch.arange(17), torch.arange(17)).any()

    def test_visible_at_any_positions(self):
        mask = dense_mask(2, 63, 5, 16)
        blocks = BlockIndex.from_dense(mask, 16)
        q_pos, k_pos = torch.tensor([[3, 62, 17], [0, 1, 44]]), torch.tensor([[60, 2], [31, 32]])
        got = blocks.visible(q_pos, k_pos)
        assert got.shape == (2, 2, 3, 2)
        for b, h, i, j in itertools.product(range(2), range(2), range(3), range(2)):
            assert got[b, h, i, j] == mask[h, q_pos[b, i], k_pos[b, j]]
        assert torch.equal(blocks.visible(q_pos, k_pos[:1])[1], blocks.visible(q_pos[1], k_pos[0]))

    def test_keys_beyond_the_pattern_are_not_seen(self):
        blocks = BlockIndex.from_dense(torch.ones(16, 16, dtype=torch.bool), 8)
        assert blocks.visible(torch.arange(16), torch.tensor([15, 16, 400]))[0].tolist() == [[True, False, False]] * 16

    def test_wide_patterns(self):
        mask = dense_mask(1, 63, 3, 8)[0, :20]
        blocks = BlockIndex.from_dense(mask, 8)
        assert torch.equal(blocks.visible(torch.arange(20), torch.arange(63))[0], mask)

    def test_all_full_pattern_stores_no_masks(self):
        blocks = BlockIndex.from_dense(torch.ones(17, 17, dtype=torch.bool), 8)
        assert blocks.masks.shape == (0, 8, 8) and blocks.mask_ids.eq(-1).all() and blocks.columns.numel() == 9

    GOOD: ClassVar = {
        "size": 2,
        "offsets": torch.tensor([[0, 1, 3]]),
        "columns": torch.tensor([0, 0, 1]),
        "mask_ids": torch.tensor([0, -1, 0]),
        "masks": torch.eye(2, dtype=torch.bool)[None],
    }

    def test_valid_index_is_accepted(self):
        seen = BlockIndex(**self.GOOD).visible(torch.arange(4), torch.arange(4))[0].int()
        assert seen.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"size": 0}, ["blocks.size is 0", "expected at least 1"]),
            ({"offsets": torch.tensor([[0, 1, 3]]).int()}, ["blocks.offsets has dtype torch.int32", "torch.int64"]),
            ({"columns": torch.tensor([0.0, 0.0, 1.0])}, ["blocks.columns has dtype torch.float32", "torch.int64"]),
            ({"mask_ids": torch.tensor([0, -1, 0]).int()}, ["blocks.mask_ids has dtype torch.int32", "torch.int64"]),
            ({"offsets": torch.tensor([0, 1, 3])}, ["blocks.offsets has shape [3]", "expected [1 or H, rows + 1]"]),
            ({"offsets": torch.zeros(0, 3).long()}, ["blocks.offsets has shape [0, 3]", "expected [1 or H, rows + 1]"]),
            ({"columns": torch.ones(3, device="meta").long()}, ["blocks.columns is on meta", "expected cpu"]),
            ({"masks": torch.ones(1, 2, 2, device="meta").bool()}, ["blocks.masks is on meta", "expected cpu"]),
            ({"offsets": torch.tensor([[0]])}, ["blocks.offsets has shape [1, 1]", "expected [1 or H, rows + 1]"]),
            ({"mask_ids": torch.tensor([0, -1])}, ["blocks.mask_ids has shape [2]", "expected [3], as columns has"]),
            (
                {"masks": torch.ones(1, 2, 2)},
                ["blocks.masks has shape [1, 2, 2] and dtype torch.float32", "torch.bool"],
            ),
            ({"masks": torch.ones(1, 3, 2).bool()}, ["blocks.masks has shape [1, 3, 2]", "expected [M, 2, 2]"]),
            ({"offsets": torch.tensor([[0, 3, 1]])}, ["blocks.offsets must ascend within 0 … 3"]),
            ({"offsets": torch.tensor([[0, 1, 4]])}, ["blocks.offsets must ascend within 0 … 3"]),
            ({"offsets": torch.tensor([[-1, 1, 3]])}, ["blocks.offsets must ascend within 0 … 3"]),
            ({"columns": torch.tensor([-1, 0, 1])}, ["blocks.columns must not be negative"]),
            ({"mask_ids": torch.tensor([1, -1, 0])}, ["blocks.mask_ids must lie in −1 … 0"]),
            ({"mask_ids": torch.tensor([0, -2, 0])}, ["blocks.mask_ids must lie in −1 … 0"]),
            ({"columns": torch.tensor([0, 1, 0])}, ["blocks.columns must ascend strictly within each block row"]),
            ({"columns": torch.tensor([0, 1, 1])}, ["blocks.columns must ascend strictly within each block row"]),
        ],
    )
    def test_malformed(self, change, words):
        with refused(*words):
            BlockIndex(**{**self.GOOD, **change})

    def test_bad_masks(self):
        with refused("size is 0", "expected at least 1 position per block"):
            BlockIndex.from_dense(torch.ones(8, 8, dtype=torch.bool), 0)
        for mask in (
            torch.ones(8).bool(),
            torch.zeros(8, 8),
            torch.ones(0, 8, 8).bool(),
            torch.ones(1, 1, 8, 8).bool(),
        ):
            with refused(
                f"mask has shape {list(mask.shape)} and dtype {mask.dtype}", "expected [L, L] or [1 or H, L, L]"
            ):
                BlockIndex.from_dense(mask, 4)

    def test_heads_that_differ(self):
        two, three = (BlockIndex.from_dense(torch.ones(n, 8, 8, dtype=torch.bool), 4) for n in (2, 3))
        for a, b in ((two, three), (three, two)):
            with refused("blocks of", "heads cannot be combined"):
                a & b

    def test_sizes_that_differ(self):
        ones = torch.ones(16, 16, dtype=torch.bool)
        with refused("blocks of sizes 8 and 16 cannot be combined"):
            BlockIndex.from_dense(ones, 8) & BlockIndex.from_dense(ones, 16)


class TestChoice:
    """The dispatcher, with stand-ins for the backends: what it picks, says and refuses."""

    @pytest.fixture
    def install(self, monkeypatch):
        def put(**reasons: tuple[list[str], list[str]]) -> list[str]:
            ran: list[str] = []

            def run_as(name: str):
                def run(call) -> Attended:
                    ran.append(name)
                    return Attended(call.q, call.q[..., 0])

                return run

            loaded = {}
            for name in dispatch.NAMES:
                unusable, refuses = reasons.get(name, ([], []))
                loaded[name] = Backend(name, lambda u=unusable: u, lambda _call, r=refuses: r, run_as(name))
            monkeypatch.setattr(dispatch, "_loaded", loaded)
            monkeypatch.setattr(dispatch, "_logged", set())
            return ran

        return put

    def test_backends_say_why_not(self, install):
        install(native=(["the kernel is not built"], []), flex=([], ["a reason about a call"]))
        assert backends() == {
            "native": ["the kernel is not built"],
            "triton": [],
            "flex": [],
            "banded": [],
            "reference": [],
        }

    def test_auto_uses_the_first_backend_that_serves(self, install):
        install()
        assert choose_backend(*qkv(), Rule(4)) == "native"
        install(native=(["the kernel is not built"], []))
        assert choose_backend(*qkv(), Rule(4)) == "banded"
        install(native=([], ["dynamic spans"]))
        assert choose_backend(*qkv(), Rule(4), dropout=0.5) == "banded"

    def test_auto_is_what_attend_runs(self, install):
        ran = install(native=([], ["no"]))
        attend(*qkv(), Rule(4))
        attend(*qkv(), Rule(4), backend="flex")
        assert ran == ["banded", "flex"]

    def test_other_devices_use_banded(self, install):
        install()
        q, k, v = (t.to("meta") for t in qkv())
        assert choose_backend(q, k, v, Rule(4)) == "banded"

    def test_auto_never_uses_reference(self, install):
        install(native=(["the kernel is not built"], []), banded=([], ["float8", "odd heads"]))
        with refused(
            "no backend can serve this call",
            "native: the kernel is not built",
            "banded: float8; odd heads",
            "'reference'",
        ):
            attend(*qkv(), Rule(4))

    def test_named_backend_serves_or_refuses(self, install):
        ran = install(native=(["the kernel is not built"], []), flex=([], ["no CPU backward", "no sinks"]))
        with refused("backend 'native' cannot serve this call: the kernel is not built"):
            attend(*qkv(), Rule(4), backend="native")
        with refused("backend 'flex' cannot serve this call: no CPU backward; no sinks"):
            attend(*qkv(), Rule(4), backend="flex")
        assert ran == []

    def test_choice_checks_the_call(self, install):
        install()
        with refused("q has shape [2, 4, 6, 8], 4 heads", "expected 3, as the rule has"):
            choose_backend(*qkv(), Rule(3))
        with refused("dropout is 2.0"):
            choose_backend(*qkv(), Rule(4), dropout=2.0)

    def test_choice_is_logged_once_with_its_reasons(self, install, caplog):
        install(native=(["the kernel is not built"], []))
        with caplog.at_level(logging.INFO, "spanformer"):
            for _ in range(3):
                attend(*qkv(), Rule(4))
        assert [r.message for r in caplog.records] == ["attention runs on 'banded' (native: the kernel is not built)"]


class TestDropout:
    def draws(self, p: float, seed: int = 123, rows: int = 4, tq: int = 256, tk: int = 256) -> Tensor:
        row, i, j = torch.arange(rows).view(-1, 1, 1), torch.arange(tq).view(-1, 1), torch.arange(tk)
        return keep(torch.tensor([seed]), p, row, i, j)

    @pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
    @pytest.mark.parametrize("seed", [0, 123, (1 << 62) - 1])
    def test_rate_overall_and_along_every_axis(self, p, seed):
        dropped = ~self.draws(p, seed)
        for axes in ((0, 1, 2), (1, 2), (0, 2), (0, 1)):
            rates = dropped.double().mean(axes)
            n = dropped.numel() / rates.numel()
            assert (rates - p).abs().max() < 6 * math.sqrt(p * (1 - p) / n), axes

    def test_neighbours_are_uncorrelated(self):
        x = self.draws(0.5).double() * 2 - 1
        shifts = [(x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[:, :, 1:], x[:, :, :-1]), (x, x.transpose(1, 2))]
        shifts.append((x[:, :1] * x[:, 1:], x[:, :1, :1] * x[:, 1:, :1]))  # two rows against two columns
        shifts.append((x, self.draws(0.5, seed=124).double() * 2 - 1))
        shifts.append((x, self.draws(0.5, seed=123 + (1 << 32)).double() * 2 - 1))  # the seed's upper half counts too
        for a, b in shifts:
            product = (a * b).flatten()
            assert product.mean().abs() < 6 / math.sqrt(product.numel())

    def test_dropout_does_not_depend_on_the_requested_shape(self):
        whole = self.draws(0.3)
        assert torch.equal(whole, self.draws(0.3))
        assert torch.equal(whole[:, :5, 200:], keep(torch.tensor([123]), 0.3, torch.arange(4).view(-1, 1, 1),
                                                    torch.arange(5).view(-1, 1), torch.arange(200, 256)))  # fmt: skip
        assert not torch.equal(whole, self.draws(0.3, seed=124))

    def test_higher_rate_drops_more_of_the_same(self):
        assert (self.draws(0.2) | ~self.draws(0.5)).all()
        assert self.draws(0.0).all()

    def test_seeds_follow_torchs_generators(self):
        def draw() -> Tensor:
            return draw_seed(torch.Generator().manual_seed(5), torch.device("cpu"))

        assert torch.equal(draw(), draw()) and draw().shape == (1,) and draw().dtype == torch.int64
        torch.manual_seed(5)
        first = draw_seed(None, torch.device("cpu"))
        assert not torch.equal(first, draw_seed(None, torch.device("cpu")))
        torch.manual_seed(5)
        assert torch.equal(first, draw_seed(None, torch.device("cpu")))

    def test_attend_is_reproducible_and_right_on_average(self):
        q, k, v = qkv(b=1, h=2, hkv=2)

        def run(seed: int) -> Attended:
            generator = torch.Generator().manual_seed(seed)
            return attend(q, k, v, Rule(2), backend="reference", dropout=0.3, generator=generator)

        assert torch.equal(run(1).out, run(1).out) and not torch.equal(run(1).out, run(2).out)
        plain = attend(q, k, v, Rule(2), backend="reference")
        assert torch.equal(run(1).lse, plain.lse)  # weights are dropped after the softmax
        mean = torch.stack([run(seed).out for seed in range(1000)]).mean(0)
        assert torch.allclose(mean, plain.out, atol=0.15)

    @pytest.mark.parametrize("name", [name for name in dispatch.NAMES if name != "reference"])
    def test_every_backend_drops_the_same_weights(self, name):
        reasons = pytest.importorskip(f"spanformer.ops.backends.{name}").BACKEND.unusable()
        if reasons:
            pytest.skip("; ".join(reasons))
        q, k, v = qkv(d=16)
        rule = Rule(4, span=torch.tensor([0.5, 2.0, 3.5, 9.0]), ramp=2.0)

        def run(backend: str) -> Attended:
            generator = torch.Generator().manual_seed(3)
            return attend(q, k, v, rule, backend=backend, dropout=0.5, generator=generator)

        try:
            got = run(name)
        except ValueError as refusal:
            pytest.skip(str(refusal))
        assert torch.allclose(got.out, run("reference").out, atol=1e-5)
