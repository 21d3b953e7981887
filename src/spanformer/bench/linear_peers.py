"""Part peers of `bench linear`: other packages' linear attention.

Peers receive views of our tensors, in the order of axes that they want.
Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.bench import linear_oracles as oracles
from spanformer.bench import peer_tasks
from spanformer.bench.linear_work import Inputs, make_kind, make_text, of_mechanism
from spanformer.bench.peer_tasks import Peer, Task
from spanformer.bench.session import Bench
from spanformer.ops import attend_linear, sum_linear

EPS = 1e-6
"""that fast-transformers' CausalLinearAttention adds to a sum of weights"""


def measure(bench: Bench, fla: Path | None) -> None:
    """fla: a clone of flash-linear-attention, or None for the installed package."""
    peer_tasks.measure(bench, tasks(fla))


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


def _fast_transformers() -> Peer:
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


def _transformers_delta() -> Peer:
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


def _performer_pytorch() -> Peer:
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


def tasks(fla: Path | None = None) -> dict[str, Task]:
    """fla: a clone of flash-linear-attention, or None for the installed package."""
    of_fla = {
        name: functools.partial(make, fla)
        for name, make in (("linear", _fla_linear), ("decay", _fla_decayed), ("delta", _fla_delta))
    }
    return {
        "elu + 1": Task(
            4096, _plain, _our_linear,
            {"fast-transformers": _fast_transformers, "flash-linear-attention": of_fla["linear"]},
        ),
        "decay": Task(4096, _decayed, _our_decayed, {"flash-linear-attention": of_fla["decay"]}),
        "gated delta rule": Task(
            4096, _gated, _our_delta,
            {"flash-linear-attention": of_fla["delta"], "transformers": _transformers_delta},
        ),
        "FAVOR+": Task(1024, _plain, _our_performer, {"performer-pytorch": _performer_pytorch}),
    }  # fmt: skip
