"""Load a saved model from its folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import torch

from spanformer.core.fields import build
from spanformer.model.config import ModelConfig
from spanformer.model.encoder import Encoder
from spanformer.model.folder import META, NewerFormat, faults, open_part, read_meta
from spanformer.model.lm import LM
from spanformer.model.meta import TooLarge, build_on_meta
from spanformer.model.part import Part
from spanformer.model.seq2seq import Seq2Seq
from spanformer.model.weights import misfit, shapes

CHECKPOINTS = "checkpoints"
SPARE = 1000  # parameters to build beyond the limit, so as to name the first that does not fit
MODELS: dict[str, type[LM] | type[Seq2Seq] | type[Encoder]] = {"lm": LM, "seq2seq": Seq2Seq, "encoder": Encoder}
"""the classes by ModelConfig.kind"""
Model = TypeVar("Model", LM, Seq2Seq, Encoder)


def load(path: str | Path, kind: type[Model] = LM, *, device: str | torch.device = "cpu") -> Model:
    """The model of a folder, in eval mode and float32: of a model folder, of a checkpoint, or of a run.

    kind: `LM`, `Seq2Seq` or `Encoder`, the class that the caller expects.
    For a run it takes the checkpoint with the lowest score (the later of equals), or the newest if none has a score.
    A checkpoint whose meta.json cannot be read has no score; the one that is taken must be complete.
    """
    found = load_any(path, device=device)
    if not isinstance(found, kind):
        raise ValueError(f"{path} holds a model of kind {found.config.kind!r}; expected {kind.__name__}")
    return found


def load_any(path: str | Path, *, device: str | torch.device = "cpu") -> LM | Seq2Seq | Encoder:
    """The model of a folder as in `load`, of any kind."""
    folder = model_folder(path)
    if found := faults(folder):
        raise ValueError(f"{folder} is damaged or incomplete: {'; '.join(found)}; choose another one")
    config = build(ModelConfig, _read(folder)["model"], where=str(folder / META))
    weights = open_part(folder, "model")
    if wrong := _misfit(config, weights):
        raise ValueError(f"the weights in {folder} do not fit its configuration: {wrong}")
    with torch.random.fork_rng(devices=[]):  # the caller's random state must not change
        model = MODELS[config.kind](config)
    model.load_state_dict(dict(weights))
    return model.to(device).eval()


def _misfit(config: ModelConfig, weights: Part) -> str | None:
    """How the files' shapes differ from the model's. Checked before either takes memory: an untrusted configuration may
    ask for any size."""
    try:  # a tied parameter is registered twice and may be saved once
        planned = build_on_meta(lambda: MODELS[config.kind](config), tensors=2 * len(weights) + SPARE)
    except TooLarge:
        return f"it has {len(weights):,} tensors, and the configuration describes a larger model"
    return misfit({name: weights.shape(name) for name in weights}, shapes(planned.state_dict()))


def load_meta(path: str | Path) -> dict:
    """The meta.json of the model that `load` would take, with its configuration under "model"."""
    return _read(model_folder(path))


def _read(folder: Path) -> dict:
    meta = read_meta(folder)
    if not isinstance(meta.get("model"), dict):
        raise ValueError(f'{folder / META} has no "model", the configuration; expected a model, a checkpoint or a run')
    return meta


def model_folder(path: str | Path) -> Path:
    """The folder of one model: the path itself, or a checkpoint if the path is a run."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist; expected the folder of a model, a checkpoint or a run")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; expected the folder of a model, a checkpoint or a run")
    if (path / META).exists():
        return path
    steps = _checkpoints(path / CHECKPOINTS)
    if not steps:
        raise ValueError(f"{path} has neither {META} nor checkpoints; expected the folder of a model, or of a run")
    scores = [(score, -step, folder) for step, folder in steps if (score := _score(folder)) is not None]
    return min(scores)[2] if scores else steps[-1][1]


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder), in the order of steps."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(found[1]), path) for path in entries if (found := re.fullmatch(r"step-(\d{8,})", path.name)))


def _score(folder: Path) -> float | None:
    try:
        score = read_meta(folder).get("score")
    except NewerFormat:
        raise
    except ValueError:
        return None
    return score if isinstance(score, int | float) else None
