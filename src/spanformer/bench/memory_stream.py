"""A long stream through a memory that holds its last tokens: time per token, process memory, and every value checked.

Shapes: H heads, D head size, N rows of the store.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spanformer.attention import Memorizing, View
from spanformer.memory import LayerCall, MemoryShape
from spanformer.memory.retrieved import Retrieved
from spanformer.position import Position

HEADS, DIM = 2, 64
ASKED = 50
"""keys for which the peer's memory is searched"""


@dataclass(frozen=True)
class Streamed:
    tokens: int
    seconds: list[float]
    """of the processor, for each tenth of the stream after the memory is full: other processes do not change it much"""
    resident: list[int]
    """bytes of the process at the end of each tenth"""
    wrong: int
    """rows of the store whose key or value is not that of their token, summed over all checks"""
    checks: int

    @property
    def slower(self) -> float:
        """The last tenth's time over the first's."""
        return self.seconds[-1] / self.seconds[0]

    @property
    def larger(self) -> float:
        return self.resident[-1] / self.resident[0]


def vectors(at: Tensor, seed: int) -> Tensor:
    """[H, n, D] for tokens at positions [n]: the same whenever they are asked for."""
    # large steps, so that neighbours have nothing in common
    angle = at[None, :, None] * torch.linspace(370.3, 2900.7, DIM, dtype=torch.float64) * (seed + 1)
    return torch.cat([(angle + head).sin() for head in range(HEADS)]).float()


@torch.inference_mode()
def stream(tokens: int, memory: int, block: int, k: int) -> Streamed:
    """Feed a stream block by block; after each, every row of the store must hold the token that its position names."""
    mechanism = Memorizing(HEADS, HEADS * DIM, ring=block, memory=memory, k=k, block=block).eval()
    held = mechanism.new_memory(MemoryShape(1, HEADS, DIM, in_place=True))
    assert isinstance(held, Retrieved)
    first, tenth = memory + 2 * block, (tokens - memory - 2 * block) // 10
    seconds, resident, wrong, checks, spent = [], [], 0, 0, 0.0
    for start in range(0, tokens, block):
        at = torch.arange(start, start + block)
        q, key, value = (vectors(at, seed)[None] for seed in range(3))
        states = torch.zeros(1, block, HEADS * DIM)
        view = View(x=states, q_positions=at, k_positions=at)
        call = LayerCall(mechanism, Position(), view, q, key.clone, value, _none, _none)
        began = time.process_time()
        held.attend(call)
        held = held.keep(states)
        spent += time.process_time() - began
        if start % (16 * block) == 0 or start + block >= tokens:
            wrong += _wrong(held)
            checks += 1
        if start + block <= first:
            spent = 0.0
        elif (start + block - first) // tenth > len(seconds) and len(seconds) < 10:
            seconds.append(spent)
            resident.append(_resident())
            spent = 0.0
    return Streamed(tokens, seconds, resident, wrong, checks)


def _none(_states: Tensor, _heads: list[int] | None) -> tuple[Tensor, Tensor]:
    raise AssertionError("decoding projects no earlier hidden states")


def _wrong(held: Retrieved) -> int:
    tensors = held.tensors()
    at = tensors["store_at"][0]
    rows = (at >= 0).nonzero()[:, 0]
    keys = torch.nn.functional.normalize(vectors(at[rows], 1), dim=2)
    off = (tensors["store_values"][0][:, rows] != vectors(at[rows], 2)).any(2)
    off |= (tensors["store_keys"][0][:, rows] - keys).abs().amax(2) > 1e-6
    return int(off.sum())


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peer_right(capacity: int, block: int, times: int) -> list[tuple[int, int]]:
    """(tokens, how many of ASKED keys of the newest block find their own value) in the peer's memory, over `times` its
    capacity, at the end of every fourth block."""
    try:
        knn = importlib.import_module("memorizing_transformers_pytorch.knn_memory")
    except ImportError as error:
        raise ImportError(
            "part peer needs its package: pip install memorizing-transformers-pytorch==0.4.1 faiss-cpu"
        ) from error
    rows, random = [], torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        memory = knn.KNNMemory(
            dim=DIM, max_memories=capacity, memmap_filename=f"{folder}/memory", multiprocessing=False
        )  # fmt: skip
        for start in range(0, times * capacity, block):
            at = torch.arange(start, start + block)
            key, value = (vectors(at, seed)[0] for seed in (1, 2))
            key = torch.nn.functional.normalize(key, dim=1)  # so that a key is the best match of itself
            memory.add(torch.stack([key, value], 1)[None])
            if (start // block) % 4 == 3:
                asked = torch.randperm(block, generator=random)[:ASKED]
                found, there = memory.search(key[None, asked], 1)
                right = there[0, :, 0] & (found[0, :, 0, 1] == value[asked]).all(1)
                rows.append((start + block, int(right.sum())))
    return rows
