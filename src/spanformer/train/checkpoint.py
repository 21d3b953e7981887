"""The checkpoints of a run: folders `step-00000400`, of which the last few and the best one are kept.

Also packs the state of any torch optimiser as tensors and JSON keyed by parameter name, bit for bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spanformer.core.files import remove_folder, sweep
from spanformer.model.folder import Files, faults, open_part, parts_of, read_meta, write_folder
from spanformer.model.part import Part

NamedParameters = Iterable[tuple[str, nn.Parameter]]

_NAME = r"step-(\d{8,})"


class Checkpoints:
    """Saves, finds and prunes checkpoints in `folder`; keeps the last `keep` and the one with the lowest score."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; expected at least 1 checkpoint")
        self.folder, self.keep = folder, keep

    def save(
        self,
        step: int,
        parts: dict[str, dict[str, Tensor]],
        meta: dict,
        *,
        score: float | None = None,
        others: Callable[[Path], Files] | None = None,
    ) -> Path:
        """Save the run after `step` steps. `score`: of the evaluation at this step, lower is better; None without one.
        `others`: see `write_folder`.

        A run that went back to an earlier checkpoint repeats its steps and replaces the checkpoints it finds there.
        """
        assert not {"step", "score"} & set(meta), "these keys are reserved for the checkpoint"
        path = self.folder / f"step-{step:08d}"
        comparable = score is not None and math.isfinite(score)
        meta = {**meta, "step": step, "score": score if comparable else None}
        write_folder(path, parts, meta, replace=True, others=others)
        self._prune(step)
        return path

    def newest(self, on_bad: Callable[[str], None]) -> Path | None:
        """The last complete checkpoint; `on_bad` receives a sentence about every later one that is not complete.

        A checkpoint of a newer format raises: continuing from an earlier one would throw work away.
        """
        if self.folder.is_dir():
            sweep(self.folder, _NAME)
        for path in reversed(self._paths()):
            found = faults(path)
            if not found:
                return path
            on_bad(f"{path} is not complete: {'; '.join(found)}")
        return None

    def best(self) -> Path | None:
        """The checkpoint with the lowest score, the later one of a tie; None if none has a score."""
        scored = [(score, -_step(path), path) for path in self._paths() if (score := _score(path)) is not None]
        return min(scored)[2] if scored else None

    def load(self, path: Path) -> tuple[dict, dict[str, Part]]:
        """(meta, parts) as saved; parts are read on demand. Raises if the checkpoint is not complete."""
        if found := faults(path):
            raise ValueError(f"{path} is not complete: {'; '.join(found)}; choose another checkpoint")
        meta = read_meta(path)
        return meta, {name: open_part(path, name) for name in parts_of(meta)}

    def _paths(self) -> list[Path]:
        """Sorted by step."""
        if not self.folder.is_dir():
            return []
        return sorted((path for path in self.folder.iterdir() if re.fullmatch(_NAME, path.name)), key=_step)

    def _prune(self, step: int) -> None:
        """Checkpoints later than `step` date from before the run went back: they are not counted and not deleted."""
        past = [path for path in self._paths() if _step(path) <= step]
        best = self.best()
        for path in past[: -self.keep]:
            if path != best:
                remove_folder(path)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _score(path: Path) -> float | None:
    try:
        score = read_meta(path).get("score")
    except ValueError:
        return None
    return score if isinstance(score, int | float) else None


def pack_optimizer(optimizer: Optimizer, named_parameters: NamedParameters) -> tuple[dict[str, Tensor], dict]:
    """(tensors, meta): tensors keyed "PARAMETER/KEY", not copied; meta holds other values, groups and shapes."""
    names = {parameter: name for name, parameter in named_parameters}
    tensors: dict[str, Tensor] = {}
    groups, states = [], {}
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        missing = [list(parameter.shape) for parameter in group["params"] if parameter not in names]
        assert not missing, f"the optimiser holds unnamed parameters of shapes {missing}"
        groups.append(
            {
                "shapes": {names[parameter]: list(parameter.shape) for parameter in group["params"]},
                "settings": _pack(settings, f"group {number}", tensors),
            }
        )
        for parameter in group["params"]:
            if parameter in optimizer.state:
                states[names[parameter]] = _pack(dict(optimizer.state[parameter]), names[parameter], tensors)
    return tensors, {"optimizer": type(optimizer).__name__, "groups": groups, "states": states}


def unpack_optimizer(
    optimizer: Optimizer, named_parameters: NamedParameters, tensors: Mapping[str, Tensor], meta: dict
) -> None:
    """Load the state from `pack_optimizer`, group settings included, into an optimiser built the same way."""
    names = {parameter: name for name, parameter in named_parameters}
    try:
        _check_fit(optimizer, names, meta)
        settings = [_unpack(group["settings"], tensors) for group in meta["groups"]]
        states = {name: _unpack(state, tensors) for name, state in meta["states"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the saved optimiser state is damaged ({error!r}); choose another checkpoint") from error
    optimizer.state.clear()
    for group, restored in zip(optimizer.param_groups, settings, strict=True):
        group.update(_to(restored, torch.device("cpu")))
        for parameter in group["params"]:
            state = states.get(names[parameter], {})
            for key, value in state.items():
                # The host reads the step count, unless the kernel itself reads it.
                on_host = key == "step" and not group.get("capturable") and not group.get("fused")
                optimizer.state[parameter][key] = _to(value, torch.device("cpu") if on_host else parameter.device)


def _check_fit(optimizer: Optimizer, names: dict[nn.Parameter, str], meta: dict) -> None:
    kind = type(optimizer).__name__
    if meta["optimizer"] != kind:
        raise ValueError(f"the saved optimiser is {meta['optimizer']} and this run uses {kind}; expected the same one")
    now = [{names[p]: list(p.shape) for p in group["params"]} for group in optimizer.param_groups]
    then = [group["shapes"] for group in meta["groups"]]
    group_now = {name: (number, shape) for number, group in enumerate(now) for name, shape in group.items()}
    group_then = {name: (number, shape) for number, group in enumerate(then) for name, shape in group.items()}
    for name, (number, shape) in group_now.items():
        if name not in group_then:
            raise ValueError(f"the saved optimiser lacks the parameter {name} of this run")
        if group_then[name][1] != shape:
            raise ValueError(
                f"the saved optimiser state of {name} has shape {group_then[name][1]}; expected {shape} for this run"
            )
        if group_then[name][0] != number:
            raise ValueError(f"the saved optimiser has {name} in group {group_then[name][0]}; this run: {number}")
    if extra := [name for name in group_then if name not in group_now]:
        raise ValueError(f"the saved optimiser has a parameter {extra[0]}, which this run lacks")
    if len(now) != len(then):
        raise ValueError(f"the saved optimiser has {len(then)} groups; this run has {len(now)}")


# The packed state is JSON; an object with one key encodes each type that JSON lacks:
# {"tensor": its name}, {"list": [...]}, {"tuple": [...]}, {"dict": {...}}, {"float": "inf"}.


def _pack(value: object, name: str, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": {key: _pack(entry, f"{name}/{key}", tensors) for key, entry in value.items()}}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(entry, f"{name}/{number}", tensors) for number, entry in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"the optimiser's {name} is a {type(value).__name__}, which cannot be saved")


def _unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    match packed:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": entries}:
            return {key: _unpack(entry, tensors) for key, entry in entries.items()}
        case {"list": entries}:
            return [_unpack(entry, tensors) for entry in entries]
        case {"tuple": entries}:
            return tuple(_unpack(entry, tensors) for entry in entries)
        case {"float": text}:
            return float(text)
    return packed


def _to(value: Any, device: torch.device) -> Any:
    """A copy, because the optimiser changes it in place."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {key: _to(entry, device) for key, entry in value.items()}
    return type(value)(_to(entry, device) for entry in value) if isinstance(value, list | tuple) else value
