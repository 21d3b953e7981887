"""Optimisers and learning rates: AdamW, Muon, SGD, and Sukhbaatar et al.'s (2019) Adagrad, which clips each tensor.

Adagrad, for a parameter tensor w with gradient g, learning rate η and clip c:

    s ← s + g²          w ← w − η · min(1, c / |g|) · g / (√s + 1e-10)

The accumulator s uses the unclipped gradient; only the update is clipped, by the tensor's own norm |g|.
"""

# pyright: reportPrivateImportUsage=false
# torch's operations on lists of tensors, which its own optimisers use, have no public names.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from spanformer.train.muon import Muon, loss_of

if TYPE_CHECKING:
    from spanformer.model.stack import TransformerStack

Tensors = list[Tensor] | tuple[Tensor, ...]
Rates = tuple[Tensor, ...] | list[float]


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    kind: Literal["adamw", "muon", "adagrad", "sgd"] = "adamw"
    """The optimiser. muon updates the matrices inside blocks, and adamw all other parameters with the same lr; adagrad
    is the adaptive-span paper's (there with lr 0.07, clip 0.03, no decay)."""
    lr: float = 1e-3
    """Learning rate after the warm-up."""
    span_lr: float = 0.0
    """Learning rate of the span parameters; 0: the same as lr."""
    momentum: float = 0.9
    """Momentum of sgd and muon."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """adamw: decay rates of the running averages of gradients and of their squares."""
    weight_decay: float = 0.1
    """Decay of matrices with adamw and muon: each step shrinks them by lr · this. The other optimisers have none."""
    clip: float = 1.0
    """Largest gradient norm: of each parameter tensor with adagrad, else of all together; 0: no limit."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    warmup: int = 100
    """Steps over which the learning rate rises linearly."""
    floor: float = 0.1
    """Share of lr at the end of the cosine."""

    def __post_init__(self) -> None:
        for name in ("kind", "schedule"):
            choices = {"kind": ("adamw", "muon", "adagrad", "sgd"), "schedule": ("constant", "cosine")}[name]
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")
        for name in ("lr", "span_lr", "weight_decay", "clip", "warmup"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a finite number, 0 or more")
        for name, values in (("momentum", (self.momentum,)), ("betas", self.betas)):
            if not all(0 <= value < 1 for value in values):
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more and less than 1")
        if len(self.betas) != 2:
            raise ValueError(f"betas is {self.betas}; expected two numbers")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor is {self.floor}; expected a share of lr, 0 … 1")

    @property
    def global_clip(self) -> float:
        """The max_norm for `clip_global`; 0 for adagrad, which clips in its own step."""
        return 0.0 if self.kind == "adagrad" else self.clip


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, is_span: Callable[[str], bool]
) -> Optimizer:
    """Groups: matrices (with decay), vectors (biases, norms: without), spans (their own learning rate, without)."""
    inner, matrices, vectors, spans = [], [], [], []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            if is_span(name):
                kind = spans
            elif config.kind == "muon" and parameter.ndim == 2 and ".blocks." in f".{name}":
                kind = inner
            else:
                kind = matrices if parameter.ndim >= 2 else vectors
            kind.append(parameter)
    decay = config.weight_decay if config.kind in ("adamw", "muon") else 0.0
    groups = [
        {"params": parameters, "lr": lr, "base_lr": lr, "weight_decay": decay}
        for parameters, lr, decay in (
            (inner, config.lr, decay),
            (matrices, config.lr, decay),
            (vectors, config.lr, 0.0),
            (spans, config.span_lr or config.lr, 0.0),
        )
        if parameters
    ]
    if not groups:
        raise ValueError("no parameter requires a gradient; there is nothing to train")
    match config.kind:
        case "adamw":
            first, second = config.betas
            return AdamW(groups, betas=(first, second), fused=True)  # on a CPU, 5 to 8 times as fast as foreach
        case "muon":
            return MuonAndAdamW(groups[:1] if inner else [], groups[1:] if inner else groups, config)
        case "sgd":
            return SGD(groups, momentum=config.momentum, foreach=True)  # fused does not support distributed tensors
        case "adagrad":
            return ClippedAdagrad(groups, clip=config.clip)


def model_optimizer(model: TransformerStack, config: OptimConfig) -> Optimizer:
    """The optimiser for all parameters of a model; spans use their own learning rate."""
    spans = {id(module.ratio) for module in model.spans_modules()}
    named = dict(model.named_parameters())
    return make_optimizer(named.items(), config, lambda name: id(named[name]) in spans)


def lr_at(config: OptimConfig, step: int, total_steps: int) -> float:
    """The share of lr to use after `step` of `total_steps` optimiser steps.

    The n-th step thus uses n / warmup, as in the paper's code; the last one, with a cosine, uses the floor.
    """
    n = step + 1
    if n < config.warmup:
        return n / config.warmup
    if config.schedule == "constant":
        return 1.0
    gone = (n - config.warmup) / max(1, total_steps - config.warmup)
    return config.floor + (1 - config.floor) * (1 + math.cos(math.pi * min(1.0, gone))) / 2


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set every group's learning rate to this share of its base rate."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["base_lr"]


def clip_global(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """The norm of all gradients together, a scalar; gradients above `max_norm` are scaled down to it. 0: never.

    Accepts a mixture of distributed tensors (sharded over processes) and ordinary ones (whole in every process).
    """
    kinds: dict[type, list[nn.Parameter]] = {}  # torch rejects a list that mixes both
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(type(parameter.grad), []).append(parameter)
    norms = [_whole(get_total_norm([p.grad for p in some if p.grad is not None])) for some in kinds.values()]
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    if max_norm > 0:
        for some in kinds.values():
            clip_grads_with_norm_(some, max_norm, norm)
    return norm


def clip_model(model: TransformerStack, max_norm: float) -> Tensor:
    """`clip_global` of a model's gradients, and by itself of those that only an auxiliary loss makes: under one norm,
    either loss would scale the other's steps. Returns the first norm."""
    apart = {id(p): p for p in model.auxiliary_parameters()}
    if apart:
        clip_global(apart.values(), max_norm)
    return clip_global((p for p in model.parameters() if id(p) not in apart), max_norm)


def _whole(t: Tensor) -> Tensor:
    gather = getattr(t, "full_tensor", None)  # collective: all processes call it together
    return gather() if gather else t


class MuonAndAdamW(Optimizer):
    """Muon (train/muon.py) for some groups and AdamW for the others, in one optimiser with one state."""

    def __init__(self, inner: list[dict], others: list[dict], config: OptimConfig) -> None:
        if any(hasattr(p, "full_tensor") for group in inner for p in group["params"]):
            raise ValueError(
                "optim.kind is muon, which needs unsharded matrices, but fsdp shards them; use train.engine ddp"
            )
        super().__init__([*inner, *others], {})
        first, second = config.betas
        muon = [Muon(inner, momentum=config.momentum)] if inner else []
        self.parts: list[Optimizer] = [*muon, AdamW(others, betas=(first, second), fused=True)]
        for part in self.parts:
            part.state = self.state
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of(closure)
        for part in self.parts:
            part.step()
        return loss


class ClippedAdagrad(Optimizer):
    """Adagrad with updates clipped per tensor (see above); with clip 0, plain Adagrad. It never synchronises with the
    device."""

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict],
        lr: float = 0.07,
        clip: float = 0.03,
        weight_decay: float = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "clip": clip, "weight_decay": weight_decay, "eps": 1e-10})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = loss_of(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [p.grad for p in params]
            for p in params:
                if not self.state[p]:
                    self.state[p]["sum"] = torch.zeros_like(p)
            sums = [self.state[p]["sum"] for p in params]
            if group["weight_decay"]:
                grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
            rates = _rates(grads, group["lr"], group["clip"])
            update = _update_on_cpu if all(_is_plain_cpu(t) for t in (*params, *grads)) else _update
            update(params, grads, sums, rates, group["eps"])
        return loss


def _rates(grads: Tensors, lr: float, clip: float) -> Rates:
    """η · min(1, c / |g|) for every tensor, computed on the gradients' device."""
    if clip == 0:
        return [lr] * len(grads)
    norms = torch.stack(torch._foreach_norm(grads))
    norms = norms.float() if norms.dtype.itemsize < 4 else norms  # bfloat16 would round the learning rate
    return torch.where(norms > clip, clip * lr / (norms + 1e-10), lr).unbind()


def _update(params: Tensors, grads: Tensors, sums: Tensors, rates: Rates, eps: float) -> None:
    torch._foreach_addcmul_(sums, grads, grads)
    roots = torch._foreach_sqrt(sums)
    torch._foreach_add_(roots, eps)
    torch._foreach_addcdiv_(params, torch._foreach_mul(grads, rates), roots, value=-1)


def _update_on_cpu(params: Tensors, grads: Tensors, sums: Tensors, rates: Rates, eps: float) -> None:
    """The same update in one pass over the memory, without allocations: several times as fast."""
    step = torch.ones(())  # the kernel needs a step count for its learning-rate decay, which is 0 here
    for p, g, s, rate in zip(params, grads, sums, rates, strict=True):
        torch._fused_adagrad_(
            [p], [g], [s], [step], lr=float(rate), lr_decay=0.0, weight_decay=0.0, eps=eps, maximize=False
        )


def _is_plain_cpu(tensor: Tensor) -> bool:
    """Whether it is no tensor subclass (such as a distributed tensor) and has the layout the fused kernel needs."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.is_contiguous()
