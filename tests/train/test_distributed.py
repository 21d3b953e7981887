"""Two processes do what one does: the same losses, weights and spans, whoever saved and whoever goes on."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from distributed_jobs import run_job

import spanformer
from spanformer.model.folder import faults, read_meta, read_part
from spanformer.model.part import Part
from spanformer.train.checkpoint import Checkpoints

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")

STEPS, SAVED = 6, 3
EPS = torch.finfo(torch.float32).eps
# Sizes that two processes cannot halve, and parameters of one row, of which the second process holds nothing.
MODERN = {
    "dim": 36,
    "layers": 2,
    "heads": 3,
    "kv_heads": 1,
    "attention": {"max_span": 90, "init": 0.4, "penalty": 1e-3, "tied": True, "stack": ["adaptive_span", "dynamic_span"]},
    "feedforward": {"kind": "swiglu", "dim": 41},
    "embedding": {"tied": True},
}
PAPER = {
    "dim": 32,
    "layers": 2,
    "heads": 2,
    "attention": {"max_span": 97, "init": 0.4, "penalty": 1e-3},
    "position": {"kind": "table"},
    "feedforward": {"kind": "relu", "bias": True, "dim": 45},
    "embedding": {"bias": True},
    "norm": "layer",
    "order": "post",
    "persistent": 5,
    "init": "torch",
    "original": True,
}
CLUSTERS = {**MODERN, "embedding": {"tied": True, "cutoffs": [9, 20]}}
EXPERTS = {**PAPER, "feedforward": {"kind": "gelu", "dim": 20, "experts": 3, "balance": 0.0}}
ADAMW = {"kind": "adamw", "lr": 3e-3, "span_lr": 2e-2, "clip": 0.5, "warmup": 2, "schedule": "constant"}
ADAGRAD = {"kind": "adagrad", "lr": 0.07, "clip": 0.03, "warmup": 2, "schedule": "constant"}
CASES = {
    "adamw": (MODERN, ADAMW),
    "adagrad": (PAPER, ADAGRAD),
    "clusters": (CLUSTERS, ADAMW),
    "experts": (EXPERTS, ADAGRAD),
}


def write_text(folder: Path) -> Path:
    words = ["when", "the", "span", "of", "a", "head", "grows", "it", "sees", "more;", "who", "pays?", "(both)"]
    order = torch.randint(len(words), (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "text.txt").write_text(" ".join(words[i] for i in order))
    return folder / "text.txt"


def job(folder: Path, name: str, case: str, *, resume: Path | None = None, **train) -> dict:
    model, optim = CASES[case]
    settings = {"batch": 4, "block": 32, "micro": 2, "steps": STEPS, "eval_every": 0, "eval_tokens": 600,
                "save_every": SAVED, "keep": 9, "log_every": 1, "tensorboard": "off", "measure": False}  # fmt: skip
    config = {
        "out": str(folder / name),
        "data": {"source": str(folder / "text.txt"), "tokens": "char", "cache": str(folder / "cache")},
        "model": model,
        "optim": optim,
        "train": settings | train,
    }
    return {"config": copy.deepcopy(config), "resume": str(resume) if resume else None}


def environment() -> dict[str, str]:
    paths = [Path(spanformer.__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run_by_two(folder: Path, jobs: list[dict]) -> None:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    started = torchrun(str(Path(__file__).parents[1] / "distributed_jobs.py"), str(folder / "jobs.json"))
    _, said = communicate(started)
    assert started.returncode == 0, said


def communicate(started: subprocess.Popen[str]) -> tuple[str, str]:
    """(stdout, stderr) at its end; one that hangs is ended, with its processes."""
    try:
        return started.communicate(timeout=120)
    finally:
        started.terminate()
        started.wait()


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def rows(run: Path, event: str = "step") -> dict[int, dict]:
    """By step; of a step that was done twice, the last."""
    every = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in every if row["event"] == event}


def numbers(run: Path, steps: range, key: str) -> torch.Tensor:
    found = rows(run)
    return torch.tensor([found[step][key] for step in steps], dtype=torch.float64)


def weights(run: Path) -> torch.Tensor:
    part = read_part(checkpoint(run, STEPS), "model")
    return torch.cat([part[name].double().flatten() for name in sorted(part)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process runs every case twice, in other pieces: how far these two are apart is what float32 sums cost."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    threads = torch.get_num_threads()
    for case in CASES:
        run_job(job(folder, f"one-{case}", case))
        run_job(job(folder, f"pieces-{case}", case, micro=4))
    jobs = [job(folder, f"{engine}-{case}", case, engine=engine) for case in CASES for engine in ("ddp", "fsdp")]
    for case in ("adamw", "adagrad"):
        one, sharded = checkpoint(folder / f"one-{case}", SAVED), folder / f"shards-{case}"
        jobs += [
            job(folder, f"one-ddp-{case}", case, resume=one, engine="ddp"),
            job(folder, f"one-fsdp-{case}", case, resume=one, engine="fsdp"),
            job(folder, sharded.name, case, engine="fsdp", sharded=True, checkpointing=True),
            job(folder, f"shards-fsdp-{case}", case, resume=checkpoint(sharded, SAVED), engine="fsdp", sharded=True),
        ]
    jobs.append(job(folder, "ddp-shards-adamw", "adamw", engine="ddp", sharded=True))
    run_by_two(folder, jobs)
    for case in ("adamw", "adagrad"):
        for engine in ("ddp", "fsdp", "shards"):
            start = checkpoint(folder / f"{engine}-{case}", SAVED)
            run_job(job(folder, f"{engine}-one-{case}", case, resume=start, sharded=case == "adagrad"))
    run_job(job(folder, "ddp-shards-one-adamw", "adamw", resume=checkpoint(folder / "ddp-shards-adamw", SAVED)))
    torch.set_num_threads(threads)
    return folder


def assert_alike(folder: Path, name: str, case: str, steps: range) -> None:
    one, pieces, other = (folder / f"{kind}-{case}" for kind in ("one", "pieces", name))
    for key in ("loss", "penalty", "grad_norm"):
        truth, noise, found = (numbers(run, steps, key) for run in (one, pieces, other))
        cost = ((noise - truth) / truth).abs().max()
        assert cost < 3e-6, "a tolerance that would let anything pass"
        assert ((found - truth) / truth).abs().max() <= 10 * cost + 4 * EPS, key
    truth, noise, found = (weights(run) for run in (one, pieces, other))
    assert (found - truth).abs().max() <= 10 * (noise - truth).abs().max() + 4 * EPS * truth.abs().max()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_are_one(folder: Path, engine: str, case: str) -> None:
    assert_alike(folder, engine, case, range(1, STEPS + 1))
    moved = numbers(folder / f"{engine}-{case}", range(1, STEPS + 1), "span_average")
    assert moved[0] != moved[-1] and moved[-1] > 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_every_process_has_the_same_spans_and_its_own_share(folder: Path, engine: str, case: str) -> None:
    held = [json.loads((folder / f"{engine}-{case}" / f"process-{rank}.json").read_text()) for rank in (0, 1)]
    (one,) = [json.loads((folder / f"one-{case}" / "process-0.json").read_text())]
    assert held[0]["ratios"] == held[1]["ratios"] and held[0]["memory"] == held[1]["memory"]
    assert [[4, *shape[1:]] for _, *shape in one["memory"]] != [] and held[0]["memory"] == [
        [2, *shape[1:]] for shape in one["memory"]
    ]
    assert [h["engine"] for h in (*held, one)] == [engine, engine, "one"]
    spans = sum(map(len, one["ratios"]))
    share = one["parameters"] if engine == "ddp" else (one["parameters"] - spans) // 2
    assert all(abs(h["parameters"] - share) <= 0.05 * share for h in held)
    if engine == "fsdp":
        assert sum(h["parameters"] for h in held) == one["parameters"] + spans


@pytest.mark.parametrize("case", ["adamw", "adagrad"])
@pytest.mark.parametrize("name", ["one-ddp", "one-fsdp", "ddp-one", "fsdp-one", "shards", "shards-one", "shards-fsdp"])
def test_a_checkpoint_goes_on_under_another_world(folder: Path, name: str, case: str) -> None:
    first = 1 if name == "shards" else SAVED + 1
    assert_alike(folder, name, case, range(first, STEPS + 1))
    assert first == 1 or (1 not in rows(folder / f"{name}-{case}") and "path" in rows(folder / f"{name}-{case}", "resume")[3])


def test_replicated_weights_are_in_the_first_shard_only(folder: Path) -> None:
    run = folder / "ddp-shards-adamw"
    assert_alike(folder, "ddp-shards", "adamw", range(1, STEPS + 1))
    assert_alike(folder, "ddp-shards-one", "adamw", range(SAVED + 1, STEPS + 1))
    second = {part: set(Part([checkpoint(run, SAVED) / f"{part}-00002-of-00002.safetensors"] if part != "memory" else []))
              for part in ("model", "optimizer")}  # fmt: skip
    assert second == {"model": set(), "optimizer": set()}


@pytest.mark.parametrize("case", ["adamw", "adagrad"])
def test_torch_reads_our_shards_alike(folder: Path, case: str) -> None:
    """torch.distributed.checkpoint as the oracle of what the shards hold."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    path = checkpoint(folder / f"shards-{case}", SAVED)
    assert faults(path) == []
    assert set(read_meta(path)["files"]) == {
        f"{part}-0000{n}-of-00002.safetensors" for part in ("model", "optimizer", "memory") for n in (1, 2)
    }
    ours = {name: t for part in ("model", "optimizer", "memory") for name, t in read_part(path, part).items()}
    theirs = {name: torch.full_like(t, -1) for name, t in ours.items()}
    load(theirs, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert len(ours) > 30 and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_missing_or_damaged_shard_is_noticed(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder / "shards-adamw" / "checkpoints", tmp_path / "c")
    last = checkpoint(tmp_path / "x", STEPS).relative_to(tmp_path / "x" / "checkpoints")
    (tmp_path / "c" / last / "optimizer-00002-of-00002.safetensors").unlink()
    said: list[str] = []
    assert Checkpoints(tmp_path / "c").newest(said.append) == tmp_path / "c" / f"step-{SAVED:08d}"
    assert said[0].endswith("optimizer-00002-of-00002.safetensors is missing")
    files = sorted((tmp_path / "c" / f"step-{SAVED:08d}").glob("model-*"))
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors does not hold the rows of .* from 0 on"):
        Part(files[1:])
