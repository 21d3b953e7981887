"""A cache in a file: read on by the model that made it, by nobody else; never half written, never trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from spanformer import Cache
from spanformer.memory import cache as module
from support.small_models import CONFIGS, SMALL, make, text


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_saved_and_loaded(tmp_path, bits: int) -> None:
    lm, x = make(CONFIGS["hybrid heads"]), text(2, 100)
    cache = lm.cache(2, slack=3, bits=bits)
    lm.decode(x[:, :70], cache, lengths=torch.tensor([70, 22]))
    cache.save(tmp_path / "cache.safetensors")
    loaded = Cache.load(tmp_path / "cache.safetensors", lm)
    assert loaded.seen.tolist() == [70, 22] and loaded.slack == 3 and loaded.bits == bits
    new = torch.stack([x[0, 70:75], x[1, 22:27]])
    assert torch.equal(lm.decode(new, loaded), lm.decode(new, cache))
    other = make(CONFIGS["hybrid heads"])
    with torch.no_grad():
        next(other.parameters()).add_(0.01)
    with pytest.raises(ValueError, match=r"cache\.safetensors was saved by another model"):
        Cache.load(tmp_path / "cache.safetensors", other)
    with pytest.raises(ValueError, match=r"cache\.safetensors was saved by another model"):
        Cache.load(tmp_path / "cache.safetensors", make(SMALL))
    (tmp_path / "none").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="none cannot be read as a saved KV cache"):
        Cache.load(tmp_path / "none", lm)


def test_model_of_the_same_weights_may_be_another(tmp_path: Path) -> None:
    """Rotary positions and ALiBi have no weights."""
    rotary, alibi = make(CONFIGS["rotary"]), make(CONFIGS["alibi"])
    assert all(torch.equal(a, b) for a, b in zip(rotary.parameters(), alibi.parameters(), strict=True))
    rotary.cache(1).save(tmp_path / "cache")
    with pytest.raises(ValueError, match="was saved by another model"):
        Cache.load(tmp_path / "cache", alibi)
    assert Cache.load(tmp_path / "cache", make(CONFIGS["rotary"])).batch == 1


def test_save_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, path = make(SMALL), tmp_path / "cache"
    lm.cache(1).save(path)
    before = path.read_bytes()
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode

    def break_off(tensors, file, header):
        Path(file).write_bytes(b"half of it")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(module, "save_file", break_off)
    with pytest.raises(
        OSError,
        match=r"cache could not be saved \(No space left on device\); the file that was there before is unchanged",
    ):
        lm.cache(2).save(path)
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["cache", "plain"]


def test_unwritable_path_is_refused(tmp_path: Path) -> None:
    cache = make(SMALL).cache(1)
    with pytest.raises(OSError, match=r"none/cache could not be saved \(No such file or directory\)"):
        cache.save(tmp_path / "none" / "cache")
    with pytest.raises(OSError, match=r"could not be saved \(.*Is a directory"):
        cache.save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_any_flipped_bit_is_found(tmp_path: Path) -> None:
    lm, path = make(SMALL), tmp_path / "cache"
    cache = lm.cache(1)
    lm.decode(text(1, 60), cache)
    cache.save(path)
    whole = path.read_bytes()
    for at in [*range(0, len(whole), len(whole) // 60), len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="cache "):
            Cache.load(path, lm)


CRAFTED = {
    "place holds -5 … 60": {"place": torch.tensor([-5, 60])},
    "place holds 60 … 9223372036854775807": {"place": torch.tensor([60, 2**63 - 1])},
    r"place has shape \[2, 2\]": {"place": torch.zeros(2, 2, dtype=torch.int64)},
    r"place has shape \[2\] and dtype torch.float32": {"place": torch.tensor([3.5, torch.nan])},
    r"0.reach has shape \[0\]": {"0.reach": torch.zeros(0, dtype=torch.int64)},
    r"0.keys has shape \[2, 109, 8\].*expected \[2, 34359738376, 8\]": {"0.reach": torch.tensor([2**33] * 4)},
    r"0.keys has shape \[1\]": {"0.keys": torch.zeros(1, dtype=torch.float64)},
    r"1.values has .* dtype torch.float32": {"1.values": torch.zeros(2, 109, 8)},
    r"2.lost.oldest has shape \[1\]": {"2.lost.oldest": torch.zeros(1)},
    "2.lost.oldest holds -1": {"2.lost.oldest": torch.full((2, 4), -1)},
    "2.lost.place": {"2.lost.oldest": torch.full((2, 4), 1)},
    "2.lost.place holds -1": {"2.lost.oldest": torch.full((2, 4), 1), "2.lost.place": torch.full((2, 4), -1)},
    "0.written holds": {"0.written": torch.tensor([2**62] * 2)},
    "expected .2, 4398046511205, 8. of": {"slack": 2**40},
    "slack is 'x'": {"slack": "x"},
    "bits 8.0": {"bits": 8.0},
}


@pytest.mark.parametrize("said", CRAFTED)
def test_crafted_file_is_refused(tmp_path: Path, said: str) -> None:
    """Before anything is allocated for what it says."""
    lm, path = make(SMALL), tmp_path / "cache"
    cache = lm.cache(2, slack=2)
    lm.decode(text(2, 60), cache)
    cache.save(path)
    with safe_open(path, "pt") as file:
        about, tensors = json.loads(file.metadata()["spanformer"]), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    for name, value in CRAFTED[said].items():
        (tensors if isinstance(value, torch.Tensor) else about)[name] = value
    about["sha256"] = module.digest_tensors("", tensors)
    save_file(tensors, path, {"spanformer": json.dumps(about)})
    with pytest.raises(
        ValueError, match=rf"cache does not have the tensors that its model needs \(.*{said}.*\); the file is damaged"
    ):
        Cache.load(path, lm)
