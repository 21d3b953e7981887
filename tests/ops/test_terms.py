"""No backend ignores a term: for every field of Rule, it gives what the reference gives, or refuses with a sentence
that names the field. A field that has no sample here fails."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from spanformer import BlockIndex, HeadGroups, Rings, Rule, Union, attend, attend_rings

H, T, D = 2, 12, 16
G = torch.Generator().manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


BAND = (torch.arange(T)[:, None] - torch.arange(T)).abs() < 3
ORDER = (torch.arange(T) * 5 % T)[None, None]
SAMPLES = {
    "causal": {"causal": False},
    "reach": {"reach": [3, 5]},
    "span": {"span": torch.tensor([0.5, 2.0]), "ramp": 4.0},
    "ramp": {"span": torch.tensor([0.5, 2.0]), "ramp": 2.0},
    "distance_bias": {"distance_bias": rand(H, T)},
    "distance_vec": {"distance_vec": rand(1, T, D)},
    "distance_value": {"distance_value": rand(1, 4, D)},
    "distance_scale": {"distance_scale": rand(H, T)},
    "max_future": {"causal": False, "max_future": T - 1, "distance_bias": rand(H, 2 * T - 1)},
    "key_bias": {"key_bias": rand(1, 1, T)},
    "key_span": {"key_span": rand(1, 1, T).abs(), "ramp": 4.0},
    "forget": {"forget": -rand(1, H, T).abs().cumsum(-1)},
    "documents": {"documents": torch.arange(T) // 4},
    "sink_logits": {"sink_logits": rand(H)},
    "sink_tokens": {"reach": 3, "sink_tokens": 2},
    "orders": {"reach": 4, "orders": (ORDER, ORDER)},
    "blocks": {"blocks": BlockIndex.from_dense(BAND[None].expand(H, T, T), 16)},
    "paper_compat": {"paper_compat": True},
    "stride": {"stride": [2, 3]},
    "skip": {"skip": [1, 4]},
}
"""for each term a rule that has it, and that would mean something else without it"""
MEANINGLESS = {"heads": "a size"}
WITHOUT = {
    "span": {"span": None},
    "ramp": {"ramp": 4.0},
    "max_future": {"max_future": 0},
    "sink_tokens": {"sink_tokens": 0},
}
BACKENDS = ("native", "flex", "banded")
Q, K, V = rand(1, H, T, D), rand(1, H, T, D), rand(1, H, T, D)


def test_every_field_has_a_sample() -> None:
    assert {f.name for f in fields(Rule)} == {*SAMPLES, *MEANINGLESS}


@pytest.mark.parametrize("term", SAMPLES)
def test_samples_depend_on_their_term(term: str) -> None:
    unset = {f.name: f.default for f in fields(Rule)}
    without = {**SAMPLES[term], term: unset[term], **WITHOUT.get(term, {})}
    with_it, bare = (attend(Q, K, V, Rule(H, **terms), backend="reference").out for terms in (SAMPLES[term], without))
    assert not torch.allclose(with_it, bare, atol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("term", SAMPLES)
def test_backend_serves_or_refuses_each(term: str, backend: str) -> None:
    rule = Rule(H, **SAMPLES[term])
    expected = attend(Q, K, V, rule, backend="reference")
    with torch.no_grad():
        try:
            found = attend(Q, K, V, rule, backend=backend)
        except ValueError as error:
            assert str(error).startswith(f"backend {backend!r} cannot serve this call") and term in str(error)
            return
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-5)


SEVERAL = {
    "HeadGroups": HeadGroups([Rule(1, reach=3), Rule(1, sink_tokens=1, reach=2)]),
    "Union": Union(Rule(H, reach=3, sink_tokens=2), Rule(H, stride=4, skip=4)),
    "HeadGroups of a Union": HeadGroups([Union(Rule(1, reach=3), Rule(1, stride=2, skip=4)), Rule(1, skip=2)]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SEVERAL)
def test_backend_serves_several_rules(name: str, backend: str) -> None:
    with torch.no_grad():
        expected, found = (attend(Q, K, V, SEVERAL[name], backend=one) for one in ("reference", backend))
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SEVERAL)
def test_several_rules_have_the_interface_of_one(name: str) -> None:
    rule = SEVERAL[name]
    alone = [rule.for_heads([head]) for head in range(H)]
    assert rule.limits() == [part.limits()[0] for part in alone]
    assert rule.reach_list() == [part.reach_list()[0] for part in alone]
    assert rule.causal and not rule.paper_compat and not rule.dynamic
    more = Rule(H, causal=False, key_bias=rand(1, 1, T))
    left, right = (attend(Q, K, V, both, backend="reference").out for both in (rule + more, more + rule))
    assert torch.equal(left, right) and not torch.equal(left, attend(Q, K, V, rule, backend="reference").out)
    rings = Rings(K[0], V[0], torch.tensor([T]), torch.tensor([T - 1, T - 1]))
    with pytest.raises(ValueError, match=f"rule is of type {type(rule).__name__}; expected a Rule"):
        attend_rings(Q[0, :, None, -1:], rings, rule)  # pyright: ignore


@pytest.mark.parametrize("backend", ["auto", "native", "banded"])
@pytest.mark.parametrize("term", SAMPLES)
def test_rings_serve_or_refuse_each(term: str, backend: str) -> None:
    rule = Rule(H, **SAMPLES[term])
    kept = rule.sink_tokens
    keys, values = (torch.cat([t[:, h, i] for h in range(H) for i in (slice(0, kept), slice(0, T))], 1) for t in (K, V))
    rings = Rings(keys, values, torch.tensor([T, T]), torch.tensor([T - 1]), kept)
    try:
        found = attend_rings(Q[:, :, -1:], rings, rule, backend=backend)
    except ValueError as error:
        assert term in str(error) or "causal" in str(error)
        return
    expected = attend(Q[:, :, -1:], K, V, rule, backend="reference")
    torch.testing.assert_close(found.out, expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-4, atol=1e-5)
