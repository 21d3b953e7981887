"""The longest path of a pattern, against a walk from every token."""

from __future__ import annotations

import random

import pytest

from spanformer.cost.paths import longest_path


def walked(seen):
    """For each query and key, the fewest layers between them, by breadth-first search."""
    n, found = len(seen), {}
    for i in range(n):
        depth, edge, known = 0, {i}, {i: 0}
        while edge:
            depth += 1
            edge = {j for at in edge for j in range(n) if seen[at][j] and j not in known}
            known |= dict.fromkeys(edge, depth)
        found |= {(i, j): d for j, d in known.items()}
    return found


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("causal", [True, False])
def test_longest_path_equals_a_graph_walk(seed, causal):
    draw = random.Random(seed)
    n = draw.choice([1, 2, 9, 20])
    seen = [[(j <= i or not causal) and draw.random() < draw.choice([0.05, 0.2]) for j in range(n)] for i in range(n)]
    paths, known = longest_path([seen], causal=causal), walked(seen)
    assert paths.layers == max(known.values()) and paths.reached == len(known)
    assert paths.allowed == sum(j <= i or not causal for i in range(n) for j in range(n))
    assert paths.whole == (len(known) == paths.allowed)


@pytest.mark.parametrize("seed", range(12))
def test_longest_path_of_alternating_layers_equals_a_graph_walk(seed):
    draw = random.Random(seed)
    n = draw.choice([3, 9, 14])
    layers = [[[draw.random() < 0.15 for _ in range(n)] for _ in range(n)] for _ in range(draw.choice([2, 3]))]
    paths = longest_path(layers, causal=False)
    reached, counts = [{i} for i in range(n)], []
    for depth in range(12 * n):
        seen = layers[depth % len(layers)]
        reached = [set.union(reached[i], *(reached[j] for j in range(n) if seen[i][j])) for i in range(n)]
        counts.append(sum(map(len, reached)))
    grown = [at + 1 for at, count in enumerate(counts) if count > (counts[at - 1] if at else n)]
    assert paths.layers == max(grown, default=0) and paths.reached == counts[-1]


def test_known_patterns():
    n = 33
    full = [[j <= i for j in range(n)] for i in range(n)]
    window = [[0 <= i - j < 5 for j in range(n)] for i in range(n)]
    strided = [[i - j >= 0 and (i - j < 4 or (i - j) % 4 == 0) for j in range(n)] for i in range(n)]
    blocks = [[j <= i and i // 8 == j // 8 for j in range(n)] for i in range(n)]
    assert longest_path([full], causal=True) == (1, n * (n + 1) // 2, n * (n + 1) // 2)
    assert longest_path([window], causal=True).layers == 8  # 4 tokens a layer
    assert longest_path([strided], causal=True) == (2, n * (n + 1) // 2, n * (n + 1) // 2)
    assert not longest_path([blocks], causal=True).whole
