"""Groups of heads of similar context length, so that short heads do not pay for long ones."""

from __future__ import annotations

import torch

GRAIN = 8  # tokens; what a group gets is rounded up to this
SLACK = 64  # tokens; heads that differ by less are served together


def group_heads(context: list[int], past: int, device: torch.device) -> list[tuple[list[int], int]]:
    """Heads to be served together, with how many remembered tokens they get: [(heads, need)], the longest first.

    A head joins a group if it needs at least three quarters of what the group's longest head does, or lacks no more
    than a few tokens of it: less than that is saved by a call of its own. On CUDA all heads are one group: a call's
    block lists make short heads cheap, and each group's sizes would be compiled for.
    """
    needs = [min(-(-n // GRAIN) * GRAIN, past) for n in context]
    if device.type == "cuda":
        return [(list(range(len(needs))), max(needs))]
    groups: list[tuple[list[int], int]] = []
    for head in sorted(range(len(needs)), key=lambda h: -needs[h]):
        if groups and needs[head] >= 0.75 * groups[-1][1] - SLACK:
            groups[-1][0].append(head)
        else:
            groups.append(([head], needs[head]))
    return [(sorted(heads), need) for heads, need in groups]
