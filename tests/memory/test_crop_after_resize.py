"""Crops of rings that were resized: what a ring had dropped by then cannot be seen again, whatever is taken back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import HeadCache, Rule, attend
from spanformer.memory import Cache
from spanformer.ops import kernel
from support.cache_machine import Model, Setting

BACKENDS = ["banded"] if kernel.problem() else ["native", "banded"]
ZEROS = [0, 6, 1 << 40]
B, H, HKV, D = 2, 4, 2, 8
READ, NEW, REACH, SLACK = 18, 12, 4, 3
DROPPED = READ - REACH - SLACK  # tokens below are no longer held when READ were read


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, h, READ + NEW, D, generator=g) for h in (H, HKV, HKV))
    return q, k, v


def resized(zeros: int, reach: int) -> HeadCache:
    _, k, v = (t[:, :, :READ] for t in qkv())
    cache = HeadCache(B, [REACH] * HKV, D, slack=SLACK, zeros=zeros)
    cache.append(k, v)
    cache.resize([reach] * HKV)
    return cache


def expected(q: Tensor, k: Tensor, v: Tensor, reach: int, zeros: int) -> Tensor:
    """What the last tokens q see if the first DROPPED tokens are hidden, or are zeros after `zeros` other zeros."""
    ahead, rule = min(zeros, reach), Rule(H, reach=reach)
    k, v = (torch.cat([torch.zeros(B, HKV, ahead + DROPPED, D), t[:, :, DROPPED:]], 2).double() for t in (k, v))
    if not zeros:
        bias = torch.zeros(1, 1, k.shape[2], dtype=torch.float64)
        bias[..., :DROPPED] = -math.inf
        rule = rule + Rule(H, causal=False, key_bias=bias)
    return attend(q.double(), k, v, rule, backend="reference").out


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("left", [17, 14])
def test_crop_below_a_resize_is_refused_where_dropped_tokens_would_be_in_sight(left: int, zeros: int) -> None:
    cache = resized(zeros, 9)
    with pytest.raises(
        ValueError, match=rf"row 1 cannot be cropped from 18 to {left} tokens: when its rings were resized"
    ):
        cache.crop(torch.tensor([READ, left]))
    assert cache.seen.tolist() == [READ, READ]


@pytest.mark.parametrize("zeros", ZEROS)
def test_crop_below_a_resize_is_accepted_where_all_in_sight_is_held(zeros: int) -> None:
    cache = resized(zeros, REACH + 1)
    cache.crop(torch.tensor([DROPPED + REACH, READ]))
    assert cache.seen.tolist() == [DROPPED + REACH, READ]
    with pytest.raises(ValueError, match="row 0 cannot be cropped from 15 to 14 tokens"):
        cache.crop(torch.tensor([DROPPED + REACH - 1, READ]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("steps", [[1] * NEW, [NEW]], ids=len)
def test_tokens_read_after_a_resize_can_be_taken_back(steps: list[int], zeros: int, backend: str) -> None:
    """Whatever the ring had dropped before, the slack holds for what was read since."""
    (q, k, v), cache, rule = qkv(), resized(zeros, 9), Rule(H, reach=9)
    for _ in range(3):
        cache.append(*(torch.full((B, HKV, SLACK, D), 7.0) for _ in range(2)))
        cache.crop(torch.tensor([READ, READ]))
    parts = [t[:, :, READ:].split(steps, 2) for t in (q, k, v)]
    found = [cache.attend(*some, rule, backend=backend).out for some in zip(*parts, strict=True)]
    truth = expected(q[:, :, READ:], k, v, 9, zeros)
    torch.testing.assert_close(torch.cat(found, 2).double(), truth, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("how", ["reorder", "fork", "save and load"])
@pytest.mark.parametrize("zeros", ZEROS)
def test_copies_remember_where_they_were_resized(zeros: int, how: str, tmp_path: Path) -> None:
    _, k, v = (t[:, :, :READ] for t in qkv())
    model = Model(Setting(0, zeros, 0, spans=False, sinks=False), [[REACH] * HKV])
    cache = model.cache(B, slack=SLACK)
    cache.layers[0].append(k, v)
    cache.layers[0].resize([9] * HKV)
    if how == "reorder":
        cache.reorder(torch.tensor([1, 0]))
    elif how == "fork":
        cache = cache.fork(2)
    else:
        cache.save(tmp_path / "cache")
        cache = Cache.load(tmp_path / "cache", model)
    cache.layers[0].append(*(t[[0] * cache.batch, :, :2] for t in (k, v)))
    cache.crop(cache.seen - 1)
    cache.crop(cache.seen - 1)
    with pytest.raises(ValueError, match="row 0 cannot be cropped from 18 to 17 tokens: when its rings were resized"):
        cache.crop(cache.seen - 1)
