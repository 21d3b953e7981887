"""The arithmetic of attention's cost, against counting one by one."""

import pytest

from spanformer.cost import attention as cost


def count(reach, queries, keys):
    return sum(1 for q in range(keys - queries, keys) for k in range(keys) if 0 <= q - k < reach)


@pytest.mark.parametrize("reach", [0, 1, 2, 7, 16, 17, 30])
@pytest.mark.parametrize("queries, keys", [(16, 16), (1, 16), (5, 16), (0, 4), (1, 1), (16, 40)])
def test_pairs_equal_counting(reach, queries, keys):
    assert cost.head_pairs(reach, queries, keys) == count(reach, queries, keys)


def test_profile_sums_its_heads_and_modes_their_operations():
    reaches, length, dim = [3, 9, 20], 12, 8
    pairs = sum(count(reach, length, length) for reach in reaches)
    assert cost.pairs(reaches, length) == pairs
    assert cost.flops(reaches, length, dim, mode="forward", batch=2) == 2 * 4 * dim * pairs
    assert cost.flops(reaches, length, dim, mode="backward") == 10 * dim * pairs
    assert cost.flops(reaches, length, dim, mode="forward+backward") == 14 * dim * pairs


def test_bytes():
    assert cost.qkv_bytes(batch=2, heads=8, queries=16, dim=64, item=4) == 3 * 2 * 8 * 16 * 64 * 4
    assert cost.qkv_bytes(batch=1, heads=8, queries=1, keys=16, kv_heads=2, dim=4, item=2) == 2 * 4 * (8 + 2 * 2 * 16)
    assert cost.cache_bytes([64, 1000], 100, dim=4, item=4) == 2 * 4 * 4 * 164


def test_refusals_name_what_was_given():
    with pytest.raises(ValueError, match="mode is 'sideways'"):
        cost.flops([1], 1, 1, mode="sideways")
    with pytest.raises(ValueError, match="keys 3"):
        cost.head_pairs(1, 4, 3)
    with pytest.raises(ValueError, match="rate is 0"):
        cost.limit_seconds(1, 0)
