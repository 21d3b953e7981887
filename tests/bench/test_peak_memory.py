"""Peak memory: in this process, and of a contender in its own."""

import dataclasses

import pytest
import torch

from spanformer.bench import memory
from spanformer.bench.work import Work

pytestmark = pytest.mark.skipif(memory.unsupported() is not None, reason=str(memory.unsupported()))


def test_known_allocation_is_measured():
    peak, _ = memory.peak_of(lambda: torch.ones(16 * memory.MIB // 4).sum())
    assert 15 * memory.MIB < peak < 24 * memory.MIB


@pytest.mark.slow
def test_contender_is_measured_in_a_process_of_its_own():
    work = Work("A", 512, dim=16)
    peak = memory.measure(memory.Job("reference", dataclasses.asdict(work), threads=1))
    assert not peak.reason and not peak.wrong, peak
    assert peak.mib > 2 * work.dense_bytes() / memory.MIB  # it builds dense matrices, and it shows
    assert peak.seconds > 0 and "dspan" in peak.errors


def test_failing_job_gives_its_reason():
    peak = memory.measure(memory.Job("nobody", dataclasses.asdict(Work("A", 64)), threads=1))
    assert peak.mib is None and "contender is 'nobody'" in peak.reason
