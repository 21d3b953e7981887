"""Every contender equals its oracle wherever it says it can do the work, and otherwise says why not."""

import pytest
import torch

from spanformer.bench import contenders, field, peers, rings
from spanformer.bench.contenders import reason_not, runner
from spanformer.bench.oracle import check, find_truth
from spanformer.bench.work import Work, make_inputs

WORKS = [
    Work("A", 128, dim=16),
    Work("S", 128, "forward", dim=16),
    Work("F", 96, terms="distance_bias", dim=16),
    Work("B", 200, terms="distance_vec", dim=16, batch=2),
    Work("A", 200, "decode", dim=16, batch=2),
    Work("A", 128, terms="distance_vec", streaming=32, dim=16),
]


@pytest.mark.parametrize("work", WORKS, ids=lambda w: f"{w.profile}-{w.mode}-{w.terms}-{w.streaming}")
@pytest.mark.parametrize("name", [name for name in field.field() if name != "flex"])  # it compiles for many seconds
def test_every_contender_is_correct_or_gives_a_reason(name, work):
    contender = field.find(name)
    if work.kind not in contender.kinds:
        pytest.skip(f"not for {work.kind}")
    reason = reason_not(contender, work)
    if reason:
        assert len(reason) > 10
        pytest.skip(reason)
    inputs = make_inputs(work)
    forward = contender.build(inputs)
    verdict = check(forward, inputs, find_truth(inputs, contender.rule(inputs)), floor=contender.floor)
    assert verdict.right, verdict.wrong
    runner(contender, inputs, forward)()


def test_missing_backend_is_a_reason_not_an_error():
    assert "No module named" in contenders.unusable_backend("nonsense")


def test_work_beyond_memory_is_skipped(monkeypatch):
    monkeypatch.setattr(contenders, "available_bytes", lambda: 2**30)
    assert "needs about" in reason_not(contenders.SDPA_MASK, Work("A", 8192))
    assert reason_not(contenders.SDPA_MASK, Work("A", 256)) is None


def test_contenders_are_chosen_by_name():
    assert [c.name for c in field.choose(("reference",))] == ["sdpa", "reference"]
    everyone = [c.name for c in field.choose((), leave_out=("flex",))]
    assert everyone[0] == "sdpa" and "flex" not in everyone and "reference" not in everyone
    with pytest.raises(ValueError, match="contender is 'nobody'; expected one of sdpa, native"):
        field.choose(("nobody",))


def test_ring_holds_the_last_positions_in_their_slots():
    t = torch.arange(10.0)[None, :, None]
    assert rings.ring(t, 4)[0, :, 0].tolist() == [8, 9, 6, 7]
    assert rings.ring(t, 10)[0, :, 0].tolist() == list(range(10))


def test_flex_block_mask_equals_the_band():
    reaches, length, size = [5, 64, 8], 64, 8
    mask = peers.flex_block_mask(reaches, length, size, lambda b, h, i, j: i >= j)
    d = torch.arange(length)[:, None] - torch.arange(length)
    for h, reach in enumerate(reaches):
        blocks = ((d >= 0) & (d < reach)).view(8, size, 8, size).sum((1, 3))
        for row in range(8):
            part = mask.kv_indices[0, h, row, : mask.kv_num_blocks[0, h, row]].tolist()
            full = mask.full_kv_indices[0, h, row, : mask.full_kv_num_blocks[0, h, row]].tolist()
            assert sorted(part + full) == blocks[row].nonzero()[:, 0].tolist()
            assert full == (blocks[row] == size * size).nonzero()[:, 0].tolist()


def test_flex_stops_compiling_in_time(monkeypatch):
    seen = {Work("A", 128 * n, "forward") for n in range(1, 9)}
    monkeypatch.setattr(peers, "_flex_seen", seen)
    assert "8 shapes" in peers.FLEX.cannot(Work("A", 128 * 9, "forward"))
    assert peers.FLEX.cannot(Work("A", 128, "forward")) is None
    assert "no backward" in peers.FLEX.cannot(Work("A", 128))
