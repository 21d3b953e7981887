"""Attention in buckets against the dense union of rounds in float64: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spanformer.ops.bucket_rounds import attend_alike, attend_buckets
from spanformer.ops.buckets import Seen, sort_tokens, with_itself
from support.cases import differences
from support.content_oracle import union

RAMP = 4.0


def inputs(n: int, rounds: int, t: int, buckets: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(n, t, 8, generator=g, dtype=torch.float64) for name in ("q", "k", "v", "g")}
    made["g_lse"] = torch.randn(n, t, generator=g, dtype=torch.float64)
    made["span"] = torch.rand(n, generator=g, dtype=torch.float64) * 6
    return made, torch.randint(0, buckets, (n, rounds, t), generator=g)


def dense(q: Tensor, k: Tensor, v: Tensor, span: Tensor | None, ids: Tensor, window: int, itself: int):
    spans = None if span is None else span.double()[:, None, None, None]
    weight = union(ids[:, None], window, spans, None if span is None else RAMP, itself)[:, 0].to(q.dtype)
    weight = weight * (q @ k.transpose(1, 2) / 3).exp()
    total = weight.sum(-1)
    return weight @ v / torch.where(total == 0, 1, total)[..., None], torch.where(total == 0, 1, total).log()


def outcome(made: dict[str, Tensor], dtype: torch.dtype, run, learned: bool) -> dict[str, Tensor]:
    leaves = {name: made[name].to(dtype, copy=True).requires_grad_() for name in ("q", "k", "v")}
    span = made["span"].to(dtype, copy=True).requires_grad_() if learned else None
    out, lse = run(*leaves.values(), span)
    lse = torch.where(lse == -torch.inf, 0, lse)
    loss = (out * made["g"].to(dtype)).sum() + (lse * made["g_lse"].to(lse.dtype)).sum()
    names, every = (["span"], [span]) if span is not None else ([], [])
    grads = torch.autograd.grad(loss, [*leaves.values(), *every], allow_unused=True)
    grads = [torch.zeros_like(made["span" if n == 3 else "q"]) if g is None else g for n, g in enumerate(grads)]
    found = {"out": out, "lse": lse} | dict(zip((*leaves, *names), grads, strict=True))
    return {name: t.detach().double() for name, t in found.items()}


@pytest.mark.parametrize("backend", ["reference", "banded", "native"])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("itself", [0, 1])
@pytest.mark.parametrize("t, rounds, buckets", [(1, 1, 2), (31, 2, 4), (33, 4, 3), (101, 3, 6), (64, 2, 1)])
def test_union_of_rounds_is_exact(
    backend: str, learned: bool, itself: int, t: int, rounds: int, buckets: int
) -> None:  # fmt: skip
    made, ids = inputs(3, rounds, t, buckets)
    dtype = torch.float32 if backend == "native" else torch.float64

    def ours(q: Tensor, k: Tensor, v: Tensor, span: Tensor | None):
        seen = Seen(7, itself=bool(itself), span=span, ramp=RAMP, scale=1 / 3, backend=backend)
        return attend_buckets(q, k, v, sort_tokens(ids), seen)

    def plain(q: Tensor, k: Tensor, v: Tensor, span: Tensor | None):
        return dense(q, k, v, span, ids, 7, itself)

    truth, same = (outcome(made, d, plain, learned) for d in (torch.float64, dtype))
    wrong = differences(truth, same, outcome(made, dtype, ours, learned), dtype, factor=8)
    assert not wrong, wrong


def test_documents_part_buckets() -> None:
    made, ids = inputs(2, 2, 40, 3)
    documents = (torch.arange(40) // 13).expand(2, 40)
    q, k, v = (made[name] for name in "qkv")
    whole = attend_buckets(q, k, v, sort_tokens(ids, documents), Seen(50, backend="reference"))
    for start in (0, 13, 26, 39):
        some = slice(start, start + 13)
        apart = sort_tokens(ids[..., some])
        alone = attend_buckets(q[:, some], k[:, some], v[:, some], apart, Seen(50, backend="reference"))
        torch.testing.assert_close(whole.out[:, some], alone.out)


def test_rows_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ids = inputs(5, 2, 20, 3)
    run = lambda q, k, v, span: attend_buckets(q, k, v, sort_tokens(ids), Seen(4, span=span, ramp=RAMP))  # noqa: E731
    whole = outcome(made, torch.float64, run, True)
    monkeypatch.setattr("spanformer.ops.bucket_rounds.ROOM", 2 * 20 * 8)
    for name, t in outcome(made, torch.float64, run, True).items():
        torch.testing.assert_close(t, whole[name])


def test_dropout_is_the_same_in_the_backward_pass() -> None:
    """d out / d v is the dropped weights, so that out is linear in v by them."""
    made, ids = inputs(2, 2, 30, 3)
    v = made["v"].requires_grad_()
    torch.manual_seed(3)
    found = attend_buckets(made["q"], made["k"], v, sort_tokens(ids), Seen(9, dropout=0.4))
    (grad,) = torch.autograd.grad(found.out.sum(), v)
    torch.testing.assert_close((grad * v).sum(), found.out.sum())
    torch.manual_seed(4)
    other = attend_buckets(made["q"], made["k"], v, sort_tokens(ids), Seen(9, dropout=0.4))
    assert not torch.allclose(other.out, found.out)


def test_rows_that_see_nothing_see_themselves() -> None:
    made, _ = inputs(1, 1, 6, 2)
    ids = torch.tensor([[[0, 1, 0, 2, 3, 1]]])
    found = attend_buckets(made["q"], made["k"], made["v"], sort_tokens(ids), Seen(3))
    assert (found.lse == -torch.inf).tolist() == [[True, True, False, True, True, False]]
    own = (made["q"] * made["k"]).sum(-1)
    whole = with_itself(found, own, made["v"])
    alone = [0, 1, 3, 4]
    assert torch.equal(whole.out[:, alone], made["v"][:, alone]) and torch.equal(whole.lse[:, alone], own[:, alone])
    assert torch.equal(whole.out[:, [2, 5]], found.out[:, [2, 5]])


@pytest.mark.parametrize("backend", ["reference", "banded", "native"])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("t", [1, 33, 101])
def test_unit_keys_are_the_queries_at_length_1(backend: str, learned: bool, t: int) -> None:
    """Against keys that are given, and rows that saw nothing filled in afterwards: values, lse and every gradient."""
    made, ids = inputs(3, 3, t, 9)
    dtype, among = torch.float32 if backend == "native" else torch.float64, sort_tokens(ids)

    def seen(span: Tensor | None, dtype: torch.dtype) -> Seen:
        return Seen(
            5, span=span, ramp=RAMP, backend="reference" if backend != "banded" and dtype == torch.float64 else backend
        )

    def plain(q: Tensor, k: Tensor, v: Tensor, span: Tensor | None):
        unit = q / q.norm(dim=-1, keepdim=True)
        return with_itself(attend_buckets(q, unit, v, among, seen(span, q.dtype)), (q * unit).sum(-1), v)

    def ours(q: Tensor, k: Tensor, v: Tensor, span: Tensor | None):
        return attend_alike(q, v, among, seen(span, q.dtype))

    truth, same, got = (
        outcome(made, d, f, learned) for d, f in ((torch.float64, plain), (dtype, plain), (dtype, ours))
    )
    wrong = differences(truth, same, got, dtype, factor=8)
    assert not wrong, wrong


def test_keys_that_are_the_queries_get_both_gradients() -> None:
    made, ids = inputs(2, 2, 40, 3)
    q, among = made["q"].requires_grad_(), sort_tokens(ids)
    once, twice = (attend_buckets(q, k, made["v"], among, Seen(6)).out.square().sum() for k in (q, q * 1))
    torch.testing.assert_close(*(torch.autograd.grad(each, q)[0] for each in (once, twice)))
