"""Patterns: each equation against a double loop written from the paper, the algebra, the text, and what runs them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spanformer import Rule, Union, attend
from spanformer.attention import View
from spanformer.attention.pattern import (
    PATTERNS,
    Block,
    Blockwise,
    Dilated,
    Every,
    Fixed,
    Full,
    Global,
    Grid,
    Pattern,
    Random,
    Strided,
    Summary,
    Window,
    parse,
)  # fmt: skip
from spanformer.attention.patterned import Patterned
from support.dense import held_to_the_oracle

LENGTHS = (1, 63, 111, 129)
Sees = Callable[[int, int, int], bool]  # of i, j and the length


def grid(i: int, j: int, _n: int) -> bool:
    """Grid(12, 2, 4, above=3, beside=2): blocks of 2 × 4 in a line of 12 pixels, three blocks a line."""

    def pixel(t: int) -> tuple[int, int]:
        block, inner = divmod(t, 8)
        return block // 3 * 2 + inner // 4, block % 3 * 4 + inner % 4

    (y, x), (ky, kx) = pixel(i), pixel(j)
    top, left = y // 2 * 2, x // 4 * 4
    return top - 3 <= ky <= top + 1 and left - 2 <= kx <= left + 5


EQUATIONS: dict[str, tuple[Pattern, Sees]] = {
    "full": (Full(), lambda i, j, n: True),
    "window": (Window(7), lambda i, j, n: abs(i - j) < 7),
    "one-sided window": (Window(9, 2), lambda i, j, n: -2 <= i - j <= 9),
    "dilated": (Dilated(5, 7), lambda i, j, n: abs(i - j) in (0, 7, 14, 21, 28)),
    "every": (Every(6), lambda i, j, n: (i - j) % 6 == 0),
    "strided": (Strided(8), lambda i, j, n: abs(i - j) <= 8 or (i - j) % 8 == 0),
    "block": (Block(24), lambda i, j, n: i // 24 == j // 24),
    "block and more": (Block(10, 7, 3), lambda i, j, n: i // 10 * 10 - 7 <= j <= i // 10 * 10 + 9 + 3),
    "summary": (Summary(12, 3), lambda i, j, n: j % 12 in (9, 10, 11)),
    "fixed": (Fixed(12, 3), lambda i, j, n: j % 12 >= 9 or i // 12 == j // 12),
    "global": (Global((0, 1, 50)), lambda i, j, n: i in (0, 1, 50) or j in (0, 1, 50)),
    "first": (Global(3, rows=False), lambda i, j, n: j < 3),
    "blockwise": (Blockwise((2, 0, 1)), lambda i, j, n: (2, 0, 1)[i // -(-n // 3)] == j // -(-n // 3)),
    "blockwise, over and over": (
        Blockwise((1, 2, 0), size=10),
        lambda i, j, n: (1, 2, 0)[i // 10 % 3] + i // 30 * 3 == j // 10,
    ),
    "grid": (Grid(12, 2, 4, above=3, beside=2), grid),
    "either": (Window(3) | Global((9,)), lambda i, j, n: abs(i - j) < 3 or i == 9 or j == 9),
    "both": (
        (Window(9) | Every(5)) & Block(40),
        lambda i, j, n: i // 40 == j // 40 and (abs(i - j) < 9 or (i - j) % 5 == 0),
    ),
}  # fmt: skip


def dense(sees: Sees, start: int, length: int, causal: bool) -> Tensor:
    at = range(start, start + length)
    pairs = [[(j <= i or not causal) and sees(i, j, start + length) for j in at] for i in at]
    return torch.tensor(pairs)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation_blocks_and_rule_agree(name: str, causal: bool) -> None:
    pattern, sees = EQUATIONS[name]
    for length, (size, start) in itertools.product(LENGTHS, [(16, 0), (32, 37)]):
        want, at = dense(sees, start, length, causal), torch.arange(start, start + length)
        assert torch.equal(pattern.visible(at[:, None], at, causal=causal, length=start + length), want)
        blocks = pattern.blocks(length, size, start=start, causal=causal)
        assert torch.equal(blocks.visible(at - start, at - start)[0], want), (length, size, start)
        rule = pattern.rule(1, length, start=start, causal=causal, size=size)
        q = torch.zeros(1, 1, length, 4)
        weights = attend(q, q, torch.eye(length)[None, None], rule, backend="reference").out[0, 0]
        assert torch.equal(weights > 0, want), (length, size, start)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("text", [
    "Window(40) | Global([0, 1, 200])", "Block(32, 32, 32) | Global(64) | Random(2, seed=5, size=32, near=1, first=2)",
    "Fixed(48, 5)", "Strided(24)", "Window(30, 7)", "Grid(16, 4, 4, above=5, beside=3)", "Dilated(9, 5) | Window(4)",
])  # fmt: skip
def test_kernel_equals_equation_on_longer_texts(text: str, causal: bool) -> None:
    """Long enough for several segments of keys, with blocks far from the diagonal; and the banded backend."""
    length, pattern, at = 611, parse(text), torch.arange(611)
    mask = pattern.visible(at[:, None], at, causal=causal, length=length)
    rule = pattern.rule(4, length, causal=causal)
    held_to_the_oracle(rule, mask, "native")
    held_to_the_oracle(pattern.rule(2, 150, causal=causal, size=16), mask[:150, :150] if causal else pattern.visible(
        at[:150, None], at[:150], causal=False, length=150), "banded", 1)  # fmt: skip


def test_pattern_for_each_head_by_distance_by_blocks_and_empty() -> None:
    patterns = [Strided(9), Fixed(32, 3), Full(), Window(7) | Global((3,)), Window(5) & Every(7), Window(5) & Global(0)]
    at = torch.arange(203)
    mask = torch.stack([p.visible(at[:, None], at) for p in patterns])
    module = Patterned(6, patterns)
    rule = module.rule(View(length=203))
    assert module.rule_needs() == "positions" and isinstance(rule, Union)
    held_to_the_oracle(rule, mask, "native", batch=1, kv_heads=6)


def test_distance_patterns_need_no_blocks() -> None:
    assert Window(9).rule(2, 100).blocks is None and Window(9).rule(2, 100).limits() == [9, 9]
    assert Dilated(4, 3).rule(2, 100).strides() == [(3, 0)] * 2
    strided = (Strided(8) & Window(30)).rule(1, 100)
    assert isinstance(strided, Union) and strided.limits() == [30]
    assert [rule.blocks for rule in strided.rules] == [None, None]
    assert strided.rules[1].strides() == [(8, 9)] and strided.rules[0].reach_list() == [9]
    assert isinstance((Window(9) | Window(20) | Every(1)).rule(1, 9), Rule)
    assert (Every(4) | Every(6)).rule(1, 50).blocks is not None  # both at 12: no such bands
    assert Window(2, 9).rule(1, 50, causal=False).limits() == Block(7, 3).rule(1, 50, causal=False).limits() == [10]
    assert Window(9, 2).rule(1, 50).blocks is None and Window(9, 2).rule(1, 50, causal=False).blocks is not None


def test_no_tensor_of_all_pairs() -> None:
    """A square over 100,000 tokens would not fit."""
    index = (Window(64) | Global(64) | Random(1, seed=2)).blocks(100_000)
    assert index.rows == 1563 and index.columns.numel() < 5 * 1563 and index.masks.shape[0] < 8


class TestRandom:
    pattern = Random(3, seed=4, size=8, near=1, first=2)

    def drawn(self, length: int, causal: bool) -> Tensor:
        at = torch.arange(0, length, 8)
        return self.pattern.visible(at[:, None], at, causal=causal, length=length)

    def test_random_blocks_exclude_near_and_first_ones(self) -> None:
        for causal in (True, False):
            seen = self.drawn(800, causal)
            rows = torch.arange(100)
            assert not seen[:, :2].any() and not seen[(rows[:, None] - rows).abs() <= 1].any()
            counts = seen.sum(1)
            assert counts[8:].eq(3).all()
            assert counts[:3].eq(0).all() if causal else counts.eq(3).all()

    def test_causal_random_blocks_do_not_depend_on_length(self) -> None:
        assert torch.equal(self.drawn(800, True)[:40, :40], self.drawn(320, True))

    def test_random_blocks_are_uniform(self) -> None:
        hits = torch.zeros(38)
        at = torch.arange(40)
        for seed in range(400):
            hits += Random(3, seed=seed, size=1, first=2).visible(torch.tensor(40), at)[2:]
        assert hits.min() > 10 and abs(hits.mean() - 400 * 3 / 38) < 1e-3
        assert ((hits - hits.mean()) ** 2).mean() < 2 * hits.mean()

    def test_different_seeds_sample_different_blocks(self) -> None:
        at = torch.arange(400)
        first, other = (Random(3, seed=s, size=8).visible(at[:, None], at) for s in (0, 1))
        assert not torch.equal(first, other)

    def test_random_in_both_directions_needs_the_length(self) -> None:
        at = torch.arange(9)
        with pytest.raises(ValueError, match="samples blocks of the whole text in both directions; pass its length"):
            self.pattern.visible(at[:, None], at, causal=False)


class TestText:
    @pytest.mark.parametrize("name", EQUATIONS)
    def test_parse_inverts_str(self, name: str) -> None:
        pattern = EQUATIONS[name][0]
        assert parse(str(pattern)) == pattern

    def test_parse_reads_the_documented_examples(self) -> None:
        assert parse(" Window(256) | Global([0]) | Random(3, seed=1)") == Window(256) | Global((0,)) | Random(3, seed=1)
        assert parse("Window(2) | Full() & Every(3)") == Window(2) | (Full() & Every(3))
        assert str((Window(2) | Full()) & Every(3)) == "(Window(2) | Full()) & Every(3)"

    @pytest.mark.parametrize(("text", "words"), [
        ("__import__('os').system('true')", "is not a pattern; expected one of Full, Window"),
        ("Window(", "'Window(' is not a pattern; expected one such as 'Window(256) | Global([0])'"),
        ("Windows(3)", "'Windows(3)' in 'Windows(3)' is not a pattern"),
        ("Window(3) + Full()", "combined by | and &"),
        ("Window('a')", "'a' in \"Window('a')\" is neither a whole number nor a list of them"),
        ("Window(3.5)", "3.5 in 'Window(3.5)' is neither a whole number nor a list of them"),
        ("Window(wide=3)", "got an unexpected keyword argument 'wide'"),
        ("Window()", "missing 1 required positional argument: 'width'"),
        ("Window(*[3])", "is neither a whole number nor a list of them"),
        ("Window(**{})", "is not a pattern"),
        ("Window(0)", "width is 0; expected a whole number from 1 to 2,147,483,648"),
        ("Window(True)", "width is True; expected a whole number"),
        ("Fixed(4, 5)", "last is 5; expected at most the block's size, 4"),
        ("Blockwise([0, 0])", "permutation is [0, 0]; expected each of 0 … 1 once"),
        ("Global([-1])", "tokens is -1; expected a whole number from 0 to 2,147,483,648"),
        ("Blockwise(3)", "permutation is 3; expected a list of blocks, such as [1, 0]"),
        ("Blockwise([])", "permutation is (); expected a list of blocks"),
        ("Global(None)", "tokens is None; expected a number of first tokens, or a list of positions"),
        ("Every(99999999999999999999)", "to 2,147,483,648"),
        ("Grid(10, 2, 4)", "width is 10; expected a multiple of the blocks' 4 columns"),
    ])  # fmt: skip
    def test_parse_refuses_other_text(self, text: str, words: str) -> None:
        with pytest.raises(ValueError, match=re.escape(words)):
            parse(text)

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("length", [1, 63, 64, 150])
    @pytest.mark.parametrize("text", ["Window(9)", "Full()", "Global([0, 70]) | Every(7)", "Block(24, 12) & Window(30)",
                                      "Random(2, size=8)", "Window(1) & Every(64)"])  # fmt: skip
    def test_pairs_are_counted(self, text: str, length: int, causal: bool) -> None:
        at = torch.arange(length)
        pattern = parse(text)
        seen = pattern.visible(at[:, None], at[None], causal=causal, length=length).expand(length, length)
        assert pattern.pairs(length, causal=causal) == int(seen.sum())

    def test_every_pattern_can_be_written(self) -> None:
        assert {type(pattern).__name__ for pattern, _ in EQUATIONS.values()} | {"Random"} >= set(PATTERNS)


class TestPatterned:
    def test_trimmed_memory_sees_the_same_as_the_whole_text(self) -> None:
        """The keys are the last 80 of 200 tokens, and only the last 30 ask."""
        pattern = Block(24, 12) | Global((5, 130)) | Random(2, seed=3, size=8)
        at = torch.arange(200)
        whole = pattern.visible(at[:, None], at)
        view = View(x=torch.zeros(1, 30, 4), start=120, length=80)
        rule = Patterned(1, pattern, size=16).rule(view)
        q, k = torch.zeros(1, 1, 30, 4), torch.zeros(1, 1, 80, 4)
        for backend in ("native", "banded", "reference"):
            weights = attend(q, k, torch.eye(80)[None, None], rule, backend=backend).out[0, 0]
            assert torch.equal(weights > 0, whole[170:, 120:])

    def test_longest_limits_an_unbounded_pattern(self) -> None:
        module = Patterned(2, Strided(4), longest=10)
        assert module.context_length() == [9, 9] and module.rule().limits() == [10, 10]
        assert module.rule_needs() == "positions"
        assert Patterned(2, Window(5)).context_length() == [4, 4]
        assert Patterned(2, Window(5)).rule_needs() == "nothing"

    def test_rule_is_built_once(self) -> None:
        module, view = Patterned(2, Fixed(8, 2)), View(length=64)
        assert module.rule(view) is module.rule(view)

    def test_bad_arguments_are_refused(self) -> None:
        with pytest.raises(
            ValueError, match="pattern is a list of 2 for 3 heads; expected one pattern, or one for each head"
        ):
            Patterned(3, [Full(), Full()])
        with pytest.raises(ValueError, match=re.escape("Fixed(8, 2) depends on the positions of keys; pass a view")):
            Patterned(1, Fixed(8, 2)).rule()
        with pytest.raises(ValueError, match="longest is 0; expected at least 1 token"):
            Patterned(1, Full(), longest=0)
        assert "Window(5)" in repr(Patterned(2, Window(5), causal=False))


def test_intersection_of_many_unions_is_served_by_blocks():
    """2^20 intersections of bands are not listed, and the pairs stay the same."""
    pattern = parse(" & ".join(["(Window(2) | Every(3))"] * 20))
    assert pattern.bands(True) is None
    assert pattern.pairs(50) == parse("Window(2) | Every(3)").pairs(50)


def test_stride_beyond_any_text_leaves_the_token_itself():
    pattern = parse("Every(2147483647) & Every(2147483629) & Every(2147483587)")
    assert pattern.rule(1, 20).stride is not None and pattern.pairs(20) == 20


def test_grid_beyond_the_text_sees_all_of_it():
    pattern = parse("Grid(8, 2, 2, 1000000000, 1000000000)")
    assert pattern.pairs(64) == parse("Full()").pairs(64) == 64 * 65 // 2
