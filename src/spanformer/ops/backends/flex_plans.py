"""Block masks of each part of a call, shared by calls that see the same pairs: layers with equal windows, or with a
common tensor of spans, are planned once per step.

Comparing calls reads no device: numbers on the host (reaches, sizes) compare by value, tensors by memory and
version. A write through `.data` is not noticed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from spanformer.ops.backends.flex_blocks import working_dtype
from spanformer.ops.backends.flex_mods import Mod
from spanformer.ops.lower import Lowered

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MOST = 4  # plans kept: about the kinds of layers in a model. Each takes O(heads · blocks²) numbers


class Seen(NamedTuple):
    """Which pairs are visible, in FlexAttention's form."""

    mask: Mod
    block_mask: BlockMask


class Plans:
    """The last few plans."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[tuple[Seen, ...], list[Tensor]]] = OrderedDict()

    def find(self, call: Lowered) -> tuple[Seen, ...] | None:
        key = _key(call)
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        return self._known[key][0]

    def keep(self, call: Lowered, seen: tuple[Seen, ...]) -> None:
        if (key := _key(call)) is None:
            return
        # The tensors in the key stay allocated, or others could get their addresses.
        self._known[key] = seen, [t.detach() for t in _tensors(call) if t is not None]
        if len(self._known) > MOST:
            self._known.popitem(last=False)


def _tensors(call: Lowered) -> list[Tensor | None]:
    blocks = call.blocks
    pattern = [] if blocks is None else [blocks.offsets, blocks.columns, blocks.mask_ids, blocks.masks]
    ids = [call.q_positions, call.k_positions, call.q_documents, call.k_documents]
    return [call.span, call.key_bias, *ids, *pattern]


def _key(call: Lowered) -> Hashable:
    """Equal for calls that see the same pairs; None where that cannot be known."""
    tensors, device = _tensors(call), call.q.device
    if torch.compiler.is_compiling() or type(call.q) not in _PLAIN or not all(map(_told_apart, tensors)):
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # a replayed graph writes tensors without changing their version
    numbers = call.causal, call.shift, call.ramp, None if call.reach is None else tuple(call.reach_list())
    mode = torch.is_inference_mode_enabled()  # lists made there cannot be saved for a backward pass
    sizes = device, working_dtype(call.q), *call.q.shape[:3], call.k.shape[2], call.blocks and call.blocks.size
    return mode, *sizes, *numbers, *(None if t is None else _identity(t) for t in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


def _told_apart(t: Tensor | None) -> bool:
    """Inference tensors have no version; fake and meta ones no memory."""
    return t is None or (type(t) in _PLAIN and t.device.type != "meta" and not t.is_inference())


def _identity(t: Tensor) -> Hashable:
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t._version
