"""Matrices as characters."""

from __future__ import annotations

import numpy as np

from spanformer.report.terminal import SHADES, beside, half_blocks, shades


def test_half_blocks_are_two_rows_a_line():
    seen = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 0]], bool)
    assert half_blocks(seen) == "▀ █\n▀▀ "


def test_shades_name_every_query_and_key():
    weights = np.array([[1.0, 0.0], [0.25, 0.75]])
    assert shades(weights, ["ab", "c"], ["ab", "c"], 40) == "    a c\nab  ██\n c  ▒▒██"


def test_shades_of_two_texts():
    assert shades(np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), ["a", "end"], "xyz") == "     x y z\n  a    ██\nend  ██"


def test_shades_distinguish_zero_from_small():
    shown = shades(np.array([[1.0, 0.0, 1e-9], [0, 1, 0], [0, 0, 1]]), "abc", "abc", 40).splitlines()
    assert shown[1] == "a  ██  " + SHADES[1] * 2


def test_keys_that_do_not_fit_are_merged():
    n = 50
    shown = shades(np.eye(n), ["x"] * n, ["x"] * n, 30).splitlines()
    assert len(shown) == n + 1 and max(map(len, shown)) <= 30
    assert all(SHADES[-1] in line for line in shown[1:])


def test_pictures_are_placed_side_by_side_if_they_fit():
    pictures = {"a": "██\n██", "b": "▀▀\n  "}
    assert beside(pictures, 20) == "a    b\n██   ▀▀\n██\n"
    assert beside(pictures, 6) == "a\n██\n██\n\nb\n▀▀\n\n"
