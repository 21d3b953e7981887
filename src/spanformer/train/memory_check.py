"""Checks by arithmetic, before anything large is allocated, whether a run fits into this machine's memory."""

from __future__ import annotations

from spanformer.core.fields import as_dict
from spanformer.core.memory import machine_bytes, shown_bytes
from spanformer.model.load import MODELS
from spanformer.model.meta import TooLarge, build_on_meta
from spanformer.train.config import RunConfig
from spanformer.train.distributed import World

ITEM = 4  # bytes of a float32
TRAINED = 3  # least numbers per trained parameter: value, gradient, one moment
USUAL = {
    "model.vocab": 256, "model.dim": 256, "model.layers": 4, "model.feedforward.dim": 1024,
    "model.feedforward.experts": 4, "model.persistent": 256, "model.position.length": 1024, "model.position.clip": 16,
    "model.attention.max_span": 1024, "train.batch": 16, "train.block": 256,
}  # fmt: skip
"""usual sizes; the error suggests lowering the value that exceeds its usual size most"""


def check_memory(config: RunConfig, world: World) -> None:
    """Refuse a run whose lower bound exceeds the memory: weights, gradients and one moment per parameter, the input of
    every layer, and the logits."""
    room = machine_bytes()
    here = world.engine != "fsdp" and world.device.type == "cpu"
    per_parameter = ITEM * (TRAINED if here else 1)  # trained on another device, the model is only built here
    try:
        planned = build_on_meta(lambda: MODELS[config.model.kind](config.model), numbers=room // per_parameter)
    except TooLarge:
        raise ValueError(f"the model needs more than {_advice(config, room)}") from None
    needed = per_parameter * sum(p.numel() for p in planned.parameters()) + (_hidden(config, world) if here else 0)
    if needed > room:
        raise ValueError(f"the run needs {shown_bytes(needed)}, more than {_advice(config, room)}")


def _hidden(config: RunConfig, world: World) -> int:
    """Bytes of the layers' inputs and of the logits; the backward pass needs both. Pairs may be shorter than a block,
    and an encoder has logits of its masked tokens only."""
    t, m = config.train, config.model
    if m.kind == "seq2seq":
        return 0
    logits = m.vocab if m.kind == "lm" and not (m.embedding.cutoffs or m.embedding.loss_chunk) else 0
    inputs = 2 if m.stack == "reversible" else m.layers  # one pair of streams, whatever the number of layers
    return ITEM * (t.batch // t.grad_accum_steps // world.size) * t.block * (m.dim * inputs + logits)


def _advice(config: RunConfig, room: int) -> str:
    values = {name: _value(config, name) for name in USUAL}
    name = max(values, key=lambda name: values[name] / USUAL[name])
    return f"the {shown_bytes(room)} of memory on this machine; lower {name} (now {values[name]:,})"


def _value(config: RunConfig, name: str) -> int:
    found = as_dict(config)
    for key in name.split("."):
        found = found[key]
    return int(found)  # pyright: ignore[reportArgumentType]
