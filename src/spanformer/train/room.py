"""Whether a run can fit into this machine's memory, by arithmetic and before anything large is made."""

from __future__ import annotations

from spanformer.core.memory import machine_bytes, shown_bytes
from spanformer.model.fields import as_dict
from spanformer.model.load import MODELS
from spanformer.model.meta import TooLarge, build_on_meta
from spanformer.train.config import RunConfig
from spanformer.train.world import World

ITEM = 4  # bytes of a float32
TRAINED = 3  # numbers a parameter takes at least while it is trained: itself, its gradient, a moment
USUAL = {
    "model.vocab": 256, "model.dim": 256, "model.layers": 4, "model.feedforward.dim": 1024,
    "model.feedforward.experts": 4, "model.persistent": 256, "model.position.length": 1024, "model.position.clip": 16,
    "model.attention.max_span": 1024, "train.batch": 16, "train.block": 256,
}  # fmt: skip
"""what sizes usually are; the one farthest above is the one to lower"""


def check_room(config: RunConfig, world: World) -> None:
    """Refuse a run that needs more memory than there is, by the least it can need: weights, gradients and one moment of
    each, the input of every layer, and the logits."""
    room = machine_bytes()
    here = world.engine != "fsdp" and world.device.type == "cpu"
    per_parameter = ITEM * (TRAINED if here else 1)  # elsewhere the model is only built here
    try:
        planned = build_on_meta(lambda: MODELS[config.model.kind](config.model), numbers=room // per_parameter)
    except TooLarge:
        raise ValueError(f"the model needs more than {_advice(config, room)}") from None
    needed = per_parameter * sum(p.numel() for p in planned.parameters()) + (_hidden(config, world) if here else 0)
    if needed > room:
        raise ValueError(f"the run needs {shown_bytes(needed)}, more than {_advice(config, room)}")


def _hidden(config: RunConfig, world: World) -> int:
    """Bytes of the states that go into the layers, and of the logits; the backward pass needs both. Pairs may be
    shorter than a block, and an encoder has logits of its masked tokens alone."""
    t, m = config.train, config.model
    if m.kind == "seq2seq":
        return 0
    logits = m.vocab if m.kind == "lm" and not m.embedding.cutoffs else 0
    return ITEM * (t.batch // t.micro // world.size) * t.block * (m.dim * m.layers + logits)


def _advice(config: RunConfig, room: int) -> str:
    values = {name: _value(config, name) for name in USUAL}
    name = max(values, key=lambda name: values[name] / USUAL[name])
    return f"the {shown_bytes(room)} of memory of this machine; lower {name} (now {values[name]:,})"


def _value(config: RunConfig, name: str) -> int:
    found = as_dict(config)
    for key in name.split("."):
        found = found[key]
    return int(found)  # pyright: ignore[reportArgumentType]
