"""`spanformer bench gpu`: check and time the GPU kernels; without a GPU, say what can be checked there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spanformer.bench.contenders import Contender, backend
from spanformer.bench.gpu_compile import ARCHS, GATED, compile_kernels, faults
from spanformer.bench.gpu_model import A100, FA2, LEAST_ALONE, Kernel, dense_operations, dense_rate, predict, split_from
from spanformer.bench.gpu_peers import PEERS
from spanformer.bench.gpu_time import add_predictions, check_contender, cuda_timer, describe_device, time_work
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.bench.work import Work, make_inputs

SPLIT = "forward_long_64"  # the same kernel for few blocks: the long ones are split


@dataclass(frozen=True)
class GpuBench(BenchOptions):
    """Check the GPU kernels against the float64 oracle, compile them for GPUs that are not here, predict their time,
    and time them where there is a GPU.

        spanformer bench gpu
        spanformer bench gpu --parts compile predict --out docs/results/gpu.json
    """

    parts: tuple[str, ...] = ()
    """equal: values and gradients against the oracle, on the GPU or in Triton's interpreter; compile: registers, spills
    and instructions of every kernel; predict: time on an A100; time: against SDPA, flash-attn and flash-sparse-attn, on
    a GPU only. Default: all."""
    archs: tuple[str, ...] = tuple(ARCHS)
    """Architectures to compile for."""
    head_sizes: tuple[int, ...] = (64, 128)
    """Head sizes to compile."""
    triton: Path | None = None
    """Folder with another Triton, to compile with it too: `pip install --no-deps --target FOLDER triton==3.7.1`."""
    cache: Path = Path("out/bench/triton")
    """Folder for compiled kernels; a second run compiles only what changed."""
    length: int = 8192
    """Tokens of the sequences to time."""
    batches: tuple[int, ...] = (1, 4)
    """Batch sizes to time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if unknown := [arch for arch in self.archs if arch not in ARCHS]:
            raise ValueError(f"archs holds {unknown[0]!r}; expected any of {', '.join(ARCHS)}")
        if self.triton is not None and not (self.triton / "triton").is_dir():
            raise ValueError(f"triton is {self.triton}, which holds no folder triton; install another Triton there")


def run(bench: Bench[GpuBench]) -> None:
    for part in bench.options.parts or PARTS:
        PARTS[part](bench)


def device() -> torch.device | None:
    return torch.device("cuda") if torch.cuda.is_available() else None


# --- equality ---------------------------------------------------------------------------------------------------------


def check_equal(bench: Bench[GpuBench]) -> None:
    """Compare our backends with the float64 oracle, on the GPU or, without one, in Triton's interpreter."""
    where = device()
    if where is None:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: nothing of triton is imported yet
    calls = device_calls(bench) if where else interpreter_calls(bench)
    bench.plan(len(calls))
    rows = [_equal(bench, work, backend(name), where) for name, work in calls]
    place = describe_device(where)["name"] if where else "Triton's interpreter, on the CPU"
    wrong = [row for row in rows if row.get("wrong")]
    bench.keep("equal", {"where": place, "rows": rows})
    checked = sum("errors" in row for row in rows)
    bench.say(f"equal: {checked - len(wrong)} of {len(rows)} calls equal the float64 oracle, on {place}")
    for row in rows:
        if row.get("wrong") or row.get("reason"):
            bench.say(f"  {row['contender']}, {row['work']}: {row.get('wrong') or row['reason']}")
    if wrong:
        raise ValueError(f"{len(wrong)} calls differ from the oracle; see above")


def _equal(bench: Bench[GpuBench], work: Work, contender: Contender, where: torch.device | None) -> dict[str, Any]:
    named = f"{work.profile} {work.length} {work.dtype} D {work.dim} {work.terms}"
    bench.begin(f"equal: {contender.name}, {named}")
    row: dict[str, Any] = {"contender": contender.name, "work": named}
    if (reason := contender.cannot(work)) is not None:
        row["reason"] = reason
    else:
        verdict, _ = check_contender(contender, make_inputs(work), where or torch.device("cpu"))
        row |= {"errors": verdict.errors, "allowed": verdict.allowed, "wrong": "; ".join(verdict.wrong)}
    bench.end()
    return row


def device_calls(bench: Bench[GpuBench]) -> list[tuple[str, Work]]:
    """flex compiles for many seconds for each dtype and term, so it gets few calls, long enough for its two parts."""
    dtypes, lengths = ("bfloat16", "float16", "float32"), (257,) if bench.options.quick else (257, 1000, 2048)
    each = itertools.product(lengths, (64, 128), dtypes, ("plain", "distance_bias"))
    works = [Work("B", length, batch=2, dim=dim, dtype=dtype, terms=terms) for length, dim, dtype, terms in each]
    longer = [Work("B", 2304, dtype=dtype) for dtype in dtypes[: 1 if bench.options.quick else 3]]
    return [*(("triton", work) for work in works), *(("flex", work) for work in longer)]


def interpreter_calls(bench: Bench[GpuBench]) -> list[tuple[str, Work]]:
    """Short ones: a call takes seconds there, and its bfloat16 products are wrong."""
    dtypes = ("float32",) if bench.options.quick else ("float32", "float16")
    return [("triton", Work("B", 129, heads=2, dim=16, dtype=dtype)) for dtype in dtypes]


# --- compilation and prediction ---------------------------------------------------------------------------------------


def compile_all(bench: Bench[GpuBench]) -> None:
    """Compile every kernel for every architecture; print the bars that are missed."""
    options, rows = bench.options, []
    tritons = [None, *([options.triton] if options.triton else [])]
    archs, sizes = (options.archs, options.head_sizes) if not options.quick else (("sm_80",), (64,))
    bench.plan(len(tritons) * len(archs) * len(sizes))
    for triton, arch, size in itertools.product(tritons, archs, sizes):
        bench.begin(f"compile {arch}, head size {size}")
        only = (GATED, SPLIT) if options.quick else ()
        rows += compile_kernels(arch, (size,), triton=triton, cache=options.cache.absolute(), only=only)
        bench.end()
    missed = [fault for row in rows for fault in faults(row)]
    bench.keep("compile", {"rows": rows, "faults": missed})
    bench.say(f"compile: {len(rows)} kernels for {', '.join(archs)}; {len(missed)} bars missed")
    for fault in missed:
        bench.say(f"  {fault}")
    for row in rows:
        if row["kernel"] == GATED and row["arch"] == "sm_80":
            full, edge = row["per_pair"]["full"], row["per_pair"]["edge"]
            bench.say(
                f"  {GATED}, sm_80, triton {row['triton']}: {row['registers']} registers, {row['spilled']} bytes "
                f"spilled, {full} instructions a pair in the full loop, {edge} in the edge loop"
            )


def compiled_rows(bench: Bench[GpuBench]) -> list[dict[str, Any]]:
    """The kernels for sm_80 by the installed Triton, as compiled before; else the forward kernel, compiled now."""
    rows = [row for row in (bench.file.found("compile") or {}).get("rows", ()) if row["arch"] == "sm_80"]
    if not rows:
        return compile_kernels("sm_80", (64,), cache=bench.options.cache.absolute(), only=(GATED, SPLIT))
    return [row for row in rows if row["triton"] == rows[0]["triton"]]


def predict_times(bench: Bench[GpuBench]) -> None:
    """Predict profile A, forward, on an A100, and its ratio to FlashAttention-2's published speed."""
    compiled, length, heads = {row["kernel"]: row for row in compiled_rows(bench)}, 8192, 8
    whole, long = (Kernel.of(compiled[name]) for name in (GATED, SPLIT))
    found = []
    for batch in (1, 2, 4, 8):
        reaches = Work("A", length, heads=heads).reaches()
        theirs = [1e6 * dense_operations(length, heads * batch, 64) / rate for rate in FA2]
        least = split_from(whole, heads, length, batch)
        kernel = whole if least is None else long
        best, worst = (predict(kernel, reaches, length, batch, alone=a, least=least).us for a in (1.0, LEAST_ALONE))
        ratios = [min(theirs) / worst, max(theirs) / best]
        found.append({"batch": batch, "us": best, "us_slow": worst, "flash_attention_2_us": theirs, "ratio": ratios})
        bench.say(
            f"predicted, A100, profile A, {length} tokens, batch {batch}: {best:.0f}–{worst:.0f} µs, "
            f"{ratios[0]:.1f}–{ratios[1]:.1f} times as fast as FlashAttention-2"
        )
    dense = {
        str(size): dense_rate(Kernel.of(compiled[name]), length, 32) / 1e12
        for size in (64, 128)
        if (name := f"forward_{size}") in compiled
    }
    for size, rate in dense.items():
        bench.say(f"  the same model gives dense causal attention {rate:.0f} TFLOP/s with heads of {size}")
    rows = [compiled[name] for name in (GATED, SPLIT)]
    bench.keep("predict", {"kernels": rows, "gpu": A100.name, "dense_tflops": dense, "profile_A": found})


# --- time -------------------------------------------------------------------------------------------------------------


def time_all(bench: Bench[GpuBench]) -> None:
    """Time our backends and their peers on the GPU."""
    if (where := device()) is None:
        bench.say("time: no GPU here, so nothing was timed; the parts equal and compile are what can be checked")
        return
    options, described = bench.options, describe_device(where)
    length = options.size(options.length, 512)
    modes = ("forward", "forward+backward")
    works = [
        Work(profile, length, mode=mode, batch=batch, dim=dim, dtype="bfloat16")
        for profile, dim, batch, mode in itertools.product("ABF", (64, 128), options.batches, modes)
    ]
    bench.plan(len(works))
    rows, timer, compiled = [], cuda_timer(), compiled_rows(bench)
    bench.say(f"time: {described['name']}, {length} tokens, 8 heads, bfloat16")
    for work in works:
        bench.begin(f"time {work.profile}, D {work.dim}, batch {work.batch}, {work.mode}")
        made = time_work(work, PEERS, where, timer, bench.rounds)
        add_predictions(made, compiled, described)
        rows += made
        bench.end()
        bench.keep("time", {"device": described, "rows": rows})
        for row in made:
            bench.say(line(row))


def line(row: dict[str, Any]) -> str:
    begin = f"{row['profile']} D {row['dim']} batch {row['batch']} {row['mode']:16} {row['contender']:18}"
    if "us" not in row:
        return f"{begin} {row['reason']}"
    predicted = f", predicted {row['predicted_us']:.0f}" if "predicted_us" in row else ""
    ratio = f" {row['speedup']:5.2f} times as fast as SDPA" if "speedup" in row else ""
    return f"{begin} {row['us']:8.0f} µs{predicted}{ratio}"


PARTS: dict[str, Callable[[Bench[GpuBench]], None]] = {
    "equal": check_equal, "compile": compile_all, "predict": predict_times, "time": time_all,
}  # fmt: skip
OPTIONS = GpuBench
