"""The settings of `spanformer bench attention`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spanformer.bench import field, profiles

Mode = Literal["forward", "forward+backward", "decode"]
Terms = Literal["plain", "distance_bias", "distance_vec"]
Part = Literal["cost", "decode", "overhead", "short", "per_token", "limit", "streaming", "memory", "long"]

PROFILES, QUICK_PROFILES = ("A", "B", "S", "M", "F"), ("A", "S", "F")
LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384), (512, 1024, 2048)
QUICK_MODES: tuple[Mode, ...] = ("forward+backward", "decode")
MODES: tuple[Mode, ...] = ("forward", *QUICK_MODES)
QUICK_PARTS: tuple[Part, ...] = ("cost", "decode", "overhead", "memory")
PARTS: tuple[Part, ...] = (*QUICK_PARTS, "short", "per_token", "limit", "streaming", "long")


@dataclass(frozen=True)
class AttentionBench:
    """Time attention whose heads have different spans against comparable implementations, in one run.

    Each contender is checked against a float64 reference on the same shape before it is timed. One that differs is
    listed as WRONG, without a speed. Cases that a contender does not support are listed with the reason.
    """

    profiles: tuple[str, ...] = ()
    """Spans of the heads. A: one head sees all tokens, the others 64; B: 32 … 1024 and all; S: all heads 64; M: all
    heads 512; F: all heads see all; a number: that span for every head. Default: A B S M F (with --quick: A S F)."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths. Default: 1024 2048 4096 8192 16384 (with --quick: 512 1024 2048)."""
    modes: tuple[Mode, ...] = ()
    """Time forward alone, forward with all gradients, or one decoding step. Default: all three (with --quick: not
    forward alone)."""
    terms: tuple[Terms, ...] = ("plain",)
    """Terms of the score besides q·k and the span: none, a learned bias per distance, or a learned vector per
    distance."""
    parts: tuple[Part, ...] = ()
    """Tables to measure. cost: time by profile and length; decode: one query over a KV cache; overhead: at length
    16; short: lengths 128 to 1024, batches of 1 and 4; per_token: profile S up to 64k; limit: share of the machine's
    sgemm rate by span; streaming: against the original code; memory: peak at profile A; long: profile A at 65536.
    Default: all (with --quick: cost decode overhead memory)."""
    contenders: tuple[str, ...] = ()
    """Contenders: sdpa (always), native, banded, sdpa-mask, flex, x-transformers, local-attention, rings-native,
    rings-torch, original, reference. Default: all but reference (with --quick also without flex, which compiles for
    many seconds). Rings are timed in decode only, x-transformers and local-attention on whole sequences only."""
    batch: int = 1
    """Sequences per batch."""
    heads: int = 8
    """Attention heads."""
    dim: int = 64
    """Size of a head."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of q, k and v."""
    caches: int = 1
    """Decoding: number of layers whose KV caches are read in turn. A single one may stay in the CPU's cache between
    tokens; those of a real model do not."""
    threads: int = 2
    """CPU threads."""
    repeats: int = 5
    """Rounds; results are medians over rounds."""
    budget: float = 30.0
    """Seconds per cell of a table: after this time no new round begins, once two are done. Up to a third is spent on
    waiting and repeating when other processes disturb a measurement."""
    keep_memory: bool = True
    """Let the C library keep freed memory while timing, for every contender, as jemalloc or tcmalloc would."""
    quick: bool = False
    """Run a rough benchmark in under a minute: fewer profiles, lengths, tables and rounds."""
    original: Path | None = None
    """A clone of facebookresearch/adaptive-span to compare with (its code is imported)."""
    out: Path = Path("docs/results/attention")
    """Folder for the result file and its pictures."""

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "dim", "caches", "threads", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.budget < 0:
            raise ValueError(f"budget is {self.budget}; expected seconds, 0 or more")
        if any(length < 2 for length in self.lengths):
            raise ValueError(f"lengths holds {min(self.lengths)}; expected at least 2 tokens")
        for profile in self.profiles:
            profiles.reaches(profile, self.heads, 2)
        for name in self.contenders:
            field.find(name)
        if self.original is not None and not (self.original / "models.py").is_file():
            raise ValueError(f"original is {self.original}; expected a clone of adaptive-span, with models.py in it")

    @property
    def chosen_profiles(self) -> tuple[str, ...]:
        return self.profiles or (QUICK_PROFILES if self.quick else PROFILES)

    @property
    def chosen_lengths(self) -> tuple[int, ...]:
        return self.lengths or (QUICK_LENGTHS if self.quick else LENGTHS)

    @property
    def chosen_modes(self) -> tuple[Mode, ...]:
        return self.modes or (QUICK_MODES if self.quick else MODES)

    @property
    def chosen_parts(self) -> tuple[Part, ...]:
        return self.parts or (QUICK_PARTS if self.quick else PARTS)

    @property
    def rounds(self) -> int:
        return min(self.repeats, 3) if self.quick else self.repeats

    @property
    def longest(self) -> float:
        """Seconds after which no new round begins in one cell."""
        return min(self.budget, 0.5) if self.quick else self.budget

    @property
    def shortest(self) -> float:
        """Minimum seconds per sample."""
        return 0.02 if self.quick else 0.06
