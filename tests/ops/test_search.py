"""Search by a scan against scores of all rows in float64; ties, threads, missing rows, numbers that are not finite."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from spanformer.ops import kernel
from spanformer.ops.search import LEVELS, Codes, quantise, squared_distances, top_k

BACKENDS = ["torch"] if kernel.problem() else ["native", "torch"]
SIZES = [(1, 1, 1), (31, 3, 5), (32, 4, 32), (33, 5, 33), (101, 2, 576), (2500, 7, 64), (4100, 6, 101)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes_of(keys: torch.Tensor, **options) -> Codes:
    """Appended in two parts, so that memory is allocated more than once."""
    codes = Codes(keys.shape[0], keys.shape[2], **options)
    half = keys.shape[1] // 2
    codes.append(keys[:, :half])
    codes.append(keys[:, half:])
    return codes


def scores_by_hand(codes: Codes, queries: torch.Tensor) -> torch.Tensor:
    """[B, Q, N] of the rows as they are stored, in float64."""
    rows = codes.rows[:, : codes.count].double()
    if codes.scales is not None:
        rows = rows * codes.scales[:, : codes.count, None].double()
    scores = queries.double() @ rows.mT
    return scores if codes.bias is None else scores + codes.bias[:, None, : codes.count].double()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("n, q, d", SIZES)
def test_the_best_rows_are_found(n: int, q: int, d: int, metric, bits, backend: str) -> None:
    keys, queries, k = random(2, n, d), random(2, q, d, seed=1), 9
    codes = codes_of(keys, bits=bits, metric=metric)
    found, truth = top_k(codes, queries, k, backend=backend), scores_by_hand(codes, queries)
    count = min(k, n)
    expected = truth.sort(-1, descending=True).values[..., :count]
    # an error of float32, and of queries of 16 bits or, where sums would overflow, fewer
    levels = min((1 << 15) - 1, ((1 << 31) - 1) // (LEVELS * d))
    size = queries.norm(dim=-1)[..., None] * keys.norm(dim=-1).amax(1)[:, None, None]
    slack = size * (2e-6 + (bits == 8) * d**0.5 / levels) + (metric == "l2") * 2e-6 * size**2 / size.amin()
    assert bool(((found.scores[..., :count] - expected).abs() <= slack).all())
    own = truth.gather(-1, found.ids[..., :count])
    assert bool(((own - found.scores[..., :count]).abs() <= slack).all())
    assert bool((found.ids[..., count:] == -1).all()) and bool((found.scores[..., count:] == -torch.inf).all())
    assert all(len(set(row.tolist())) == count for row in found.ids[..., :count].flatten(0, 1))
    exact = queries.double() @ keys.double().mT - (keys.double().square().sum(-1) / 2)[:, None] * (metric == "l2")
    off = (exact.gather(-1, found.ids[..., :count]) - found.scores[..., :count]).abs().amax(-1)
    assert bool((off <= found.bound).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [8, 32])
def test_of_equal_scores_the_smaller_row_comes_first(backend: str, bits) -> None:
    keys = random(1, 5, 48).repeat(1, 900, 1)  # row n equals row n mod 5
    found = top_k(codes_of(keys, bits=bits), keys[:, :1], 400, backend=backend)
    (best,) = set((found.ids[0, 0] % 5).tolist())
    assert found.ids[0, 0].tolist() == list(range(best, 2000, 5))


@pytest.mark.skipif(kernel.problem() is not None, reason="the kernel is not built")
@pytest.mark.parametrize("bits", [8, 32])
def test_neither_threads_nor_other_queries_change_what_is_found(bits) -> None:
    codes, queries = codes_of(random(2, 9000, 72), bits=bits, metric="l2"), random(2, 9, 72, seed=3)
    before = torch.get_num_threads()
    try:
        together = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            together.append(top_k(codes, queries, 33))
    finally:
        torch.set_num_threads(before)
    alone = [top_k(codes, queries[:, n : n + 1], 33) for n in range(9)]
    for found in together:
        assert torch.equal(found.ids, torch.cat([each.ids for each in alone], 1))
        assert torch.equal(found.scores, torch.cat([each.scores for each in alone], 1))


@pytest.mark.skipif(kernel.problem() is not None, reason="the kernel is not built")
def test_8_bits_give_the_same_scores_by_the_kernel_and_by_torch() -> None:
    codes, queries = codes_of(random(2, 3000, 40), metric="l2"), random(2, 5, 40, seed=3)
    native, portable = (top_k(codes, queries, 50, backend=backend) for backend in ("native", "torch"))
    assert torch.equal(native.ids, portable.ids)
    assert torch.allclose(native.scores, portable.scores, rtol=1e-6, atol=1e-6)  # one may fuse a product and a sum


PROBE = """
import torch
from spanformer.ops.search import Codes, top_k
r = torch.Generator().manual_seed(0)
for bits in (8, 32):
    codes = Codes(1, 77, bits=bits)
    codes.append(torch.randint(-127, 128, (1, 3000, 77), generator=r).float())
    print(top_k(codes, torch.randint(-50, 50, (1, 6, 77), generator=r).float(), 20, backend="native").ids.tolist())
"""


@pytest.mark.slow
@pytest.mark.skipif(kernel.problem() is not None, reason="the kernel is not built")
def test_every_instruction_set_finds_the_same() -> None:
    said = set()
    for isa in ("portable", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=os.environ | {"SPANFORMER_ISA": isa}, capture_output=True, text=True
        )
        if "SPANFORMER_ISA is" not in done.stderr:  # this processor has it
            assert done.returncode == 0, done.stderr
            said.add(done.stdout)
    assert len(said) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_queries_that_are_not_finite_find_nothing(backend: str) -> None:
    keys, queries = random(1, 200, 24), random(1, 3, 24, seed=1)
    keys[0, 7, 3], keys[0, 8, 0], queries[0, 1, 5] = torch.nan, torch.inf, torch.nan
    for bits in (8, 32):
        codes = codes_of(keys, bits=bits, metric="l2")
        found = top_k(codes, queries, 200, backend=backend)
        assert not {7, 8} & set(found.ids[0, 0].tolist())
        assert bool((found.ids[0, 1] == -1).all())
        assert bool((found.ids[0, 2, :198] >= 0).all())
        assert bool(codes.error.isfinite().all()) and bool(codes.longest.isfinite().all())


def test_an_empty_matrix_finds_nothing() -> None:
    found = top_k(Codes(2, 8), random(2, 3, 8), 4)
    assert bool((found.ids == -1).all()) and found.ids.shape == (2, 3, 4)
    assert top_k(codes_of(random(1, 5, 8)), random(1, 0, 8), 4).ids.shape == (1, 0, 4)


def test_a_row_that_is_written_again_replaces_the_old_one() -> None:
    keys = random(1, 10, 16)
    codes = codes_of(keys)
    new = 50 * torch.ones(1, 1, 16)
    codes.write(3, new)
    found = top_k(codes, new, 1)
    assert codes.count == 10 and found.ids.item() == 3
    codes.crop(3)
    assert top_k(codes, new, 9).ids[0, 0].tolist().count(-1) == 6


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_existing_rows_are_searched_in_place(metric) -> None:
    keys, queries = random(1, 70, 33), random(1, 2, 33, seed=2)
    rows, scales = quantise(keys)
    codes = Codes.of(rows, scales, metric)
    assert codes.rows.data_ptr() == rows.data_ptr()
    stored = rows.double() * scales[..., None]
    truth = queries.double() @ stored.mT - (metric == "l2") * stored.square().sum(-1)[:, None] / 2
    found = top_k(codes, queries, 5)
    assert torch.equal(found.ids, truth.topk(5).indices)


def test_rounding_is_within_half_a_step() -> None:
    keys = random(50, 33) * torch.logspace(-30, 30, 50)[:, None]
    codes, scales = quantise(keys)
    assert bool(((codes * scales[:, None] - keys).abs() <= scales[:, None] * 0.5001).all())
    assert quantise(torch.zeros(2, 4))[0].tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
@pytest.mark.parametrize("d", [1, 31, 576])
def test_distances_are_those_of_float64(dtype, d: int) -> None:
    keys, queries = random(40, d), random(3, d, seed=1)
    keys[0, 0] = 2.0**-20  # a subnormal number of float16
    queries[1] = keys[5] + 1e-4
    scales = None
    if dtype == torch.int8:
        keys, scales = quantise(keys)
    stored = keys.to(dtype)
    ids = torch.randint(0, 40, (3, 17), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[1, 1], ids[2, 2] = 0, 5, -1
    found = squared_distances(stored, scales, queries, ids)
    full = stored.double() if scales is None else stored.double() * scales[:, None].double()
    truth = (queries.double()[:, None] - full[ids.clamp_min(0)]).square().sum(-1)
    assert found[2, 2] == torch.inf
    found[2, 2] = truth[2, 2]
    assert torch.allclose(found, truth, rtol=1e-12, atol=0)


REFUSED = {
    "queries of another width": (lambda c: top_k(c, random(1, 2, 9), 3), "queries has shape .1, 2, 9."),
    "keys of another width": (lambda c: c.append(random(1, 2, 9)), "keys has shape .1, 2, 9."),
    "whole numbers": (lambda c: top_k(c, torch.zeros(1, 2, 8, dtype=torch.int64), 3), "dtype torch.int64"),
    "k": (lambda c: top_k(c, random(1, 2, 8), 0), "k is 0; expected 1 or more"),
    "backend": (lambda c: top_k(c, random(1, 2, 8), 1, backend="faiss"), "backend is 'faiss'"),
    "a row after the end": (lambda c: c.write(6, random(1, 1, 8)), "at is 6; expected a row from 0 to 5"),
    "crop": (lambda c: c.crop(9), "count is 9; expected 0 to 5"),
    "bits": (lambda c: Codes(1, 8, bits=4), "bits 4"),  # type: ignore[arg-type]
    "ids": (
        lambda c: squared_distances(torch.zeros(5, 8), None, random(1, 8), torch.tensor([[5]])),
        "ids has rows from 5 to 5; expected −1 to 4",
    ),
    "codes without scales": (
        lambda c: squared_distances(torch.zeros(5, 8, dtype=torch.int8), None, random(1, 8), torch.tensor([[1]])),
        "dtype torch.int8 without scales",
    ),
    "rows": (lambda c: Codes.of(torch.zeros(1, 5, 8), torch.zeros(1, 5)), "dtype torch.float32 with scales"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name: str) -> None:
    call, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        call(codes_of(random(1, 5, 8)))
