"""`spanformer bench rare`: what counts as a right answer, and the two trainings at reduced size."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spanformer.bench.rare import LANES, answered
from spanformer.cli.main import main
from spanformer.data.tasks import Facts
from support.refusals import refusal


class Oracle:
    """Knows the whole stream, and predicts each next token; wrong with the answers of every second part."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.text = torch.from_numpy(tokens.astype(np.int64)).view(LANES, -1)

    def eval(self) -> None:
        pass

    def __call__(self, ids: torch.Tensor, state: int | None) -> SimpleNamespace:
        at = state or 0
        assert torch.equal(ids, self.text[:, at : at + ids.shape[1]])
        following = self.text[:, at + 1 : at + 1 + ids.shape[1]].clone()
        following[::2] += 1
        return SimpleNamespace(state=at + ids.shape[1], logits=torch.nn.functional.one_hot(following, 256).float())


@pytest.mark.parametrize("block", [64, 100, 5000])
def test_answers_are_counted_where_they_stand(block: int) -> None:
    tokens, answers = Facts(50, 100).draw(np.random.default_rng(0), LANES * 5000)
    counted = answers.reshape(LANES, -1)[:, 2048:]
    assert answered(Oracle(tokens), tokens, answers, block) == pytest.approx(counted[1::2].sum() / counted.sum())  # type: ignore[arg-type]


def test_both_trainings_and_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("SPANFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("spanformer.data.tasks.facts.TOKENS", {"train": 20_000, "valid": 4000, "test": 4000})
    out = tmp_path / "rare.json"
    main(["bench", "rare", "--quick", "--threads", "1", "--out", str(out), "--kinds", "static", "hybrid",
          "--rates", "100", "--penalties", "1e-6", "1e-4"])  # fmt: skip
    found = {name: part["found"] for name, part in json.loads(out.read_text())["parts"].items()}
    assert set(found) == {"static", "hybrid"} and len(found["hybrid"]["spans"]) == 2
    assert set(found["static"]["arms"]) == {"100 1e-06", "100 0.0001"}
    assert max(found["static"]["spans"]) <= 2048
    assert out.with_suffix(".png").stat().st_size > 5000 and "one answer in     100" in capsys.readouterr().out


def test_floor_is_placed_where_the_head_that_answers_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four heads the third answers most, and becomes the first, which has no price."""
    right, swapped = [0.9, 0.8, 0.1, 0.9], []
    shares = iter([*right, 0.9, 0.7])
    monkeypatch.setenv("SPANFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("spanformer.data.tasks.facts.TOKENS", {"train": 20_000, "valid": 4000, "test": 4000})
    monkeypatch.setattr("spanformer.bench.rare.share", lambda *_: next(shares))
    monkeypatch.setattr("spanformer.bench.rare.swap_heads", lambda _layer, *heads: swapped.append(heads))
    out = tmp_path / "rare.json"
    main(["bench", "rare", "--quick", "--threads", "1", "--out", str(out), "--kinds", "placed_floor", "--rates", "100",
          "--penalties", "1e-4"])  # fmt: skip
    found = json.loads(out.read_text())["parts"]["placed_floor"]["found"]
    assert swapped == [(0, 2)] and found["without"] == right and found["arms"]["100 0.0001"]["right"] == 0.7
    assert (tmp_path / "rare" / "placed-floor-placed").is_dir()


def test_map_before_learn_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["bench", "rare", "--parts", "map", "--kinds", "static", "--out", str(tmp_path / "rare.json")]
    assert "run `spanformer bench rare --parts learn --kinds static` before map" in refusal(words, capsys)


def test_rate_that_has_too_few_keys_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert "every of facts is 20; expected 42" in refusal(["bench", "rare", "--rates", "20"], capsys)
