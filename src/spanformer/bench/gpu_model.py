"""Predicted time of a forward pass on a GPU, from the instructions that the compiler made: no GPU, no measurement.

A tile of BM × BN pairs keeps an SM busy for

    clocks = BM · BN · D · products / (multiply-adds a clock)  +  instructions of a thread · warps / schedulers

so tensor cores and instruction issue do not overlap at all. That is pessimistic for an ideal kernel; for dense causal
attention it comes near the speeds that are published (`dense_rate`, docs/gpu.md). A block of queries runs its tiles in
turn, and blocks go to the SMs in the order of their launch: the longest head first, in it the longest block. Long
blocks are split in two if there are few. Not modelled: latency, bank conflicts, L2, memory but for the merge of split
blocks, clocks under load.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BLOCK_CLOCKS = 1500  # to begin and end a block: first loads, the output's store
EXIT_CLOCKS = 800  # of a block's second part that has nothing to do
PARTS = 2
LAUNCH_US, BYTES_PER_US = 3.0, 1.5e6  # of the kernel that merges parts
LEAST_ALONE = 0.6
"""share of an SM's rate that one block reaches by itself, at worst: its few warps cannot hide each other's latency"""
FA2 = (150e12, 190e12)
"""operations a second of FlashAttention-2 on an A100: forward, causal, heads of 64, 8k tokens (paper and reports)"""


@dataclass(frozen=True)
class Gpu:
    name: str
    sms: int
    hertz: float
    macs: int
    """16-bit multiply-adds that an SM's tensor cores do in a clock"""
    registers: int = 65536
    shared: int = 164 << 10
    schedulers: int = 4


A100 = Gpu("A100", 108, 1.41e9, 1024)


@dataclass(frozen=True)
class Kernel:
    """A row of the compile gate, as far as the model needs it."""

    tile: tuple[int, int]
    warps: int
    full: float
    """instructions a pair without masks, and below with them"""
    edge: float
    registers: int
    shared: int
    head_size: int
    products: int = 2

    @classmethod
    def of(cls, row: dict[str, Any]) -> Kernel:
        """From a row of `compile_kernels`."""
        same = {name: row[name] for name in ("warps", "registers", "shared", "head_size", "products")}
        return cls(tuple(row["tile"]), **same, **row["per_pair"])

    def clocks(self, gpu: Gpu, per_pair: float) -> float:
        """Of one tile."""
        pairs = self.tile[0] * self.tile[1]
        return pairs * (self.head_size * self.products / gpu.macs + per_pair / 32 / gpu.schedulers)

    def resident(self, gpu: Gpu) -> int:
        """Blocks that fit an SM at once. Registers are given to warps in units of 8 a thread."""
        threads = 32 * self.warps
        by_registers = gpu.registers // (-(-self.registers // 8) * 8 * threads)
        return max(1, min(by_registers, gpu.shared // max(1, self.shared), 2048 // threads))


@dataclass(frozen=True)
class Predicted:
    us: float
    work_us: float
    """if the work were spread over all SMs evenly"""
    longest_us: float
    """of the longest block of queries by itself"""


def tiles(length: int, tile: tuple[int, int], reach: int, ramp: int) -> Iterator[tuple[int, int]]:
    """(with masks, without) of each block of queries, the last one first. reach: keys that a query sees, itself
    included; the last `ramp` of them are on the ramp, if reach is less than the length."""
    queries, keys = tile
    near = reach - ramp if reach < length else length  # keys with weight 1
    for first in range((length - 1) // queries * queries, -1, -queries):
        last = min(first + queries, length) - 1
        low, high = max(0, first - reach + 1) // keys, last // keys + 1
        whole = max(low, -(-max(0, last - near + 1) // keys)), (first + 1) // keys
        full = max(0, min(whole[1], high) - whole[0])
        yield high - low - full, full


def predict(
    kernel: Kernel, reaches: list[int], length: int, batch: int, gpu: Gpu = A100, *, ramp: int = 32, alone: float = 1.0,
    least: int | None = None,
) -> Predicted:  # fmt: skip
    """reaches: one for each head. alone: the share of an SM's rate that one block reaches by itself. least: blocks of
    more tiles are split in two; None: none is."""
    edge, full, us = kernel.clocks(gpu, kernel.edge), kernel.clocks(gpu, kernel.full), 1e6 / gpu.hertz
    jobs, split = [], 0
    for reach in sorted(reaches, reverse=True):
        for e, f in tiles(length, kernel.tile, reach, ramp):
            clocks = e * edge + f * full
            if least is not None and e + f > least:
                split += batch * kernel.tile[0]
                jobs += [BLOCK_CLOCKS + clocks / PARTS] * batch * PARTS
            else:
                jobs += [BLOCK_CLOCKS + clocks, *([] if least is None else [EXIT_CLOCKS] * (PARTS - 1))] * batch
    merging = 0.0 if least is None else LAUNCH_US + split * kernel.head_size * 4 * PARTS * 2 / BYTES_PER_US
    end = run_blocks(jobs, gpu.sms, kernel.resident(gpu), alone) * us + merging
    return Predicted(end, sum(jobs) / gpu.sms * us + merging, max(jobs) * us)


def split_from(kernel: Kernel, heads: int, length: int, batch: int, gpu: Gpu = A100) -> int | None:
    """`least` as the launcher of the forward kernel chooses it."""
    from spanformer.ops.backends.triton.launch import LONG_TILES, WAVES  # triton reads its environment at import

    blocks = batch * heads * -(-length // kernel.tile[0])
    few = blocks <= WAVES * 2 * gpu.sms and length > LONG_TILES * kernel.tile[1]
    return LONG_TILES if few else None


def run_blocks(jobs: list[float], sms: int, resident: int, alone: float = 1.0) -> float:
    """When the last job ends. Each SM takes up to `resident` jobs, in order, and shares its rate of 1 among them; a job
    gets at most `alone`."""
    waiting = iter(jobs)
    places = [Sm(alone) for _ in range(sms)]
    for _ in range(resident):
        for place in places:
            place.begin(next(waiting, None))
    ends = [(place.end, number) for number, place in enumerate(places) if place.running]
    heapq.heapify(ends)
    now = 0.0
    while ends:
        now, number = heapq.heappop(ends)
        place = places[number]
        place.finish(now)
        place.begin(next(waiting, None))
        if place.running:
            heapq.heappush(ends, (place.end, number))
    return now


class Sm:
    """Jobs that share one SM."""

    def __init__(self, alone: float) -> None:
        self.alone, self.now, self.progress = alone, 0.0, 0.0
        self.running: list[float] = []
        """a heap: the progress at which each job ends"""

    @property
    def rate(self) -> float:
        """Clocks of each job's work that are done in a clock."""
        return min(self.alone, 1 / len(self.running))

    @property
    def end(self) -> float:
        """When the next job ends."""
        return self.now + (self.running[0] - self.progress) / self.rate

    def begin(self, job: float | None) -> None:
        if job is not None:
            heapq.heappush(self.running, self.progress + job)

    def finish(self, now: float) -> None:
        """The next job ends now."""
        self.progress, self.now = heapq.heappop(self.running), now


def dense_rate(kernel: Kernel, length: int, heads: int, gpu: Gpu = A100) -> float:
    """Predicted operations a second of causal attention without spans, for comparison with published figures."""
    found = predict(kernel, [length] * heads, length, 1, gpu)
    return dense_operations(length, heads, kernel.head_size) / (found.us * 1e-6)


def dense_operations(length: int, heads: int, head_size: int) -> float:
    """Of causal attention forward, as FlashAttention counts them: half of the square."""
    return 2.0 * heads * length**2 * head_size
