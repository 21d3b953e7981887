"""Operations, time and memory of a training step with the model's attention, and with full attention in its place.

Both use the same weights and batch; a language model is in steady state, each segment memory as long as its heads look
back. "learned" means the model's own attention, whether or not it learns spans. Time and memory cover a whole step with
the optimiser's update; operations cover forward and backward only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spanformer.core.events import CostEvent, NoteEvent
from spanformer.core.peak import peak_of, unsupported
from spanformer.inspect.clocks import AttentionClock, ProductClock
from spanformer.model.config import ModelConfig
from spanformer.model.linear import counted_products
from spanformer.model.lm import LM, State
from spanformer.model.load import MODELS
from spanformer.model.stack import TransformerStack
from spanformer.train.config import RunConfig
from spanformer.train.distributed import World
from spanformer.train.optim import clip_model, model_optimizer, set_lr
from spanformer.train.step import Batch, backward

ROUNDS = 3
MOST_SEGMENTS = 40
"""read to fill a memory, such as 8,192 tokens in segments of 256"""
SEGMENTS = ("picked", "alone", "alone_padding")
"""arguments of forward for ETC's global tokens"""
Arguments = Mapping[str, Tensor | State]
"""keyword arguments of a model's forward, including `targets`"""


class Times(NamedTuple):
    """Seconds of one step and of its disjoint parts."""

    step: float
    attention: float
    products: float
    """matrix products outside attention and the optimiser"""
    optimizer: float
    """clipping, update and after_step"""


def measure_cost(model: TransformerStack, batch: Batch, config: RunConfig) -> dict[str, Any]:
    """The measured fields of a CostEvent, for a batch of the model's objective on the CPU. Measures copies; the model
    stays unchanged. Arguments that full attention does not accept are omitted from both."""
    batch = batch._replace(arguments={name: t for name, t in batch.arguments.items() if name not in SEGMENTS})
    configs = {"learned": model.config, "full": with_full_attention(model.config)}
    steps = {name: MeasuredStep(copy_of(model, one), batch, config) for name, one in configs.items()}
    event: dict[str, Any] = {"flops": {name: step.flops() for name, step in steps.items()}}
    rounds: dict[str, list[Times]] = {name: [] for name in steps}
    for _ in range(ROUNDS):  # alternate, so that a slow moment of the machine affects both
        for name, step in steps.items():
            rounds[name].append(step.time())
    # take all parts from the same round, so that they add up
    median = {name: sorted(times)[ROUNDS // 2]._asdict() for name, times in rounds.items()}
    for part in Times._fields:
        event[f"{part}_seconds"] = {name: times[part] for name, times in median.items()}
    event["peak_bytes"] = {}
    if unsupported() is None:
        event["peak_bytes"] = {name: peak_of(step.run)[0] for name, step in steps.items()}
    return event


class MeasuredStep:
    """Repeats a training step on the same batch with learning rate 0, so that weights and spans do not change."""

    def __init__(self, model: TransformerStack, batch: Batch, config: RunConfig) -> None:
        self.model, self.batch, self.config = model, batch, config
        arguments = batch.arguments
        self.world = World(0, 1, arguments["targets"].device, "one")
        self.state = steady_state(model, arguments["x"]) if isinstance(model, LM) and not batch.whole else None
        self.optimizer = model_optimizer(model, config.optim)
        set_lr(self.optimizer, 0.0)

    def flops(self) -> float:
        arguments = self.batch.arguments
        return count_flops(self.model, arguments if self.state is None else {**arguments, "state": self.state})

    def run(self) -> None:
        self.gradients()
        self.update()

    def gradients(self) -> None:
        t = self.config.train
        self.optimizer.zero_grad(set_to_none=True)
        backward(
            self.model,
            self.model,
            self.world,
            self.batch,
            self.state,
            grad_accum_steps=t.grad_accum_steps,
            dtype=t.dtype,
        )

    def update(self) -> None:
        clip_model(self.model, self.config.optim.global_clip)
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
        rest = middle - began - attention.seconds  # the second pass may have been slower
        return Times(end - began, attention.seconds, min(products.seconds, rest), end - middle)


def cost_event(model: TransformerStack, batch: Batch, config: RunConfig, step: int) -> CostEvent | NoteEvent:
    """The cost of a step with this batch, or a note why it could not be measured."""
    try:
        found = measure_cost(model, batch, config)
    except (RuntimeError, MemoryError) as error:  # full attention may run out of memory
        return NoteEvent(step, f"the cost of a step could not be measured: {error}")
    return CostEvent(step, **found, tokens=batch.tokens)


def with_full_attention(config: ModelConfig) -> ModelConfig:
    """The same model with full attention in every layer, in both halves of an encoder–decoder."""
    whole = replace(config, attention=replace(config.attention, kind="full", stack=()))
    if config.kind != "seq2seq":
        return whole
    reading = replace(config.encoder.attention, kind="full", stack=())
    return replace(whole, encoder=replace(config.encoder, attention=reading))


def copy_of(model: TransformerStack, config: ModelConfig) -> TransformerStack:
    """A model of this configuration with the other model's weights where they match, and its training settings."""
    weight = next(model.parameters())
    copy = MODELS[config.kind](config).to(weight.device, weight.dtype)
    known = copy.state_dict()
    copy.load_state_dict({name: t for name, t in model.state_dict().items() if name in known}, strict=False)
    copy.checkpointing = model.checkpointing
    return copy


def in_steady_state(model: TransformerStack, arguments: Mapping[str, Tensor]) -> Arguments:
    """Add full segment memories to a language model's arguments; other models have none."""
    return {**arguments, "state": steady_state(model, arguments["x"])} if isinstance(model, LM) else arguments


def steady_state(lm: LM, x: Tensor) -> State:
    """The memory before a segment x [B, T] late in a text; its values do not affect the cost. Memories other than of
    hidden states fill by reading."""
    empty, lengths = lm.start(len(x)), lm.memory_lengths()
    full = {
        name: torch.randn(len(x), lengths[int(name.partition(".")[0])], *t.shape[2:], dtype=t.dtype, device=t.device)
        for name, t in empty.tensors().items()
        if name.endswith(".hidden")
    }
    state = empty.with_tensors(empty.tensors() | full, seen=0)
    if len(full) < len(empty.tensors()):
        furthest = max(max(layer) for layer in lm.context_length())  # 0 of a recurrent state, which has no length
        with torch.no_grad():
            for _ in range(min(furthest // x.shape[1] + 1, MOST_SEGMENTS)):
                state = lm(x, state=state).state
    return state


def one_step(model: TransformerStack, arguments: Arguments) -> None:
    found = model(**arguments)
    assert found.nll is not None
    (found.nll.mean() + found.penalty).backward()
    model.zero_grad(set_to_none=True)


def count_flops(model: TransformerStack, arguments: Arguments) -> float:
    """Operations of the matrix products that PyTorch runs, with attention on the `banded` backend."""
    parts = [m for m in model.modules() if isinstance(getattr(m, "backend", None), str)]  # including nested ones
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
