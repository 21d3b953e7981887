"""What a training step costs with the attention that a model has, and with full attention in its place: counted and
timed.

Both are the same weights on the same batch; a language model in a steady state, its memories as long as their heads
look back. "learned" is what the model has, whether or not it learns spans.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spanformer.core.peak import peak_of, unsupported
from spanformer.model.config import ModelConfig
from spanformer.model.layered import Layered
from spanformer.model.linear import counted_products
from spanformer.model.lm import LM, State
from spanformer.model.load import MODELS
from spanformer.train.step import Drawn, autocast

ROUNDS = 3
SEGMENTS = ("picked", "alone", "alone_padding")
"""arguments for ETC's global tokens"""
Arguments = Mapping[str, Tensor | State]
"""of a model's forward, by name, `targets` among them"""


def measure_cost(model: Layered, arguments: Mapping[str, Tensor], *, dtype: str = "float32") -> dict[str, dict]:
    """The values of a cost event, for a batch on the CPU as the model's objective draws it, `Drawn.arguments`. Copies
    of the model are measured: it is left as it is. What full attention cannot do is left out of both."""
    arguments = {name: t for name, t in arguments.items() if name not in SEGMENTS}
    configs = {"learned": model.config, "full": with_full_attention(model.config)}
    models = {name: copy_of(model, config) for name, config in configs.items()}
    calls = {name: in_steady_state(one, arguments) for name, one in models.items()}
    event: dict[str, dict] = {"flops": {}, "step_seconds": {}, "attention_seconds": {}, "peak_bytes": {}}
    for name, one in models.items():
        event["flops"][name] = count_flops(one, calls[name])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    with autocast(dtype, arguments["targets"].device):
        for _ in range(ROUNDS):  # in turn, so that a slow moment of the machine meets both
            for name, one in models.items():
                times[name].append(time_step(one, calls[name]))
        for name, one in models.items():
            event["step_seconds"][name] = statistics.median(whole for whole, _ in times[name])
            event["attention_seconds"][name] = statistics.median(part for _, part in times[name])
            if unsupported() is None:
                event["peak_bytes"][name] = peak_of(lambda one=one, name=name: one_step(one, calls[name]))[0]
    return event


def cost_event(model: Layered, drawn: Drawn, dtype: str, step: int) -> tuple[str, dict]:
    """What to tell of a batch's cost: the event's name and its row."""
    try:
        found = measure_cost(model, drawn.arguments, dtype=dtype)
    except (RuntimeError, MemoryError) as error:  # full attention may want more memory than there is
        return "note", {"step": step, "text": f"what a step costs could not be measured: {error}"}
    return "cost", {"step": step, **found, "tokens": drawn.tokens}


def with_full_attention(config: ModelConfig) -> ModelConfig:
    """The same model with full attention in every layer, of an encoder–decoder in both halves."""
    whole = replace(config, attention=replace(config.attention, kind="full", stack=()))
    if config.kind != "seq2seq":
        return whole
    reading = replace(config.encoder.attention, kind="full", stack=())
    return replace(whole, encoder=replace(config.encoder, attention=reading))


def copy_of(model: Layered, config: ModelConfig) -> Layered:
    """A model of this configuration with the weights of the other that it has, and its way of training."""
    weight = next(model.parameters())
    copy = MODELS[config.kind](config).to(weight.device, weight.dtype)
    known = copy.state_dict()
    copy.load_state_dict({name: t for name, t in model.state_dict().items() if name in known}, strict=False)
    copy.checkpointing = model.checkpointing
    return copy


def in_steady_state(model: Layered, arguments: Mapping[str, Tensor]) -> Arguments:
    """A language model's with what it remembers once it has read for a while; others remember nothing."""
    return {**arguments, "state": steady_state(model, len(arguments["x"]))} if isinstance(model, LM) else arguments


def steady_state(lm: LM, batch: int) -> State:
    """Memories of full length; what stands in them costs the same."""
    weight = next(lm.blocks.parameters())
    lengths = lm.memory_lengths()
    return State(tuple(torch.randn(batch, n, lm.config.dim, dtype=weight.dtype, device=weight.device) for n in lengths))


def one_step(model: Layered, arguments: Arguments) -> None:
    found = model(**arguments)
    assert found.nll is not None
    (found.nll.mean() + found.penalty).backward()
    model.zero_grad(set_to_none=True)


def count_flops(model: Layered, arguments: Arguments) -> float:
    """Operations of the products PyTorch really runs, attention in its blockwise form."""
    parts = [m for m in model.modules() if isinstance(getattr(m, "backend", None), str)]  # also those inside others
    kept = [part.backend for part in parts]
    try:
        for part in parts:
            part.backend = "banded"  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        with counted_products(), FlopCounterMode(display=False) as counter:
            one_step(model, arguments)
    finally:
        for part, backend in zip(parts, kept, strict=True):
            part.backend = backend
    return float(counter.get_total_flops())


def time_step(model: Layered, arguments: Arguments) -> tuple[float, float]:
    """Seconds of a forward and backward pass, and of the attention operation in it."""
    clock = _AttentionClock(model)
    began = time.perf_counter()
    with clock:
        one_step(model, arguments)
    return time.perf_counter() - began, clock.seconds


class _AttentionClock:
    """Times every mechanism's `mix`, and its backward pass from the gradient of its result to that of its queries."""

    def __init__(self, model: Layered) -> None:
        listening = [block.cross.mechanism for block in model.layers() if block.cross is not None]
        self.mechanisms, self.seconds = [*model.mechanisms(), *listening], 0.0

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
