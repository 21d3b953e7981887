"""Pairs that are within reach in another order of the tokens are hidden: values and every gradient against a dense
float64 softmax, on every backend that serves `Rule.orders`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spanformer import Rule, attend


def places(order: Tensor, buckets: Tensor, gap: int) -> Tensor:
    """[T]: the place of each token where tokens are sorted by bucket; buckets are `gap` apart."""
    return torch.argsort(order) + gap * buckets


def inputs(t: int, orders: int, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v [2, 1, T, 8]; documents [2, T], ascending; places [E, 2, T] in other orders."""
    g = torch.Generator().manual_seed(seed)
    qkv = [torch.randn(2, 1, t, 8, generator=g, dtype=torch.float64) for _ in range(3)]
    documents = torch.randint(0, 4, (2, t), generator=g).sort(1).values
    buckets = torch.randint(0, 3, (orders, 2, t), generator=g)
    other = torch.stack([
        torch.stack([places(torch.argsort(b, stable=True), b, 100) for b in rows]) for rows in buckets
    ])  # fmt: skip
    return qkv, documents, other


def dense(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, other: Tensor, span: Tensor, ramp: float, shift: int):
    t = q.shape[2]
    d = torch.arange(t)[:, None] - torch.arange(t) - shift
    m = ((ramp + span - d) / ramp).clamp(0, 1)
    seen = (d >= 0) & (m > 0) & (documents[:, :, None] == documents[:, None])
    apart = other[:, :, :, None] - other[:, :, None] - shift
    seen = seen & ~((apart >= 0) & (((ramp + span.detach() - apart) / ramp) > 0)).any(0)
    weight = torch.where(seen[:, None], m.expand(seen.shape)[:, None] * (q @ k.transpose(-1, -2) / 8**0.5).exp(), 0)
    total = weight.sum(-1, keepdim=True)
    return weight @ v / torch.where(total == 0, 1, total), total[..., 0]


@pytest.mark.parametrize("backend", ["reference", "banded", "native"])
@pytest.mark.parametrize("span", ["reach", "static", "dynamic"])
@pytest.mark.parametrize("t, orders", [(1, 1), (31, 1), (33, 2), (101, 3)])
def test_pairs_in_other_orders_are_hidden(backend: str, span: str, t: int, orders: int) -> None:
    (q, k, v), documents, other = inputs(t, orders)
    ramp, z = (1e-6, 6.0) if span == "reach" else (4.0, 5.3)
    size = () if span != "dynamic" else (2, 1, t)
    found = []
    for dtype in (torch.float64, torch.float32 if backend == "native" else torch.float64):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        spans = torch.full(size, z, dtype=dtype, requires_grad=span != "reach")
        if not found:
            of_query = spans if span != "dynamic" else spans[:, 0, :, None]
            out, total = dense(*leaves, documents, other, of_query, ramp, 1)
            lse = torch.where(total == 0, 0, total).clamp(min=1e-300).log()
        else:
            terms = {"reach": {"reach": 7}, "static": {"span": spans.view(-1)}, "dynamic": {"span": spans}}[span]
            rule = Rule(1, ramp=4.0, paper_compat=True, documents=documents, orders=(other, other), **terms)
            out, lse = attend(*leaves, rule, backend=backend)
            assert torch.equal(lse == -torch.inf, found[0] == 0)
        total = found[0] if found else total
        loss = (out * v.to(dtype)).sum() + torch.where(total == 0, 0, lse).sum()
        every = [*leaves, *([spans] if span != "reach" else [])]
        grads = torch.autograd.grad(loss, every)
        found.append(total)
        found.append([out.detach(), *grads])
    true, got = found[1], found[3]
    for a, b in zip(true, got, strict=True):
        close = 1e-9 if b.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(b.double().view(a.shape), a, rtol=close, atol=close)


def test_queries_at_given_positions() -> None:
    """As a memory calls it: keys in no order, queries elsewhere."""
    (q, k, v), documents, other = inputs(40, 2)
    at = torch.randperm(40)
    rule = Rule(1, reach=5, documents=documents, orders=(other, other))
    whole = attend(q, k, v, rule, backend="reference")
    part = Rule(1, reach=5, documents=(documents[:, 20:], documents[:, at]), orders=(other[..., 20:], other[..., at]))
    for backend, dtype in (("reference", torch.float64), ("banded", torch.float64), ("native", torch.float32)):
        some = (x.to(dtype) for x in (q[:, :, 20:], k[:, :, at], v[:, :, at]))
        found = attend(*some, part, backend=backend, q_positions=torch.arange(20, 40), k_positions=at)
        torch.testing.assert_close(found.out.double(), whole.out[:, :, 20:], rtol=1e-5, atol=1e-5)


def test_bad_orders_are_refused() -> None:
    other = torch.zeros(1, 1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"orders is beside sink_tokens; expected a causal rule"):
        Rule(1, orders=(other, other), sink_tokens=2)
    with pytest.raises(ValueError, match=r"orders is beside causal=False"):
        Rule(1, orders=(other, other), causal=False)
    with pytest.raises(ValueError, match=r"expected the places \(of queries, of keys\)"):
        Rule(1, orders=other)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"orders has shape .* expected \[E, 1 or B, T\] of int64"):
        Rule(1, orders=(other.int(), other))
    q = torch.randn(1, 1, 5, 4)
    with pytest.raises(ValueError, match=r"orders\[0\] has shape \[1, 1, 4\] .*expected \[E, 1 or 1, 5\]"):
        attend(q, q, q, Rule(1, orders=(other, other)))
    with pytest.raises(ValueError, match=r"backend 'flex' cannot serve this call: .*does not support orders"):
        attend(q, q, q, Rule(1, orders=(other.new_zeros(1, 1, 5),) * 2), backend="flex")
