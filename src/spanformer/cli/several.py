"""Training several runs one after another; those that are done are not trained again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from spanformer.cli.screen import Screen
from spanformer.core.text import printable
from spanformer.model.fields import as_dict, build
from spanformer.train.config import RunConfig
from spanformer.train.place import hold_folder

SIGNALS = {each.name for each in signal.Signals}
OF_THE_MACHINE = {"out", "resume", "data.cache", "data.from", "model.vocab"} | {
    f"train.{name}" for name in ("threads", "device", "keep", "save_every", "log_every", "keep_memory", "tensorboard")
}
"""settings that change nothing about what a run comes to"""


def train_each(runs: Sequence[RunConfig]) -> None:
    """Train all, in this order. One that is to be continued and has come to its end is passed over."""
    from spanformer.train.run import train

    for number, each in enumerate(runs, 1):
        done = each.resume and finished(each)
        print(f"{number} of {len(runs)}: {printable(Path(each.out).name)}" + (", trained already" if done else ""))
        if done:
            continue
        with Screen(each) as screen:
            result = train(each, watch=screen.show)
        if result.signal:
            raise KeyboardInterrupt(f"stopped in {each.out}; go on with the same command and --resume")


def hold_out(out: Path) -> contextlib.AbstractContextManager:
    """Let no other command write its runs and their report into the folder; of torchrun's processes the first holds
    it for all."""
    return hold_folder(out) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext()


def finished(config: RunConfig) -> bool:
    """Whether the run's folder holds it, trained as long as it says. A ValueError names what was set otherwise."""
    from spanformer.report.events import NAME, read_run

    if not (Path(config.out) / NAME).exists():
        return False
    found = read_run(Path(config.out))
    if found.stop is None or found.stop.reason in SIGNALS:
        return False
    # built, so that what an older version did not have yet has its default
    recorded = as_dict(build(RunConfig, found.start.config, str(Path(config.out) / NAME)))
    for key, now, then in differing(as_dict(config), recorded):
        raise ValueError(
            f"{config.out} holds a run that was trained with {key} = {then!r}, and this one has {now!r}; change it "
            "back, or choose another --out"
        )
    return True


def differing(now: dict, then: dict, above: str = "") -> Iterator[tuple[str, object, object]]:
    """(dotted key, now, then) of every setting that is not the same, those of the machine aside."""
    for key, value in now.items():
        before, name = then.get(key), above + key
        if isinstance(value, dict) and isinstance(before, dict):
            yield from differing(value, before, f"{name}.")
        elif name not in OF_THE_MACHINE and value != before:
            yield name, value, before
