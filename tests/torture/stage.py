"""What faults are tried on, and the same undisturbed: a tiny run, its data, a tiny Hugging Face model, a text."""

from __future__ import annotations

import importlib.util
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from support.byte_llama import save_byte_llama
from support.tiny_runs import options, write_text
from torture.phases import seconds_of
from torture.processes import run
from torture.tally import Tally

PROSE = "The river stood behind the market, and nobody had ever seen it so quiet. Ein Wort: 1234.\n"
STEPS = 12


@dataclass
class Stage:
    """Folders of one torture run. Undisturbed results lie in `straight`; every case gets a folder of its own."""

    root: Path
    tally: Tally
    draw: random.Random
    hf: bool
    """whether transformers is there"""
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """by command and phase, how long an undisturbed process was in it"""
    prepared: str = ""
    """the folder of the tiny run's data, in the cache"""
    _cases: int = 0

    @property
    def straight(self) -> Path:
        return self.root / "straight"

    def case(self) -> Path:
        self._cases += 1
        path = self.root / f"case-{self._cases}"
        path.mkdir()
        return path

    def clear(self, case: Path, wrong: list[str]) -> None:
        """The folder of a case that went well goes at once."""
        if not wrong:
            shutil.rmtree(case, ignore_errors=True)

    # ---- command lines

    def train(self, out: Path, *more: str, steps: int = STEPS, cache: Path | None = None) -> list[str]:
        changes = {"out": str(out), "train.steps": steps, "data.cache": str(cache or self.root / "cache")}
        return ["train", *options(self.root, changes), "--resume", *more]

    def train_only(self, out: Path, *more: str, steps: int = STEPS, cache: Path | None = None) -> list[str]:
        return ["train-only", *self.train(out, *more, steps=steps, cache=cache)[1:]]

    def report(self, out: Path) -> list[str]:
        return ["report", str(self.straight / "run"), "--out", str(out)]

    def data(self, cache: Path) -> list[str]:
        return ["data", str(self.root / "long.txt"), "--tokens", "bpe", "--vocab", "400", "--cache", str(cache)]

    def fit(self, out: Path) -> list[str]:
        model = self.root / "model"
        return ["fit-spans", str(model), "--data", str(model / "prose.txt"), "--out", str(out), "--budget", "0.4",
                "--context", "64", "--steps", "3", "--survey", "2", "--measure", "1", "--no-baselines",
                "--dtype", "float32"]  # fmt: skip

    def caches(self, folder: Path) -> list[str]:
        return ["save-caches", str(folder / "cache.safetensors"), str(folder / "last")]

    def commands(self, folder: Path) -> dict[str, list[str]]:
        """One of each kind, with results in this folder."""
        found = {
            "train": self.train(folder / "run"),
            "train-only": self.train_only(folder / "run"),
            "report": self.report(folder / "report"),
            "data": self.data(folder / "cache"),
            "caches": self.caches(folder),
        }
        return found | ({"fit": self.fit(folder / "fit")} if self.hf else {})


def has_transformers() -> bool:
    return all(importlib.util.find_spec(name) for name in ("transformers", "tokenizers"))


def set_up(stage: Stage) -> None:
    """Write the inputs, and run everything once without a fault."""
    write_text(stage.root / "text.txt")
    write_text(stage.root / "long.txt", letters=120_000, seed=1)
    if stage.hf:
        save_byte_llama(stage.root / "model", longest=256)
        (stage.root / "model" / "prose.txt").write_text(PROSE * 40)
    stage.straight.mkdir()
    for name, arguments in stage.commands(stage.straight).items():
        if name == "train-only":
            continue  # the same without its report
        place = stage.root / f"screen-{name}"
        ended = run(arguments, place)
        if ended.code:
            raise SystemExit(f"torture: `spanformer {name}` fails without any fault:\n{ended.said[-3000:]}")
        stage.seconds[name] = seconds_of(place / "phase")
        stage.tally.step(0, f"undisturbed {name}")
    stage.seconds["train-only"] = stage.seconds["train"]
    (found,) = (stage.root / "cache" / "tokens").iterdir()
    stage.prepared = found.name
