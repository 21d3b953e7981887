"""Models back from their folders: a model's, a checkpoint's, a run's; and everything that may be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import spanformer
from spanformer.core.fields import as_dict
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig
from spanformer.model.folder import write_folder
from spanformer.model.lm import LM
from spanformer.model.load import load, load_meta

SMALL = ModelConfig(
    vocab=17, dim=16, layers=2, heads=2, attention=AttentionConfig(max_span=20), feedforward=FeedForwardConfig(dim=16),
    embedding=EmbeddingConfig(tied=True),
)  # fmt: skip


def save(path: Path, *, seed: int = 0, config: ModelConfig = SMALL, **meta) -> LM:
    torch.manual_seed(seed)
    lm = LM(config)
    write_folder(path, {"model": dict(lm.state_dict())}, {"model": as_dict(config), **meta})
    return lm


def same(a: LM, b: LM) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_model_folder(tmp_path: Path) -> None:
    lm = save(tmp_path / "m", vocab=["a", "b"])
    torch.manual_seed(9)
    before = torch.get_rng_state()
    found = spanformer.load(str(tmp_path / "m"))
    assert same(found, lm) and found.config == SMALL and not found.training
    assert found.head.weight is found.embedding.weight  # what is tied still is
    assert torch.equal(torch.get_rng_state(), before)
    x = torch.arange(17)[None]
    assert torch.equal(found(x).logits, lm.eval()(x).logits)
    assert load_meta(tmp_path / "m")["vocab"] == ["a", "b"]


def test_run_folder_loads_best_or_else_newest_checkpoint(tmp_path: Path) -> None:
    at = tmp_path / "run" / "checkpoints"
    third = [save(at / f"step-{step:08d}", seed=step, score=None) for step in (100, 200, 1000)][2]
    assert same(load(tmp_path / "run"), third)
    save(at / "step-00000300", seed=3, score=1.5)
    best = save(at / "step-00000400", seed=4, score=1.25)
    later = save(at / "step-00000500", seed=5, score=1.25)
    save(at / "step-00000600", seed=6, score=2.0)
    assert same(load(tmp_path / "run"), later) and load_meta(tmp_path / "run")["score"] == 1.25
    assert same(load(at / "step-00000400"), best)
    (at / "step-00000500" / "meta.json").write_text("{")
    assert same(load(tmp_path / "run"), best)


def break_weights(path: Path) -> None:
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def rewrite(path: Path, **changes) -> None:
    """Change what meta.json says, as a newer version or a careless hand would."""
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(meta | changes))


def of_another_shape(path: Path) -> None:
    write_folder(path, {"model": {"embedding.weight": torch.ones(3, 3)}}, {"model": as_dict(SMALL)})


def of_a_newer_version(path: Path) -> None:
    write_folder(path, {"model": {}}, {"model": as_dict(SMALL) | {"warp": 3}})


WRONG = {
    "m does not exist; expected the folder of a model, a checkpoint or a run": lambda path: None,
    "m is a file; expected": lambda path: path.write_text("hello"),
    "m has neither meta.json nor checkpoints": lambda path: path.mkdir(),
    "m is damaged or incomplete: .*model.safetensors has changed": lambda p: (save(p), break_weights(p)),
    "m is damaged or incomplete: .*safetensors is missing": lambda p: (save(p), (p / "model.safetensors").unlink()),
    "m is damaged or incomplete: .*meta.json cannot be read": lambda p: (save(p), (p / "meta.json").write_text("{")),
    r"m was written by a newer spanformer \(format 99": lambda p: (save(p), rewrite(p, format=99)),
    'meta.json has no "model", the configuration': lambda p: write_folder(p, {"model": {}}, {}),
    "has no part 'model'": lambda p: write_folder(p, {"other": {}}, {"model": as_dict(SMALL)}),
    r"in .*m do not fit its configuration: its embedding.weight has shape \[3, 3\], expected \[17, 16\]": (
        of_another_shape
    ),
    r"unknown key warp in .*meta.json": of_a_newer_version,
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_bad_folders_are_refused_in_one_sentence(message: str, tmp_path: Path) -> None:
    WRONG[message](tmp_path / "m")
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "m")
    assert "\n" not in str(caught.value)
