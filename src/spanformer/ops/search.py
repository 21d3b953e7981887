"""Exact search: for each query, the k rows of a matrix with the largest scores, by a scan of 8-bit codes or float32.

    metric "dot"   score = q·k_n
    metric "l2"    score = q·k_n − ‖k_n‖²/2, so that larger is nearer:  ‖q − k_n‖² = ‖q‖² − 2·score

With 8 bits a row is c_n·s_n: int8 numbers and one float32 scale, its largest number / 127. Queries are rounded to
16 bits at most, so products of integers are exact, and larger scores come first, of equal ones the smaller row. What is
found depends neither on the number of threads nor on the other queries. `Found.bound` says how far a score may be from
the one of the vectors before rounding; `squared_distances` computes those in float64 for rows that were found.

Shapes: B matrices, N rows, D numbers of a row, Q queries of each matrix, k rows to find.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from spanformer.ops import kernel
from spanformer.ops.c_layout import RESCORE, SCAN

Metric = Literal["dot", "l2"]
LEVELS = 127  # the largest 8-bit code: codes are symmetric
STEP = 32  # the kernel reads this many numbers of a query at a time
QUERIES = 256  # of one call of the kernel
ROUNDING = 2.0**-22  # of float32 scores, relative to the largest sum of |q·k|
STORED = {torch.float16: 16, torch.float32: 32, torch.int8: 8}


class Found(NamedTuple):
    scores: Tensor
    """[B, Q, k] float32, largest first; −∞ where there are fewer rows than k, or the query is not finite"""
    ids: Tensor
    """[B, Q, k] int64 rows; −1 likewise"""
    bound: Tensor
    """[B, Q] float32: a score is at most this far from the score of the vectors before rounding"""


class Codes:
    """B growing matrices of equal length: `append` adds rows, `write` replaces some."""

    def __init__(
        self, batch: int, dim: int, *, bits: Literal[8, 32] = 8, metric: Metric = "dot", capacity: int = 0
    ) -> None:
        """capacity: rows to allocate now; more are allocated when needed."""
        if bits not in (8, 32) or metric not in ("dot", "l2") or batch < 1 or dim < 1 or capacity < 0:
            raise ValueError(
                f"batch is {batch}, dim {dim}, bits {bits}, metric {metric!r}, capacity {capacity}; expected at least "
                "one matrix and one number of a row, 8 or 32 bits, 'dot' or 'l2', and 0 rows or more"
            )
        self.bits, self.metric, self.count = bits, metric, 0
        self.rows = torch.empty(batch, capacity, dim, dtype=torch.int8 if bits == 8 else torch.float32)
        """[B, capacity, D]; the first `count` are in use"""
        self.scales = torch.empty(batch, capacity) if bits == 8 else None
        """[B, capacity] float32"""
        self.bias = torch.empty(batch, capacity) if metric == "l2" else None
        """[B, capacity] float32: −‖k‖²/2 of the rows before rounding"""
        self.error = torch.zeros(batch)
        """[B] float32: the largest ‖k − row·scale‖ so far"""
        self.longest = torch.zeros(batch)
        """[B] float32: the largest ‖k‖ so far"""

    @classmethod
    def of(cls, rows: Tensor, scales: Tensor | None, metric: Metric = "dot") -> Codes:
        """Existing rows [B, N, D], int8 with scales [B, N] or float32, as they are: they may be memory-mapped. `error`
        is 0: bounds are about these rows, and not about vectors before rounding."""
        if rows.dtype != (torch.float32 if scales is None else torch.int8) or rows.ndim != 3 or rows.stride(2) != 1:
            raise ValueError(
                f"rows has shape {list(rows.shape)} and dtype {rows.dtype} {'without' if scales is None else 'with'} "
                "scales; expected contiguous rows [B, N, D], int8 with scales or float32 without"
            )
        made = cls(len(rows), rows.shape[2], bits=32 if scales is None else 8, metric=metric)
        made.rows, made.scales, made.count = rows, scales, rows.shape[1]
        squares = torch.empty(rows.shape[:2])
        for at in range(0, rows.shape[1], 8192):
            part = slice(at, at + 8192)
            factor = 1.0 if scales is None else scales[:, part, None].double()
            squares[:, part] = (rows[:, part].double() * factor).square().sum(-1)
        made.longest = squares.nan_to_num(0.0, 0.0, 0.0).amax(1).sqrt() if rows.shape[1] else made.longest
        made.bias = squares / -2 if metric == "l2" else None
        return made

    @property
    def dim(self) -> int:
        return self.rows.shape[2]

    def bytes(self) -> int:
        """Of the rows in use, with their scales and biases."""
        each = self.dim * self.rows.itemsize + 4 * (self.scales is not None) + 4 * (self.bias is not None)
        return self.rows.shape[0] * self.count * each

    def append(self, keys: Tensor) -> None:
        """keys [B, n, D]"""
        self.write(self.count, keys)

    def write(self, at: int, keys: Tensor) -> None:
        """Put keys [B, n, D] in rows `at` … at + n − 1; at is at most `count`."""
        _check(keys, "keys", (self.rows.shape[0], None, self.dim))
        if not 0 <= at <= self.count:
            raise ValueError(f"at is {at}; expected a row from 0 to {self.count}, the number of rows")
        end = at + keys.shape[1]
        self.reserve(end)
        keys = keys.detach().float()
        if self.scales is None:
            self.rows[:, at:end] = keys
        else:
            codes, scales = quantise(keys)
            self.rows[:, at:end], self.scales[:, at:end] = codes, scales
            self.error = _larger(self.error, keys - codes * scales[..., None])
        self.longest = _larger(self.longest, keys)
        if self.bias is not None:
            self.bias[:, at:end] = keys.double().square().sum(-1) / -2
        self.count = max(self.count, end)

    def crop(self, count: int) -> None:
        """Keep the first `count` rows."""
        if not 0 <= count <= self.count:
            raise ValueError(f"count is {count}; expected 0 to {self.count}, the number of rows")
        self.count = count

    def reserve(self, count: int) -> None:
        """Room for this many rows."""
        held = self.rows.shape[1]
        if count <= held:
            return
        more = max(count, held + held // 2, 64) - held
        self.rows = torch.cat([self.rows, self.rows.new_empty(self.rows.shape[0], more, self.dim)], 1)
        for name in ("scales", "bias"):
            if (old := getattr(self, name)) is not None:
                setattr(self, name, torch.cat([old, old.new_empty(old.shape[0], more)], 1))


def _larger(so_far: Tensor, vectors: Tensor) -> Tensor:
    """[B]: the larger of so_far and the norms of vectors [B, n, D], without those that are not finite."""
    if not vectors.shape[1]:
        return so_far
    return torch.maximum(so_far, vectors.norm(dim=-1).nan_to_num(0.0, 0.0, 0.0).amax(1))


def quantise(keys: Tensor) -> tuple[Tensor, Tensor]:
    """[…, D] → int8 codes [..., D] and float32 scales [...]: each number is off by at most scale/2, the largest / 254.
    A row that is not finite gets a scale that is not, so no search finds it."""
    largest = keys.abs().amax(-1) if keys.shape[-1] else keys.new_zeros(keys.shape[:-1])
    scales = largest / LEVELS
    codes = (keys / torch.where(scales > 0, scales, 1.0)[..., None]).round_()
    return codes.nan_to_num_(0.0, 0.0, 0.0).clamp_(-LEVELS, LEVELS).to(torch.int8), scales.float()


def top_k(codes: Codes, queries: Tensor, k: int, *, backend: str = "auto") -> Found:
    """The k best rows for each of queries [B, Q, D]. backend: "native" (CPU), "torch" (any device) or "auto"."""
    b, _, d = codes.rows.shape
    _check(queries, "queries", (b, None, d))
    if k < 1:
        raise ValueError(f"k is {k}; expected 1 or more")
    if backend not in ("auto", "native", "torch"):
        raise ValueError(f"backend is {backend!r}; expected 'auto', 'native' or 'torch'")
    queries = queries.detach().float()
    native = backend == "native" or (backend == "auto" and queries.device.type == "cpu" and not kernel.problem())
    prepared, scales = (queries, None) if codes.bits == 32 else round_queries(queries)
    find = _native if native else _portable
    parts = [
        find(codes, prepared[:, n : n + QUERIES], None if scales is None else scales[:, n : n + QUERIES], k)
        for n in range(0, queries.shape[1], QUERIES)
    ]
    if not parts:
        parts = [(queries.new_empty(b, 0, k), queries.new_empty(b, 0, k, dtype=torch.int64))]
    scores, ids = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    return Found(scores, ids, _bound(codes, queries, prepared, scales))


def round_queries(queries: Tensor) -> tuple[Tensor, Tensor]:
    """[B, Q, D] → whole numbers [B, Q, D] and scales [B, Q], so that Σ|q·c| < 2³¹. A query that is not finite becomes 0
    with a scale of NaN, so all its scores are."""
    d = queries.shape[2]
    most = min((1 << 15) - 1, ((1 << 31) - 1) // (LEVELS * d))
    if most < LEVELS:
        raise ValueError(f"queries has {d} numbers in a row; expected at most {(1 << 31) // LEVELS**2}")
    largest = queries.abs().amax(-1)
    scales = torch.where(largest.isfinite(), largest / most, torch.nan)
    whole = (queries / torch.where(scales > 0, scales, 1.0)[..., None]).round_()
    return whole.nan_to_num_(0.0, 0.0, 0.0).clamp_(-most, most).to(torch.int16), scales


def _bound(codes: Codes, queries: Tensor, prepared: Tensor, scales: Tensor | None) -> Tensor:
    """By Cauchy and Schwarz: |q·k − q̂·k̂| ≤ ‖q‖·‖k − k̂‖ + ‖q − q̂‖·‖k̂‖."""
    size, longest = queries.norm(dim=-1), (codes.longest + codes.error)[:, None]
    rounding = ROUNDING * (size * longest + (longest**2 if codes.bias is not None else 0.0))
    if scales is None:
        return rounding
    off = (queries - prepared * scales[..., None]).norm(dim=-1)
    return size * codes.error[:, None] + off * longest + rounding


def _native(codes: Codes, queries: Tensor, scales: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    (b, q, d), keys = queries.shape, codes.rows
    padded = -(-d // STEP) * STEP
    laid = torch.nn.functional.pad(queries, (0, padded - d)).contiguous()
    a = None if scales is None else scales.contiguous()
    counts = torch.full((b,), codes.count, dtype=torch.int64)
    best, ids = torch.empty(b, q, k), torch.empty(b, q, k, dtype=torch.int64)
    beside = codes.scales if codes.scales is not None else codes.bias
    packed = SCAN.struct.pack(
        torch.get_num_threads(), codes.bits, b, keys.shape[1], q, d, k, keys.data_ptr(), keys.stride(0), keys.stride(1),
        _address(codes.scales), _address(codes.bias), 0 if beside is None else beside.stride(0), counts.data_ptr(),
        laid.data_ptr(), padded, _address(a), best.data_ptr(), ids.data_ptr(),
    )  # fmt: skip
    kernel.library().scan(packed)
    return best, ids


def _portable(codes: Codes, queries: Tensor, scales: Tensor | None, k: int, size: int = 65536) -> tuple[Tensor, Tensor]:
    """The same in PyTorch: sums of whole numbers are exact in float64, too."""
    b, q, _ = queries.shape
    best = torch.full((b, q, k), -torch.inf, device=queries.device)
    ids = torch.full((b, q, k), -1, dtype=torch.int64, device=queries.device)
    for at in range(0, codes.count, size):
        rows = slice(at, min(at + size, codes.count))
        if scales is None:
            scores = queries @ codes.rows[:, rows].mT
        else:
            assert codes.scales is not None
            sums = (queries.double() @ codes.rows[:, rows].double().mT).float()
            scores = sums * (codes.scales[:, None, rows] * scales[..., None])
        if codes.bias is not None:
            scores = scores + codes.bias[:, None, rows]
        here = torch.arange(rows.start, rows.stop, device=queries.device).expand_as(scores)
        best, ids = _first(torch.cat([best, scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)], 2),
                           torch.cat([ids, here], 2), k)  # fmt: skip
    return best, torch.where(best == -torch.inf, -1, ids)


def _first(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest; of equal ones, those that come first."""
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    return best[..., :k], ids.gather(-1, order[..., :k])


def squared_distances(keys: Tensor, scales: Tensor | None, queries: Tensor, ids: Tensor) -> Tensor:
    """[Q, m] float64: ‖q − k‖² of queries [Q, D] to the rows ids [Q, m] of keys [N, D], in int8 (with scales [N]),
    float16 or float32; ∞ where an id is −1."""
    _check(queries, "queries", (ids.shape[0], keys.shape[1]))
    if keys.dtype not in STORED or (scales is None) != (keys.dtype != torch.int8):
        raise ValueError(
            f"keys has dtype {keys.dtype} {'with' if scales is not None else 'without'} scales; expected int8 with "
            "scales, or float16 or float32 without"
        )
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < len(keys):
        raise ValueError(
            f"ids has rows from {int(ids.min())} to {int(ids.max())}; expected −1 to {len(keys) - 1}, as keys has"
        )
    queries, ids = queries.detach().float().contiguous(), ids.contiguous()
    out = torch.empty(ids.shape, dtype=torch.float64)
    if kernel.problem() or keys.device.type != "cpu":
        for n, row in enumerate(ids):
            chosen = keys[row.clamp_min(0)].double() * (1.0 if scales is None else scales[row.clamp_min(0), None])
            out[n] = (queries[n].double() - chosen).square().sum(-1).masked_fill(row < 0, torch.inf)
        return out
    packed = RESCORE.struct.pack(
        torch.get_num_threads(), STORED[keys.dtype], *queries.shape, ids.shape[1], keys.data_ptr(), keys.stride(0),
        _address(scales), queries.data_ptr(), ids.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    kernel.library().rescore(packed)
    return out


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _check(t: Tensor, name: str, shape: tuple[int | None, ...]) -> None:
    fits = t.ndim == len(shape) and all(want in (None, got) for got, want in zip(t.shape, shape, strict=True))
    if not fits or not t.is_floating_point():
        expected = f"[{', '.join('any' if n is None else str(n) for n in shape)}]"
        raise ValueError(f"{name} has shape {list(t.shape)} and dtype {t.dtype}; expected numbers {expected}")
