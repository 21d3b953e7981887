"""Contenders from other projects: FlexAttention, x-transformers, local-attention, and the original adaptive-span code.

All are optional; one that is not installed is skipped with that reason.

Shapes: B batch, H heads, Tq queries, Tk keys, D head size, L length; n blocks of S positions.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from spanformer.bench import profiles
from spanformer.bench.contenders import Contender, full_rule
from spanformer.bench.work import Inputs, Work
from spanformer.ops import Rule

FLEX_SHAPES = 8  # after this many recompilations dynamo falls back to the dense, uncompiled form
FLEX_BLOCK = 128
_flex_seen: set[Work] = set()


def _missing(module: str, package: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{package} is not installed (pip install {package})"


def _flex_cannot(work: Work) -> str | None:
    if work.mode == "forward+backward":
        return "FlexAttention has no backward on the CPU"
    if work.mode == "decode" or work.streaming:
        return "needs one compilation per KV cache length"
    if work.terms == "distance_vec":
        return "q·r[d] in a score_mod would need an L × L table"
    if work.length % FLEX_BLOCK:
        return f"{work.length} is not a multiple of its block, {FLEX_BLOCK}"
    if work not in _flex_seen and len(_flex_seen) >= FLEX_SHAPES:
        return f"{FLEX_SHAPES} shapes are compiled already; it would run uncompiled"
    return None


def flex_block_mask(reaches: list[int], length: int, size: int, mask_mod):
    """A BlockMask of causal bands, computed from [H, n, n] integers without an L × L tensor."""
    from torch.nn.attention.flex_attention import BlockMask

    start = torch.arange(-(-length // size)) * size
    nearest = start[:, None] - (start + size - 1)  # [n, n] the smallest distance within a block
    farthest = (start + size - 1)[:, None] - start
    reach = torch.tensor(reaches)[:, None, None]
    some = (farthest >= 0) & (nearest < reach)
    full = (nearest >= 0) & (farthest < reach)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)  # the chosen columns first, ascending
        return blocks.sum(-1).int()[None], order.int()[None]

    part, whole = listed(some & ~full), listed(full)
    return BlockMask.from_kv_blocks(*part, *whole, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(length, length))


def _flex_build(inputs: Inputs) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    work, span, bias, ramp = inputs.work, inputs.span, inputs.distance_bias, profiles.RAMP

    def score_mod(score, _b, h, i, j):
        m = ((ramp + span[h] - (i - j)) / ramp).clamp(1e-30, 1.0)
        score = score + m.log()
        return score if bias is None else score + bias[h, (i - j).clamp(min=0)]

    def mask_mod(_b, h, i, j):
        return (i >= j) & (i - j < ramp + span[h])

    mask = flex_block_mask(work.reaches(), work.length, FLEX_BLOCK, mask_mod)
    _flex_seen.add(work)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(inputs.q, inputs.k, inputs.v, score_mod=score_mod, block_mask=mask)


def _x_transformers_cannot(work: Work) -> str | None:
    if work.profile != "F":
        return "has no spans per head; supports profile F only, full causal attention"
    return _missing("x_transformers", "x-transformers")


def _x_transformers_build(inputs: Inputs) -> Callable[[], Tensor]:
    Attend = importlib.import_module("x_transformers.attend").Attend  # an optional package

    attend = Attend(causal=True, flash=True, heads=inputs.work.heads)
    return lambda: attend(inputs.q, inputs.k, inputs.v)[0]


def _local_cannot(work: Work) -> str | None:
    window = profiles.uniform_reach(work.profile)
    if window is None:
        return "has one window for all heads; supports profiles S and M only"
    if window >= work.length or work.length % window:
        return f"the length must be a larger multiple of the window, {window}"
    return _missing("local_attention", "local-attention")


def _local_build(inputs: Inputs) -> Callable[[], Tensor]:
    LocalAttention = importlib.import_module("local_attention").LocalAttention

    window = profiles.uniform_reach(inputs.work.profile)
    attend = LocalAttention(window, causal=True, exact_windowsize=True, use_rotary_pos_emb=False)
    return lambda: attend(inputs.q, inputs.k, inputs.v)


def _local_rule(inputs: Inputs) -> Rule:
    """Its window has a hard edge and does not count the token itself."""
    window = profiles.uniform_reach(inputs.work.profile)
    assert window is not None  # checked by _local_cannot
    return Rule(inputs.work.heads, reach=window + 1)


def original(path: Path | None) -> Contender:
    """SeqAttention, imported from a clone of facebookresearch/adaptive-span; this project contains none of its code."""

    def cannot(work: Work) -> str | None:
        if path is None:
            return "pass --original PATH, a clone of facebookresearch/adaptive-span"
        if not work.streaming or work.terms != "distance_vec":
            return "supports only a block of queries after a cache, with a table of positions: see the streaming rows"
        return None if (path / "models.py").is_file() else f"{path} holds no models.py"

    def build(inputs: Inputs) -> Callable[[], Tensor]:
        assert path is not None
        work = inputs.work
        attention = import_from(path, "models").SeqAttention(
            hidden_size=work.dim,
            nb_heads=work.heads,
            attn_span=work.length,
            dropout=0.0,
            adapt_span_params={
                "adapt_span_enabled": True,
                "adapt_span_loss": 0.0,
                "adapt_span_ramp": profiles.RAMP,
                "adapt_span_init": 0.0,
                "adapt_span_cache": False,
            },
            pers_mem_params={"pers_mem_size": 0},
        )
        mask = attention.adaptive_span._mask
        del mask.current_val  # replace its parameter by the spans of this work, so that gradients reach them
        q, k, v = (t.flatten(0, 1) for t in (inputs.q, inputs.k, inputs.v))
        vectors = inputs.distance_vec
        assert vectors is not None  # checked by cannot()

        def forward() -> Tensor:
            mask.current_val = (inputs.span / work.length)[:, None, None]
            table = vectors.flip(1).transpose(1, 2)  # [1, D, L], the farthest distance first
            return attention(q, k, v, table).view(inputs.q.shape)

        return forward

    # it adds 1e-8 to its normaliser, which matters for short spans of a softmax over L
    return Contender("original", "original adaptive-span", cannot, build, dense=8.0, floor=1e-4)


def import_from(path: Path, name: str):
    """Import a module and its imports from a folder, then restore sys.path and sys.modules."""
    before = set(sys.modules)
    sys.path.insert(0, str(path))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(path))
        for taken in set(sys.modules) - before:
            file = getattr(sys.modules[taken], "__file__", None)
            if file and Path(file).parent == path:
                del sys.modules[taken]


FLEX = Contender("flex", "FlexAttention, compiled", _flex_cannot, _flex_build)
X_TRANSFORMERS = Contender(
    "x-transformers", "x-transformers, flash", _x_transformers_cannot, _x_transformers_build, full_rule,
    same_work=False, kinds=("whole",),
)  # fmt: skip
LOCAL = Contender(
    "local-attention", "local-attention, hard window", _local_cannot, _local_build, _local_rule,
    same_work=False, kinds=("whole",),
)  # fmt: skip
