"""Part peers of `bench linear`: other packages' linear attention, each checked against an oracle of what it computes.

None is needed to use this project; one that is not installed is skipped with that reason. Peers receive views of our
tensors, in the order of axes that they want. Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.bench import linear_oracles as oracles
from spanformer.bench.linear_work import (
    Contender,
    Forward,
    Inputs,
    changed_rows,
    check,
    make_kind,
    make_text,
    of_mechanism,
    to_dtype,
)
from spanformer.bench.session import Bench
from spanformer.ops import attend_linear, sum_linear

EPS = 1e-6
"""that fast-transformers' CausalLinearAttention adds to a sum of weights"""


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
    peers: dict[str, Callable[[Path | None], Peer]]
    """each is made, given a clone of flash-linear-attention or None; raises ImportError if it is not installed"""


def measure(bench: Bench, fla: Path | None) -> None:
    """fla: a clone of flash-linear-attention, or None for the installed package."""
    rows: list[dict] = []
    bench.plan(len(TASKS))
    for title, task in TASKS.items():
        rows += _compare(bench, title, task, fla)
        bench.keep("peers", rows)


def _compare(bench: Bench, title: str, task: Task, fla: Path | None) -> list[dict]:
    length = bench.options.size(task.length, 128)
    inputs, rows, found = task.inputs(length), [], {}
    truth = functools.cache(functools.partial(_truth, inputs))  # of an oracle, which peers share
    makers = {"ours": task.ours} | {name: functools.partial(make, fla) for name, make in task.peers.items()}
    for name, make in makers.items():
        bench.begin(f"checking {title}, {name}")
        row: dict = {"task": title, "name": name, "length": length}
        rows.append(row)
        try:
            peer = make()
            row |= _check(peer, inputs, *truth(peer.oracle))
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


def _check(peer: Peer, inputs: Inputs, exact: Inputs, plain: Inputs) -> dict:
    checked = check(Contender(peer.forward).step(inputs), exact, plain)
    found: dict = {"off": checked.off, "changed_rows": changed_rows(peer.forward, inputs)}
    return found | ({"wrong": checked.wrong} if checked.wrong else {})


# ---- inputs


def _plain(length: int) -> dict[str, Tensor]:
    return {name: t for name, t in make_text(length).items() if name != "x"}


def _decayed(length: int) -> dict[str, Tensor]:
    """decay [B, H, T] of retention: log(1 − 2^(−5 − h)), the same for all tokens."""
    inputs = _plain(length)
    heads = torch.arange(inputs["q"].shape[1])
    decay = torch.log1p(-torch.exp2(-5.0 - heads))
    return inputs | {"decay": decay[None, :, None].expand(1, -1, length).contiguous()}


def _gated(length: int) -> dict[str, Tensor]:
    """Keys of length 1; beta and decay [B, H, T] are learned gates."""
    inputs, g = _plain(length), torch.Generator().manual_seed(2)
    beta, gate = (torch.randn(inputs["q"].shape[:3], generator=g) for _ in range(2))
    k = F.normalize(inputs["k"].detach(), dim=3)
    learned = {"k": k, "beta": beta.sigmoid(), "decay": F.logsigmoid(gate + 4)}
    return inputs | {name: t.requires_grad_() for name, t in learned.items()}


# ---- elu + 1


LINEAR = oracles.by_head(oracles.linear)


def _elu(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return F.elu(inputs["q"]) + 1, F.elu(inputs["k"]) + 1


def _our_linear() -> Peer:
    return Peer(lambda i: attend_linear(i["q"], i["k"], i["v"], elu=True)[0].out, LINEAR)


def _fast_transformers(_fla: Path | None) -> Peer:
    product = importlib.import_module("fast_transformers.causal_product").causal_dot_product

    def forward(inputs: Inputs) -> Tensor:  # as its CausalLinearAttention, without its transposes
        a, b = _elu(inputs)
        total = torch.einsum("bhtd,bhtd->bht", a, b.cumsum(2)) + EPS
        return product(a, b, inputs["v"]) / total[..., None]

    return Peer(forward, LINEAR, aim=1.5)


def _fla_linear(fla: Path | None) -> Peer:
    chunked = _naive(fla, "linear_attn").naive_chunk_linear_attn

    def forward(inputs: Inputs) -> Tensor:
        a, b = _elu(inputs)
        return _swap(chunked(*map(_swap, (a, b, inputs["v"])), normalize=True))

    return Peer(forward, LINEAR, aim=2.5)


# ---- decayed


DECAYED = oracles.by_head(oracles.decayed)


def _our_decayed() -> Peer:
    def forward(inputs: Inputs) -> Tensor:
        q = inputs["q"] * inputs["q"].shape[3] ** -0.5
        return sum_linear(q, inputs["k"], inputs["v"], inputs["decay"])[0][0]

    return Peer(forward, DECAYED)


def _fla_decayed(fla: Path | None) -> Peer:
    chunked = _naive(fla, "simple_gla").naive_chunk_simple_gla
    names = ("q", "k", "v", "decay")
    return Peer(lambda i: _swap(chunked(*(_swap(i[name]) for name in names))[0]), DECAYED, aim=2.5)


# ---- gated delta rule


def _our_delta() -> Peer:
    from spanformer.ops import attend_delta

    def forward(i: Inputs) -> Tensor:
        return attend_delta(i["q"] * i["q"].shape[3] ** -0.5, i["k"], i["v"], i["beta"], i["decay"])[0]

    return Peer(forward, oracles.delta_rule)


def _delta_peer(chunked: Callable) -> Peer:
    def forward(inputs: Inputs) -> Tensor:
        q, k, v, g, beta = (_swap(inputs[name]) for name in ("q", "k", "v", "decay", "beta"))
        return _swap(chunked(q, k, v, g=g, beta=beta)[0])

    return Peer(forward, oracles.delta_rule, aim=6.0)


def _fla_delta(fla: Path | None) -> Peer:
    return _delta_peer(_naive(fla, "gated_delta_rule").naive_chunk_gated_delta_rule)


def _transformers_delta(_fla: Path | None) -> Peer:
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    return _delta_peer(module.torch_chunk_gated_delta_rule)


# ---- Performer


def _omega() -> Tensor:
    """[256, D] the features of both."""
    omega = make_kind("performer", 1).omega
    assert isinstance(omega, Tensor)
    return omega


def _our_performer() -> Peer:
    mechanism = of_mechanism(make_kind("performer", 1))
    oracle = oracles.by_head(functools.partial(oracles.favor, omega=_omega()))
    return Peer(lambda i: mechanism.forward(dict(i) | {"x": i["q"][:, 0]}), oracle)


def _performer_pytorch(_fla: Path | None) -> Peer:
    omega = _omega()
    attention = importlib.import_module("performer_pytorch").FastAttention(omega.shape[1], len(omega), causal=True)
    attention.projection_matrix.copy_(omega)
    oracle = oracles.by_head(functools.partial(oracles.performer_pytorch, omega=omega))
    forward = lambda i: attention(i["q"], i["k"], i["v"])  # noqa: E731
    return Peer(forward, oracle, aim=10.0)


# ---- all of them


def _swap(t: Tensor) -> Tensor:
    """[B, H, T, …] to [B, T, H, …] and back."""
    return t.transpose(1, 2)


def _naive(clone: Path | None, name: str) -> ModuleType:
    """fla/ops/NAME/naive.py, by file: importing the package needs triton."""
    if clone is None:
        spec = importlib.util.find_spec("fla")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("flash-linear-attention is neither installed nor given by --fla")
        folder = Path(next(iter(spec.submodule_search_locations)))
    else:
        folder = clone / "fla"
    spec = importlib.util.spec_from_file_location(f"naive_{name}", folder / "ops" / name / "naive.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TASKS = {
    "elu + 1": Task(
        4096, _plain, _our_linear, {"fast-transformers": _fast_transformers, "flash-linear-attention": _fla_linear}
    ),
    "decay": Task(4096, _decayed, _our_decayed, {"flash-linear-attention": _fla_decayed}),
    "gated delta rule": Task(
        4096, _gated, _our_delta, {"flash-linear-attention": _fla_delta, "transformers": _transformers_delta}
    ),
    "FAVOR+": Task(1024, _plain, _our_performer, {"performer-pytorch": _performer_pytorch}),
}
