"""What a benchmark leaves behind: one JSON file with the machine, the settings and what was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spanformer.core.files import write_text

KIND = "spanformer attention benchmark"
FORMAT = 1


@dataclass
class Row:
    """One contender on one work. Without a speed, `status` and `reason` say why."""

    part: str
    """which table it belongs to: cost, decode, overhead, short, per_token, limit, streaming, memory, long"""
    mode: str
    profile: str
    length: int
    batch: int
    heads: int
    dim: int
    terms: str
    dtype: str
    streaming: int
    contender: str
    label: str
    same_work: bool
    status: str = "ok"
    """ok, WRONG (differs from the oracle: no speed), skipped (cannot, or not here)"""
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    """largest absolute error of out and of each gradient against the float64 oracle"""
    allowed: dict[str, float] = field(default_factory=dict)
    ms: float | None = None
    """median of a call"""
    samples: int = 0
    disturbed: int = 0
    """samples during which other processes took CPU time, kept for want of better ones"""
    speedup: float | None = None
    """over the yardstick (SDPA, full causal) in the same rounds; in streaming rows, over the original"""
    gflops: float | None = None
    """operations on in-span pairs (14·D each, forward and backward) per second"""
    limit_share: float | None = None
    """gflops over the sgemm rate of the same rounds"""
    sgemm_gflops: float | None = None
    peak_mib: float | None = None
    us_per_token: float | None = None


@dataclass
class Results:
    machine: dict
    config: dict
    rows: list[Row] = field(default_factory=list)

    def to_json(self) -> dict:
        rates = sorted(row.sgemm_gflops for row in self.rows if row.sgemm_gflops)
        return {
            "kind": KIND,
            "format": FORMAT,
            "machine": self.machine,
            "config": self.config,
            "sgemm_gflops": rates[len(rates) // 2] if rates else None,
            "rows": [asdict(row) for row in self.rows],
        }

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")


class PartsFile:
    """The result file of a benchmark of several parts: each with its machine, its options and what was found.

    A part that is measured again replaces the old one; parts that are not measured stay. Written after every part.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.kind, self.parts = path, f"spanformer benchmark {name}", {}
        if path.exists():
            try:
                held = json.loads(path.read_text(encoding="utf-8"))
                kind, self.parts = held.get("kind"), held.get("parts")
            except (ValueError, AttributeError):
                kind = None
            if kind != self.kind or not isinstance(self.parts, dict):
                raise ValueError(f"out is {path}, which holds no {self.kind}; choose another file with --out")
        path.parent.mkdir(parents=True, exist_ok=True)  # now rather than after measuring, should it be refused

    def found(self, part: str) -> Any:
        """What was found before, or None."""
        return self.parts.get(part, {}).get("found")

    def keep(self, part: str, found: object, options: dict, machine: dict) -> None:
        """found: anything that JSON can hold."""
        self.parts[part] = {"machine": machine, "options": options, "found": found}
        held = {"kind": self.kind, "format": FORMAT, "parts": self.parts}
        write_text(self.path, json.dumps(held, indent=1, ensure_ascii=False) + "\n")


def describe_machine(threads: int, memory_is_kept: bool) -> dict:
    """Where and when, so that a number can be judged later."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        # Large blocks are taken and freed in every call: speeds depend on how malloc is set.
        "malloc": {name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))},
        "memory_is_kept": memory_is_kept,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit this source was checked out at, with "+" if there are changes beside it; None if it is not in git."""
    here = Path(__file__).parent
    try:
        run = lambda *args: subprocess.run(  # noqa: E731
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        return run("rev-parse", "--short", "HEAD") + ("+" if run("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
