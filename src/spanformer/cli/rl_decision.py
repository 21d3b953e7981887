"""`spanformer rl collect | imitate`, and `rl eval` of what `rl imitate` trained: Decision Transformers."""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.cli.runfile import read_run
from spanformer.core.events import Event, NoteEvent, ProgressEvent, ResumeEvent, StepsEvent, StopEvent
from spanformer.core.policy_events import AskedEvent, ImitateEvent, ImitationStartEvent
from spanformer.core.text import printable
from spanformer.rl.config import EnvConfig
from spanformer.rl.decision_config import ImitationConfig

if TYPE_CHECKING:
    from spanformer.cli.rl import EvalPolicy


@dataclass(frozen=True)
class Collect:
    """Record episodes of random actions, or of a policy that `rl train` trained, for `rl imitate`.

    For example:  spanformer rl collect random --env graph --length 40 --out out/graph.npz
                  spanformer rl collect out/t_maze --level expert --out out/t_maze.npz
    """

    policy: tyro.conf.Positional[str]
    """random, or the folder of a run of `rl train`"""
    out: str
    """.npz file to write"""
    level: Literal["expert", "medium", "medium-replay"] = "expert"
    """of a run: expert, its last checkpoint; medium, the first one with half of its final return; medium-replay, all
    checkpoints up to that one"""
    env: str = ""
    """environment; by default that of the run's training"""
    length: int = 50
    """with --env: its length"""
    continuous: bool = False
    """with random: the environment's actions are vectors of numbers, such as those of Pendulum-v1"""
    episodes: int = 1000
    seed: int = 1
    greedy: bool = False
    """take the most probable action instead of drawing one by the probabilities"""
    minari: str = ""
    """also create the Minari data set of this id, such as graph/random-v0 (needs minari and h5py)"""


def collect(o: Collect) -> None:
    from spanformer.rl.envs.gym import make_batch
    from spanformer.rl.levels import collect_policy
    from spanformer.rl.minari_export import export_minari, load_minari
    from spanformer.rl.recording import ROWS, random_player, record, seed_player
    from spanformer.rl.trajectories import About

    if o.episodes < 1:
        raise ValueError(f"--episodes is {o.episodes}; expected at least 1")
    if not o.out.endswith(".npz"):
        raise ValueError(f"--out is {o.out!r}; expected a file name that ends with .npz")
    if o.minari and o.continuous:
        raise ValueError(
            "--minari is given, and actions are continuous, stored as −1 … 1 of their bounds; leave one out"
        )
    if o.minari:
        load_minari()  # before the work, not after it
    rows = max(n for n in range(1, min(ROWS, o.episodes) + 1) if o.episodes % n == 0)
    with Progress(transient=True) as report:
        report(f"recording {o.episodes:,} episodes", 0, 0)
        if o.policy == "random":
            if not o.env:
                raise ValueError("--env is missing; expected the environment of the random actions, such as graph")
            batch = make_batch(o.env, rows, o.length, continuous=o.continuous)
            seed_player(batch, o.seed)
            about = About(o.env, o.length, batch.actions, o.continuous, "random actions", o.seed)
            data = record(
                random_player(batch, o.seed, continuous=o.continuous), rows, o.episodes, about,
                lambda done: report(f"recording {o.episodes:,} episodes", done, o.episodes),
            )  # fmt: skip
        else:
            env = EnvConfig(o.env, o.length) if o.env else None
            data = collect_policy(Path(o.policy), o.level, o.episodes, rows, env=env, seed=o.seed, greedy=o.greedy)
    data.save(Path(o.out))
    print(f"{printable(o.out)}: {data.said()}")
    if o.minari:
        export_minari(data, o.minari)
        print(f"Minari data set: {printable(o.minari)}")


def parse(program: str, arguments: list[str]) -> ImitationConfig:
    known = sorted(str(path) for path in Path("runs/rl/decision").glob("*.toml"))
    config = read_run(ImitationConfig, program, arguments, known)
    named = arguments and not arguments[0].startswith("-")
    return config if config.out else dataclasses.replace(
        config, out=str(Path("out") / (Path(arguments[0]).stem if named else "imitate"))
    )  # fmt: skip


class Watcher:
    """Shows events; remembers the last loss."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.latest = progress, ""

    def __call__(self, event: Event | ProgressEvent | StepsEvent) -> None:
        say = self.progress.say
        match event:
            case ProgressEvent():
                self.progress(event.title + self.latest, event.done, event.total)
            case ImitateEvent():
                spans = "" if math.isnan(event.span_average) else f" · average span {event.span_average:.1f} tokens"
                self.latest = f" · loss {event.loss:.3f}{spans}"
            case ImitationStartEvent():
                low, mean, high = event.returns
                say(f"{event.run}: {event.parameters:,} parameters; {event.episodes:,} episodes of {event.env}, "
                    f"{event.data_steps:,} steps, returns {low:.3g} … {high:.3g}, {mean:.3g} on average")  # fmt: skip
            case ResumeEvent():
                say(f"continued from step {event.step:,} ({event.path})")
            case NoteEvent():
                say(f"note: {event.text}")
            case AskedEvent():
                self.latest = ""
            case StopEvent():
                say(f"ended: {event.reason}, {event.step:,} steps in {event.seconds:.0f} s")


def run(config: ImitationConfig) -> None:
    from spanformer.cli.summary import reporting
    from spanformer.report.imitation import write_imitation_report
    from spanformer.rl.decision_run import imitate

    with Progress() as progress:
        result = imitate(config, watch=Watcher(progress))
    if result.signal:
        print(f"stopped by {result.reason} at step {result.steps:,}; continue with the same command and --resume")
        sys.exit(128 + result.signal)
    show(result.asked)
    with reporting(result.out, shlex.join(["spanformer", "rl", "report", str(result.out)])):
        print(f"report: {printable(write_imitation_report([result.out], result.out / 'report'))}")


def evaluate(o: EvalPolicy) -> None:
    """`spanformer rl eval` of a run of `rl imitate`."""
    from spanformer.report.imitation import ImitationArm, ImitationRows, asked_picture
    from spanformer.rl.decision_run import EVAL_ROWS, ask, asked_event, targets_of
    from spanformer.rl.decision_saving import Loaded
    from spanformer.rl.envs.gym import make_batch

    loaded = Loaded(o.run)
    cloning = loaded.config.imitate.method == "cloning"
    if o.target and cloning:
        raise ValueError(
            f"--target is {o.target[0]:g}, and {o.run} is a clone, which is asked for nothing; leave it out"
        )
    length = o.length if o.env else loaded.about.length
    env = make_batch(
        o.env or loaded.about.env, min(EVAL_ROWS, o.episodes), length, continuous=loaded.about.continuous
    )  # fmt: skip
    loaded.check(env)
    found = []
    with Progress(transient=True) as progress:
        for target in o.target or targets_of(loaded.config, loaded.returns):
            outcome = ask(
                loaded.model, loaded.config, env, target, o.episodes, o.seed, greedy=not o.sample,
                watch=Watcher(progress),
            )  # fmt: skip
            found.append(asked_event(0, env.name, outcome))
    show(found)
    low, _, high = loaded.returns
    name = Path(o.run).name
    arm = ImitationArm(name, [ImitationRows(name, env.name, 0, {}, (low, high), [], found)])
    if not math.isnan(rank := arm.rank_correlation()):
        print(f"rank correlation of asked and got: {rank:.3f}")
    outside = [event.target for event in found if not cloning and not low <= event.target <= high]
    if outside:
        print(f"note: the data has returns of {low:.3g} … {high:.3g}; asked for beyond them: {numbers(outside)}")
    if o.picture:
        picture = asked_picture([arm], env.name, (low, high))
        if picture is None:
            raise ValueError("--picture needs a return to ask for; give --target, of a run that is no clone")
        print(f"picture: {printable(picture.save(Path(o.picture)))}")


def numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def show(asked: Sequence[AskedEvent]) -> None:
    """One line for each return that was asked for."""
    for e in asked:
        what = "" if math.isnan(e.target) else f"asked {e.target:.3f}, "
        right = "" if math.isnan(e.success) else f", {100 * e.success:.1f} % right"
        print(
            f"{e.env}: {what}got {e.episode_return:.3f} ± {e.deviation:.3f}{right}; {e.episodes:,} episodes of "
            f"{e.length:.1f} steps on average"
        )


COLLECT = Command(Collect, collect)
IMITATE = Command(ImitationConfig, run, parse)
