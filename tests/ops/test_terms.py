"""No backend ignores a term: for every field of Rule, it gives what the reference gives, or refuses with a sentence
that names the field. A field that has no sample here fails."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from spanformer import BlockIndex, Rings, Rule, attend, attend_rings

H, T, D = 2, 12, 16
G = torch.Generator().manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=G)


BAND = (torch.arange(T)[:, None] - torch.arange(T)).abs() < 3
SAMPLES = {
    "causal": {"causal": False},
    "reach": {"reach": [3, 5]},
    "span": {"span": torch.tensor([0.5, 2.0]), "ramp": 4.0},
    "ramp": {"span": torch.tensor([0.5, 2.0]), "ramp": 2.0},
    "distance_bias": {"distance_bias": rand(H, T)},
    "distance_vec": {"distance_vec": rand(1, T, D)},
    "distance_value": {"distance_value": rand(1, 4, D)},
    "distance_scale": {"distance_scale": rand(H, T)},
    "ahead": {"causal": False, "ahead": T - 1, "distance_bias": rand(H, 2 * T - 1)},
    "key_bias": {"key_bias": rand(1, 1, T)},
    "key_span": {"key_span": rand(1, 1, T).abs(), "ramp": 4.0},
    "forget": {"forget": -rand(1, H, T).abs().cumsum(-1)},
    "documents": {"documents": torch.arange(T) // 4},
    "sinks": {"sinks": rand(H)},
    "kept": {"reach": 3, "kept": 2},
    "blocks": {"blocks": BlockIndex.from_dense(BAND[None].expand(H, T, T), 16)},
    "original": {"original": True},
    "apart": {"apart": (Rule(1, reach=3), Rule(1, kept=1, reach=2))},
    "stride": {"stride": [2, 3]},
    "skip": {"skip": [1, 4]},
    "also": {"reach": 3, "also": Rule(H, stride=4, skip=4)},
}
"""for each term a rule that has it, and that would mean something else without it"""
MEANINGLESS = {"heads": "a size", "penalty": "for the loss alone"}
WITHOUT = {"span": {"span": None}, "ramp": {"ramp": 4.0}, "ahead": {"ahead": 0}, "kept": {"kept": 0}}
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
def test_a_backend_serves_or_refuses_each(term: str, backend: str) -> None:
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


@pytest.mark.parametrize("backend", ["auto", "native", "banded"])
@pytest.mark.parametrize("term", SAMPLES)
def test_rings_serve_or_refuse_each(term: str, backend: str) -> None:
    rule = Rule(H, **SAMPLES[term])
    kept = rule.kept
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
