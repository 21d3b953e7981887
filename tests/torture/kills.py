"""SIGKILL at random moments. What goes on afterwards ends as if nothing had happened, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torture.checks import differences, half_written, leftovers, other_files
from torture.phases import STARTING
from torture.processes import Child, Ended, run
from torture.stage import Stage

PART = "kills"
SHARE_OF_TIME = 0.6
# The share of kills in each phase: a moment in it is drawn, over its length in an undisturbed process.
SHARES = {
    "train-only": {STARTING: 3, "training": 14, "evaluating": 5, "saving a checkpoint": 18},
    "train": {"reporting": 4},
    "report": {"reporting": 14},
    "data": {STARTING: 1, "preparing data": 13},
    "fit": {STARTING: 1, "fitting spans": 5, "saving a fitted model": 6},
    "caches": {"saving a KV cache": 16},
}


def torture(stage: Stage, kills: int) -> None:
    """About `kills` kills, spread over commands and phases by their shares."""
    for name in [name for name in SHARES if name not in stage.seconds]:
        stage.tally.skip(PART, f"{name}: transformers is not installed", 1)
    shares = {name: SHARES[name] for name in stage.seconds}
    whole = sum(sum(each.values()) for each in shares.values())
    for name, phases in shares.items():
        wanted = [phase for phase, share in phases.items() for _ in range(max(1, round(share * kills / whole)))]
        stage.draw.shuffle(wanted)
        while wanted and not stage.tally.late(SHARE_OF_TIME):
            some = min(len(wanted), stage.draw.randint(1, 4))
            _chain(stage, name, [wanted.pop() for _ in range(some)])


def _chain(stage: Stage, name: str, phases: list[str]) -> None:
    """One folder: kill the command in these phases, one after the other, then let it end."""
    case, wrong, done = stage.case(), [], []
    for number, phase in enumerate(phases):
        folder = case / f"fit-{number}" if name == "fit" else case / "out"  # a fit does not go on: it begins anew
        ended = kill_in(stage, name, folder, case / "screen", phase)
        if ended.code != -9:
            if ended.code:
                wrong.append(f"ended with {ended.code} before it was killed: {ended.said[-500:]}")
            break
        stage.tally.kills[ended.phase] += 1
        done.append(ended.phase)
        wrong += half_written(folder) if folder.exists() else []
        wrong += _half_model(stage, folder / "fit") if name == "fit" else []
    last = case / "out"
    ended = run(stage.commands(last)[name], case / "screen")
    stage.tally.counts["resumes"] += 1
    wrong += [f"ended with {ended.code}: {ended.said[-800:]}"] if ended.code else AFTER[name](stage, last)
    stage.tally.counts["identical"] += not wrong
    stage.tally.case(PART, f"{name}, killed while {', '.join(done) or 'nothing'}", wrong, weight=len(phases))
    stage.clear(case, wrong)


def kill_in(stage: Stage, name: str, folder: Path, place: Path, phase: str) -> Ended:
    """Start the command and kill it at a random moment of the phase; one that ends before is returned as it ended."""
    child = Child(stage.commands(folder)[name], place)
    if phase == STARTING:
        child.reach(STARTING, 0, stage.draw.uniform(0, 0.3))
        return child.kill()
    seconds = stage.seconds[name].get(phase) or [0.0]
    turn = stage.draw.randrange(len(seconds))
    # A process that went on from a checkpoint enters the phase less often: then it is killed at its last entry or ends.
    turn = min(turn, stage.draw.randrange(len(seconds)))
    if child.reach(phase, turn + 1, stage.draw.uniform(0, seconds[turn])):
        return child.kill()
    return child.wait()


def _half_model(stage: Stage, out: Path) -> list[str]:
    """A folder with config.json is a model, and then it is the whole one."""
    if not (out / "config.json").exists():
        return []
    names = [path.name for path in (stage.straight / "fit").iterdir() if path.is_file() and path.name != "events.jsonl"]
    wrong = [f"{out / name} is missing beside config.json" for name in names if not (out / name).exists()]
    same = ("config.json", "model.safetensors", "tokenizer.json")
    return wrong + [
        f"{out / name} is not as an undisturbed fit writes it"
        for name in same
        if not wrong and (out / name).read_bytes() != (stage.straight / "fit" / name).read_bytes()
    ]


def _after_train(stage: Stage, folder: Path) -> list[str]:
    out = folder / "run"
    return differences(out, stage.straight / "run") + half_written(out) + leftovers(out)


def _after_report(stage: Stage, folder: Path) -> list[str]:
    found = folder / "report"
    return other_files(found, stage.straight / "report") + half_written(found) + leftovers(found)


def _after_data(stage: Stage, folder: Path) -> list[str]:
    return other_files(folder / "cache", stage.straight / "cache") + leftovers(folder)


def _after_fit(stage: Stage, folder: Path) -> list[str]:
    return _half_model(stage, folder / "fit") + half_written(folder) + leftovers(folder)


def _after_caches(stage: Stage, folder: Path) -> list[str]:
    names = ("cache.safetensors", "last")
    wrong = [f"{folder / n} is missing" for n in names if not (folder / n).exists()]
    return (
        wrong
        or [
            f"{folder / n} is not as an undisturbed process writes it"
            for n in names
            if (folder / n).read_bytes() != (stage.straight / n).read_bytes()
        ]
    ) + leftovers(folder)


AFTER: dict[str, Callable[[Stage, Path], list[str]]] = {
    "train": _after_train,
    "train-only": _after_train,
    "report": _after_report,
    "data": _after_data,
    "fit": _after_fit,
    "caches": _after_caches,
}
