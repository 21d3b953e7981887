"""`bench gpu` on a machine without a GPU, and its timing with other contenders on the CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spanformer.bench import gpu
from spanformer.bench.contenders import SDPA, Contender, backend, full_rule
from spanformer.bench.gpu_peers import PEERS, hard_rule
from spanformer.bench.gpu_time import add_predictions, describe_device, host_timer, on_device, time_work
from spanformer.bench.work import Work, make_inputs
from spanformer.cli.main import main

CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
WORK = Work("A", 96, heads=2, dim=16)


def wrong(inputs):
    return lambda: inputs.q + inputs.k + inputs.v


def failing(_inputs):
    raise RuntimeError("no kernel image is available\nfor execution")


def test_contenders_are_checked_then_timed() -> None:
    mistaken = Contender("wrong", "wrong", lambda _work: None, wrong, full_rule)
    broken = Contender("broken", "broken", lambda _work: None, failing)
    absent = Contender("absent", "absent", lambda _work: "absent is not installed", failing)
    rows = time_work(WORK, (SDPA, backend("flex"), mistaken, broken, absent), CPU, host_timer, rounds=2)
    sdpa, flex, mistaken_row, broken_row, absent_row = rows
    assert sdpa["us"] > 0 and sdpa["speedup"] == 1.0 and flex["us"] > 0 and flex["errors"]["dspan"] >= 0
    assert mistaken_row["reason"].startswith("WRONG: out differs by") and "us" not in mistaken_row
    assert broken_row["reason"] == "failed: no kernel image is available"
    assert absent_row["reason"] == "absent is not installed"
    assert [gpu.line(row)[:2] for row in rows] == ["A "] * 5 and "times as fast as SDPA" in gpu.line(flex)


def test_peers_that_are_not_installed_say_so() -> None:
    said = {peer.name: peer.cannot(dataclasses.replace(WORK, dtype="bfloat16")) for peer in PEERS}
    assert list(said) == ["sdpa", "flash-attn", "flash-sparse-attn", "triton", "flex"]
    for name, module in (("flash-attn", "flash_attn"), ("flash-sparse-attn", "flash_sparse_attn")):
        if importlib.util.find_spec(module) is None:
            assert said[name] == f"{name} is not installed (pip install {name})"
    assert PEERS[0].cannot(WORK) == "takes 16-bit numbers only"


def test_hard_windows_are_as_long_as_spans_with_their_ramps() -> None:
    inputs = make_inputs(Work("A", 200, heads=3, dim=16))
    assert hard_rule(inputs).reach_list() == [64, 64, 200]
    assert inputs.span.tolist() == [32.0, 32.0, 200.0]


def test_inputs_are_copied_with_their_gradients() -> None:
    inputs = make_inputs(WORK)
    moved = on_device(inputs, CPU)
    assert moved.q.requires_grad and moved.span.requires_grad and not moved.grad.requires_grad
    assert torch.equal(moved.q, inputs.q) and moved.distance_bias is None and moved.work is WORK


def test_predictions_stand_beside_our_kernel_on_an_a100_only() -> None:
    forward = {
        "kernel": "forward_64", "tile": [64, 64], "warps": 4, "registers": 188, "shared": 40960, "head_size": 64,
        "products": 2, "per_pair": {"full": 11.6, "edge": 25.3},
    }  # fmt: skip
    backward = [forward | {"kernel": f"backward_{name}_64", "products": 4} for name in ("q", "kv")]
    work = dataclasses.asdict(Work("A", 2048, mode="forward", dim=64))
    works = [work, work | {"mode": "forward+backward"}, work | {"dim": 128}]
    for capability, compiled, expected in (
        ([8, 0], [forward, *backward], [True, True, False]),
        ([8, 0], [forward], [True, False, False]),
        ([9, 0], [forward, *backward], [False] * 3),
    ):
        rows = [{"contender": name} | each for name in ("triton", "sdpa") for each in works]
        add_predictions(rows, compiled, {"capability": capability, "sms": 108})
        assert ["predicted_us" in row for row in rows] == [*expected, False, False, False]
        assert not all(expected[:2]) or rows[1]["predicted_us"] > 2 * rows[0]["predicted_us"]


def test_cpu_is_described_with_versions() -> None:
    assert set(describe_device(CPU)["versions"]) == {"triton", "flash-attn", "flash-sparse-attn"}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--parts", "fly"), "parts holds 'fly'; expected any of equal, compile, predict, time"),
        (("--archs", "sm_70"), "archs holds 'sm_70'; expected any of sm_80, sm_90, gfx942"),
        (("--triton", "/nowhere"), "triton is /nowhere, which holds no folder triton"),
    ],
)
def test_mistakes_give_one_sentence(arguments, said, capsys, tmp_path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "gpu", *arguments, "--out", str(tmp_path / "gpu.json")])
    shown = capsys.readouterr()
    assert end.value.code == 2 and said in shown.err and "Traceback" not in shown.err


@no_gpu
def test_nothing_is_timed_without_a_gpu(tmp_path: Path, capsys) -> None:
    main(["bench", "gpu", "--parts", "time", "--out", str(tmp_path / "gpu.json")])
    assert "time: no GPU here, so nothing was timed" in capsys.readouterr().out


@no_gpu
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_without_a_gpu_it_says_what_was_checked(tmp_path: Path) -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "spanformer", "bench", "gpu", "--quick", "--threads", "1", "--out", str(out)]
    command += ["--cache", str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "equal: 1 of 1 calls equal the float64 oracle, on Triton's interpreter" in done.stdout
    assert "0 bars missed" in done.stdout and "no GPU here, so nothing was timed" in done.stdout
    found = {name: part["found"] for name, part in json.loads(out.read_text())["parts"].items()}
    assert list(found) == ["equal", "compile", "predict"]
    assert [row["batch"] for row in found["predict"]["profile_A"]] == [1, 2, 4, 8]
    assert all(row["us"] <= row["us_slow"] for row in found["predict"]["profile_A"])
