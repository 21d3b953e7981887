"""Hostile folders and files: refused in one sentence, in bounded time and memory, and nothing in them is executed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torture.processes import Child
from torture.stage import Stage

PART = "hostile folders"
CANARY = "executed"
LONGEST = 40.0  # seconds: what takes longer has no end


@dataclass(frozen=True)
class Trap:
    """Makes a folder, and returns the command that is to meet it."""

    make: Callable[[Stage, Path], list[str]]
    harmless: bool = False
    """the command may also end well: what it was given is no reason to stop"""


class Runs:
    """Folders of runs."""

    @staticmethod
    def copy(stage: Stage, case: Path, name: str = "run") -> Path:
        shutil.copytree(stage.straight / "run", case / name, ignore=shutil.ignore_patterns("report"))
        return case / name / "checkpoints" / "step-00000012"

    @staticmethod
    def is_a_file(stage: Stage, case: Path) -> list[str]:
        (case / "run").write_text("no folder")
        return stage.train_only(case / "run")

    @staticmethod
    def is_a_loop(stage: Stage, case: Path) -> list[str]:
        (case / "run").symlink_to(case / "run")
        return stage.train_only(case / "run")

    @staticmethod
    def deep_meta(stage: Stage, case: Path) -> list[str]:
        (Runs.copy(stage, case) / "meta.json").write_text("[" * 100_000)
        return stage.train_only(case / "run")

    @staticmethod
    def long_meta(stage: Stage, case: Path) -> list[str]:
        os.truncate(Runs.copy(stage, case) / "meta.json", 1 << 40)  # sparse: it takes no room
        return stage.train_only(case / "run")

    @staticmethod
    def pipe_for_weights(stage: Stage, case: Path) -> list[str]:
        weights = Runs.copy(stage, case) / "model.safetensors"
        weights.unlink()
        os.mkfifo(weights)
        return stage.train_only(case / "run")

    @staticmethod
    def device_for_weights(stage: Stage, case: Path) -> list[str]:
        weights = Runs.copy(stage, case) / "model.safetensors"
        weights.unlink()
        weights.symlink_to("/dev/zero")
        return stage.train_only(case / "run")

    @staticmethod
    def pipe_for_events(stage: Stage, case: Path) -> list[str]:
        Runs.copy(stage, case)
        (case / "run" / "events.jsonl").unlink()
        os.mkfifo(case / "run" / "events.jsonl")
        return ["report", str(case / "run")]

    @staticmethod
    def lying(key: str, value: int) -> Callable[[Stage, Path], list[str]]:
        """A checkpoint whose configuration was changed and signed again."""

        def make(stage: Stage, case: Path) -> list[str]:
            path = Runs.copy(stage, case) / "meta.json"
            meta = json.loads(path.read_bytes())
            meta["model"][key] = meta["config"]["model"][key] = value
            rest = {name: entry for name, entry in meta.items() if name != "sha256"}
            meta["sha256"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
            path.write_text(json.dumps(meta))
            return ["generate", str(path.parent), "--prompt", "a", "--max-tokens", "2"]

        return make


class Inputs:
    """Run files and texts."""

    @staticmethod
    def deep_run_file(stage: Stage, case: Path) -> list[str]:
        (case / "run.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
        return ["train", str(case / "run.toml"), "--out", str(case / "run")]

    @staticmethod
    def absurd_size(stage: Stage, case: Path) -> list[str]:
        return stage.train_only(case / "run", "--model.dim", str(10**12))

    @staticmethod
    def pipe_for_text(stage: Stage, case: Path) -> list[str]:
        os.mkfifo(case / "pipe")
        return ["data", str(case / "pipe"), "--cache", str(case / "cache")]

    @staticmethod
    def device_for_text(stage: Stage, case: Path) -> list[str]:
        return ["data", "enwik8", "--from", "/dev/zero", "--cache", str(case / "cache")]

    @staticmethod
    def file_for_prepared_data(stage: Stage, case: Path) -> list[str]:
        (case / "cache" / "tokens").mkdir(parents=True)
        (case / "cache" / "tokens" / stage.prepared).write_text("no folder")
        return stage.train_only(case / "run", cache=case / "cache")

    @staticmethod
    def escape_codes(stage: Stage, case: Path) -> list[str]:
        Runs.copy(stage, case, "\x1b]0;owned\x07")
        return ["spans", str(case / "\x1b]0;owned\x07")]


class Models:
    """Folders of Hugging Face models. Whatever is executed in them writes a file."""

    @staticmethod
    def copy(stage: Stage, case: Path, **config: object) -> list[str]:
        model = case / "model"
        shutil.copytree(stage.root / "model", model)
        found = json.loads((model / "config.json").read_bytes())
        (model / "config.json").write_text(json.dumps(found | config))
        command, _, *rest = stage.fit(case / "fit")
        return [command, str(model), *rest]

    @staticmethod
    def own_code(stage: Stage, case: Path) -> list[str]:
        named = {name: f"evil.{kind}" for name, kind in (("AutoConfig", "C"), ("AutoModelForCausalLM", "M"))}
        arguments = Models.copy(stage, case, auto_map=named, model_type="evil")
        code = f"open({str(case / CANARY)!r}, 'w').close()\nclass C: pass\nclass M: pass\n"
        (case / "model" / "evil.py").write_text(code)
        return arguments

    @staticmethod
    def pickled_weights(stage: Stage, case: Path) -> list[str]:
        arguments = Models.copy(stage, case)
        (case / "model" / "model.safetensors").unlink()
        (case / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(str(case / CANARY))))
        return arguments

    @staticmethod
    def lying(stage: Stage, case: Path) -> list[str]:
        return Models.copy(stage, case, hidden_size=10**6)


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


TRAPS = {
    "the folder of a run is a file": Trap(Runs.is_a_file),
    "the folder of a run is a loop of links": Trap(Runs.is_a_loop),
    "meta.json nested 100,000 deep": Trap(Runs.deep_meta, harmless=True),
    "meta.json of a terabyte": Trap(Runs.long_meta, harmless=True),
    "a pipe for weights": Trap(Runs.pipe_for_weights, harmless=True),
    "a device for weights": Trap(Runs.device_for_weights, harmless=True),
    "a pipe for events": Trap(Runs.pipe_for_events),
    "a checkpoint that says dim = 10^9": Trap(Runs.lying("dim", 10**9)),
    "a checkpoint that says layers = 10^7": Trap(Runs.lying("layers", 10**7)),
    "a checkpoint that says vocab = 10^12": Trap(Runs.lying("vocab", 10**12)),
    "a run file nested 5,000 deep": Trap(Inputs.deep_run_file),
    "a model of 10^12 channels": Trap(Inputs.absurd_size),
    "a pipe for a text": Trap(Inputs.pipe_for_text),
    "a device for a corpus": Trap(Inputs.device_for_text),
    "a file for prepared data": Trap(Inputs.file_for_prepared_data, harmless=True),
    "escape codes in a name": Trap(Inputs.escape_codes, harmless=True),
}
HF_TRAPS = {
    "a model with code of its own": Trap(Models.own_code),
    "pickled weights": Trap(Models.pickled_weights),
    "a model that says hidden_size = 10^6": Trap(Models.lying),
}
CASES = len(TRAPS) + len(HF_TRAPS)


def torture(stage: Stage) -> None:
    if not stage.hf:
        stage.tally.skip(PART, "Hugging Face models: transformers is not installed", len(HF_TRAPS))
    for name, trap in (TRAPS | (HF_TRAPS if stage.hf else {})).items():
        if stage.tally.late():
            return
        case = stage.case()
        ended = Child(trap.make(stage, case), case / "screen", answer="y\n" * 20).wait(LONGEST)
        fine = ended.refused or (trap.harmless and ended.code == 0 and "Traceback" not in ended.said)
        wrong = [] if fine else [f"ended with {ended.code}: {ended.said[-500:]}"]
        wrong += ["it was executed"] if (case / CANARY).exists() else []
        wrong += ["escape codes reached the terminal"] if "\x1b]" in ended.said or "\x07" in ended.said else []
        stage.tally.counts["refusals"] += ended.refused
        stage.tally.case(PART, name, wrong)
        stage.clear(case, wrong)
