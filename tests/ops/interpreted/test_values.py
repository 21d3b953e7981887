"""The Triton kernels in the interpreter: values and every gradient against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from spanformer import Rule, attend
from spanformer.ops.backends.triton import launch, tiles
from support.cases import Case, check
from support.triton_cases import CASES, HALVES, MOST, attend_in_nan, highest

F32, F16 = torch.float32, torch.float16


def check_triton(case: Case, dtype: torch.dtype = F32) -> None:
    check(case, "triton", dtype, highest=highest(case, dtype), call=attend_in_nan)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32(case: Case) -> None:
    check_triton(case)


@pytest.mark.parametrize("case", HALVES, ids=lambda case: case.name)
def test_float16(case: Case) -> None:
    check_triton(case, F16)


def test_tiles_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 by 64 and 64 by 128, as on a GPU."""
    monkeypatch.undo()
    assert tiles.tile("forward", 64, 2, 130) == tiles.Tile(64, 64, 4, 3)
    check_triton(Case(tq=130, tk=130, terms=("span",), spans=(2.0, 62.0), d=48), F16)


@pytest.mark.parametrize("parts", [1, 3])
def test_keys_in_parts_give_the_same(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "parts_of", lambda *_: (parts, 1))
    check_triton(Case(tq=40, tk=70, terms=MOST, reach=(60, 3)))


@pytest.mark.parametrize("terms", [(), ("span", "sink_logits")], ids=str)
def test_rows_that_see_nothing(terms: tuple[str, ...]) -> None:
    check_triton(Case(b=2, tq=17, tk=17, terms=(*terms, "padding"), reach=(0, 3)))
    q, hidden = torch.randn(1, 2, 3, 16, requires_grad=True), torch.full((1, 1, 3), -torch.inf)
    sinks = torch.tensor([1.0, -torch.inf], requires_grad=True)
    out, lse = attend(q, q, q, Rule(2, key_bias=hidden, sink_logits=sinks), backend="triton")
    assert (out == 0).all() and (lse[:, 0] == 1).all() and (lse[:, 1] == -torch.inf).all()
    grads = torch.autograd.grad(out.sum() + lse[:, 0].sum(), [q, sinks])
    assert (grads[0] == 0).all() and torch.equal(grads[1], torch.tensor([3.0, 0.0]))


def test_no_keys() -> None:
    q, none = torch.randn(1, 2, 3, 16, requires_grad=True), torch.zeros(1, 2, 0, 16)
    sinks = torch.tensor([1.0, 2.0], requires_grad=True)
    out, lse = attend(q, none, none, Rule(2, causal=False, sink_logits=sinks), backend="triton")
    assert (out == 0).all() and (lse[:, 0] == 1).all() and (lse[:, 1] == 2).all()
    grads = torch.autograd.grad(out.sum() + lse.sum(), [q, sinks])
    assert (grads[0] == 0).all() and (grads[1] == 3).all()


@pytest.mark.parametrize("paper_compat", [False, True])
def test_the_future_is_not_read(paper_compat: bool) -> None:
    """Keys of NaN, values of any size, and values of NaN in tiles that no row sees. (In a tile that some row sees,
    0 · NaN would reach the others: docs/attention.md says so.)"""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 80, 16)
    rule, now = Rule(2, span=torch.tensor([9.0, 70.0]), paper_compat=paper_compat), 40
    before = attend(q, k, v, rule, backend="triton")
    q[:, :, now + 1 :] = torch.nan
    first = now + (0 if paper_compat else 1)
    k[:, :, first:] = torch.nan
    v[:, :, first:] *= 1e30
    v[:, :, 64:] = torch.nan
    after = attend(q, k, v, rule, backend="triton")
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old[:, :, : now + 1], new[:, :, : now + 1])
        assert not torch.equal(old[:, :, now + 1 :], new[:, :, now + 1 :])


def test_visible_nan_reaches_its_rows() -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    q[0, 0, 4] = torch.nan
    out, lse = attend(q, k, v, Rule(2), backend="triton")
    assert out[0, 0, 4].isnan().all() and lse[0, 0, 4].isnan()
    assert out.isnan().sum() == 16 and lse.isnan().sum() == 1
    k[0, 1, 6] = torch.nan
    out, _ = attend(q, k, v, Rule(2), backend="triton")
    assert out[0, 1, 6:].isnan().all() and out[0, 1, :6].isfinite().all()


def test_two_runs_are_equal_bit_for_bit() -> None:
    q, k, v = (torch.randn(2, h, 50, 16, requires_grad=True) for h in (4, 2, 2))
    span = torch.tensor([3.0, 20.5, 9.0, 40.0], requires_grad=True)

    def run() -> tuple[torch.Tensor, ...]:
        out, lse = attend(q, k, v, Rule(4, span=span), backend="triton")
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), [q, k, v, span])

    assert all(map(torch.equal, run(), run()))


def test_part_gradients_are_those_of_the_whole() -> None:
    """Keys in two parts under one softmax, as `ring` attention has them."""
    from spanformer.ops.attend import part_gradients

    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))
    span = torch.tensor([7.0, 30.0], requires_grad=True)
    rule = Rule(2, span=span, ramp=9.0)
    out, lse = attend(q, k, v, rule, backend="reference")
    g_out, g_lse = torch.randn_like(out), torch.randn_like(lse)
    true = torch.autograd.grad((out * g_out).sum() + (lse * g_lse).sum(), [q, k, v, span])
    spread = g_lse - (g_out * out).sum(-1)
    given = (t.detach() for t in (q, k, v))
    got = part_gradients(
        *given, Rule(2, span=span.detach(), ramp=9.0), g_out, lse.detach(), spread.detach(), backend="triton",
        dropout=0.0, generator=None, scale=0.25,
    )  # fmt: skip
    assert got is not None
    for mine, exact in zip(got, true, strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-5)
