"""What a fit found, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from spanformer.core.memory import shown_bytes


@dataclass(frozen=True)
class Outcome:
    windows: Tensor
    """[L, Hkv] tokens a head keeps beside the sinks"""
    share: float
    """share of the full key/value memory"""
    bits: dict[str, float]
    """bits per byte of held-out text: full, fitted, uniform, by mass"""
    seconds: float
    adapted: bool
    """whether LoRA changed the weights"""
    states: int = 0
    """heads with a linear state"""
    state_bytes: int = 0
    """their bytes, which `share` includes"""
    retrieving: dict[str, float] = field(default_factory=dict)
    """share of the KV heads that retrieve, how many they are, ring, k, share of an 8-bit KV cache in RAM, its bytes,
    and those of the keys and values that are stored beside it; empty: none"""
    growth: Tensor | None = None
    """[L, Hkv] tokens that a window gains with each token beyond the texts' length; 1: unlimited"""
    form: str = ""
    """of windows by layer, in words; empty: windows by head"""
    early: dict[str, float] = field(default_factory=dict)
    """bits per byte of the beginning of texts, before the positions of `bits`: full and fitted; empty: not measured"""

    def text(self) -> str:
        lines = [f"{self.share:.3f} of the key/value memory, fitted in {self.seconds / 60:.1f} minutes; held-out text:"]
        if self.state_bytes:
            lines.insert(0, f"{self.states} KV heads have a linear state, {self.state_bytes:,} bytes in all, part of")
        if self.retrieving:
            found, heads = self.retrieving, self.windows.numel()
            lines[0] = (
                f"{found['heads']:g} of {heads} KV heads retrieve (ring {found['ring']:g}, k {found['k']:g}): "
                f"{found['ram']:.4f} of an 8-bit KV cache, {shown_bytes(found['ram_bytes'])}, in RAM, and "
                f"{shown_bytes(found['stored_bytes'])} of keys and values in RAM or files; "
                f"fitted in {self.seconds / 60:.1f} minutes; held-out text:"
            )
        if self.form:
            lines.insert(0, f"{self.form}, the others see all; learned sink logits;")
        lines += _lines(self.bits)
        if self.early:
            lines += ["the beginning of the texts, before that:", *_lines(self.early)]
        return "\n".join(lines)


def _lines(bits: dict[str, float]) -> list[str]:
    width = max(24, *(len(name) + 2 for name in bits))
    return [
        f"  {name:<{width}}{b:.4f} bits per byte  {100 * (b / bits['full'] - 1):+.2f} %" for name, b in bits.items()
    ]
