"""What a training step costs with the attention that a model has, and with full attention in its place: counted and
timed.

Both are the same weights on the same batch; a language model in a steady state, its memories as long as their heads
look back. "learned" is what the model has, whether or not it learns spans. Time and memory are those of a whole step,
with the optimiser's update; operations are counted in forward and backward only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spanformer.core.peak import peak_of, unsupported
from spanformer.model.config import ModelConfig
from spanformer.model.layered import Layered
from spanformer.model.linear import counted_products
from spanformer.model.lm import LM, State
from spanformer.model.load import MODELS
from spanformer.train.clocks import AttentionClock, ProductClock
from spanformer.train.config import RunConfig
from spanformer.train.optim import clip_global, model_optimizer, set_lr
from spanformer.train.step import Drawn, backward
from spanformer.train.world import World

ROUNDS = 3
SEGMENTS = ("picked", "alone", "alone_padding")
"""arguments for ETC's global tokens"""
Arguments = Mapping[str, Tensor | State]
"""of a model's forward, by name, `targets` among them"""


class Times(NamedTuple):
    """Seconds of one step, and of parts of it that do not overlap."""

    step: float
    attention: float
    products: float
    """of matrices, outside attention and the optimiser"""
    optimizer: float
    """clipping, the update and what follows it"""


def measure_cost(model: Layered, drawn: Drawn, config: RunConfig) -> dict[str, dict]:
    """The values of a cost event, for a batch on the CPU as the model's objective draws it. Copies of the model are
    measured: it is left as it is. What full attention cannot do is left out of both."""
    drawn = drawn._replace(arguments={name: t for name, t in drawn.arguments.items() if name not in SEGMENTS})
    configs = {"learned": model.config, "full": with_full_attention(model.config)}
    steps = {name: MeasuredStep(copy_of(model, one), drawn, config) for name, one in configs.items()}
    event: dict[str, dict] = {
        "flops": {name: count_flops(step.model, in_steady_state(step.model, drawn.arguments))
                  for name, step in steps.items()}
    }  # fmt: skip
    rounds: dict[str, list[Times]] = {name: [] for name in steps}
    for _ in range(ROUNDS):  # in turn, so that a slow moment of the machine meets both
        for name, step in steps.items():
            rounds[name].append(step.time())
    # all parts of the same round, so that they add up
    median = {name: sorted(times)[ROUNDS // 2]._asdict() for name, times in rounds.items()}
    for part in Times._fields:
        event[f"{part}_seconds"] = {name: times[part] for name, times in median.items()}
    event["peak_bytes"] = {}
    if unsupported() is None:
        event["peak_bytes"] = {name: peak_of(step.run)[0] for name, step in steps.items()}
    return event


class MeasuredStep:
    """One optimiser step as training takes it, again and again on the same batch: the learning rate is 0, so that
    weights and spans stay."""

    def __init__(self, model: Layered, drawn: Drawn, config: RunConfig) -> None:
        self.model, self.drawn, self.config = model, drawn, config
        targets = drawn.arguments["targets"]
        self.world = World(0, 1, targets.device, "one")
        self.state = steady_state(model, len(targets)) if isinstance(model, LM) else None
        self.optimizer = model_optimizer(model, config.optim)
        set_lr(self.optimizer, 0.0)

    def run(self) -> None:
        self.gradients()
        self.update()

    def gradients(self) -> None:
        t = self.config.train
        self.optimizer.zero_grad(set_to_none=True)
        backward(self.model, self.model, self.world, self.drawn, self.state, micro=t.micro, dtype=t.dtype)

    def update(self) -> None:
        clip_global(self.model.parameters(), self.config.optim.global_clip)
        self.optimizer.step()
        self.model.after_step()

    def time(self) -> Times:
        began = time.perf_counter()
        with AttentionClock(self.model) as attention:
            self.gradients()
        middle = time.perf_counter()
        self.update()
        end = time.perf_counter()
        with AttentionClock(self.model) as within, ProductClock(within) as products:
            self.gradients()
        self.optimizer.zero_grad(set_to_none=True)
        rest = middle - began - attention.seconds  # the second pass may have met a slower moment
        return Times(end - began, attention.seconds, min(products.seconds, rest), end - middle)


def cost_event(model: Layered, drawn: Drawn, config: RunConfig, step: int) -> tuple[str, dict]:
    """What to tell of a batch's cost: the event's name and its row."""
    try:
        found = measure_cost(model, drawn, config)
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
