"""Checkpoints: which are kept, which is found, what a kill at any moment leaves, and optimisers bit for bit."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, NAdam, Optimizer

from spanformer.model.folder import NewerFormat, read_part, write_folder
from spanformer.train.checkpoint import Checkpoints, pack_optimizer, unpack_optimizer
from spanformer.train.optim import ClippedAdagrad, OptimConfig, make_optimizer


def parts(value: float) -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.full((40,), value)}, "optimizer": {"s": torch.full((3,), value)}}


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def never(sentence: str) -> None:
    raise AssertionError(sentence)


def test_last_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.newest(never) is None and checkpoints.best() is None
    scores = {100: 3.0, 200: 1.0, 300: None, 400: 2.0, 500: float("nan"), 600: float("-inf"), 700: 1.0}
    for step, score in scores.items():
        path = checkpoints.save(step, parts(step), {"config": {"a": 1}}, score=score)
        assert path == tmp_path / "c" / f"step-{step:08d}" and checkpoints.newest(never) == path
        kept = [s for s in scores if s <= step][-2:]
        assert steps(tmp_path / "c") == sorted({*kept, 100 if step < 200 else 200 if step < 700 else 700})
        assert checkpoints.best() == tmp_path / "c" / f"step-{100 if step < 200 else 200 if step < 700 else 700:08d}"
    meta, read = checkpoints.load(path)
    assert (meta["step"], meta["score"], meta["config"]) == (700, 1.0, {"a": 1})
    assert {name: set(tensors) for name, tensors in read.items()} == {"model": {"w"}, "optimizer": {"s"}}
    assert torch.equal(read["model"]["w"], torch.full((40,), 700.0))


def test_steps_beyond_eight_digits_are_in_order(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (99_999_998, 99_999_999, 100_000_000):
        last = checkpoints.save(step, parts(1), {}, score=None)
    assert steps(tmp_path) == [99_999_999, 100_000_000] and checkpoints.newest(never) == last


def test_damaged_checkpoints_are_named_and_skipped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=5)
    a, b, c, d = (checkpoints.save(step, parts(step), {}, score=None) for step in (1, 2, 3, 4))
    (d / "optimizer.safetensors").unlink()
    (c / "meta.json").write_bytes(b"{")
    content = bytearray((b / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (b / "model.safetensors").write_bytes(content)
    said: list[str] = []
    assert checkpoints.newest(said.append) == a
    assert [sentence.split(": ", 1)[0] for sentence in said] == [f"{path} is not complete" for path in (d, c, b)]
    assert said[0].endswith("optimizer.safetensors is missing") and "meta.json cannot be read" in said[1]
    assert said[2].endswith("model.safetensors has changed since it was written")
    with pytest.raises(
        ValueError, match=r"step-00000002 is not complete: .* since it was written; choose another checkpoint$"
    ):
        checkpoints.load(b)
    (a / "meta.json").unlink()
    assert checkpoints.newest(said.append) is None and len(said) == 3 + 4


def test_run_that_went_back_loses_nothing_new(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    late = checkpoints.save(300, parts(300), {}, score=None)
    (late / "meta.json").unlink()
    new = checkpoints.save(250, parts(250), {}, score=None)
    said: list[str] = []
    assert checkpoints.newest(said.append) == new and len(said) == 1
    assert checkpoints.save(300, parts(301), {}, score=None) == late
    assert checkpoints.newest(never) == late and read_part(late, "model")["w"][0] == 301
    assert steps(tmp_path) == [300]


def test_checkpoint_of_a_newer_format_is_not_skipped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, parts(1), {}, score=None)
    newer = checkpoints.save(2, parts(2), {}, score=None)
    text = (newer / "meta.json").read_text()
    (newer / "meta.json").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(NewerFormat, match="upgrade spanformer"):
        checkpoints.newest(never)


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "events.jsonl").touch()
    (tmp_path / ".step-00000001.01234567.new").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.newest(never) is None
    for step in (1, 2):
        checkpoints.save(step, parts(step), {}, score=None)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "events.jsonl", "step-00000002"}
    with pytest.raises(ValueError, match="keep is 0; expected at least 1 checkpoint"):
        Checkpoints(tmp_path, keep=0)


# Runs in a fresh interpreter, which forks children and kills them: first before each single operation on files (the
# interpreter announces them to audit hooks), then at random moments, also inside the writing of tensors.
KILLED = """
import os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from spanformer.train.checkpoint import Checkpoints

torch.set_num_threads(1)
root = Path(sys.argv[1])
OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.listdir", "os.scandir"}

def parts(step, attempt, size):
    return {name: {"w": torch.full((size,), 10.0 * step + attempt)} for name in ("model", "optimizer", "memory")}

def die_before(count):
    def hook(event, args):
        nonlocal count
        if event in OPERATIONS and str(root) in str(args[0] if args else ""):
            count -= 1
            if count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid

def was_killed(pid):
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

def check(folder):
    said = []
    checkpoints = Checkpoints(folder, keep=2)
    newest = checkpoints.newest(said.append)
    assert not said, said
    meta, read = checkpoints.load(newest)
    values = {float(v) for part in read.values() for v in part["w"].unique()}
    assert values == {10.0 * meta["step"] + meta["attempt"]}, (meta, values)
    for path in folder.iterdir():
        assert path.name.startswith("step-"), path
        checkpoints.load(path)
    assert checkpoints.load(checkpoints.best())[0]["score"] == 0.5
    return meta["step"], meta["attempt"]

def save(folder, step, attempt, size=50):
    Checkpoints(folder, keep=2).save(step, parts(step, attempt, size), {"attempt": attempt}, score=0.5 + step - 1)

for step in (1, 2, 3):
    save(root / "three", step, 0)
outcomes = {"new": set(), "replace": set()}
for kind, step in (("new", 4), ("replace", 3)):
    for count in range(1, 1000):
        folder = shutil.copytree(root / "three", root / "copy")
        def work():
            die_before(count)
            save(folder, step, 1)
        killed = was_killed(child(work))
        outcomes[kind].add(check(folder))
        shutil.rmtree(folder)
        if not killed:
            break
    assert not killed and count > 20, count
assert outcomes == {"new": {(3, 0), (4, 1)}, "replace": {(3, 0), (3, 1)}}, outcomes

folder, last = root / "random", 1
save(folder, 1, 0, 30000)
for kill in range(12):
    def work():
        for step in range(last, last + 1000):  # the first one replaces
            save(folder, step, kill, 30000)
    pid = child(work)
    time.sleep(random.uniform(0.002, 0.06))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    step, _ = check(folder)
    assert step >= last
    last = step
print("survived", last)
"""


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "survived" in done.stdout, done.stderr


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        self.ratio = nn.Parameter(torch.full((4,), 0.5))
        self.unused = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).square().sum() * self.ratio.prod()


def train(net: nn.Module, optimizer: Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        x = torch.randn(7, 3, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> float:
            optimizer.zero_grad()
            loss = net(x)
            loss.backward()
            return loss.item()

        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step(closure)


def ours(kind: str) -> Callable[[nn.Module], Optimizer]:
    config = OptimConfig(kind=kind, lr=0.01, span_lr=0.1, clip=0.03)  # pyright: ignore[reportArgumentType]
    return lambda net: make_optimizer(net.named_parameters(), config, lambda name: name == "ratio")


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "our adamw": ours("adamw"),
    "our adagrad": ours("adagrad"),
    "our sgd": ours("sgd"),
    "adagrad": lambda net: Adagrad(net.parameters(), lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "adamw": lambda net: AdamW(net.parameters(), lr=0.01, betas=(0.8, 0.95), amsgrad=True, foreach=True),
    "adamw, rate in a tensor": lambda net: AdamW(net.parameters(), lr=torch.tensor(0.01), fused=True),
    "sgd": lambda net: SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "nadam": lambda net: NAdam(net.parameters(), lr=0.01),
    "lbfgs": lambda net: LBFGS(net.parameters(), lr=0.01, max_iter=3),  # lists of tensors, all under one parameter
}


def bits(value):
    """Anything an optimiser holds, such that equal means bit for bit."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.numpy(force=True).tobytes()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    return type(value), [bits(entry) for entry in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 1, 4])
def test_optimizer_resumes_bit_for_bit(tmp_path: Path, kind: str, before: int) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = OPTIMIZERS[kind](net)
    train(net, optimizer, 0, before)

    tensors, meta = pack_optimizer(optimizer, net.named_parameters())
    path = Checkpoints(tmp_path).save(
        before, {"model": net.state_dict(), "optimizer": tensors}, {"optimizer": meta}, score=None
    )
    resumed = Net()
    other = OPTIMIZERS[kind](resumed)
    train(resumed, other, 50, 2)  # what it held before must not matter
    meta, read = Checkpoints(tmp_path).load(path)
    resumed.load_state_dict(read["model"])
    unpack_optimizer(other, resumed.named_parameters(), read["optimizer"], meta["optimizer"])
    assert bits(other.state_dict()["state"]) == bits(optimizer.state_dict()["state"])
    assert bits(other.state_dict()["param_groups"]) == bits(optimizer.state_dict()["param_groups"])

    train(net, optimizer, before, 5)
    train(resumed, other, before, 5)
    assert bits(resumed.state_dict()) == bits(net.state_dict())
    assert bits(other.state_dict()["state"]) == bits(optimizer.state_dict()["state"])


def test_unpacking_copies() -> None:
    net = Net()
    optimizer = ClippedAdagrad(net.parameters())
    train(net, optimizer, 0, 2)
    tensors, meta = pack_optimizer(optimizer, net.named_parameters())
    kept = copy.deepcopy(tensors)
    unpack_optimizer(optimizer, net.named_parameters(), tensors, meta)
    train(net, optimizer, 2, 1)
    assert bits(tensors) == bits(kept)


def test_state_that_does_not_fit_names_the_parameter() -> None:
    net = Net()
    optimizer = ours("adamw")(net)
    train(net, optimizer, 0, 2)
    tensors, meta = pack_optimizer(optimizer, net.named_parameters())

    def refused(net: nn.Module, make: Callable[[nn.Module], Optimizer], meta: dict = meta, tensors=tensors) -> str:
        with pytest.raises(ValueError) as error:
            unpack_optimizer(make(net), net.named_parameters(), tensors, meta)
        return str(error.value)

    wider = refused(Net(6), ours("adamw"))
    assert wider == "the saved optimiser state of first.weight has shape [5, 3]; expected [6, 3] for this run"
    assert refused(Net(), ours("sgd")) == "the saved optimiser is AdamW and this run uses SGD; expected the same one"
    more, fewer = Net(), Net()
    more.extra = nn.Linear(2, 2, bias=False)
    assert refused(more, ours("adamw")) == "the saved optimiser lacks the parameter extra.weight of this run"
    del fewer.unused
    sentence = "the saved optimiser has a parameter unused, which this run lacks"
    assert refused(fewer, ours("adamw")) == sentence
    sentence = "the saved optimiser has ratio in group 2; this run: 0"
    assert refused(Net(), lambda net: AdamW(net.parameters())) == sentence
    lost = {name: tensor for name, tensor in tensors.items() if name != "first.bias/exp_avg"}
    damaged = r"the saved optimiser state is damaged (KeyError('first.bias/exp_avg')); choose another checkpoint"
    assert refused(Net(), ours("adamw"), tensors=lost) == damaged
    assert "is damaged" in refused(Net(), ours("adamw"), meta={})


def test_unsupported_state_is_named(tmp_path: Path) -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(
        ValueError, match="the optimiser's group 0/hook is a builtin_function_or_method, which cannot be"
    ):
        pack_optimizer(optimizer, net.named_parameters())
    optimizer.param_groups[0]["hook"] = [float("inf"), (1, None), {"x": torch.arange(2)}, True]
    tensors, meta = pack_optimizer(optimizer, net.named_parameters())
    write_folder(tmp_path / "o", {"optimizer": tensors}, {"optimizer": meta})
    fresh = SGD(net.parameters(), lr=0.2)
    unpack_optimizer(fresh, net.named_parameters(), read_part(tmp_path / "o", "optimizer"), meta)
    assert bits(fresh.param_groups[0]["hook"]) == bits(optimizer.param_groups[0]["hook"])
    assert fresh.param_groups[0]["lr"] == 0.1
