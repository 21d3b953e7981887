"""Counts what happened, shows how far it is, and writes the figures."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path


class Tally:
    """Figures of one run. A case passes when nothing is wrong with it."""

    def __init__(self, seed: int, planned: int, minutes: float) -> None:
        self.seed, self.planned, self.minutes = seed, planned, minutes
        self.kills: Counter[str] = Counter()
        """by what the process was doing"""
        self.counts: Counter[str] = Counter()
        """resumes, identical, refusals"""
        self.cases: dict[str, Counter[str]] = {}
        """passed, failed and skipped, by part"""
        self.failures: list[dict[str, str]] = []
        self.skips: list[str] = []
        self.begun = time.monotonic()
        self._done, self._shown = 0.0, 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def late(self, share: float = 1.0) -> bool:
        """Whether the time is over, or this share of it: what is left is not begun."""
        return self.seconds > 60 * self.minutes * share

    def case(self, part: str, name: str, wrong: list[str], weight: float = 1.0) -> None:
        self._count(part)["failed" if wrong else "passed"] += 1
        if wrong:
            self.failures.append({"part": part, "case": name, "wrong": "; ".join(wrong)[:2000]})
            self._say(f"FAILED {part}: {name}: {'; '.join(wrong)[:600]}")
        self.step(weight, f"{part}: {name}")

    def skip(self, part: str, reason: str, cases: int) -> None:
        self._count(part)["skipped"] += cases
        self.skips.append(f"{part}: {reason}")
        self.step(cases, f"{part}: skipped, {reason}")

    def step(self, weight: float, what: str) -> None:
        """So much of what was planned is done. A line a second on a terminal, and one in ten seconds elsewhere."""
        self._done += weight
        patience = 1.0 if sys.stdout.isatty() else 10.0
        if time.monotonic() - self._shown < patience:
            return
        self._shown = time.monotonic()
        rate = self._done / max(self.seconds, 1e-9)
        left = min(max(self.planned - self._done, 0) / max(rate, 1e-9), max(60 * self.minutes - self.seconds, 0))
        self._say(
            f"{self._done:.0f} of {self.planned} cases, {rate:.2f} a second, {left // 60:.0f}:{left % 60:02.0f} left"
            f"  ({what})"
        )

    def text(self) -> str:
        lines = ["", f"{'killed while':<28}{'kills':>7}"]
        lines += [f"  {phase:<26}{count:>7}" for phase, count in self.kills.most_common()]
        lines += [f"  {'in all':<26}{sum(self.kills.values()):>7}", ""]
        lines += [f"{name:<28}{self.counts[name]:>7}" for name in self.counts]
        lines += ["", f"{'part':<28}{'passed':>7}{'failed':>8}{'skipped':>9}"]
        for part, found in self.cases.items():
            lines.append(f"  {part:<26}{found['passed']:>7}{found['failed']:>8}{found['skipped']:>9}")
        lines += [f"skipped: {reason}" for reason in self.skips]
        lines += [f"FAILED {each['part']}: {each['case']}: {each['wrong']}" for each in self.failures]
        end = f"{len(self.failures)} failures" if self.failures else "no failures"
        return "\n".join([*lines, f"{end}; seed {self.seed}, {self.seconds:.0f} seconds"])

    def write(self, path: Path) -> None:
        found = {
            "seed": self.seed, "seconds": round(self.seconds, 1), "out_of_time": self.late(),
            "machine": {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()},
            "kills": dict(self.kills), "counts": dict(self.counts),
            "cases": {part: dict(count) for part, count in self.cases.items()},
            "skips": self.skips, "failures": self.failures,
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")

    def _count(self, part: str) -> Counter[str]:
        return self.cases.setdefault(part, Counter())

    def _say(self, line: str) -> None:
        print("torture: " + line, flush=True)
