"""Rotary positions against complex numbers in float64."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.position import Rotary


def by_complex_numbers(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """x [B, H, T, D], positions [B, T]: component c and c + D/2 are one number, multiplied by e^(i·angle)."""
    half = x.shape[-1] // 2
    number = torch.complex(x[..., :half], x[..., half:])
    speed = torch.tensor([base ** (-2 * c / x.shape[-1]) for c in range(half)], dtype=torch.float64)
    angle = positions[:, None, :, None].double() * speed
    turned = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def qk(tq: int, tk: int, d: int, h: int = 4, hkv: int = 2, b: int = 2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(tq * tk + d)
    q = torch.randn(b, h, tq, d, generator=g, dtype=torch.float64, requires_grad=True)
    k = torch.randn(b, hkv, tk, d, generator=g, dtype=torch.float64, requires_grad=True)
    return q, k


def check(rotary: Rotary, q: Tensor, k: Tensor, view: View, q_at: Tensor, k_at: Tensor) -> None:
    for got, x, at in zip(rotary.encode(q, k, view), (q, k), (q_at, k_at), strict=True):
        expected = by_complex_numbers(x, at.expand(len(x), -1), rotary.base)
        assert got.dtype == x.dtype
        torch.testing.assert_close(got, expected)
        weight = torch.randn_like(got)
        torch.testing.assert_close(torch.autograd.grad(got, x, weight), torch.autograd.grad(expected, x, weight))


@pytest.mark.parametrize("d", [2, 8, 64])
@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (1, 63), (7, 7), (5, 17)])
def test_without_positions_queries_are_the_last_of_the_keys(tq, tk, d):
    q, k = qk(tq, tk, d)
    keys = torch.arange(tk)[None]
    check(Rotary(d), q, k, View(), keys[:, tk - tq :], keys)


@pytest.mark.parametrize("rows", [False, True])
def test_given_positions(rows):
    q, k = qk(3, 5, 6)
    q_at, k_at = torch.tensor([[90, 1, 7], [0, 12, 4]]), torch.tensor([[5, 4, 3, 2, 99], [1, 0, 8, 8, 7]])
    if rows:
        check(Rotary(6, base=500.0), q, k, View(q_positions=q_at, k_positions=k_at), q_at, k_at)
    else:
        check(Rotary(6), q, k, View(q_positions=q_at[0], k_positions=k_at[0]), q_at[:1], k_at[:1])


def test_one_of_the_two_alone():
    rotary, (q, k) = Rotary(8), qk(3, 9, 8)
    turned_q, turned_k = rotary.encode(q, k, View())
    torch.testing.assert_close(rotary.rotate(q, torch.arange(6, 9)), turned_q)
    torch.testing.assert_close(rotary.rotate(k, torch.arange(9)), turned_k)


@pytest.mark.parametrize("shift", [1, 1000, 10_000_000])
def test_scores_depend_on_the_distance_only(shift):
    rotary, (q, k) = Rotary(8), qk(6, 6, 8, hkv=4)
    here, there = torch.arange(6), torch.arange(6) + shift
    scores = [
        turned[0] @ turned[1].transpose(-1, -2)
        for at in (here, there)
        for turned in [rotary.encode(q, k, View(q_positions=at, k_positions=at))]
    ]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-6, atol=1e-8)  # float64 angles of 1e7 keep 9 digits
    in_float32 = rotary.rotate(q.float(), there)
    torch.testing.assert_close(in_float32.double(), rotary.rotate(q, there), rtol=1e-5, atol=1e-6)


def test_more_queries_than_keys_still_end_together():
    rotary, (q, k) = Rotary(4), qk(5, 3, 4, hkv=4)
    turned = rotary.encode(q, k, View())
    places = View(q_positions=torch.arange(-2, 3), k_positions=torch.arange(3))
    expected = rotary.encode(q, k, places)
    torch.testing.assert_close(turned[0] @ turned[1].mT, expected[0] @ expected[1].mT)


def test_kept_table_follows_length_and_dtype_and_serves_training_after_inference():
    rotary = Rotary(8)
    q, k = (x.float() for x in qk(2, 9, 8))
    with torch.inference_mode():
        rotary.encode(q, k, View())
    rotary.encode(q, k, View())[0].sum().backward()
    for tk in (5, 16, 17, 40, 3):
        q, k = qk(2, tk, 8)
        keys = torch.arange(tk)[None]
        check(rotary, q, k, View(), keys[:, tk - 2 :], keys)
        single = rotary.encode(q.float(), k.float(), View())[1]
        assert single.dtype == torch.float32
        single.sum().backward()
    assert rotary.state_dict() == {}


def test_half_precision_is_rounded_once():
    rotary, (q, k) = Rotary(64), qk(50, 50, 64)
    q, k = q.detach().bfloat16(), k.detach().bfloat16()
    got = rotary.encode(q, k, View())[0]
    exact = rotary.encode(q.double(), k.double(), View())[0]
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5)


def test_rotary_bad_arguments():
    for size in (7, 0, -2):
        message = f"head_dim is {size}; expected an even number, because rotary positions rotate pairs of components"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            Rotary(size)
    with pytest.raises(ValueError, match=r"^base is 0; expected a positive number$"):
        Rotary(8, base=0)
    with pytest.raises(
        ValueError, match=r"^the head size is 8; expected 6, for which these rotary positions were made$"
    ):
        Rotary(6).encode(*qk(2, 2, 8), View())
