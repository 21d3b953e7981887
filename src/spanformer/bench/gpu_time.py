"""Checks and times contenders on a GPU, by CUDA events, with what the model predicted beside what was measured."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spanformer.bench.contenders import Contender, runner
from spanformer.bench.gpu_model import A100, Kernel, predict, split_from
from spanformer.bench.oracle import Verdict, check, find_truth
from spanformer.bench.work import Inputs, Work, make_inputs

FLUSH = 256 << 20  # bytes written before each sample, more than any L2 cache holds
STEPS = ("forward", "backward_q", "backward_kv")  # the kernels of a pass that take nearly all its time
PACKAGES = ("triton", "flash-attn", "flash-sparse-attn")
Timer = Callable[[Callable[[], object]], float]
"""seconds of one call"""


def describe_device(device: torch.device) -> dict[str, Any]:
    """The GPU, its driver and the versions that its speed depends on."""
    versions = {name: _version(name) for name in PACKAGES}
    if device.type != "cuda":
        return {"name": str(device), "versions": versions}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name, "capability": [found.major, found.minor], "sms": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1), "cuda": torch.version.cuda, "hip": torch.version.hip,
        "versions": versions,
    }  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Copies of the tensors, which require gradients as the originals do."""
    moved = {
        f.name: None if t is None else t.detach().to(device).requires_grad_(t.requires_grad)
        for f in dataclasses.fields(inputs)
        if f.name != "work"
        for t in [getattr(inputs, f.name)]
    }
    return dataclasses.replace(inputs, **moved)


def check_contender(contender: Contender, inputs: Inputs, device: torch.device) -> tuple[Verdict, Callable]:
    """Compare with the float64 oracle on the CPU; returns also the callable to time."""
    moved = on_device(inputs, device)
    forward = contender.build(moved)
    verdict = check(forward, moved, find_truth(inputs, contender.rule(inputs)), floor=contender.floor)
    return verdict, runner(contender, moved, forward)


def time_work(
    work: Work, contenders: Sequence[Contender], device: torch.device, timer: Timer, rounds: int
) -> list[dict[str, Any]]:
    """One row for each contender, which are timed in turn. One that is wrong or fails gets the reason, and no speed."""
    inputs, rows, runs = make_inputs(work), [], {}
    for contender in contenders:
        row: dict[str, Any] = {"contender": contender.name, "same_work": contender.same_work}
        rows.append(row | dataclasses.asdict(work))
        row = rows[-1]
        if (reason := contender.cannot(work)) is not None:
            row["reason"] = reason
            continue
        try:
            verdict, run = check_contender(contender, inputs, device)
        except Exception as error:  # a kernel that never ran anywhere may raise anything: report it and continue
            row["reason"] = f"failed: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}"
            continue
        row["errors"] = verdict.errors
        if verdict.right:
            runs[contender.name] = run
        else:
            row["reason"] = "WRONG: " + "; ".join(verdict.wrong)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(timer(run))
    for row in rows:
        if taken := samples.get(row["contender"]):
            row["us"] = 1e6 * statistics.median(taken)
            if "sdpa" in samples:
                row["speedup"] = statistics.median(a / b for a, b in zip(samples["sdpa"], taken, strict=True))
    return rows


def add_predictions(rows: list[dict[str, Any]], compiled: list[dict[str, Any]], device: dict[str, Any]) -> None:
    """The model's time of our kernels, on the GPU that it is for. compiled: rows of the compile gate."""
    if device.get("capability") != [8, 0]:
        return
    gpu, kernels = dataclasses.replace(A100, sms=device["sms"]), {row["kernel"]: row for row in compiled}
    for row in rows:
        names = [f"{step}_{row['dim']}" for step in STEPS[: 3 if row["mode"] == "forward+backward" else 1]]
        if row["contender"] == "triton" and all(name in kernels for name in names):
            work = Work(**{f.name: row[f.name] for f in dataclasses.fields(Work)})
            each = [Kernel.of(kernels[name]) for name in names]
            splits = [split_from(each[0], work.heads, work.length, work.batch, gpu), None, None]
            if splits[0] is not None and (long := f"forward_long_{work.dim}") in kernels:
                each[0] = Kernel.of(kernels[long])
            row["predicted_us"] = sum(
                predict(kernel, work.reaches(), work.length, work.batch, gpu, least=least).us
                for kernel, least in zip(each, splits, strict=False)
            )


def cuda_timer(calls: int = 20) -> Timer:
    """The median of single calls with a cold L2 cache, between events of the stream."""
    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")

    def seconds(run: Callable[[], object]) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for first, last in events:
            flush.zero_()
            first.record()
            run()
            last.record()
        torch.cuda.synchronize()
        return 1e-3 * statistics.median(first.elapsed_time(last) for first, last in events)

    return seconds


def host_timer(run: Callable[[], object]) -> float:
    """For tests on a machine without a GPU."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
