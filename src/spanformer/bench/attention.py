"""The attention benchmark: each contender is checked on a shape, then timed on it in turn with the others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from spanformer.bench import field, memory
from spanformer.bench.config import AttentionBench
from spanformer.bench.contenders import YARDSTICK, Contender, reason_not, runner
from spanformer.bench.oracle import Truth, check, find_truth
from spanformer.bench.plan import Step, steps
from spanformer.bench.results import Results, Row, describe_machine
from spanformer.bench.timing import SGEMM, OnRound, Timing, round_robin, sgemm, sgemm_rate
from spanformer.bench.work import Inputs, Work, make_inputs
from spanformer.core.malloc import keep_freed_memory
from spanformer.core.progress import OnProgress, silent
from spanformer.cost import attention as cost

RESULT_FILE = "attention.json"


def bench_attention(
    config: AttentionBench, *, on_progress: OnProgress = silent, extra: Sequence[Contender] = ()
) -> Results:
    """Run the benchmark and write `config.out`/attention.json after every step, so that no measurement is lost.

    extra: contenders in addition to the built-in ones.
    """
    plan = steps(config)
    if not plan:
        parts, modes = " ".join(config.chosen_parts), " ".join(config.chosen_modes)
        raise ValueError(f"no step of parts {parts} has modes {modes}; choose other parts or modes")
    config.out.mkdir(parents=True, exist_ok=True)  # fails now if the file cannot be written
    leave_out = ("flex",) if config.quick else ()
    taking_part = [*field.choose(config.contenders, config.original, leave_out=leave_out), *extra]
    kept = config.keep_memory and keep_freed_memory(True)
    results = Results(describe_machine(config.threads, kept), _plain(config))
    forecasts = [step.seconds(config.rounds) for step in plan]
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        begins = [0.0, *itertools.accumulate(forecasts[:-1])]
        for step, forecast, done in zip(plan, forecasts, begins, strict=True):
            on_progress(step.title, done, sum(forecasts))
            here = [c for c in taking_part if c.name not in step.without and step.work.kind in c.kinds]

            def on_round(waiting: str, share: float, title=step.title, done=done, forecast=forecast) -> None:
                on_progress(f"{title}, {waiting}" if waiting else title, done + share * forecast, sum(forecasts))

            measure = time_step if step.in_process else memory_step
            results.rows += measure(step, here, config, on_round)
            results.save(config.out / RESULT_FILE)
    finally:
        torch.set_num_threads(threads)
        if kept:
            keep_freed_memory(False)
    on_progress("done", sum(forecasts), sum(forecasts))
    return results


def time_step(step: Step, taking_part: Sequence[Contender], config: AttentionBench, on_round: OnRound) -> list[Row]:
    """Check every contender, then time the correct ones round-robin with sgemm."""
    work = step.work
    sets = [make_inputs(work, seed) for seed in range(config.caches if work.mode == "decode" else 1)]
    rows, functions, truths = [], {}, {}
    for contender in taking_part:
        row = _row(step, contender)
        rows.append(row)
        row.reason = reason_not(contender, work) or ""
        if row.reason:
            row.status = "skipped"
            continue
        try:
            forwards = [contender.build(inputs) for inputs in sets]
            truth = _truth(contender, sets[0], truths)
            verdict = check(forwards[0], sets[0], truth, floor=contender.floor)
            function = _in_turn([runner(contender, *pair) for pair in zip(sets, forwards, strict=True)])
        except Exception as error:  # a peer may raise anything: report it and continue
            row.status, row.reason = "skipped", f"failed: {_first_line(error)}"
            continue
        row.errors, row.allowed = verdict.errors, verdict.allowed
        if not verdict.right:
            row.status, row.reason = "WRONG", "; ".join(verdict.wrong)
            continue
        functions[contender.name] = function
    if functions:
        timings = round_robin(
            {SGEMM: sgemm(), **functions},
            repeats=config.rounds,
            warm_up=0 if config.quick else 1,  # the check has warmed them up
            shortest=config.shortest,
            budget=config.longest,
            on_round=on_round,
        )
        _fill(rows, timings, work)
    return rows


def memory_step(step: Step, taking_part: Sequence[Contender], config: AttentionBench, on_round: OnRound) -> list[Row]:
    """Measure each contender's peak memory in a separate process, and check its result there."""
    rows = []
    for number, contender in enumerate(taking_part):
        on_round("", number / len(taking_part))
        row = _row(step, contender)
        rows.append(row)
        reason = reason_not(contender, step.work)
        if reason is None:
            original = str(config.original) if config.original else None
            peak = memory.measure(memory.Job(contender.name, dataclasses.asdict(step.work), config.threads, original))
            row.peak_mib, row.errors, reason = peak.mib, peak.errors or {}, peak.reason or None
            row.ms = None if peak.seconds is None else peak.seconds * 1e3
            row.us_per_token = None if row.ms is None else row.ms * 1e3 / (step.work.batch * step.work.queries)
            if peak.wrong:
                row.status, row.reason = "WRONG", peak.wrong
        if reason is not None:
            row.status, row.reason = "skipped", reason
    return rows


def _fill(rows: list[Row], timings: dict[str, Timing], work: Work) -> None:
    rate = sgemm_rate(timings[SGEMM].median)
    base = timings.get("original" if work.streaming else YARDSTICK)
    for row in rows:
        timing = timings.get(row.contender)
        if timing is None:
            continue
        row.ms, row.samples, row.disturbed = timing.median * 1e3, len(timing.samples), timing.disturbed
        row.us_per_token = timing.median * 1e6 / (work.batch * work.queries)
        row.sgemm_gflops = rate / 1e9
        row.speedup = timing.times_as_fast_as(base) if base else None
        operations = None if work.mode == "decode" else _operations(row, work)  # memory limits decoding
        if operations is not None:
            row.gflops = operations / timing.median / 1e9
            of_sgemm = cost.limit_seconds(operations, sgemm_rate(1.0))  # number of sgemm calls of the same duration
            row.limit_share = of_sgemm * timing.times_as_fast_as(timings[SGEMM])


def _operations(row: Row, work: Work) -> int | None:
    """Operations that the contender must do: on the pairs in the spans, or on all pairs for full attention."""
    if row.same_work:
        return work.flops()
    return dataclasses.replace(work, profile="F").flops() if row.contender in (YARDSTICK, "x-transformers") else None


def _row(step: Step, contender: Contender) -> Row:
    shape = dataclasses.asdict(step.work)
    return Row(step.part, contender=contender.name, label=contender.label, same_work=contender.same_work, **shape)


def _truth(contender: Contender, inputs: Inputs, known: dict[Callable, Truth]) -> Truth:
    """The oracle's result for the contender's rule; most contenders share one."""
    if contender.rule not in known:
        known[contender.rule] = find_truth(inputs, contender.rule(inputs))
    return known[contender.rule]


def _in_turn(functions: list[Callable[[], object]]) -> Callable[[], object]:
    if len(functions) == 1:
        return functions[0]
    cycle = itertools.cycle(functions)
    return lambda: next(cycle)()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:200]


def _plain(config: AttentionBench) -> dict:
    """The settings as JSON values."""
    names = ("profiles", "lengths", "modes", "parts")
    fields = dataclasses.asdict(config) | {name: getattr(config, f"chosen_{name}") for name in names}
    return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}
