"""`spanformer show`: what is seen, what it costs, how far it reaches; as a picture and on the terminal."""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest

from spanformer.cli.main import main
from spanformer.cli.show import facts, visible
from spanformer.cost.sizes import Sizes
from spanformer.kinds import KINDS
from spanformer.kinds.costs import layer_cost
from spanformer.report.measures import amount
from spanformer.report.pattern_pictures import pattern_picture
from support.definitions import sees

PATTERNS = importlib.util.find_spec("spanformer.attention.pattern") is not None


def defined(name, n, *numbers, causal=True):
    return np.array([[sees(name, causal)(n, i, j, *numbers) for j in range(n)] for i in range(n)])


def test_kinds_show_what_a_models_heads_see():
    n = 40
    found = visible("2 window(7) + 1 full", n)
    assert found.shape == (3, n, n)
    assert (found[:2] == defined("window", n, 7)).all() and (found[2] == defined("full", n)).all()
    assert (visible("longformer(6, 2)", n)[0] == defined("longformer", n, 6, 2, 1)).all()


def test_kinds_show_what_an_encoders_heads_see():
    n = 40
    for kind, name, numbers in (
        ("window(7)", "window", (7,)), ("strided(6)", "strided", (6,)), ("fixed(6, 2)", "fixed", (6, 2)),
        ("longformer(6, 2, 2)", "longformer", (6, 2, 2)), ("image_1d(8, 5)", "image_1d", (8, 5)),
    ):  # fmt: skip
        assert (visible(kind, n, causal=False)[0] == defined(name, n, *numbers, causal=False)).all(), kind


def test_alternating_layers(capsys, tmp_path):
    main(["show", "Window(9)", "Every(8)", "--length", "40", "--out", str(tmp_path / "x.png")])
    shown = capsys.readouterr().out
    assert "layer 1: Window(9)" in shown and "layer 2: Every(8)" in shown and "1 head in each of 2 layers" in shown
    assert "after 2 layers every token" in shown  # each by itself takes 5, or never gets there
    main(["show", "Window(9)", "2 window(8) + 2 dilated(4, 4)", "--length", "40", "--out", str(tmp_path / "x.png")])
    assert "1 and 4 heads in each of 2 layers" in capsys.readouterr().out
    main(["show", "strided_heads(8)", "--length", "40", "--out", str(tmp_path / "x.png")])
    assert "forward, 2 heads of 64" in capsys.readouterr().out
    main(["show", " ( Window(3) )", "--length", "40", "--out", str(tmp_path / "x.png")])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_shown(kind):
    """As language models have it, or encoders."""
    example = KINDS[kind].tested[0]
    (seen, *_) = visible(example, 37, causal=not kind.startswith(("etc", "linformer")))
    assert seen.any(1).all()


@pytest.mark.parametrize("hard", ["false", "true"])
def test_etc_shows_its_four_parts(hard):
    n, m, radius = 20, 4, 2
    (seen,) = visible(f"etc({radius}, 5, 12, {hard})", n, causal=False)
    for i in range(m + n):
        for j in range(m + n):
            long = i >= m and j >= m
            near = abs(i - j) <= radius if long else j < m or (j - m) // 5 == i or hard == "false"
            assert seen[i, j] == near, (i, j)
    assert (visible(f"etc_projected({radius}, 5, 12, {hard})", n, causal=False)[0] == seen).all()
    assert layer_cost(f"etc({radius}, 5, 12, {hard})", Sizes(n, 1, 64)).pairs == seen.sum()


@pytest.mark.parametrize(
    "kind",
    [
        "full",
        "window(7)",
        "longformer(6, 2, 2)",
        "sink_window(5, 2)",
        "dilated(3, 4)",
        "strided(6)",
        "2 strided_heads(5)",
        "fixed(6, 2)",
        "2 fixed_heads(5, 2)",
        "image_1d(8, 5)",
        "image_2d(8, 2, 4, 2, 2)",
        "blockwise(3, 4)",
        "big_bird(4, 3, 1, 2)",
        "chunked",
        "additive",
        "forgetting",
    ],
)
def test_costs_count_what_heads_see(kind):
    n, bare = 40, kind.removeprefix("2 ")
    seen = visible(kind, n)
    assert layer_cost(bare, Sizes(n, len(seen), 64)).pairs == seen.sum() / len(seen)


@pytest.mark.skipif(not PATTERNS, reason="there are no patterns")
@pytest.mark.parametrize("causal", [True, False])
def test_patterns_show_their_definitions(causal):
    n = 33
    for text, name, numbers in (
        ("Window(5)", "window", (5,)), ("Strided(6)", "strided", (6,)), ("Dilated(3, 4)", "dilated", (3, 4)),
        ("Fixed(6, 2)", "fixed", (6, 2)), (" Full()", "full", ()),
    ):  # fmt: skip
        assert (visible(text, n, causal=causal)[0] == defined(name, n, *numbers, causal=causal)).all(), text
    both = visible("(Window(4) | Strided(8)) & Window(20)", n, causal=causal)[0]
    either = defined("window", n, 4, causal=causal) | defined("strided", n, 8, causal=causal)
    assert (both == either & defined("window", n, 20, causal=causal)).all()


def test_facts_are_counted():
    seen = np.stack([defined("window", 9, 3), defined("full", 9)])
    density, cost, path = facts([seen], causal=True, dim=10)
    pairs = int(seen.sum())
    assert density.startswith(f"{pairs} of 90 pairs are visible") and f"{seen.sum(-1).mean():.1f} keys" in density
    assert "forward, 2 heads of 10" in cost and "1 layer every token" in path
    blocks = defined("image_1d", 9, 3, 0)[None]
    assert "never connected" in facts([blocks], causal=True, dim=1)[2]
    assert "after 4 layers" in facts([defined("window", 9, 3)[None]], causal=True, dim=1)[2]


@pytest.mark.parametrize("kind, beside", [
    ("additive", 2 * 10 * 45 + 4 * 9 * 10 * 10), ("general", 2 * 9 * 10 * 10), ("bilinear", 2 * 9 * 10 * 10),
    ("dynamic_span", 2 * 9 * 10), ("longformer(4, 1)", 3 * 2 * 10 * 10), ("longformer(4)", 0), ("window", 0), ("", 0),
    ("1 general", 2 * 9 * 10 * 10), ("Window(3) | Global([0])", 0), ("1 Window(3)", 0),
])  # fmt: skip
def test_kind_cost_uses_its_own_operations(kind, beside):
    """9 tokens and a head of 10: full attention has 45 pairs."""
    cost = facts([defined("full", 9)[None]], causal=True, dim=10, kinds=[kind])[1]
    assert cost == f"{amount(4 * 10 * 45 + beside)} FLOPs forward, 1 head of 10; full attention takes 1,800."


def test_mixture_cost_uses_its_pairs():
    seen = np.stack([defined("window", 9, 3), defined("full", 9)])
    assert facts([seen], causal=True, dim=10, kinds=["1 window(3) + 1 general"]) == facts([seen], causal=True, dim=10)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_is_drawn_and_shown(tmp_path, capsys, ending):
    path = tmp_path / "deep" / f"x.{ending}"
    main(["show", "1 window(3) + 2 full", "--length", "20", "--out", str(path)])
    shown = capsys.readouterr().out
    assert path.stat().st_size > 3000 and str(path) in shown and "heads 2, 3" in shown
    assert "▀" in shown and "Longest path: after 1 layer" in shown


def test_long_pattern_fits_above_its_picture():
    text = "Window(8) | Global([0, 1, 2, 3, 4, 5, 6, 7]) | Random(2, seed=1, size=4)"
    figure = pattern_picture(text, {text: visible(text, 16)[0]}, "", causal=True).figure
    assert figure._suptitle.get_window_extent().x1 <= figure.bbox.width


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("forgetting", "--no-causal"), "model.attention.kind is 'forgetting', which is causal only"),
        (("window(8)", "--length", "0"), "length is 0; expected 1 … 1024"),
        (("window(8)", "--out", "x.jpg"), "out is 'x.jpg'; expected a file that ends in .png or .svg"),
        (("window(0)",), "window in model.attention.kind, 'window(window=0)', is 0; expected at least 1"),
        (("Window(-1)",), "width is -1; expected a whole number from 1 to 2,147,483,648"),
        (("windo(8)",), "is 'windo(8)'; did you mean window?"),
        (("Window(99999999999999999999)",), "expected a whole number from 1 to 2,147,483,648"),
        (("etc(4, 8)",), "etc reads a whole text in both directions"),
        (("etc(4, 8)", "full", "--no-causal"), "some layers have global tokens beside the text"),
        ((), "PATTERNS is missing"),
    ],
)
def test_mistakes_are_one_sentence(capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        main(["show", *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2 and said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("Random(99999999)", "count is 99999999; expected a whole number from 0 to 1,024"),
        ("Random(1024, size=1)", ""),
        ("Grid(1000000, 1, 1, 1000000, 1000000)", ""),
        ("Every(2147483647) & Every(2147483629) & Every(2147483587)", ""),
        (" & ".join(["(Window(2) | Every(3))"] * 40), ""),
        ("100000000 window(8)", "'100000000 window(8)' has 100,000,000 heads; expected at most 64"),
        ("big_bird(100000000)", "block is 100000000 and max_span "),
        ("longformer(8, 100000000)", "positions has 100,000,000 global tokens; expected at most 65,536"),
    ],
)  # fmt: skip
def test_absurd_pattern_is_refused_or_shown_at_once(pattern, said, tmp_path, capsys):
    begun = time.monotonic()
    arguments = ["show", pattern, "--length", "32", "--out", str(tmp_path / "a.png")]
    if said:
        with pytest.raises(SystemExit):
            main(arguments)
        assert said in capsys.readouterr().err
    else:
        main(arguments)
    assert time.monotonic() - begun < 60
