"""The result file of a benchmark: JSON with the machine, the settings and the measurements."""

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
from spanformer.core.text import printable

KIND = "spanformer attention benchmark"
FORMAT = 1


@dataclass
class Row:
    """The result of one contender on one work. `status` and `reason` say why a speed is missing."""

    part: str
    """its table: cost, decode, overhead, short, per_token, limit, streaming, memory or long"""
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
    """ok, WRONG (differs from the oracle; not timed) or skipped (not supported, or not on this machine)"""
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    """largest absolute error of out and of each gradient against the float64 oracle"""
    allowed: dict[str, float] = field(default_factory=dict)
    ms: float | None = None
    """median seconds per call"""
    samples: int = 0
    disturbed: int = 0
    """number of samples disturbed by other processes, for which no better sample was found"""
    speedup: float | None = None
    """speed-up over SDPA with full causal attention in the same rounds; in streaming rows, over the original"""
    gflops: float | None = None
    """operations on in-span pairs (14·D each, forward and backward) per second"""
    limit_share: float | None = None
    """gflops relative to the sgemm rate in the same rounds"""
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
    """The result file of a benchmark with several parts, each with its machine, options and measurements.

    A new measurement replaces the old one of its part; other parts stay. The file is written after every part.
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
                raise ValueError(f"out is {path}, which is not a file of {self.kind}; choose another with --out")
        path.parent.mkdir(parents=True, exist_ok=True)  # fails now if the file cannot be written

    def found(self, part: str) -> Any:
        """The earlier measurement of a part, or None."""
        return self.parts.get(part, {}).get("found")

    def all_found(self) -> dict[str, Any]:
        """What was found in each part, by its name."""
        return {name: part.get("found") for name, part in self.parts.items()}

    def check_settings(self, row: str, settings: dict) -> None:
        """Refuse a row whose settings are not those of all other rows."""
        for other, part in self.parts.items():
            if other != row and part["found"]["settings"] != settings:
                raise ValueError(
                    f"{self.path} holds {printable(other)}, measured with other questions, texts or settings; expected "
                    "the same for all rows: repeat its options, measure it again, or choose another --out"
                )

    def keep(self, part: str, found: object, options: dict, machine: dict) -> None:
        """found: any JSON value."""
        self.parts[part] = {"machine": machine, "options": options, "found": found}
        held = {"kind": self.kind, "format": FORMAT, "parts": self.parts}
        write_text(self.path, json.dumps(held, indent=1, ensure_ascii=False) + "\n")


def describe_machine(threads: int, memory_is_kept: bool) -> dict:
    """The machine, versions and date of a measurement."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        # Every call allocates and frees large blocks, so speeds depend on malloc's settings.
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
    """The commit of this source, with "+" if there are uncommitted changes; None outside git."""
    here = Path(__file__).parent
    try:
        run = lambda *args: subprocess.run(  # noqa: E731
            ["git", "-C", str(here), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        return run("rev-parse", "--short", "HEAD") + ("+" if run("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
