"""Each mutation breaks one line of a Triton kernel; the interpreter's tests must notice. One that survives names a test
that is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import spanformer

HERE = Path(__file__).parent
KERNELS = Path("ops/backends/triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    tests: str = "float32"
    """pytest -k"""


MUTATIONS = {
    "a tile on the ramp counts as full": Mutation(
        "pairs",
        "near = tl.floor(low).to(tl.int32) + 1",
        "near = tl.floor(low).to(tl.int32) + 2",
    ),
    "the loop starts a tile late": Mutation(
        "pairs",
        "first - far + 1, last - near",
        "first - far + 17, last - near",
    ),
    "the full loop starts a tile early": Mutation("pairs", "last - near + 1\n", "last - near - 15\n"),
    "the loop ahead ends early": Mutation("pairs", "last + far, first + near", "last + 1, first + near"),
    "the last tile is left out": Mutation(
        "pairs",
        "tl.cdiv(tl.minimum(tl.maximum(hi, 0), N), B) * B, lo)",
        "tl.minimum(tl.maximum(hi, 0), N) // B * B, lo)",
    ),
    "parts overlap": Mutation("pairs", "count * tl.minimum(part, parts) // parts,", "0 * count,", "parts or 257"),
    "one token of the future": Mutation("pairs", "seen = d >= 0\n", "seen = d >= -1\n"),
    "a reach too long": Mutation("pairs", "away < reach", "away <= reach"),
    "a ramp without its width": Mutation("pairs", "left * (1.0 / ramp)", "left"),
    "weight beyond the ramp": Mutation("pairs", "seen = seen & (left > 0.0)", "seen = seen & (left > -1.0)"),
    "documents are not told apart": Mutation("pairs", "seen & (row_doc == col_doc)", "seen & (row_doc >= col_doc)"),
    "a table read one entry on": Mutation("pairs", "d + max_future, away)", "d + max_future, away + 1)"),
    "one row too many is read": Mutation(
        "pairs",
        "mask=rows[:, None] < N - first, other",
        "mask=rows[:, None] <= N - first, other",
    ),
    "lse in powers of two": Mutation("pairs", "lse * LOG2E)", "lse)"),
    "key biases of another head": Mutation("tokens", "(h // shared)", "(h // shared * 0)"),
    "two heads of one rank": Mutation(
        "tokens",
        "before = group[None, :] < group[:, None]",
        "before = group[None, :] <= group[:, None]",
    ),
    "documents end a tile early": Mutation(
        "tokens",
        "last = tl.where(some, n0 + B, last)",
        "last = tl.where(some, n0, last)",
    ),
    "positions of the future": Mutation("tokens", "(at >= low) & (at <= high)", "(at >= low) & (at < high)"),
    "full tiles without scale": Mutation("forward", "p = tl.exp2(s * scale2 - new", "p = tl.exp2(s - new"),
    "old sums keep their weight": Mutation(
        "forward",
        "return acc, total * keep + tl.sum(p, 1), new",
        "return acc, total + tl.sum(p, 1), new",
    ),
    "lse without its sum": Mutation(
        "forward",
        "tl.store(LSE + rows, (top + tl.log2(total)) * LN2, mask=rows < whole)",
        "tl.store(LSE + rows, top * LN2, mask=rows < whole)",
    ),
    "keys of another group": Mutation("forward", "K += b64 * skb + (h // G)", "K += b64 * skb + (h % (H // G))"),
    "sink logits have no weight": Mutation("forward", "total * keep + tl.exp2(sink - safe)", "total * keep"),
    "parts count alike": Mutation("forward", "some * weight[:, None]", "some", "parts or 257"),
    "split rows are done": Mutation("forward", "(split == 1) & (part == 0)", "part == 0", "parts or 257"),
    "δ with lse's gradient added": Mutation("backward_q", "delta -= tl.load(DLSE", "delta += tl.load(DLSE"),
    "spans learn off the ramp": Mutation("backward_q", "tl.where(left < ramp, ds, 0.0)", "ds"),
    "dS without its weight": Mutation("backward_q", "ds = ds * weight(left, ramp)", "ds = ds * 1.0"),
    "dq without scale": Mutation("backward_q", "dq * scale", "dq"),
    "a sink's gradient turned round": Mutation("backward_q", "-share * delta", "share * delta"),
    "dk from one head of the group": Mutation("backward_kv", "h = g * G + shared", "h = g * G"),
    "dk without scale": Mutation("backward_kv", "dk * scale", "dk"),
    "short dynamic spans are skipped": Mutation(
        "backward_kv",
        "longest(z, rows, TQ, True) + ramp",
        "longest(z, rows, TQ, True)",
    ),
    "dv without weights": Mutation("backward_kv", "p = p * weight(left, ramp)", "p = p * 1.0"),
    "one diagonal of two": Mutation("backward_bias", "range(2)", "range(1)"),
    "rings do not wrap": Mutation(
        "decode",
        "first + position % capacity",
        "first + position % N",
        "caches or slots",
    ),
    "the newest token is left out": Mutation(
        "decode",
        "newest + 1 - shift), 0)",
        "newest - shift), 0)",
        "caches or slots",
    ),
    "every part writes nothing new": Mutation(
        "decode",
        "(part == 0) & (newest >= 0)",
        "(part == 1) & (newest >= 0)",
        "caches or slots",
    ),
    "8-bit rows without scales": Mutation(
        "decode",
        "return x * tl.load(SCALES + at, mask=there, other=0.0)[None, :] if SCALES is not None else x",
        "return x",
        "caches or slots",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    there = tmp_path_factory.mktemp("mutated")
    shutil.copytree(
        Path(spanformer.__file__).parent, there / "spanformer", ignore=shutil.ignore_patterns("__pycache__")
    )
    return there


@pytest.fixture
def run(package: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    def tests(chosen: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"TRITON_INTERPRET": "1", "SPANFORMER_TRITON_TESTS": "1", "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"], env["PYTHONDONTWRITEBYTECODE"] = str(package), "1"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            chosen,
            str(HERE / "interpreted"),
        ]
        return subprocess.run(command, env=env, capture_output=True, text=True, cwd=HERE.parents[1])

    return tests


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, package: Path, run: Callable) -> None:
    file, old, new, tests = MUTATIONS[name]
    path = package / "spanformer" / KERNELS / f"{file}.py"
    source = path.read_text(encoding="utf-8")
    assert source.count(old) >= 1, f"{file}.py has no {old!r} any more"
    try:
        path.write_text(source.replace(old, new), encoding="utf-8")
        done = run(tests)
    finally:
        path.write_text(source, encoding="utf-8")
    assert done.returncode == 1, f"{name}: every test passes, or none ran\n{done.stdout[-1500:]}{done.stderr[-500:]}"


def test_unbroken_copy_passes(package: Path, run: Callable) -> None:
    done = run("parts or 257 or slots or 16-16")
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-1500:]
