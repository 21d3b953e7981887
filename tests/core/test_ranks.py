"""Rank correlation against its definition and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from spanformer.core.ranks import ranks, spearman


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert ranks([3.0, 1.0, 1.0, 5.0]) == [2.0, 0.5, 0.5, 3.0]


def test_correlation_is_that_of_ranks() -> None:
    random = np.random.default_rng(1)
    x, y = random.integers(0, 5, 12).tolist(), random.normal(size=12).tolist()
    assert spearman(x, y) == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1])
    assert spearman(range(3), [1.0, 2.0, 3.0]) == 1.0 and spearman(range(3), [3.0, 2.0, 1.0]) == -1.0
    assert spearman(range(3), [1.0, 1.0, 2.0]) == pytest.approx(0.866, abs=1e-3)


def test_constant_values_have_no_correlation() -> None:
    assert spearman([2.0, 2.0], [1.0, 2.0]) == 0.0 and spearman([], []) == 0.0
