"""Train several runs one after another; finished runs are not trained again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from spanformer.cli.screen import Screen
from spanformer.core.fields import as_dict, build
from spanformer.core.text import printable
from spanformer.train.config import RunConfig
from spanformer.train.run_folder import hold_folder

SIGNALS = {each.name for each in signal.Signals}
OF_THE_MACHINE = {"out", "resume", "data.cache", "data.from", "model.vocab"} | {
    f"train.{name}" for name in ("threads", "device", "keep", "save_every", "log_every", "keep_memory", "tensorboard")
}
"""settings that do not change the result of a run"""


def train_many(runs: Sequence[RunConfig], out: Path) -> None:
    """Train all runs in this order. Finished runs with `resume` are skipped.

    out: the folder of them all, which must not be in use now. It is not held while runs train, each of which holds its
    own folder: another process may train other runs of it.
    """
    from spanformer.train.run import train

    with hold_out(out):
        pass
    for number, each in enumerate(runs, 1):
        done = each.resume and finished(each)
        print(f"{number} of {len(runs)}: {printable(Path(each.out).name)}" + (", already trained" if done else ""))
        if done:
            continue
        with Screen(each) as screen:
            result = train(each, watch=screen.show)
        if result.signal:
            raise KeyboardInterrupt(f"stopped in {each.out}; continue with the same command and --resume")


def hold_out(out: Path) -> contextlib.AbstractContextManager:
    """Lock the folder against other commands that write runs or reports into it. Under torchrun, rank 0 holds the
    lock for all processes."""
    return hold_folder(out) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext()


def finished(config: RunConfig) -> bool:
    """Whether the folder holds this run, trained to its end. A ValueError names a setting that differs."""
    from spanformer.core.events import FILE
    from spanformer.report.events import read_run

    if not (Path(config.out) / FILE).exists():
        return False
    found = read_run(Path(config.out))
    if found.stop is None or found.stop.reason in SIGNALS:
        return False
    # build() fills in defaults for settings that an older version did not have
    recorded = as_dict(build(RunConfig, found.start.config, str(Path(config.out) / FILE)))
    for key, now, then in differing(as_dict(config), recorded):
        raise ValueError(
            f"{config.out} holds a run with {key} = {then!r}, and this run {now!r}; expected the same value (change "
            "it back, or choose another --out)"
        )
    return True


def differing(now: dict, then: dict, above: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted key, now, then) of every setting that differs, except OF_THE_MACHINE."""
    for key, value in now.items():
        before, name = then.get(key), above + key
        if isinstance(value, dict) and isinstance(before, dict):
            yield from differing(value, before, f"{name}.")
        elif name not in OF_THE_MACHINE and value != before:
            yield name, value, before
