"""Reformer: The Efficient Transformer (Kitaev, Kaiser, Levskaya, 2020). https://arxiv.org/abs/2001.04451

    k_j = q_j / |q_j|        h_r(x) = argmax([x·R_r; −x·R_r])        s_ij = q_i·k_j
    P_i = ∪_r {j < i : h_r(q_j) = h_r(q_i), at most w tokens of the bucket back}        a_ij ∝ exp(s_ij), j ∈ P_i

A token sees itself only if P_i is empty. The score is trax's q·k/|k|: the length of q is the temperature, and no 1/√D
beside it. The paper cuts sorted tokens into chunks, whose borders move with later tokens; a window in the bucket does
not. More than 128 buckets are hashed as two factors, one argmax each, so that the cost does not grow with the text.
Shapes: B batch, H heads, N = B·H, R rounds, T tokens, D head size.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention.adaptive_span import AdaptiveSpan
from spanformer.attention.base import View, own_output
from spanformer.attention.bucketed import Bucketed
from spanformer.attention.lsh_chunks import attend_chunks
from spanformer.kinds import HeadSpec
from spanformer.memory.base import MemoryShape, OwnMemory
from spanformer.ops import AnyRule, Attended
from spanformer.ops.bucket_rounds import SHORTEST, attend_alike
from spanformer.ops.buckets import Placed, Seen, Sorted, with_itself

FACTORED = 128  # more buckets than this are the product of two numbers
MOST_ROUNDS = 1024


class LSH(Bucketed):
    """`learned`: each head learns how many tokens of its bucket it sees, up to `window`, on a ramp of ranks. `chunked`:
    the paper's form, in which later tokens decide which earlier ones are seen; for comparison only."""

    rotations: Tensor
    """[H, R, D, columns]: of one factor after the other, half of its buckets each"""

    def __init__(
        self, heads: int, head_dim: int, window: int, *, buckets: int = 64, rounds: int = 4, learned: bool = False,
        chunked: bool = False, seed: int = 0, ramp: float = 32.0, init: float = 0.0, penalty: float = 2e-6,
    ) -> None:  # fmt: skip
        super().__init__(heads, window, buckets, rounds)
        self.factors, self.chunked = factors_of(buckets), chunked
        _check_rounds(rounds)
        if learned and chunked:
            raise ValueError("learned is true beside chunked; a span needs ranks, which chunks do not have; drop one")
        self.seed, sizes = seed, (heads, head_dim, sum(self.factors) // 2)
        self.register_buffer("rotations", torch.stack([_rotations(seed, n, sizes) for n in range(rounds)], 1))
        self._alike: Tensor | None = None  # whether all tokens of the last training step were in one bucket
        if learned:
            self.span = AdaptiveSpan(heads, window, ramp=ramp, init=init, penalty=penalty)
            self.window = window + math.ceil(ramp)

    def set_rounds(self, rounds: int) -> None:
        """Hash in more or fewer rounds than the model was trained with. The first ones stay, so that with more rounds a
        token sees what it saw, and more."""
        _check_rounds(rounds)
        heads, known, *sizes = self.rotations.shape
        more = [_rotations(self.seed, n, (heads, *sizes)).to(self.rotations) for n in range(known, rounds)]
        self.rotations = torch.cat([self.rotations[:, :rounds], *(each[:, None] for each in more)], 1)
        self.rounds = rounds

    @classmethod
    def build(cls, spec: HeadSpec) -> LSH:
        p, s = spec.p, spec.section
        return cls(
            spec.heads, spec.head_dim, p.window, buckets=p.buckets, rounds=p.rounds, learned=p.learned,
            chunked=p.chunked, ramp=s.ramp, init=s.init, penalty=s.penalty,
        )  # fmt: skip

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = super().supports(position=position)
        if cache and self.chunked:
            reasons.append(
                "LSH with chunked=true has no KV cache: later tokens move the borders of its chunks, so that what a "
                "token sees depends on the future; use chunked=false"
            )
        return [*reasons, *(own_output(self, cache=False, mixed=mixed) if self.chunked else [])]

    def start_from(self, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
        self.keys_are_queries = True
        key.requires_grad_(False)  # keys are the queries: what is not used must not wait for a gradient

    def keys(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=SHORTEST)

    def attend_sorted(self, placed: Placed, among: Sorted, seen: Seen) -> Attended:
        return attend_alike(placed.q, placed.v, among, seen)

    def hashed(self, x: Tensor) -> Tensor:
        at = x.device.type
        with torch.autocast(at, enabled=False) if torch.amp.is_autocast_available(at) else nullcontext():
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            turns = self.rotations.to(wide.dtype)
            if x.shape[2] == 1:  # all rounds in one product: a step of decoding is short
                return self._round(wide.transpose(0, 1).transpose(1, 2) @ turns).permute(2, 0, 1)[..., None]
            found = [self._round(wide @ turns[:, n]) for n in range(self.rounds)]
        return torch.stack(found, 2)

    def _round(self, turned: Tensor) -> Tensor:
        """[B, H, T, columns] → [B, H, T]"""
        ids, times = torch.zeros((), dtype=torch.int64, device=turned.device), 1
        for part, size in zip(turned.split([n // 2 for n in self.factors], -1), self.factors, strict=True):
            most, at = part.abs().max(-1)  # NaN if any is
            negative = part.gather(-1, at[..., None])[..., 0] < 0
            ids, times = ids + times * (at + negative * (size // 2)), times * size
            ids = torch.where(most.isnan(), math.prod(self.factors), ids)
        return ids.clamp(max=self.buckets)

    def seen(self, batch: int) -> Seen:
        dropout = self.dropout if self.training else 0.0
        if self.span is None:
            return Seen(self.window, dropout=dropout, backend=self.backend)
        span = self.span.rule().span
        assert span is not None
        return Seen(self.window, span=span.repeat(batch), ramp=self.span.ramp, dropout=dropout, backend=self.backend)

    def place(self, q: Tensor, v: Tensor, view: View) -> Placed:
        placed = super().place(q, v, view)
        if self.training and placed.ids.shape[2] > 1:
            self._alike = (placed.ids == placed.ids[..., :1]).all()
        return placed

    def advice(self) -> str | None:
        """Hashes that tell nothing apart."""
        if self._alike is None or not bool(self._alike):
            return None
        return (
            f"all tokens are in one bucket, in every round: LSH is then a window of {self.window} tokens; queries that "
            "are alike need no hashing, so use window, or lower optim.lr"
        )

    def finish(self, found: Attended, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        return with_itself(found, (q * k).sum(-1), v)

    def new_memory(self, shape: MemoryShape) -> OwnMemory | None:
        return None if self.chunked else super().new_memory(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        if not self.chunked:
            return super().forward(q, k, v, rule, view)
        placed = self.place(q, v, view)
        k = self.keys(placed.q)
        found = self.finish(attend_chunks(placed, k, self.window), placed.q, k, placed.v)
        return Attended(found.out.view(*q.shape[:3], -1), found.lse.view(q.shape[:3]))

    def extra_repr(self) -> str:
        more = (", learned=True" if self.span is not None else "") + (", chunked=True" if self.chunked else "")
        return f"heads={self.heads}, window={self.window}, buckets={self.buckets}, rounds={self.rounds}{more}"


def _check_rounds(rounds: int) -> None:
    if not 1 <= rounds <= MOST_ROUNDS:
        raise ValueError(f"rounds is {rounds}; expected 1 … {MOST_ROUNDS:,}")


def _rotations(seed: int, round_: int, sizes: tuple[int, ...]) -> Tensor:
    """[H, D, columns] of one round, by a generator of its own: never by the global one, which is the user's."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1000 * seed + round_))


def factors_of(buckets: int) -> tuple[int, ...]:
    """The buckets of each argmax: one, or two even ones as alike as possible."""
    if buckets < 2 or buckets % 2:
        raise ValueError(
            f"buckets is {buckets}; expected an even number, since each rotation gives one bucket per sign"
        )
    if buckets <= FACTORED:
        return (buckets,)
    for a in range(math.isqrt(buckets) // 2 * 2, 1, -2):
        if buckets % a == 0 and buckets // a % 2 == 0:
            return a, buckets // a
    raise ValueError(
        f"buckets is {buckets}; beyond {FACTORED} they are hashed as two even factors, so expected a multiple of 4"
    )
