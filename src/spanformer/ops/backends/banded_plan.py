"""How the banded backend cuts a call: heads of similar reach together, queries in chunks, and for each chunk the keys
that any of its queries could see. Windows are plain integers, because they are sizes of tensors.

Shapes: B batch, H heads, Tq queries, Tk keys; C queries in a chunk, n chunks in a step, W keys in a chunk's window,
S positions in a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.ops.blocks import FULL, HIDDEN, BlockIndex
from spanformer.ops.lower import Lowered, Numbers
from spanformer.ops.rule import UNLIMITED

ROOM = {"cpu": 1 << 20}  # how many scores a step may hold: on a CPU about as many as fit its cache
ROOM_ELSEWHERE = 1 << 24
WORTH_GATHERING = 0.75  # gather a window's keys one by one if fewer than this share of them are in the pattern


@dataclass(frozen=True, eq=False)
class Step:
    """n chunks of C queries for a few heads; each chunk sees W keys, and the next chunk's keys begin C later."""

    heads: tuple[int, ...]
    limit: int
    """no head of the step sees a distance of this or more"""
    size: int
    """C"""
    start: int
    """the first query"""
    chunks: int
    """n"""
    lo: int
    """the first key of the first chunk"""
    width: int
    """W, at least 1"""
    columns: Tensor | None = None
    """[W] indices of the keys, if they are not lo … lo + W − 1 (n is then 1)"""


@dataclass(frozen=True, eq=False)
class Plan:
    """The parts of a call that have no gradient, and its steps."""

    steps: list[Step]
    offset: int | None
    """query i is at i + offset relative to key 0, and key j at j; None for other positions"""
    reach: list[int]
    least_span: list[float] | None
    """the shortest span of each head, on a CPU, where reading it is free"""
    least_key_span: float | None
    """the shortest span of any key, likewise"""
    causal: bool
    max_future: int
    shift: int
    ramp: float
    scale: float
    dropout: float
    seed: Tensor | None
    numbers: Numbers | None
    """with dropout"""
    q_positions: Tensor
    k_positions: Tensor
    q_documents: Tensor | None
    k_documents: Tensor | None
    blocks: BlockIndex | None
    orders: tuple[Tensor, Tensor] | None


def make_plan(call: Lowered) -> Plan:
    """On an accelerator this costs a device-to-host copy if a span comes without a reach, and if positions or blocks
    are given: windows are sizes of tensors, which the host must know."""
    batch = call.q.shape[0]
    offset, blocks = _regular_offset(call), call.blocks
    room = ROOM.get(call.q.device.type, ROOM_ELSEWHERE) // (4 if call.dropout else 1)  # dropout hashes in int64
    columns = None if blocks is None else blocks.masks.any(1)
    steps: list[Step] = []
    for (size, limit, *_), heads in _groups(call, offset).items():
        windows = _windows(call, offset, size, limit)
        widest = max((hi - lo for lo, hi in windows), default=1)
        together = max(1, room // max(1, batch * size * widest))
        for i in range(0, len(heads), together):
            some = tuple(heads[i : i + together])
            cut = _plain_steps(call, some, size, limit, windows, room // max(1, batch * len(some)))
            if blocks is None or columns is None:
                steps += cut
            else:
                steps += (_narrowed(step, blocks, columns, *call.positions()) for step in cut)
    if call.key_span is not None:
        steps = [_alive(step, call.key_span.detach(), call) for step in steps]
    least = least_key = None
    if call.key_span is not None and call.key_span.device.type == "cpu" and call.key_span.numel():
        least_key = float(call.key_span.detach().min())
    if call.span is not None and call.span.device.type == "cpu" and call.span.numel():
        z = call.span.detach().double()
        least = (z.amin((0, 2)) if call.dynamic else z).tolist()
    return Plan(
        steps, offset, call.reach_list(), least, least_key, call.causal, call.max_future, call.shift, call.ramp,
        call.scale, call.dropout, call.seed, call.numbered() if call.dropout else None, *call.positions(),
        call.q_documents, call.k_documents, blocks, call.orders,
    )  # fmt: skip


def _regular_offset(call: Lowered) -> int | None:
    """The offset between queries and keys if explicit positions are runs of consecutive ones, as they mostly are."""
    if call.q_positions is None or call.k_positions is None:
        return call.offset
    q, k = call.q_positions, call.k_positions
    gap = q[:, :1] - k[:, :1]  # [1 or B, 1]
    runs = [(t - t[:, :1] == torch.arange(t.shape[1], device=t.device)).all() for t in (q, k)]
    regular, first = torch.stack([runs[0] & runs[1] & (gap == gap[:1]).all(), gap[0, 0]]).tolist()
    return first if regular else None


def _groups(call: Lowered, offset: int | None) -> dict[tuple[int, ...], list[int]]:
    """Heads by (C, limit). Limits are rounded up by less than half a chunk, so that heads of similar reach share
    steps."""
    tq, tk = call.q.shape[2], call.k.shape[2]
    read = call.reach_list if call.reach is not None and call.q.device.type != "cpu" else call.limits
    longest = UNLIMITED
    if offset is not None:
        back, future = offset + tq - 1 - call.shift, tk - 1 - offset
        longest = max(0, (back if call.causal else max(back, future)) + 1)
    groups: dict[tuple[int, ...], list[int]] = {}
    for head, limit in enumerate(read()):
        limit = min(limit, longest)
        size = 64 if limit <= 256 else 128 if limit <= 1024 else 256
        if call.blocks is not None:
            size = min(max(call.blocks.size, 64), 256)
        if limit:
            limit = min(longest, 1 + -(-(limit - 1) // (size // 2)) * (size // 2))
        own = (head,) if call.blocks is not None and call.blocks.offsets.shape[0] > 1 else ()
        groups.setdefault((max(1, min(size, tq)), limit, *own), []).append(head)
    return groups


def _windows(call: Lowered, offset: int | None, size: int, limit: int) -> list[tuple[int, int]]:
    """For each chunk of queries, the range of keys [lo, hi), at least one, that it can see."""
    tq, tk = call.q.shape[2], call.k.shape[2]
    starts = range(0, tq, size)
    back, future = limit - 1, 0 if call.causal else limit - 1
    if offset is not None:
        first = offset - call.shift
        pairs = [(first + s - back, first + min(s + size, tq) + future) for s in starts]
    else:
        q, k = call.positions()
        if bool((k[:, 1:] < k[:, :-1]).any()):  # keys are not in order: every chunk reads all of them
            return [(0, tk)] * len(starts)
        chunks = torch.arange(len(starts) * size, device=q.device).clamp(max=tq - 1)
        q = q[:, chunks].unflatten(1, (-1, size)) - call.shift
        low, high, rows = q.amin(-1) - back, q.amax(-1) + future, max(q.shape[0], k.shape[0])
        k, low, high = (t.expand(rows, -1).contiguous() for t in (k, low, high))
        lo, hi = torch.searchsorted(k, low).amin(0), torch.searchsorted(k, high, right=True).amax(0)
        pairs = [(a, b) for a, b in torch.stack([lo, hi], 1).tolist()]
    clipped = [(min(max(lo, 0), tk - 1), hi) for lo, hi in pairs]
    return [(lo, min(max(hi, lo + 1), tk)) for lo, hi in clipped]


def _plain_steps(
    call: Lowered, heads: tuple[int, ...], size: int, limit: int, windows: list[tuple[int, int]], room: int
) -> Iterator[Step]:
    """Join consecutive chunks whose windows slide along with them into one step, as far as `room` allows."""
    tq, step = call.q.shape[2], None
    for index, (lo, hi) in enumerate(windows):
        start, width = index * size, hi - lo
        now = Step(heads, limit, min(size, tq - start), start, 1, lo, width)
        if step is None:
            step = now
        elif (
            call.blocks is None
            and call.key_span is None
            and (now.size, now.width, now.lo) == (step.size, step.width, step.lo + step.chunks * size)
            and (step.chunks + 1) * size * width <= room
        ):
            step = dataclasses.replace(step, chunks=step.chunks + 1)
        else:
            yield step
            step = now
    if step is not None:
        yield step


def _narrowed(step: Step, blocks: BlockIndex, columns: Tensor, q_positions: Tensor, k_positions: Tensor) -> Step:
    """The step with only the keys that the pattern stores for its block rows, if they are much fewer. columns [M, S]:
    which keys of a partly covered block any of its queries sees."""
    rows = (q_positions[:, step.start : step.start + step.size] // blocks.size).unique()
    lines = _block_lines(blocks, step.heads[0], rows)
    keys = k_positions[:, step.lo : step.lo + step.width]
    ids = lines[:, _block_column(keys, blocks.size, lines.shape[1])]  # [rows, 1 or B, W]
    held = ids == FULL
    if blocks.masks.shape[0]:
        held |= (ids >= 0) & columns[ids.clamp(min=0), keys % blocks.size]
    wanted = held.flatten(0, 1).any(0).nonzero()[:, 0] + step.lo
    if wanted.numel() > WORTH_GATHERING * step.width:
        return step
    if not wanted.numel():
        return dataclasses.replace(step, width=1)
    return dataclasses.replace(step, columns=wanted, width=wanted.numel())


def _alive(step: Step, key_span: Tensor, call: Lowered) -> Step:
    """The step without the keys that have expired for all its queries, if these are many."""
    q_positions, k_positions = call.positions()
    queries = q_positions[:, step.start : step.start + step.size] - call.shift
    numbers = step.columns
    if numbers is None:
        numbers = torch.arange(step.lo, step.lo + step.width, device=key_span.device)
    keys, last = k_positions[:, numbers], queries.amax(1, keepdim=True)
    nearest = torch.maximum(queries.amin(1, keepdim=True) - keys, keys - last).clamp(min=0)  # [1 or B, W]
    spans = key_span[..., numbers]
    if spans.shape[1] > 1:
        spans = spans[:, list(step.heads)]
    seen = spans.amax(1) - nearest + call.ramp > 0
    if call.causal:
        seen = seen & (keys <= last)
    wanted = numbers[seen.any(0)]
    if wanted.numel() > WORTH_GATHERING * step.width:
        return step
    if not wanted.numel():
        return dataclasses.replace(step, columns=None, width=1)
    return dataclasses.replace(step, columns=wanted, width=wanted.numel())


def block_visible(blocks: BlockIndex, head: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """[.., C, W] element mask of one head for positions [.., C] and [.., W]: BlockIndex.visible, but made from these
    block rows alone."""
    rows, line = (q_pos // blocks.size).unique(return_inverse=True)
    lines = _block_lines(blocks, head, rows)
    ids = lines[line[..., :, None], _block_column(k_pos, blocks.size, lines.shape[1])[..., None, :]]
    if not blocks.masks.shape[0]:
        return ids == FULL
    inner = blocks.masks[ids.clamp(min=0), (q_pos % blocks.size)[..., :, None], (k_pos % blocks.size)[..., None, :]]
    return (ids == FULL) | ((ids >= 0) & inner)


def _block_lines(blocks: BlockIndex, head: int, rows: Tensor) -> Tensor:
    """[len(rows), columns + 1] mask ids of these block rows; the last column is for keys beyond the pattern."""
    offsets = blocks.offsets[head if blocks.offsets.shape[0] > 1 else 0]
    known = (rows >= 0) & (rows < blocks.rows)
    row = torch.where(known, rows, 0)
    first, counts = offsets[row], torch.where(known, offsets[row + 1] - offsets[row], 0)
    line = torch.repeat_interleave(torch.arange(rows.numel(), device=rows.device), counts)
    entry = torch.arange(line.numel(), device=rows.device) + (first - counts.cumsum(0) + counts)[line]
    columns = blocks.columns[entry]
    width = int(columns.max()) + 1 if columns.numel() else 0
    lines = torch.full((rows.numel(), width + 1), HIDDEN, dtype=torch.int64, device=rows.device)
    lines[line, columns] = blocks.mask_ids[entry]
    return lines


def _block_column(k_pos: Tensor, size: int, width: int) -> Tensor:
    column = k_pos // size
    return torch.where((column >= 0) & (column < width - 1), column, width - 1)


def ends(near: int, far: int, causal: bool) -> tuple[int, int]:
    """The least and the greatest distance, from signed ones."""
    return (near, far) if causal else (0, max(abs(near), abs(far)))
