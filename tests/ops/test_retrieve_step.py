"""A decoding step over a store by the kernel, against dense attention in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spanformer.ops import Attended, kernel
from spanformer.ops.retrieve_step import attend_step, kernel_serves
from spanformer.ops.search import Codes, quantise

pytestmark = pytest.mark.skipif(kernel.problem() is not None, reason="the kernel is not built")
B, KV, SHARED, GROUPS = 2, 3, 2, [2, 0]


class Stores:
    """n rows for KV heads 2 and 0 of two texts, and a query of every head."""

    def __init__(self, n: int, d: int, dv: int, near: float = 1.0) -> None:
        self.random, self.n, self.d = torch.Generator().manual_seed(n + d), n, d
        self.keys, self.values = self.drawn(4, n + 1, d), self.drawn(4, n + 1, dv)
        self.codes = Codes(4, d)
        self.codes.append(self.keys[:, :n])
        self.codes.reserve(n + 1)
        self.q, self.new = self.drawn(B, KV * SHARED, 1, d), (self.drawn(B, KV, 1, d), self.drawn(B, KV, 1, dv))
        self.near = Attended(self.drawn(B, KV * SHARED, 1, dv), near * self.drawn(B, KV * SHARED, 1))

    def drawn(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random)

    def step(self, count: int, k: int, new: bool = True) -> tuple[Attended, Tensor]:
        assert kernel_serves(self.codes, self.q)
        stored, groups = (self.keys, self.values), torch.tensor(GROUPS)
        return attend_step(
            self.codes, stored, groups, self.q, self.new if new else None, KV, count, self.near, k, 0.3
        )  # fmt: skip

    def dense(self, count: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and certificates by a softmax over the k best of all scores, in float64."""
        out, lse = (t.double().clone() for t in self.near)
        shares = []
        for m in range(4):
            heads = [GROUPS[m % 2] * SHARED + s for s in range(SHARED)]
            for h in heads:
                at = (m // 2, h, 0)
                scores = 0.3 * self.keys[m, :count].double() @ self.q[at].double()
                best, ids = scores.topk(min(k, count))
                whole = torch.cat([lse[at][None], best])
                weights = whole.softmax(0)
                out[at] = weights[0] * out[at] + weights[1:] @ self.values[m, ids].double()
                lse[at] = whole.logsumexp(0)
                rest = math.log(count - k) + best[-1] if count > k else torch.tensor(-math.inf)
                shares.append((rest - lse[at]).sigmoid())
        return out, lse, torch.stack(shares).view(2, -1, 1)


@pytest.mark.parametrize(
    "n, d, dv, k", [(1, 1, 3, 1), (31, 5, 7, 4), (63, 64, 64, 63), (111, 77, 20, 16), (300, 64, 64, 64)]
)
def test_step_equals_softmax_over_the_best_rows(n: int, d: int, dv: int, k: int) -> None:
    stores = Stores(n, d, dv)
    for count in (n, n // 2, 0):
        out, lse, shares = stores.dense(count, k) if count else (*stores.near, torch.zeros(2, 4, 1))
        found, share = stores.step(count, k, new=False)
        torch.testing.assert_close(found.out.double(), out.double(), rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(found.lse.double(), lse.double(), rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(share.double(), shares.double(), rtol=2e-5, atol=2e-6)
    assert stores.codes.count == n


def test_new_token_is_stored_as_a_write_would_store_it() -> None:
    stores, n = Stores(40, 64, 16), 40
    stores.new[0][0, 2] *= 9  # the longest key
    before = [t.clone() for t in (stores.codes.error, stores.codes.longest)]
    stores.step(30, 5)
    keys, values = (t[:, GROUPS].flatten(0, 1)[:, 0] for t in stores.new)
    assert torch.equal(stores.keys[:, n], keys) and torch.equal(stores.values[:, n], values)
    codes, scales = quantise(keys)
    assert stores.codes.scales is not None and stores.codes.count == n + 1
    assert torch.equal(stores.codes.rows[:, n], codes) and torch.equal(stores.codes.scales[:, n], scales)
    errors = torch.maximum(before[0], (keys - codes * scales[:, None]).norm(dim=1))
    torch.testing.assert_close(stores.codes.error, errors)
    torch.testing.assert_close(stores.codes.longest, torch.maximum(before[1], keys.norm(dim=1)))


def test_keys_that_codes_cannot_tell_apart_are_decided_in_float32() -> None:
    stores = Stores(200, 16, 8)
    stores.keys[:] = stores.keys[:, :1] + 1e-3 * stores.keys
    stores.codes = Codes(4, 16)
    stores.codes.append(stores.keys[:, :200])
    found, share = stores.step(200, 10, new=False)
    out, _, shares = stores.dense(200, 10)
    torch.testing.assert_close(found.out.double(), out, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(share.double(), shares, rtol=2e-5, atol=2e-6)


def test_numbers_that_are_not_finite_are_never_found() -> None:
    stores = Stores(50, 16, 8)
    stores.keys[:, 7], stores.values[:, 7] = math.nan, math.nan
    stores.codes = Codes(4, 16)
    stores.codes.append(stores.keys[:, :50])
    stores.codes.reserve(51)
    stores.q[0, 0] = math.inf
    stores.new[0][:] = math.nan
    found, share = stores.step(50, 60)
    assert bool(found.out.isfinite().all()) and torch.equal(found.out[0, 0], stores.near.out[0, 0])
    assert not bool(share.any())
    assert stores.codes.scales is not None and bool(stores.codes.scales[:, 50].isnan().all())
    assert bool(stores.codes.longest.isfinite().all())


def test_heads_without_a_store_and_hidden_rings_keep_their_meaning() -> None:
    stores = Stores(20, 8, 8)
    stores.near.lse[:, 0] = -math.inf
    found, _ = stores.step(20, 4, new=False)
    assert torch.equal(found.out[:, 2:4], stores.near.out[:, 2:4])  # KV head 1 has no store
    assert torch.equal(found.lse[:, 2:4], stores.near.lse[:, 2:4])
    out, _, _ = stores.dense(20, 4)
    torch.testing.assert_close(found.out[:, 0].double(), out[:, 0], rtol=2e-5, atol=2e-6)
