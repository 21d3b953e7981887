"""The fixed sparse mechanisms: what each sees, from its paper's equation; values, gradients, causality, streaming."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spanformer.attention import (
    Attention,
    BigBird,
    Blockwise,
    DilatedWindow,
    FixedSparse,
    Full,
    ImageLocal1D,
    ImageLocal2D,
    StridedSparse,
    View,
    Window,
)
from spanformer.attention.blockwise import shifted
from spanformer.attention.image_local import order
from support.dense import held_to_the_oracle

Sees = Callable[[int, int, int, int], bool]  # of the head, i, j and the length


def image(_h: int, i: int, j: int, _n: int) -> bool:
    """Blocks of 2 × 3 in lines of 12 pixels, two lines above and one column beside."""
    tokens = order(12, 40, (2, 3)).tolist()
    (y, x), (ky, kx) = divmod(tokens[i], 12), divmod(tokens[j], 12)
    top, left = y - y % 2, x - x % 3
    return top - 2 <= ky < top + 2 and left - 1 <= kx < left + 4


def big_bird_without_draws(_h: int, i: int, j: int, _n: int) -> bool:
    a, b = i // 16, j // 16
    return abs(a - b) <= 1 or a < 2 or b < 2


MADE: dict[str, tuple[Callable[[bool], Attention], Sees]] = {
    "full": (lambda c: Full(2, causal=c), lambda h, i, j, n: True),
    "window": (lambda c: Window(2, 20, causal=c), lambda h, i, j, n: abs(i - j) < 20),
    "dilated": (
        lambda c: DilatedWindow(2, 6, [1, 5], causal=c),
        lambda h, i, j, n: abs(i - j) % (1, 5)[h] == 0 and abs(i - j) <= 5 * (1, 5)[h],
    ),
    "strided, merged": (
        lambda c: StridedSparse(2, 9, causal=c), lambda h, i, j, n: abs(i - j) <= 9 or (i - j) % 9 == 0,
    ),
    "strided, by head": (
        lambda c: StridedSparse(2, 9, use="heads", causal=c),
        lambda h, i, j, n: ((i - j) % 9 == 0) if h else abs(i - j) <= 9,
    ),
    "strided, odd layer": (
        lambda c: StridedSparse(2, 9, use="layers", layer=3, causal=c), lambda h, i, j, n: (i - j) % 9 == 0,
    ),
    "fixed, merged": (
        lambda c: FixedSparse(2, 20, 3, causal=c), lambda h, i, j, n: i // 20 == j // 20 or j % 20 >= 17,
    ),
    "fixed, by head": (
        lambda c: FixedSparse(2, 20, 3, use="heads", causal=c),
        lambda h, i, j, n: j % 20 >= 17 if h else i // 20 == j // 20,
    ),
    "fixed, even layer": (
        lambda c: FixedSparse(2, 20, 3, use="layers", layer=2, causal=c), lambda h, i, j, n: i // 20 == j // 20,
    ),
    "image, 1-D": (
        lambda c: ImageLocal1D(2, 24, 10, causal=c),
        lambda h, i, j, n: i // 24 * 24 - 10 <= j < i // 24 * 24 + 24 + 10,
    ),
    "image, 2-D": (lambda c: ImageLocal2D(2, 12, (2, 3), (2, 1), causal=c), image),
    "blockwise": (
        lambda c: Blockwise(2, 4, causal=c),
        lambda h, i, j, n: (i // -(-n // 4) - h) % 4 == j // -(-n // 4),
    ),
    "BigBird": (lambda c: BigBird(2, 16, tokens=2, random=0, causal=c), big_bird_without_draws),
}  # fmt: skip


def mask_of(sees: Sees, heads: int, length: int, causal: bool) -> Tensor:
    t = range(length)
    return torch.tensor(
        [[[(j <= i or not causal) and sees(h, i, j, length) for j in t] for i in t] for h in range(heads)]
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("name", MADE)
def test_values_and_gradients_are_those_of_the_equation(name: str, causal: bool) -> None:
    make, sees = MADE[name]
    for length in (1, 145):
        module = make(causal)
        mask = mask_of(sees, 2, length, causal)
        held_to_the_oracle(module.rule(View(length=length)), mask, "native", batch=1)


def test_big_bird_samples_per_head_and_block() -> None:
    causal, both = (BigBird(3, 16, tokens=2, random=3, seed=7, causal=c) for c in (True, False))
    at = torch.arange(0, 640, 16)
    for module, is_causal in ((causal, True), (both, False)):
        rows = torch.stack([p.visible(at[:, None], at, causal=is_causal, length=640) for p in module.patterns])
        local = torch.tensor([[big_bird_without_draws(0, int(i), int(j), 0) for j in at] for i in at])
        extra = (rows & ~local).sum(-1)
        assert extra[:, 7:].eq(3).all() if is_causal else extra[:, 2:].eq(3).all()
        assert not torch.equal(rows[0], rows[1])
        held_to_the_oracle(
            module.rule(View(length=300)),
            torch.stack([p.visible(torch.arange(300)[:, None], torch.arange(300), causal=is_causal, length=300)
                         for p in module.patterns]),
            "native", batch=1, kv_heads=3,
        )  # fmt: skip


CAUSAL = [make(True) for make, _ in MADE.values()] + [BigBird(2, 16, causal=True)]


@pytest.mark.parametrize("module", CAUSAL, ids=lambda m: repr(m)[:40])
def test_future_tokens_have_no_effect(module: Attention) -> None:
    """Neither other tokens ahead nor more of them: what was seen stays seen as a text grows."""
    if isinstance(module, Blockwise):
        module = Blockwise(2, 4, size=10, causal=True)  # blocks of a share of the text move as it grows
    q, k, v = (torch.randn(1, 2, 130, 8, generator=torch.Generator().manual_seed(1)) for _ in range(3))
    short = module(q[:, :, :97], k[:, :, :97], v[:, :, :97], module.rule(View(length=97)), View()).out
    long = module(q, k, v, module.rule(View(length=130)), View()).out
    assert torch.allclose(short, long[:, :, :97], atol=2e-6)


@pytest.mark.parametrize("module", CAUSAL, ids=lambda m: repr(m)[:40])
def test_token_by_token_equals_one_pass(module: Attention) -> None:
    if isinstance(module, Blockwise):
        module = Blockwise(2, 4, size=10, causal=True)
    q, k, v = (torch.randn(1, 2, 90, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    whole = module(q, k, v, module.rule(View(length=90)), View()).out
    for t in (1, 2, 40, 77, 90):
        view = View(x=torch.zeros(1, 1, 16), length=t)
        one = module(q[:, :, t - 1 : t], k[:, :, :t], v[:, :, :t], module.rule(view), View()).out
        assert torch.allclose(one[:, :, 0], whole[:, :, t - 1], atol=2e-6), t


def test_permutations() -> None:
    assert shifted(4, 1) == [3, 0, 1, 2]
    module = Blockwise(5, 3)
    assert [getattr(p, "permutation", None) for p in module.patterns] == [(0, 1, 2)] * 3 + [(2, 0, 1), (1, 2, 0)]


def test_order_of_an_image() -> None:
    assert order(4, 4, (2, 2)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_sparse_bad_arguments() -> None:
    for words, make in (
        ("use is 'both'; expected one of merged, heads, layers", lambda: StridedSparse(2, 8, use="both")),
        (
            "heads is 1 with use 'heads'; expected at least 2, one for each factor",
            lambda: FixedSparse(1, 8, 2, use="heads"),
        ),
        ("window is 2; expected an odd number of blocks", lambda: BigBird(2, window=2)),
        ("blocks is 0; expected 1 … 4,096", lambda: Blockwise(2, 0)),
        ("pattern is a list of 3 for 2 heads", lambda: DilatedWindow(2, 4, [1, 2, 3])),
        ("height is 5 and width 4; expected multiples of the block, 2 × 2", lambda: order(4, 5, (2, 2))),
    ):
        with pytest.raises(ValueError, match=words):
            make()
