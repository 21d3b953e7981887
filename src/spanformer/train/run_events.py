"""Start and step events of a run. The start event records the machine and the shape that costs are computed from."""

from __future__ import annotations

import math
import os
import resource
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spanformer.core.events import StartEvent, StepEvent
from spanformer.core.fields import as_dict
from spanformer.core.shape import Shape
from spanformer.core.version import VERSION
from spanformer.model.stack import TransformerStack

if TYPE_CHECKING:
    from spanformer.train.loop import TrainingLoop


def start_event(run: TrainingLoop) -> StartEvent:
    splits = run.data.splits
    return StartEvent(
        step=run.progress.step,
        run=run.out.name,
        config=as_dict(run.config),
        parameters=sum(p.numel() for p in run.model.parameters()),
        unit=run.data.unit,
        tokens={name: s.tokens for name, s in splits.items()},
        units={name: s.units for name, s in splits.items()},
        shape=shape_of(run),
        machine=describe_machine(str(run.world.device), run.world.size),
        version=VERSION,
        objective=run.config.objective,
    )


def step_event(run: TrainingLoop, grad_norm: float) -> StepEvent:
    """Means since the previous row, and the current spans and reaches."""
    p, spans, split = run.progress, learned_spans(run.model), run.data.splits["train"]
    tokens_per_unit = split.tokens / split.units if run.config.model.kind == "lm" else 1.0  # others count tokens
    return StepEvent(
        step=p.step,
        seconds=p.seconds,
        tokens=p.tokens,
        loss=p.mean_loss,
        penalty=p.mean_penalty,
        lr=run.optimizer.param_groups[0]["lr"],
        grad_norm=grad_norm,
        tokens_per_second=p.tokens_per_second,
        spans=np.array(run.model.spans(), dtype=np.float64),  # None becomes NaN: the head learns no span
        reach=np.array(run.model.distances()),
        memory=run.state.tokens() if run.state else [],
        resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        bits=p.mean_loss * tokens_per_unit / math.log(2),
        span_average=sum(spans) / len(spans) if spans else math.nan,
        span_longest=max(spans, default=math.nan),
        **({} if run.budget is None else run.budget.row()),
        choice_entropy=_mean([choice.entropy for choice in run.model.choices()]),
        choice_variance=_mean([choice.variance for choice in run.model.choices()]),
        depth=math.nan if run.model.depth is None else run.model.depth.mean_steps() or math.nan,
    )


def _mean(numbers: list[float]) -> float:
    """Of those that are known."""
    known = [number for number in numbers if not math.isnan(number)]
    return sum(known) / len(known) if known else math.nan


def learned_spans(model: TransformerStack) -> list[float]:
    """Spans in tokens of all heads that learn one."""
    return [z for layer in model.spans() for z in layer if z is not None]


def describe_machine(device: str, processes: int) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "torch": torch.__version__,
        "processes": processes,
    }


def shape_of(run: TrainingLoop) -> Shape:
    return model_shape(run.model, run.config.train.block, run.config.train.batch)


def model_shape(model: TransformerStack, block: int, batch: int) -> Shape:
    """The sizes that determine the cost of steps of `batch` rows of `block` tokens."""
    m, layer = model.config, model.layers()[0]
    feedforward, gates = layer.feedforward, sum(p.numel() for p in layer.gates.parameters() if p.ndim == 2)
    return Shape(
        layers=len(model.layers()),
        dim=m.dim,
        heads=m.heads,
        kv_heads=m.groups,
        head_dim=m.head_dim,
        feedforward=gates + (feedforward.weights_per_token if feedforward is not None else 0),  # pyright: ignore
        persistent=m.persistent,
        vocab=m.vocab,
        block=block,
        batch=batch,
        max_span=m.max_span,
    )
