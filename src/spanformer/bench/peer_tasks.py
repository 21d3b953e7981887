"""Peers of a benchmark: other packages that compute what ours does, each checked against an oracle of what it computes.

None is needed to use this project; one that is not installed is skipped with that reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.bench.linear_work import Contender, Forward, Inputs, changed_rows, check, to_dtype
from spanformer.bench.session import Bench


@dataclass(frozen=True)
class Peer:
    forward: Forward
    oracle: Forward
    aim: float | None = None
    """how many times as fast ours was meant to be"""


@dataclass(frozen=True)
class Task:
    """One function of q, k and v, by us and by others."""

    length: int
    inputs: Callable[[int], dict[str, Tensor]]
    ours: Callable[[], Peer]
    peers: dict[str, Callable[[], Peer]]
    """each is made; raises ImportError if it is not installed"""
    quick: int = 128
    """the length for testing"""
    same: float = 0.0
    """a row has changed if a number differs by more than this"""


def measure(bench: Bench, tasks: Mapping[str, Task]) -> None:
    rows: list[dict] = []
    bench.plan(len(tasks))
    for title, task in tasks.items():
        rows += _compare(bench, title, task)
        bench.keep("peers", rows)


def _compare(bench: Bench, title: str, task: Task) -> list[dict]:
    length = bench.options.size(task.length, task.quick)
    inputs, rows, found = task.inputs(length), [], {}
    truth = functools.cache(functools.partial(_truth, inputs))  # of an oracle, which peers share
    for name, make in ({"ours": task.ours} | task.peers).items():
        bench.begin(f"checking {title}, {name}")
        row: dict = {"task": title, "name": name, "length": length}
        rows.append(row)
        try:
            peer = make()
            row |= _check(peer, inputs, task.same, *truth(peer.oracle))
        except Exception as error:  # a peer may fail in any way; it must not end the run, nor pass in silence
            if name == "ours":
                raise
            row["skipped"] = _why(error)
        if reason := row.get("skipped") or row.get("wrong"):
            bench.say(f"{title}: {name} {'skipped' if 'skipped' in row else 'WRONG'}: {reason}")
        else:
            found[name] = (peer, row)
    steps = {name: functools.partial(Contender(peer.forward).step, inputs) for name, (peer, _) in found.items()}
    times = bench.compare(f"{title} at {length:,} tokens", steps)
    for name, (peer, row) in found.items():
        row |= {"ms": 1e3 * times[name].median, "disturbed": times[name].disturbed, "aim": peer.aim}
        row["ours_times_as_fast"] = times["ours"].times_as_fast_as(times[name]) if "ours" in times else None
        aimed = "" if peer.aim is None else f" (aim {peer.aim:g}x)"
        bench.say(
            f"{title}: {name:24} {row['ms']:9.2f} ms   ours {row['ours_times_as_fast'] or 0:6.2f}x as fast{aimed}   "
            f"earlier rows changed by the last token: {100 * row['changed_rows']:.0f} %"
        )
    return rows


def _why(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, ImportError) else f"failed: {type(error).__name__}: {first}"


def _truth(inputs: Inputs, oracle: Forward) -> tuple[Inputs, Inputs]:
    """What an oracle computes in float64 and in float32."""
    return Contender(oracle).step(to_dtype(inputs, torch.float64)), Contender(oracle).step(inputs)


def _check(peer: Peer, inputs: Inputs, same: float, exact: Inputs, plain: Inputs) -> dict:
    checked = check(Contender(peer.forward).step(inputs), exact, plain)
    found: dict = {"off": checked.off, "changed_rows": changed_rows(peer.forward, inputs, same)}
    return found | ({"wrong": checked.wrong} if checked.wrong else {})
