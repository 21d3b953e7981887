"""Groups of heads of similar context length, so that short heads do not pay for long ones."""

from __future__ import annotations

import torch

GRAIN = 8  # tokens; a group's number of tokens is rounded up to a multiple of this
SLACK = 64  # tokens; heads that differ by less share a group


def group_heads(context: list[int], past: int, device: torch.device) -> list[tuple[list[int], int]]:
    """Groups of heads, with the number of remembered tokens that each gets: [(heads, need)], the longest first.

    A head joins a group if it needs at least three quarters of the tokens of the group's longest head, or at most
    SLACK fewer: a separate call would save less than it costs. On CUDA all heads are one group: kernels there
    make short heads cheap, and each group would be launches of its own.
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
