"""Two processes do what one does: the same losses, weights and spans, whoever saved and whoever goes on."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import spanformer
from spanformer.cli.main import main
from spanformer.core.fields import build
from spanformer.model.config import ModelConfig
from spanformer.model.encoder import Encoder
from spanformer.model.folder import faults, read_meta, read_part
from spanformer.model.lm import LM
from spanformer.model.part import Part
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.distributed import World, refuse_shared
from support.distributed_jobs import run_job

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")

STEPS, SAVED = 6, 3
EPS = torch.finfo(torch.float32).eps
# Sizes that two processes cannot halve, and parameters of one row, of which the second process holds nothing.
MODERN = {
    "dim": 36,
    "layers": 2,
    "heads": 3,
    "kv_heads": 1,
    "attention": {
        "max_span": 90,
        "init": 0.4,
        "penalty": 1e-3,
        "tied": True,
        "stack": ["adaptive_span", "dynamic_span"],
    },
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
    "paper_compat": True,
}
CLUSTERS = {**MODERN, "embedding": {"tied": True, "cutoffs": [9, 20]}}
EXPERTS = {**PAPER, "feedforward": {"kind": "gelu", "dim": 20, "experts": 3, "balance": 0.0}}
REVERSIBLE = {**MODERN, "layers": 3, "stack": "reversible", "feedforward": {"dim": 41, "chunk": 24}}
ADAMW = {"kind": "adamw", "lr": 3e-3, "span_lr": 2e-2, "clip": 0.5, "warmup": 2, "schedule": "constant"}
ADAGRAD = {"kind": "adagrad", "lr": 0.07, "clip": 0.03, "warmup": 2, "schedule": "constant"}
CASES = {
    "adamw": (MODERN, ADAMW),
    "adagrad": (PAPER, ADAGRAD),
    "clusters": (CLUSTERS, ADAMW),
    "experts": (EXPERTS, ADAGRAD),
    "reversible": (REVERSIBLE, ADAMW),
}


SPANS = {"max_span": 20, "init": 0.4, "penalty": 1e-3, "tied": True}
OTHERS = {
    # static spans: the price of dynamic ones is a mean over places, and padding differs between processes
    "pairs": ({"kind": "seq2seq", **MODERN, "attention": SPANS, "encoder": {"layers": 1, "attention": SPANS}}, ADAMW),
    "masked": ({"kind": "encoder", **PAPER, "paper_compat": False, "vocab": 41}, ADAGRAD),
}
"""what is no language model, and carries no memory"""


def write_text(folder: Path) -> Path:
    words = ["when", "the", "span", "of", "a", "head", "grows", "it", "sees", "more;", "who", "pays?", "(both)"]
    order = torch.randint(len(words), (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "text.txt").write_text(" ".join(words[i] for i in order))
    return folder / "text.txt"


def job(folder: Path, name: str, case: str, *, resume: Path | None = None, **train) -> dict:
    model, optim = (CASES | OTHERS)[case]
    source = str(folder / "text.txt") if case != "pairs" else "numbers"
    train = train if case != "pairs" else {"block": 66} | train
    settings = {"batch": 4, "block": 32, "grad_accum_steps": 2, "steps": STEPS, "eval_every": 0, "eval_tokens": 600,
                "save_every": SAVED, "keep": 9, "log_every": 1, "tensorboard": "off", "measure": False}  # fmt: skip
    config = {
        "out": str(folder / name),
        "data": {"source": source, "tokens": "char", "cache": str(folder / "cache")},
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
    started = torchrun(str(Path(__file__).parents[1] / "support" / "distributed_jobs.py"), str(folder / "jobs.json"))
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


def numbers(run: Path, steps: range, *keys: str) -> torch.Tensor:
    """[steps, keys]"""
    found, keys = rows(run), keys or ("loss", "penalty", "grad_norm")
    return torch.tensor([[found[step][key] for key in keys] for step in steps], dtype=torch.float64)


def weights(run: Path) -> torch.Tensor:
    part = read_part(checkpoint(run, STEPS), "model")
    return torch.cat([part[name].double().flatten() for name in sorted(part)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process runs every case twice, in other pieces: how far these two are apart is what float32 sums cost."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    threads = torch.get_num_threads()
    for case in CASES | OTHERS:
        run_job(job(folder, f"one-{case}", case))
        run_job(job(folder, f"pieces-{case}", case, grad_accum_steps=4))
    both = [(case, engine) for case in CASES | OTHERS for engine in ("ddp", "fsdp")]
    jobs = [job(folder, f"{engine}-{case}", case, engine=engine) for case, engine in both]
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
    truth, noise, found = (numbers(run, steps) for run in (one, pieces, other))
    cost = ((noise - truth) / truth).abs().max()
    assert cost < 1e-6, "a tolerance that would let anything pass"
    assert ((found - truth) / truth).abs().max() <= 10 * cost + 8 * EPS
    truth, noise, found = (weights(run) for run in (one, pieces, other))
    cost = (noise - truth).abs().max()
    assert cost < 1e-5 * truth.abs().max()
    assert (found - truth).abs().max() <= 10 * cost + 8 * EPS * truth.abs().max()


@pytest.mark.parametrize("case", CASES | OTHERS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_equal_one(folder: Path, engine: str, case: str) -> None:
    assert_alike(folder, engine, case, range(1, STEPS + 1))
    moved = numbers(folder / f"{engine}-{case}", range(1, STEPS + 1), "span_average")
    assert moved[0] != moved[-1] and moved[-1] > 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_every_process_has_the_same_spans_and_its_own_share(folder: Path, engine: str, case: str) -> None:
    held = [json.loads((folder / f"{engine}-{case}" / f"process-{rank}.json").read_text()) for rank in (0, 1)]
    one = json.loads((folder / f"one-{case}" / "process-0.json").read_text())
    assert [h["engine"] for h in (*held, one)] == [engine, engine, "one"]
    assert held[0]["ratios"] == held[1]["ratios"]
    assert held[0]["memory"] == held[1]["memory"] == [[2, *shape] for _, *shape in one["memory"]]
    spans = sum(map(len, one["ratios"]))
    share = one["parameters"] if engine == "ddp" else (one["parameters"] - spans) // 2
    assert all(abs(h["parameters"] - share) <= 0.05 * share for h in held)
    if engine == "fsdp":
        assert sum(h["parameters"] for h in held) == one["parameters"] + spans


@pytest.mark.parametrize("case", ["adamw", "adagrad"])
@pytest.mark.parametrize("name", ["one-ddp", "one-fsdp", "ddp-one", "fsdp-one", "shards-one", "shards-fsdp"])
def test_checkpoint_resumes_with_another_number_of_processes(folder: Path, name: str, case: str) -> None:
    run = folder / f"{name}-{case}"
    assert list(rows(run, "resume")) == [SAVED] and min(rows(run)) == SAVED + 1
    assert_alike(folder, name, case, range(SAVED + 1, STEPS + 1))


@pytest.mark.parametrize("case", ["adamw", "adagrad"])
def test_recomputing_activations_and_writing_shards_change_nothing(folder: Path, case: str) -> None:
    assert_alike(folder, "shards", case, range(1, STEPS + 1))


def test_replicated_weights_are_in_the_first_shard_only(folder: Path) -> None:
    assert_alike(folder, "ddp-shards-one", "adamw", range(SAVED + 1, STEPS + 1))
    saved = checkpoint(folder / "ddp-shards-adamw", SAVED)
    held = {part: len(Part([saved / f"{part}-00002-of-00002.safetensors"])) for part in ("model", "optimizer")}
    assert held == {"model": 0, "optimizer": 0}


@pytest.mark.parametrize("case", ["adamw", "adagrad"])
def test_torch_reads_our_shards_alike(folder: Path, case: str) -> None:
    """torch.distributed.checkpoint as the oracle of what the shards hold."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = checkpoint(folder / f"shards-{case}", SAVED)
    assert faults(path) == []
    assert set(read_meta(path)["files"]) == {
        f"{part}-0000{n}-of-00002.safetensors" for part in ("model", "optimizer", "memory") for n in (1, 2)
    }
    ours = {name: t for part in ("model", "optimizer", "memory") for name, t in read_part(path, part).items()}
    theirs = {name: torch.full_like(t, -1) for name, t in ours.items()}
    load(theirs, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert len(ours) > 30 and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_missing_shard_is_noticed(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "shards-adamw", run)
    (checkpoint(run, STEPS) / "optimizer-00002-of-00002.safetensors").unlink()
    said: list[str] = []
    assert Checkpoints(run / "checkpoints").newest(said.append) == checkpoint(run, SAVED)
    assert said[0].endswith("optimizer-00002-of-00002.safetensors is missing")


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_a_gradient_whatever_is_read(case: str) -> None:
    """The engines would wait for it: a process may meet no word of a cluster and use an expert for no token."""
    lm = LM(build(ModelConfig, {**CASES[case][0], "vocab": 23}, "model"))
    x = torch.zeros(1, 3, dtype=torch.long)
    found = lm(x, targets=x)
    assert found.nll is not None
    (found.nll.mean() + found.penalty).backward()
    assert [name for name, p in lm.named_parameters() if p.grad is None] == []


def test_lanes_are_shared_out() -> None:
    processes = [World(rank, 3, torch.device("cpu"), "ddp") for rank in range(3)]
    assert [process.rows(6) for process in processes] == [slice(0, 2), slice(2, 4), slice(4, 6)]
    with pytest.raises(ValueError, match=r"^train\.batch is 7; expected a multiple of the number of processes, 3$"):
        processes[1].rows(7)


def test_one_process_refuses_to_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", *options(tmp_path), "--train.engine", "fsdp"])
    assert capsys.readouterr().err == (
        "spanformer: train.engine is fsdp with one process; start the run with torchrun, or use engine auto\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (
            "--train.batch 3 --train.grad_accum_steps 1",
            "train.batch is 3; expected a multiple of the number of processes, 2",
        ),
        ("--optim.lr x", "--optim.lr is 'x'; expected a number (see spanformer train {run} --help)"),
        ("--out {full}", "{full} exists already; continue the run in it with --resume, or choose another --out"),
    ],
    ids=["all", "before they meet", "the first alone"],
)
@pytest.mark.slow
def test_processes_refuse_in_one_sentence(tmp_path: Path, extra: str, sentence: str) -> None:
    """Whichever of them meet the mistake, and however early: none waits for another that has gone."""
    names = {"full": tmp_path / "full", "run": tmp_path / "run.toml"}
    names["full"].mkdir()
    (names["full"] / "file").touch()
    started = torchrun("-m", "spanformer", "train", *options(tmp_path), *extra.format(**names).split())
    _, said = communicate(started)
    ours = [line for line in said.splitlines() if line.startswith(("spanformer: ", "[rank"))]
    assert started.returncode != 0 and ours == [f"spanformer: {sentence.format(**names)}"], said


def options(folder: Path, **train) -> list[str]:
    """A run of the command line."""
    write_text(folder)
    config = job(folder, "run", "adamw", **train)["config"]
    tables = ["", "data", "model", "model.attention", "model.feedforward", "model.embedding", "optim", "train"]
    lines = []
    for table in tables:
        values = config
        for key in filter(None, table.split(".")):
            values = values[key]
        lines += [f"[{table}]"] if table else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict)]
    (folder / "run.toml").write_text("\n".join(lines))
    return [str(folder / "run.toml"), "--train.threads", "1"]


def workers(started: subprocess.Popen[str]) -> dict[int, int]:
    """rank → process id, of torchrun's processes."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.joinpath("stat").read_text().rsplit(")")[1].split()[1]) == started.pid:
                environ = dict(e.split("=", 1) for e in (folder / "environ").read_text().split("\0") if "=" in e)
                found[int(environ["RANK"])] = int(folder.name)
        except (OSError, KeyError):  # gone, or just being started
            continue
    return found


def wait_for(run: Path, event: str, least: int, started: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not ((run / "events.jsonl").exists() and any(step >= least for step in rows(run, event))):
        assert time.monotonic() < end and started.poll() is None, started.communicate()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.slow
def test_ended_and_killed_runs_are_resumed(tmp_path: Path, engine: str) -> None:
    """Told to end, it saves and leaves; a process killed, torchrun starts all again; no step comes out otherwise."""
    settings = {"steps": 60, "save_every": 10, "engine": engine, "sharded": engine == "fsdp"}
    command = ("-m", "spanformer", "train", *options(tmp_path, **settings))
    run, calm = tmp_path / "run", tmp_path / "calm"
    run_by_two(tmp_path, [job(tmp_path, "calm", "adamw", **settings)])

    started = torchrun(*command)
    wait_for(run, "step", 5, started)
    started.send_signal(signal.SIGTERM)
    said, _ = communicate(started)
    (stopped,) = rows(run, "stop").values()
    assert stopped["reason"] == "SIGTERM" and 5 <= stopped["step"] < 40
    assert faults(checkpoint(run, stopped["step"])) == []
    assert said == f"stopped by SIGTERM at step {stopped['step']}; continue with the same command and --resume\n"

    started = torchrun("--max-restarts", "1", *command, "--resume")
    wait_for(run, "checkpoint", stopped["step"] + 5, started)
    os.kill(workers(started)[1], signal.SIGKILL)
    _, said = communicate(started)
    assert started.returncode == 0 and "[rank" not in said, said
    assert len(rows(run, "resume")) == 2 and rows(run, "stop")[60]["reason"] == "all steps done"
    assert torch.equal(numbers(run, range(1, 61)), numbers(calm, range(1, 61)))


LAYERWISE = {
    "kind": "encoder", "vocab": 41, "dim": 32, "layers": 2, "heads": 4, "position": {"kind": "sinusoidal"},
    "attention": {"kind": "linformer(8, 64, layerwise)"},
}  # fmt: skip


def test_one_matrix_of_all_layers_is_averaged_by_ddp_and_refused_by_fsdp(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(OTHERS, "layerwise", (LAYERWISE, ADAMW))
    write_text(tmp_path)
    run_by_two(tmp_path, [job(tmp_path, "ddp", "layerwise", engine="ddp")])
    run_job(job(tmp_path, "one", "layerwise"))
    two, one = weights(tmp_path / "ddp"), weights(tmp_path / "one")
    assert (two - one).abs().max() < 1e-4 * one.abs().max()
    model = Encoder(build(ModelConfig, LAYERWISE))
    with pytest.raises(ValueError, match=r"layer 1 shares attention.mechanism.e with layer 0, and train.engine fsdp"):
        refuse_shared(model)
