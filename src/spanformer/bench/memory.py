"""Peak memory of a contender beyond its inputs, measured in a separate process.

The C library keeps freed memory by default, so the process runs with a low MALLOC_MMAP_THRESHOLD_, which returns it.

`python -m spanformer.bench.memory JOB` is that process; JOB is a `Job` as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spanformer.core.peak import peak_of, unsupported

MIB = 2**20


@dataclass(frozen=True)
class Job:
    contender: str
    work: dict
    """the fields of a Work"""
    threads: int
    original: str | None = None
    """path of a clone of the original"""
    check: bool = True
    """compare the result with the oracle after measuring"""


@dataclass(frozen=True)
class Peak:
    mib: float | None
    """None if it could not be measured"""
    seconds: float | None = None
    """seconds of the measured call, the first at its size"""
    reason: str = ""
    wrong: str = ""
    errors: dict | None = None


def measure(job: Job, timeout: float = 1800.0) -> Peak:
    """Run a job in a fresh process."""
    return in_fresh_process("spanformer.bench.memory", asdict(job), job.threads, timeout)


def in_fresh_process(module: str, job: dict, threads: int, timeout: float = 1800.0) -> Peak:
    """Run `python -m module JOB`, whose last line is a `Peak` as JSON."""
    reason = unsupported()
    if reason:
        return Peak(None, reason=reason)
    env = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-m", module, json.dumps(job)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Peak(None, reason=f"took more than {timeout:.0f} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        killed = "was killed, probably out of memory" if done.returncode == -9 else last
        return Peak(None, reason=f"the measuring process failed: {killed}")
    return Peak(**json.loads(done.stdout.strip().splitlines()[-1]))


def _run_job(job: Job) -> Peak:
    import torch

    from spanformer.bench.contenders import reason_not, runner
    from spanformer.bench.field import find
    from spanformer.bench.oracle import check, find_truth
    from spanformer.bench.work import Work, make_inputs

    torch.set_num_threads(job.threads)
    contender, work = find(job.contender, Path(job.original) if job.original else None), Work(**job.work)
    reason = reason_not(contender, work)
    if reason:
        return Peak(None, reason=reason)
    small = replace(work, length=128, streaming=min(work.streaming, 64))
    inputs = make_inputs(small)
    runner(contender, inputs, contender.build(inputs))()  # first use loads libraries and starts threads
    inputs = make_inputs(work)
    peak, seconds = peak_of(lambda: runner(contender, inputs, contender.build(inputs))())
    wrong, errors = "", None
    if job.check:
        truth = find_truth(inputs, contender.rule(inputs))
        verdict = check(contender.build(inputs), inputs, truth, floor=contender.floor)
        wrong, errors = "; ".join(verdict.wrong), verdict.errors
    return Peak(None if wrong else peak / MIB, None if wrong else seconds, wrong=wrong, errors=errors)


if __name__ == "__main__":
    print(json.dumps(asdict(_run_job(Job(**json.loads(sys.argv[1]))))))
