"""`spanformer rl train | eval | report`: policies with memory, trained by PPO."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.cli.rl_decision import evaluate as evaluate_imitation
from spanformer.cli.runfile import read_run
from spanformer.core.events import (
    Event,
    NoteEvent,
    ProgressEvent,
    ResumeEvent,
    StepsEvent,
    StopEvent,
)
from spanformer.core.policy_events import PolicyStartEvent
from spanformer.core.text import printable
from spanformer.rl.config import EnvConfig, RLConfig

if TYPE_CHECKING:
    from spanformer.report.policy_pictures import EpisodeMaps


@dataclass(frozen=True)
class EvalPolicy:
    """Play whole episodes with a trained policy, or with a model of `rl imitate`, and print the mean return.

    For example:  spanformer rl eval out/t_maze --episodes 500
                  spanformer rl eval out/graph --target -2 -4 -8
    """

    run: tyro.conf.Positional[str]
    """a run's folder, of which it takes the newest checkpoint, or a checkpoint"""
    env: str = ""
    """another environment than the one of training, with the same observations and actions"""
    length: int = 50
    """with --env: its length"""
    episodes: int = 200
    seed: int = 1
    sample: bool = False
    """draw actions at random, by their probabilities, instead of taking the most probable one"""
    target: tuple[float, ...] = ()
    """returns to ask a Decision Transformer for; by default the best return of its data"""
    picture: str = ""
    """draw returns asked against returns got into this file"""


@dataclass(frozen=True)
class ReportPolicies:
    """Draw learning curves, learned spans and the attention along an episode, on one page.

    For example:  spanformer rl report out/seed-1 out/seed-2 out/lstm --out out/curves

    Runs that differ only in their seed are one line, with its range. runs.json beside the page has the figures. For
    runs of `rl imitate`: losses, and returns asked for against returns got.
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    """folders of runs"""
    out: str = ""
    """output folder; by default `report` in the first run's folder"""
    episode: bool = True
    """play an episode with the first transformer's newest checkpoint, and draw what it attends to"""
    scores: tuple[float, float] | None = None
    """of runs of `rl imitate`: the mean returns of random actions and of an expert, which count as 0 and 100 normalised
    points in runs.json"""


def parse(program: str, arguments: list[str]) -> RLConfig:
    config = read_run(RLConfig, program, arguments, sorted(str(path) for path in Path("runs/rl").glob("*.toml")))
    named = arguments and not arguments[0].startswith("-")
    return config if config.out else dataclasses.replace(
        config, out=str(Path("out") / (Path(arguments[0]).stem if named else "rl"))
    )  # fmt: skip


def show(progress: Progress, event: Event | ProgressEvent | StepsEvent) -> None:
    match event:
        case ProgressEvent():
            progress(event.title, event.done, event.total)
        case PolicyStartEvent():
            progress.say(f"{event.run}: {event.parameters:,} parameters; {event.rows} environments {event.env}")
        case ResumeEvent():
            progress.say(f"continued from update {event.step:,} ({event.path})")
        case NoteEvent():
            progress.say(f"note: {event.text}")
        case StopEvent():
            progress.say(f"ended: {event.reason}, {event.step:,} updates in {event.seconds:.0f} s")


def run(config: RLConfig) -> None:
    from spanformer.cli.summary import reporting
    from spanformer.report.policy import read_policy, said, write_policy_report
    from spanformer.rl.run import train

    with Progress() as progress:
        result = train(config, watch=lambda event: show(progress, event))
    if result.signal:
        print(f"stopped by {result.reason} at update {result.updates:,}; continue with the same command and --resume")
        sys.exit(128 + result.signal)
    with reporting(result.out, shlex.join(["spanformer", "rl", "report", str(result.out)])):
        print(said(read_policy(result.out)))
        page = write_policy_report([result.out], result.out / "report", watched([result.out]))
        print(f"report: {printable(page)}")


def evaluate(options: EvalPolicy) -> None:
    from spanformer.rl.decision_saving import is_imitation
    from spanformer.rl.rollout import play_episodes
    from spanformer.rl.run import EVAL_ROWS, play_event
    from spanformer.rl.saving import load_policy

    if options.episodes < 1:
        raise ValueError(f"--episodes is {options.episodes}; expected at least 1")
    if is_imitation(options.run):
        return evaluate_imitation(options)
    if options.target or options.picture:
        raise ValueError(
            f"--target and --picture are for models of `rl imitate`, and {options.run} is a policy of `rl train`; "
            "leave them out"
        )
    other = EnvConfig(options.env, options.length) if options.env else None
    policy, env = load_policy(options.run, other, min(EVAL_ROWS, options.episodes))
    with Progress(transient=True) as progress:
        progress(f"playing {options.episodes:,} episodes of {env.name}", 0, 0)
        found = play_episodes(env, policy, options.episodes, seed=options.seed, greedy=not options.sample)
    played = play_event(0, env.name, found)
    right = "" if played.success != played.success else f", {100 * played.success:.1f} % right"
    print(
        f"{env.name}: return {played.episode_return:.3f}{right}; {played.episodes:,} episodes of {played.length:.1f} "
        "steps on average"
    )


def report(options: ReportPolicies) -> None:
    from spanformer.report.imitation import is_imitation, write_imitation_report
    from spanformer.report.policy import read_policy, said, write_policy_report

    if not options.runs:
        raise ValueError("no run is given; expected the folder of at least one run of `spanformer rl train`")
    paths = [Path(each) for each in options.runs]
    if options.scores is not None and not options.scores[0] < options.scores[1]:
        raise ValueError(f"--scores is {options.scores}; expected two returns, the expert's above the random one")
    if is_imitation(paths[0]):
        page = write_imitation_report(paths, Path(options.out or paths[0] / "report"), options.scores)
        print(f"report: {printable(page)}")
        return
    if options.scores is not None:
        raise ValueError(
            f"--scores is for runs of `rl imitate`, and {paths[0]} is a policy of `rl train`; leave it out"
        )
    for path in paths:
        print(said(read_policy(path)))
    seen = watched(paths) if options.episode else []
    print(f"report: {printable(write_policy_report(paths, Path(options.out or paths[0] / 'report'), seen))}")


def watched(paths: Sequence[Path]) -> list[EpisodeMaps]:
    """One episode of the first run with a transformer and a checkpoint."""
    from spanformer.report.policy_pictures import EpisodeMaps
    from spanformer.rl.saving import load_policy
    from spanformer.rl.watching import watch_episode

    for path in paths:
        if not (path / "checkpoints").is_dir():
            continue
        policy, env = load_policy(path, None, 1)
        if policy.stack() is not None:
            found = watch_episode(policy, env, seed=1)
            maps = [each.float().numpy() for each in found.maps]
            return [EpisodeMaps(path.name, found.env, maps, found.episode_return, found.success)]
    return []


TRAIN = Command(RLConfig, run, parse)
EVAL = Command(EvalPolicy, evaluate)
REPORT = Command(ReportPolicies, report)
