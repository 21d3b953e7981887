"""The predicted time of GPU kernels: tiles counted as a dense mask has them, blocks scheduled in order."""

from __future__ import annotations

import pytest
import torch

from spanformer.bench.gpu_model import (
    A100,
    Kernel,
    dense_operations,
    dense_rate,
    predict,
    run_blocks,
    split_from,
    tiles,
)

FORWARD = Kernel((64, 64), 4, full=11.6, edge=25.3, registers=188, shared=40960, head_size=64)
PROFILE_A = [64] * 7 + [8192]


@pytest.mark.parametrize("tile", [(16, 16), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("reach", [1, 9, 16, 24, 33, 100, 1000])
def test_tiles_are_those_of_a_dense_mask(tile: tuple[int, int], reach: int) -> None:
    length, ramp = 100, 8
    d = torch.arange(128)[:, None] - torch.arange(128)
    seen = (d >= 0) & (d < reach)
    level = seen if reach >= length else (d >= 0) & (d < reach - ramp)
    seen[length:] = False
    level[length:] = True  # queries beyond the last need no mask: nothing of them is stored
    seen[:, length:] = level[:, length:] = False

    def blocks(mask: torch.Tensor) -> torch.Tensor:
        rows, columns = -(-length // tile[0]), -(-length // tile[1])
        cut = mask[: rows * tile[0], : columns * tile[1]]
        return cut.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0])).transpose(1, 2).flatten(2)

    some, full = blocks(seen).any(-1), blocks(level).all(-1)
    expected = [(int((some & ~full)[n].sum()), int((some & full)[n].sum())) for n in range(len(some))]
    assert list(tiles(length, tile, reach, ramp)) == expected[::-1]


def test_blocks_share_an_sm_and_queue_in_order() -> None:
    assert run_blocks([3.0, 2.0, 1.0], sms=1, resident=1) == 6.0
    assert run_blocks([3.0, 2.0, 1.0], sms=1, resident=3) == pytest.approx(6.0)
    assert run_blocks([4.0, 1.0, 1.0, 1.0], sms=2, resident=1) == 4.0
    # On the first SM, 4 shares with 1, 1 and 1 and ends when all is done.
    assert run_blocks([4.0, 7.0, 1.0, 1.0, 1.0], sms=2, resident=2) == pytest.approx(8.0)
    assert run_blocks([1.0, 1.0], sms=2, resident=1, alone=0.5) == 2.0
    assert run_blocks([1.0, 1.0], sms=1, resident=2, alone=0.5) == 2.0


def test_prediction_is_work_or_the_longest_block() -> None:
    one, many = (predict(FORWARD, PROFILE_A, 8192, batch) for batch in (1, 16))
    assert one.us >= max(one.work_us, one.longest_us) and one.us > 1.3 * one.work_us
    assert many.us == pytest.approx(16 * one.work_us, rel=0.01)
    assert predict(FORWARD, PROFILE_A, 8192, 1, alone=0.5).us >= one.us
    assert predict(FORWARD, PROFILE_A[::-1], 8192, 1) == one  # the longest head comes first, wherever it is


def test_few_blocks_are_split_as_the_launcher_does() -> None:
    splits = [split_from(FORWARD, 8, length, batch) for length, batch in ((8192, 1), (8192, 2), (2048, 1), (2112, 1))]
    assert splits == [32, None, None, 32]
    whole, split = (predict(FORWARD, PROFILE_A, 8192, 1, least=least) for least in (None, 32))
    assert split.us < 0.9 * whole.us and split.longest_us < 0.6 * whole.longest_us
    assert split.work_us > whole.work_us  # for parts that only end, and the merge


def test_dense_attention_is_near_published_speeds() -> None:
    """Triton's own tutorial kernel: 183 TFLOP/s by a report (triton-lang/triton#1934: 6.02 ms for 4 × 32 heads), and
    FlashAttention-2 177 there. A model that misses these by a third would say nothing."""
    reported = dense_operations(8192, 4 * 32, 64) / 6.023782e-3
    assert reported == pytest.approx(182.5e12, rel=0.01)
    assert dense_rate(FORWARD, 8192, 32) == pytest.approx(reported, rel=1 / 3)


def test_resident_blocks_are_limited_by_registers_and_shared_memory() -> None:
    assert FORWARD.resident(A100) == 2  # 192 · 128 registers each
    assert Kernel((64, 64), 4, 12, 27, registers=64, shared=80 << 10, head_size=64).resident(A100) == 2
    assert Kernel((64, 64), 4, 12, 27, registers=255, shared=160 << 10, head_size=64).resident(A100) == 1
