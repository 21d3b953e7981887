"""Part decode of `bench linear`: the time of one token after texts of different lengths.

Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import Attention, View
from spanformer.bench.gallery import DIM, HEADS, model
from spanformer.bench.linear_work import check, make_kind, of_mechanism
from spanformer.bench.session import Bench
from spanformer.memory import LayerCall, MemoryShape
from spanformer.model.build import make_position

CONTEXTS, QUICK_CONTEXTS = (1024, 32768, 1_000_000), (64, 128, 256)
PIECE = 1024
"""tokens that are read at a time"""


@dataclass(eq=False)
class Reader:
    """A layer's attention that reads a text and remembers it. Tokens are drawn from a seed, the same in every dtype."""

    mechanism: Attention
    dtype: torch.dtype = torch.float32
    memory: Any = None
    seen: int = 0
    tokens: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        self.position = make_position(model("full", heads=HEADS, head_dim=DIM, length=PIECE))
        self.memory = self.mechanism.new_memory(MemoryShape(1, HEADS, DIM, dtype=self.dtype))

    def call(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> LayerCall:
        def project(_states: Tensor, _heads: list[int] | None) -> tuple[Tensor, Tensor]:
            raise AssertionError("a recurrent state projects no earlier hidden states")

        view = View(x=x, start=self.seen, length=q.shape[2])
        return LayerCall(self.mechanism, self.position, view, q, lambda: k, v, project, project)

    def read(self, until: int) -> Reader:
        """Itself, after this many tokens."""
        while self.seen < until:
            *qkv, x = draw(min(PIECE, until - self.seen), self.tokens)
            call = self.call(*(t.to(self.dtype) for t in qkv), x.to(self.dtype))
            self.memory.attend(call)
            self.memory = self.memory.keep(call.view.x)
            self.seen += call.q.shape[2]
        return self

    def step(self, call: LayerCall) -> Tensor:
        """out [B, H, 1, D] of one token; the memory after it is made and dropped, so that each call is the same."""
        out = self.memory.attend(call)[0].out
        self.memory.keep(call.view.x)
        return out


def draw(length: int, tokens: torch.Generator) -> Iterator[Tensor]:
    """q, k, v [B, H, T, D] and hidden states x [B, T, H·D]"""
    yield from (torch.randn(1, HEADS, length, DIM, generator=tokens) for _ in range(3))
    yield torch.randn(1, length, HEADS * DIM, generator=tokens)


@torch.no_grad()
def measure(bench: Bench, kinds: tuple[str, ...]) -> None:
    contexts, rows = QUICK_CONTEXTS if bench.options.quick else CONTEXTS, []
    bench.plan(len(kinds) * (len(contexts) + 1))
    full = tuple(torch.randn(1, HEADS, contexts[1], DIM) for _ in range(2))
    token = list(draw(1, torch.Generator().manual_seed(1)))
    steps: dict[str, Callable[[], object]]
    for kind in kinds:
        reader, steps = Reader(make_kind(kind, PIECE)), {}
        off = check_step(reader.mechanism, contexts[0], token)
        for context in contexts:
            bench.begin(f"{kind} reads {context:,} tokens")
            reader.read(context)
            kept = copy.copy(reader)
            steps[str(context)] = functools.partial(kept.step, kept.call(*token))
            bench.end()
        steps["SDPA"] = functools.partial(F.scaled_dot_product_attention, token[0], *full)
        times = bench.compare(f"one token of {kind}", steps)
        micro = [1e6 * times[str(context)].median for context in contexts]
        relative = [times[str(contexts[0])].times_as_fast_as(times[str(context)]) for context in contexts]
        row = {
            "kind": kind, "contexts": contexts, "us": micro, "relative": relative, "off": off,
            "state_bytes": reader.memory.bytes(), "sdpa_context": contexts[1], "sdpa_us": 1e6 * times["SDPA"].median,
            "times_as_fast": times[str(contexts[1])].times_as_fast_as(times["SDPA"]),
        }  # fmt: skip
        rows.append(row)
        bench.keep("decode", rows)
        spread = max(relative) / min(relative) - 1
        bench.say(
            f"{kind:16} µs a token after {', '.join(f'{n:,}' for n in contexts)}: "
            f"{', '.join(f'{each:.1f}' for each in micro)}   spread {100 * spread:.1f} %   "
            f"SDPA over {contexts[1]:,} {row['sdpa_us']:.0f} µs, {row['times_as_fast']:.1f}x"
        )


def check_step(mechanism: Attention, context: int, token: list[Tensor]) -> float:
    """One token after `context` tokens against the last row of one pass in float64, relative to its largest value. A
    ValueError if it differs by more than float32 costs."""
    drawn = Reader(mechanism).tokens
    pieces = [list(draw(min(PIECE, context - at), drawn)) for at in range(0, context, PIECE)]
    text = [torch.cat([*(piece[n] for piece in pieces), token[n]], 1 if n == 3 else 2) for n in range(4)]
    inputs = dict(zip(("q", "k", "v", "x"), text, strict=True))

    def last(dtype: torch.dtype) -> dict[str, Tensor]:
        forward = of_mechanism(copy.deepcopy(mechanism).to(dtype)).forward
        return {"out": forward({name: t.to(dtype) for name, t in inputs.items()})[:, :, -1:]}

    reader = Reader(mechanism).read(context)
    checked = check({"out": reader.step(reader.call(*token))}, last(torch.float64), last(torch.float32))
    if checked.wrong:
        raise ValueError(f"a token of {type(mechanism).__name__} after {context} tokens is wrong: {checked.wrong}")
    return checked.off
