"""ETC's attention from its equation: every pair's score by the definition, one pair at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spanformer.attention.etc import Structure

PARTS = ("l2l", "l2g", "g2g", "g2l")


def oracle(t: dict[str, Tensor], structure: Structure, radius: int, clip: int, hard: bool) -> list[Tensor]:
    """long out, long lse, global out, global lse, of q_long, q_global, k_l2l … v_g2l and the tables l2l … g2l."""
    (b, heads, n, d), m = t["q_long"].shape, t["q_global"].shape[2]
    segments = structure.segments.tolist()
    found = []
    for kind, length in (("l", n), ("g", m)):
        q = t["q_long"] if kind == "l" else t["q_global"]
        outs, lses = [], []
        for row in range(b):
            for i in range(length):
                scores, values = [], []
                for j in range(n + m):
                    part, at = (f"{kind}2l", j) if j < n else (f"{kind}2g", j - n)
                    padding = structure.long_padding if j < n else structure.global_padding
                    if padding is not None and padding[row, at]:
                        continue
                    if part == "l2l" and abs(i - at) > radius:
                        continue
                    if part in ("l2l", "g2g"):
                        label = max(-clip, min(clip, i - at)) + clip
                    else:
                        label = int(segments[row][i] == at if part == "l2g" else segments[row][at] == i)
                    if part == "g2l" and hard and not label:
                        continue
                    key = t[f"k_{part}"][row, :, at] + t[part][:, label]  # [H, D]
                    scores.append((q[row, :, i] * key).sum(-1) / math.sqrt(d))
                    values.append(t[f"v_{part}"][row, :, at])
                if not scores:
                    outs.append(q.new_zeros(heads, d)), lses.append(q.new_full((heads,), -math.inf))
                    continue
                score = torch.stack(scores, 1)  # [H, what is seen]
                outs.append(torch.einsum("hj,hjd->hd", score.softmax(1), torch.stack(values, 1)))
                lses.append(score.logsumexp(1))
        found += [torch.stack(outs).view(b, length, heads, d).transpose(1, 2)]
        found += [torch.stack(lses).view(b, length, heads).transpose(1, 2)]
    return found
