"""Heads that remember a running sum share a layer with heads that remember keys and values.

The sum stands for every mechanism with a memory of its own (`Attention.new_memory`): each head's output is the mean of
all values so far, which the mean over the whole text checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import LM
from spanformer.attention import Attention, Dot, Mixed, MixedMemory, Sinks, Window, mix
from spanformer.memory import ByHead, LayerCall, MemoryShape
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.ops import Attended
from support.reading import (
    by_segments,
    check_crop_reorder_fork_and_save,
    check_rows_and_stack_of_states,
    check_rows_of_different_lengths,
    from_cache,
    text,
)


@dataclass(frozen=True)
class RunningSum:
    """sums [B, 1 + slack, Hkv, D] and counts [B, 1 + slack]: after the last token, and before it, and so on."""

    sums: Tensor
    counts: Tensor
    tokens: int = 0
    pending: tuple[Tensor, Tensor] | None = None

    def attend(self, call: LayerCall) -> tuple[Attended, None]:
        real = torch.ones(call.v.shape[0], call.v.shape[2], dtype=call.v.dtype)
        if call.view.padding is not None:
            real = (~call.view.padding[:, -call.v.shape[2] :]).to(call.v.dtype)
        steps = (call.v * real[:, None, :, None]).permute(2, 0, 1, 3)
        sums, counts = [self.sums[:, 0] + steps.cumsum(0), self.counts[:, 0] + real.T.cumsum(0)]
        mean = (sums / counts.clamp(min=1)[..., None, None]).permute(1, 2, 0, 3)  # [B, Hkv, T, D]
        lse = counts.clamp(min=1).log().T[:, None].expand(mean.shape[:3])
        history = self._history(sums, self.sums), self._history(counts, self.counts)
        object.__setattr__(self, "pending", tuple(h.detach() for h in history))
        return Attended(*(t.repeat_interleave(call.shared, 1) for t in (mean, lse))), None

    def _history(self, new: Tensor, old: Tensor) -> Tensor:
        """new [T, B, …] behind old [B, N, …], the newest first."""
        every = torch.cat([new.flip(0).transpose(0, 1), old], 1)
        return every[:, : old.shape[1]]

    def keep(self, states: Tensor) -> RunningSum:
        assert self.pending is not None
        return RunningSum(*self.pending)

    def crop(self, back: Tensor) -> RunningSum:
        if int(back.max()) >= self.sums.shape[1]:
            raise ValueError(f"at most {self.sums.shape[1] - 1} tokens can be taken back")
        at = back[:, None] + torch.arange(self.sums.shape[1])
        at = at.clamp(max=self.sums.shape[1] - 1)  # what lies further back is not known
        return RunningSum(*(torch.stack([t[b, at[b]] for b in range(len(t))]) for t in (self.sums, self.counts)))

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.sums, self.counts))

    def tensors(self) -> dict[str, Tensor]:
        return {"sums": self.sums, "counts": self.counts}

    def with_tensors(self, tensors: dict[str, Tensor]) -> RunningSum:
        return replace(self, sums=tensors["sums"], counts=tensors["counts"], pending=None)


class Mean(Attention):
    """Every head's output is the mean of all values so far."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def context_length(self) -> list[int]:
        return [0] * self.heads

    def new_memory(self, shape: MemoryShape) -> RunningSum:
        counts = torch.zeros(shape.batch, 1 + shape.slack, dtype=shape.dtype)
        sums = torch.zeros(*counts.shape, shape.kv_heads, shape.head_dim, dtype=shape.dtype)
        return RunningSum(sums, counts)


@pytest.fixture(params=["none", "rotary", "transformer_xl", "alibi", "learned"])
def lm(request: pytest.FixtureRequest) -> LM:
    """Two windows, a mean of two heads that share a key/value head, and two windows again."""
    torch.manual_seed(0)
    position = PositionConfig(kind=request.param, length=64)
    config = ModelConfig(vocab=31, dim=48, layers=2, heads=6, kv_heads=3, position=position,
                         attention=AttentionConfig(kind="window(5)"))  # fmt: skip
    model = LM(config)
    for block in model.layers():
        block.attention.mechanism = mix([Window(2, 5), Mean(2), Window(1, 3), Window(1, 9)])
    return model.double().eval()


def test_neighbours_with_keys_and_values_share_rings(lm: LM) -> None:
    mechanism = lm.mechanisms()[0]
    assert isinstance(mechanism, MixedMemory) and [part.heads for part in mechanism.each()] == [2, 2, 2]
    assert [len(ring.reach) for ring in lm.cache(1).rings()] == [1, 1] * 2
    assert isinstance(lm.start(1).layers[0], ByHead)
    assert not isinstance(mix([Window(2, 5), Window(2, 3)]), MixedMemory)


def test_means_are_of_all_values_so_far(lm: LM) -> None:
    """Against the mean of the values that the layer projects, by hooks on the layer's output projection."""
    found: list[Tensor] = []
    attention = lm.layers()[0].attention
    attention.out.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    x = text(2, 11)
    lm(x)
    states = []
    attention.value.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    lm(x)
    value = attention.value(states[0]).view(2, 11, 3, 8)[:, :, 1]
    expected = value.cumsum(1) / torch.arange(1, 12, dtype=torch.float64)[:, None]
    heads = found[0].view(2, 11, 6, 8)
    torch.testing.assert_close(heads[:, :, 2], expected)
    torch.testing.assert_close(heads[:, :, 3], expected)


@pytest.mark.parametrize("cuts", [[4, 9], [1, 2, 3], [12]])
def test_segments_equal_one_pass(lm: LM, cuts: list[int]) -> None:
    x = text(2, 17)
    torch.testing.assert_close(by_segments(lm, x, cuts), lm(x).logits)


def test_gradients_reach_every_parameter(lm: LM) -> None:
    x = text(2, 9)
    found = lm(x, lm(text(2, 6, seed=1)).state, targets=x)
    assert found.nll is not None
    found.nll.mean().backward()
    used = {name: p.grad for name, p in lm.named_parameters() if p.requires_grad}
    assert all(grad is not None and bool(torch.isfinite(grad).all()) for grad in used.values())


@pytest.mark.parametrize("sizes", [[17], [1] * 17, [3, 1, 8, 5]])
def test_cache_equals_one_pass(lm: LM, sizes: list[int]) -> None:
    x = text(2, 17)
    torch.testing.assert_close(from_cache(lm, x, sizes), lm(x).logits)


def test_cache_with_rows_of_different_lengths(lm: LM) -> None:
    check_rows_of_different_lengths(lm, [9, 4], 3)


def test_cache_is_cropped_reordered_forked_and_saved(lm: LM, tmp_path: Path) -> None:
    check_crop_reorder_fork_and_save(lm, tmp_path, [12], 3)


def test_crop_beyond_slack_changes_nothing(lm: LM) -> None:
    x, cache = text(1, 12), lm.cache(1, slack=2)
    lm.decode(x, cache)
    with pytest.raises(ValueError, match=r"row 0 cannot be cropped|at most 2 tokens"):
        cache.crop(torch.tensor([6]))
    assert cache.seen.tolist() == [12]


def test_bytes_count_rings_and_states(lm: LM) -> None:
    cache = lm.cache(2)
    states = [part.bytes() for part in cache.parts() if isinstance(part, RunningSum)]
    assert states == [2 * (1 + 8) * 8] * 2  # rows · (count + sum of one head) · 8 bytes
    assert cache.bytes() == sum(ring.bytes() for ring in cache.rings()) + sum(states)
    assert cache.full_bytes(100) == 2 * 100 * 2 * 3 * 16 * 8


def test_rows_and_stack_of_states(lm: LM) -> None:
    check_rows_and_stack_of_states(lm, 9, 5)


def test_parts_that_split_a_key_value_head_are_refused(lm: LM) -> None:
    """Two query heads share a key/value head; heads of different memories have no key in common."""
    lm.layers()[0].attention.mechanism = mix([Window(1, 5), Mean(2), Window(3, 5)])
    for begin in (lambda: lm.start(1), lambda: lm.cache(1)):
        with pytest.raises(
            ValueError, match=r"Window has 1 heads, and 2 query heads share .* expected a multiple of 2"
        ):
            begin()


@pytest.mark.parametrize("around", [Sinks, Dot, lambda inner: Mixed([inner, Window(2, 5)])])
def test_mechanism_without_a_rule_is_refused_where_one_is_needed(around) -> None:
    with pytest.raises(ValueError, match=r"Mean .*(needs a mechanism that only has a rule|combine it by `mix`)"):
        around(Mean(2))
