"""What a training step costs with the learned spans, and with full attention in their place: counted and timed.

Both are the same weights on the same batch, in a steady state: memories as long as their heads look back.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from spanformer.cost.peak import peak_of, unsupported
from spanformer.model.config import ModelConfig
from spanformer.model.linear import counted_products
from spanformer.model.lm import LM, State
from spanformer.train.step import autocast

ROUNDS = 3


def measure_cost(model: LM, x: torch.Tensor, y: torch.Tensor, *, dtype: str = "float32") -> dict:
    """The values of a cost event, for x, y [B, T] on the CPU. Copies of the model are measured: it is left as it is."""
    attention = replace(model.config.attention, kind="full", stack=())
    models = {
        "learned": copy_of(model, model.config),
        "full": copy_of(model, replace(model.config, attention=attention)),
    }
    states = {name: steady_state(lm, x.shape[0]) for name, lm in models.items()}
    event: dict[str, dict] = {"flops": {}, "step_seconds": {}, "attention_seconds": {}, "peak_bytes": {}}
    for name, lm in models.items():
        event["flops"][name] = count_flops(lm, x, y, states[name])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    with autocast(dtype, x.device):
        for _ in range(ROUNDS):  # in turn, so that a slow moment of the machine meets both
            for name, lm in models.items():
                times[name].append(time_step(lm, x, y, states[name]))
        for name, lm in models.items():
            event["step_seconds"][name] = statistics.median(whole for whole, _ in times[name])
            event["attention_seconds"][name] = statistics.median(part for _, part in times[name])
            if unsupported() is None:
                event["peak_bytes"][name] = peak_of(lambda lm=lm, name=name: one_step(lm, x, y, states[name]))[0]
    return event


def copy_of(model: LM, config: ModelConfig) -> LM:
    """A model of this configuration with the weights of the other that it has, and its way of training."""
    weight = next(model.parameters())
    copy = LM(config).to(weight.device, weight.dtype)
    known = copy.state_dict()
    copy.load_state_dict({name: t for name, t in model.state_dict().items() if name in known}, strict=False)
    copy.checkpointing = model.checkpointing
    return copy


def steady_state(lm: LM, batch: int) -> State:
    """Memories of full length; what stands in them costs the same."""
    weight = next(lm.blocks.parameters())
    lengths = lm.memory_lengths()
    return State(tuple(torch.randn(batch, n, lm.config.dim, dtype=weight.dtype, device=weight.device) for n in lengths))


def one_step(lm: LM, x: torch.Tensor, y: torch.Tensor, state: State) -> None:
    found = lm(x, state, targets=y)
    assert found.nll is not None
    (found.nll.mean() + found.penalty).backward()
    lm.zero_grad(set_to_none=True)


def count_flops(lm: LM, x: torch.Tensor, y: torch.Tensor, state: State) -> float:
    """Operations of the products PyTorch really runs, attention in its blockwise form."""
    mechanisms = lm.mechanisms()
    kept = [m.backend for m in mechanisms]
    try:
        for m in mechanisms:
            m.backend = "banded"
        with counted_products(), FlopCounterMode(display=False) as counter:
            one_step(lm, x, y, state)
    finally:
        for m, backend in zip(mechanisms, kept, strict=True):
            m.backend = backend
    return float(counter.get_total_flops())


def time_step(lm: LM, x: torch.Tensor, y: torch.Tensor, state: State) -> tuple[float, float]:
    """Seconds of a forward and backward pass, and of the attention operation in it."""
    clock = _AttentionClock(lm)
    began = time.perf_counter()
    with clock:
        one_step(lm, x, y, state)
    return time.perf_counter() - began, clock.seconds


class _AttentionClock:
    """Times every mechanism's `mix`, and its backward pass from the gradient of its result to that of its queries."""

    def __init__(self, lm: LM) -> None:
        self.mechanisms, self.seconds = lm.mechanisms(), 0.0

    def __enter__(self) -> None:
        for mechanism in self.mechanisms:
            mechanism.mix = self._timed(mechanism.mix)

    def __exit__(self, *_exception) -> None:
        for mechanism in self.mechanisms:
            del mechanism.mix  # the class's own shows again

    def _timed(self, mix):
        def timed(q, k, v, rule, view):
            # views of their own, so that the hooks see this call's gradients only
            q, k, v = (t.view_as(t) for t in (q, k, v))
            began = time.perf_counter()
            found = mix(q, k, v, rule, view)
            self.seconds += time.perf_counter() - began
            marks = {}
            found.out.register_hook(lambda _g: marks.__setitem__("began", time.perf_counter()))
            left = {"n": 3}

            def arrived(_g) -> None:
                left["n"] -= 1
                if not left["n"]:
                    self.seconds += time.perf_counter() - marks["began"]

            for t in (q, k, v):
                t.register_hook(arrived)
            return found

        return timed
