"""The newest tokens of a KV cache in 4 bits, which it also holds in 8: attention weighs them most.

Shapes: B batch, Hkv key/value heads, D and Dv head sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.memory.slots import Store, move, read_slots
from spanformer.ops.decode.codes import RECENT
from spanformer.ops.decode.held import Recent


class RecentTokens:
    """Rings of 16 tokens and the slack. since [B]: earlier positions are not held, because rows were cropped after
    later tokens had overwritten them; they are read in 4 bits."""

    def __init__(self, store: Store, since: Tensor) -> None:
        self.store, self.since = store, since

    @classmethod
    def empty(cls, beside: Store, slack: int) -> RecentTokens:
        """For a store in 4 bits."""
        store = Store(
            beside.batch, [RECENT + slack] * len(beside.capacities), 0, beside.dims, 8, beside.dtype,
            beside.memory.device,
        )  # fmt: skip
        with torch.inference_mode(False):  # so that both modes can write to it
            return cls(store, torch.zeros(beside.batch, dtype=torch.int64))

    def rings(self, newest: Tensor) -> Recent:
        return Recent(self.store.rings(newest, 0, None), RECENT, self.since)

    def over(
        self, old: tuple[Tensor, Tensor], place: Tensor, kv_heads: list[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys [B, heads, count, D] and values of the positions before place [B], with the newest in 8 bits."""
        count = min(RECENT, old[0].shape[2])
        held = (place[:, None] + torch.arange(-count, 0) >= self.since[:, None]).to(old[0].device)[:, None, :, None]
        new = read_slots(self.store, place, kv_heads, count, dtype)
        keys, values = (
            torch.cat([t[:, :, : t.shape[2] - count], torch.where(held, n, t[:, :, t.shape[2] - count :])], 2)
            for t, n in zip(old, new, strict=True)
        )
        return keys, values

    def note_crop(self, written: Tensor) -> None:
        """Rows that were written up to written [B] are cropped."""
        torch.maximum(self.since, written - self.store.capacities[0], out=self.since)

    @torch.inference_mode(False)
    def resized(self, beside: Store, slack: int, place: Tensor) -> RecentTokens:
        other = RecentTokens.empty(beside, slack)
        kept = min(self.store.capacities[0], RECENT + slack)
        other.since = torch.maximum(self.since, place - kept)
        move(self.store, other.store, place, other.since[:, None].expand(-1, len(self.store.capacities)))
        return other

    def rows(self, index: Tensor) -> RecentTokens:
        return RecentTokens(self.store.rows(index), self.since[index])

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, each with a row for each of the batch."""
        return {f"recent_{name}": t for name, t in self.store.tensors().items()} | {"recent_since": self.since}
