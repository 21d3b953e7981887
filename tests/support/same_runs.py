"""Two runs that must be the same to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanformer.report.events import Run
from spanformer.train.checkpoint import Checkpoints

PASSING = {"seconds", "time", "tokens_per_second", "resident_bytes", "path", "logged_seconds"}


def never(sentence: str) -> None:
    raise AssertionError(sentence)


def final(out: Path) -> tuple[dict, dict[str, dict[str, torch.Tensor]]]:
    checkpoints = Checkpoints(out / "checkpoints")
    path = checkpoints.newest(never)
    assert path is not None
    return checkpoints.load(path)


def lasting(value: Any) -> Any:
    """Without what differs between two runs of the same: clocks and places."""
    if isinstance(value, dict):
        return {key: lasting(entry) for key, entry in value.items() if key not in PASSING}
    return [lasting(entry) for entry in value] if isinstance(value, list) else value


def assert_same_checkpoint(a: Path, b: Path, memory: bool = True) -> None:
    """memory: whether it is carried from batch to batch."""
    (meta, parts), (other_meta, other_parts) = final(a), final(b)
    for key in ("progress", "guard", "lanes", "seen", "optimizer", "diagnosis", "budget", "step", "score"):
        assert lasting(meta[key]) == lasting(other_meta[key]), key
    assert {name: list(tensors) for name, tensors in parts.items()} == {n: list(t) for n, t in other_parts.items()}
    assert bool(parts["memory"]) == memory, "the memory is carried"
    for part, tensors in parts.items():
        for name, tensor in tensors.items():
            other = other_parts[part][name]
            assert tensor.dtype == other.dtype and torch.equal(tensor, other), (part, name)


def assert_same_events(a: Run, b: Run) -> None:
    assert [row.step for row in a.steps] == [row.step for row in b.steps]
    for one, other in zip(a.steps, b.steps, strict=True):
        for name in ("loss", "penalty", "lr", "grad_norm", "tokens", "memory"):
            assert getattr(one, name) == getattr(other, name), (one.step, name)
        assert np.array_equal([one.price, one.attention_share], [other.price, other.attention_share], equal_nan=True)
        assert np.array_equal(one.spans, other.spans, equal_nan=True) and np.array_equal(one.reach, other.reach)
    assert [(e.step, e.loss, e.bits) for e in a.evals] == [(e.step, e.loss, e.bits) for e in b.evals]
    # at step 0 stands what a run that begins anew says of the one before
    assert [n for n in a.notes if n.step] == [n for n in b.notes if n.step] and a.skips == b.skips
    assert a.stop and b.stop and a.stop.reason == b.stop.reason
