"""The kernel that decodes from rings of buckets, against the same in PyTorch and against the equation in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.buckets import Placed, Seen
from spanformer.ops.decode.buckets import BucketRings, attend_one, served, write_one

needs_kernel = pytest.mark.skipif(kernel.problem() is not None, reason="the native kernel is not built")
pytestmark = needs_kernel
GAP, EMPTY = 1 << 20, -(1 << 38)
ISAS = ("portable", "avx2", "avx512")


def rings(n: int, rounds: int, buckets: int, capacity: int, d: int, dv: int, dtype: torch.dtype) -> BucketRings:
    """Empty, with NaN in every slot: what is not seen must not be read."""
    slots = buckets * capacity + 1
    return BucketRings(
        torch.full((n, rounds, slots, d), math.nan, dtype=dtype),
        torch.full((n, rounds, slots, dv), math.nan, dtype=dtype),
        torch.full((n, rounds, slots, rounds + 1), EMPTY),
        torch.zeros(n, rounds, buckets, dtype=torch.int64), capacity, GAP,
    )  # fmt: skip


def token(n: int, rounds: int, buckets: int, d: int, dv: int, dtype: torch.dtype, document: int | None) -> Placed:
    q, k, v = (torch.randn(n, 1, size).to(dtype) for size in (d, d, dv))
    documents = None if document is None else torch.full((n, 1), document)
    return Placed(q, v, torch.randint(buckets + 1, (n, rounds, 1)), documents, torch.ones(n), k=k)


def ranks(ids: Tensor) -> Tensor:
    """ids [T, R] of one row → how many of the bucket came before each."""
    return torch.stack([(ids[:t] == ids[t]).sum(0) for t in range(len(ids))])


def weight(apart: Tensor, seen: Seen, span: float | None) -> Tensor:
    d = apart - (0 if seen.itself else 1)
    soft = torch.ones(apart.shape, dtype=torch.float64)
    if span is not None:
        soft = ((seen.ramp + span - d.double()) / seen.ramp).clamp(0, 1)
    return torch.where((apart > 0) & (d < seen.reach), soft, 0)


def oracle(history: list[Placed], row: int, seen: Seen, buckets: int) -> tuple[Tensor, Tensor]:
    """The last token of a row over all that came before, from the equation."""
    ids = torch.stack([each.ids[row, :, 0] for each in history])
    rank, last = ranks(ids), history[-1]
    q = last.q[row, 0].double()
    keys, values = (torch.stack([t[row, 0].double() for t in part]) for part in
                    ([e.k for e in history if e.k is not None], [e.v for e in history]))  # fmt: skip
    shown = torch.zeros(len(history), dtype=torch.float64)
    for r in range(ids.shape[1]):
        same = (ids[:, r] == ids[-1, r]) & (ids[:, r] < buckets)
        here = torch.where(
            same, weight(rank[-1, r] - rank[:, r], seen, None if seen.span is None else float(seen.span[row])), 0
        )
        shown = torch.where(shown > 0, shown, here)
    if last.documents is not None:
        theirs = torch.tensor([int(e.documents[row, 0]) for e in history if e.documents is not None])
        shown = torch.where(theirs == last.documents[row, 0], shown, 0)
    shown[-1] = 1.0 if seen.itself else 0.0
    score = keys @ q * seen.scale + shown.log()
    lse = score.logsumexp(0)
    share = torch.zeros_like(score) if lse == -math.inf else (score - lse).exp()
    return share @ values, lse


CASES = [
    (Seen(3), 3, 4, 16, 16, False), (Seen(5, itself=True, scale=0.25), 1, 3, 7, 5, False),
    (Seen(6, span=torch.tensor([0.0, 1.7, 3.2]), ramp=2.5), 2, 3, 32, 65, False), (Seen(4), 2, 2, 33, 24, True),
    (Seen(40), 4, 2, 64, 64, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("seen", "rounds", "buckets", "d", "dv", "parted"), CASES)
def test_equals_the_equation(seen: Seen, rounds: int, buckets: int, d: int, dv: int, parted: bool, dtype) -> None:
    torch.manual_seed(0)
    held, history = rings(3, rounds, buckets, seen.reach + 1, d, dv, dtype), []
    for t in range(45):
        new = token(3, rounds, buckets, d, dv, dtype, t // 11 if parted else None)
        history.append(new)
        assert served(new, held, seen)
        out, lse = attend_one(new, held, seen)
        for row in range(3):
            expected, its_lse = oracle(history, row, seen, buckets)
            # one rounding of the output to its dtype beside float32 sums
            torch.testing.assert_close(
                out[row, 0].double(), expected, rtol=max(2e-5, torch.finfo(dtype).eps), atol=2e-5
            )
            torch.testing.assert_close(lse[row, 0].double(), its_lse, rtol=1e-5, atol=2e-5)
        write_one(new, held)


def test_writes_over_the_oldest_and_counts() -> None:
    held = rings(1, 2, 2, 3, 4, 4, torch.float32)
    for t in range(5):
        ids = torch.tensor([[[0], [2 if t == 4 else 1]]])  # the last token is in no bucket of round 1
        x = torch.full((1, 1, 4), float(t))
        write_one(Placed(x, x, ids, torch.tensor([[7]]), torch.ones(1), k=x), held)
    assert held.counts.tolist() == [[[5, 0], [0, 4]]]
    assert held.keys[0, 0, :3, 0].tolist() == [3.0, 4.0, 2.0]
    assert held.values[0, 1, 3:6, 0].tolist() == [3.0, 1.0, 2.0]
    assert held.marks[0, 0, 1].tolist() == [4, 2 * GAP, 7]
    assert held.marks[0, 0, 3:].eq(EMPTY).all() and held.keys[0, 0, 3:].isnan().all()


def test_not_finite_query_stays_in_its_row() -> None:
    torch.manual_seed(0)
    held, seen = rings(3, 2, 2, 5, 8, 8, torch.float32), Seen(4, itself=True)
    for _ in range(9):
        new = token(3, 2, 1, 8, 8, torch.float32, None)
        write_one(new, held)
    whole = attend_one(new, held, seen)
    new.q[1] = math.nan
    poisoned = attend_one(new, held, seen)
    assert poisoned.out[1].isnan().all() and poisoned.lse[1].isnan().all()
    assert torch.equal(poisoned.out[::2], whole.out[::2]) and torch.equal(poisoned.lse[::2], whole.lse[::2])


def test_what_the_kernel_does_not_serve_is_left_to_pytorch() -> None:
    new, held = token(2, 1, 2, 8, 8, torch.float32, None), rings(2, 1, 2, 3, 8, 8, torch.float32)
    assert served(new, held, Seen(2))
    assert not served(new, held, Seen(2, dropout=0.1)) and not served(new, held, Seen(2, backend="banded"))
    assert not served(new, held._replace(keys=held.keys.double()), Seen(2))
    assert not served(token(2, 1, 2, 300, 8, torch.float32, None), held, Seen(2))
    new.q.requires_grad_()
    assert not served(new, held, Seen(2))
    with torch.no_grad():
        assert served(new, held, Seen(2))


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str) -> None:
    if os.environ.get("SPANFORMER_ISA") == isa:
        pytest.skip("this is the run of that instruction set")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "equation"],
        env=os.environ | {"SPANFORMER_ISA": isa, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    if "SPANFORMER_ISA is" in done.stdout + done.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stdout[-2000:]
