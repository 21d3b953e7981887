"""The KV cache under random sequences of operations; `make torture` tries many more of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

from support.cache_machine import BACKENDS, MANY, CacheMachine

torch.set_num_threads(1)


class TestCacheMachine(CacheMachine.TestCase):
    settings = settings(
        max_examples=20, stateful_step_count=25, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zeros", [0, 6, MANY])
def test_crops_on_both_sides_of_a_resize(zeros: int, backend: str) -> None:
    """Sequences that few random ones reach: rings that have wrapped grow, and rows are cropped beyond and below it."""
    machine = CacheMachine()
    pair = machine.begin(2, [[1, 19], [5, 2]], 1, 0, zeros, 8, spans=True, sinks=False)
    machine._read(pair, 12, None, 1, backend)
    machine._read(pair, 6, [6, 0], 2, backend)
    machine.resize(pair, [[5, 20], [18, 22]], 4)
    assert not machine._crop(pair, [4, 0]) and not machine._crop(pair, [0, 1])
    machine._read(pair, 5, None, 3, backend)
    assert machine._crop(pair, [4, 2])
    machine._read(pair, 12, [12, 3], 4, backend)
    for step in range(3):
        machine._read(pair, 1, None, 5 + step, backend)
    machine.counts_agree()
    machine.teardown()
