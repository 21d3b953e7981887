"""Evaluation counts every token once, as one pass over the whole text would; and leaves the model as it was."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.core.events import EvalEvent, StepEvent
from spanformer.data import prepare
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig
from spanformer.model.lm import LM
from spanformer.train.evaluate import Score, evaluate, evaluate_as_original
from spanformer.train.run import train
from support.tiny_runs import tiny

V, N = 29, 211
CONFIG = ModelConfig(
    vocab=V, dim=24, layers=2, heads=3, attention=AttentionConfig(max_span=300, ramp=20.0, dropout=0.5),
    feedforward=FeedForwardConfig(dim=32, dropout=0.5), embedding=EmbeddingConfig(dropout=0.5),
)  # fmt: skip


def model(config: ModelConfig = CONFIG) -> LM:
    torch.manual_seed(2)
    lm = LM(config).double()
    with torch.no_grad():
        for module in lm.spans_modules():
            module.ratio.copy_(torch.tensor([0.02, 0.3, 1.0]))  # some see all of the text
        for p in lm.parameters():
            p += 0.3 * torch.randn_like(p) * (p.ndim > 1)  # so that what a token sees matters
    return lm


def text(length: int = N) -> np.ndarray:
    return np.random.default_rng(1).integers(0, V, length).astype(np.uint16)


def at_once(lm: LM, ids: np.ndarray) -> list[float]:
    """−log p of every token but the first, by one forward pass over all of them; logits and softmax by hand."""
    lm.eval()
    with torch.no_grad():
        logits = lm(torch.from_numpy(ids.astype(np.int64))[None, :-1]).logits
    assert logits is not None
    log_p = logits[0].log_softmax(-1)
    return [-float(log_p[t, ids[t + 1]]) for t in range(len(ids) - 1)]


@pytest.mark.parametrize("block", [1, 7, 64, 210, 500])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_loss_is_the_sum_over_all_tokens(lanes: int, block: int) -> None:
    """Each lane begins without memory, so the truth is one pass for each lane's part, from its first token on."""
    lm, ids = model(), text()
    bounds = [(N - 1) * lane // lanes for lane in range(lanes + 1)]
    expected = math.log(V)
    for start, stop in itertools.pairwise(bounds):
        expected += sum(at_once(lm, ids[start : stop + 1]))
    found = evaluate(lm, ids, lanes=lanes, block=block)
    assert found.tokens == N
    assert found.nats == pytest.approx(expected, rel=1e-9)
    assert found.loss == pytest.approx(expected / N, rel=1e-9)
    assert found.bits == pytest.approx(expected / N / math.log(2), rel=1e-9)


def test_score_properties() -> None:
    score = Score(nats=200 * math.log(2), tokens=100, units=400.0)
    assert score.loss == pytest.approx(2 * math.log(2)) and score.bits == 0.5 and score.perplexity == pytest.approx(4)
    assert math.isfinite(Score(1e9, 1, 1).perplexity)


def test_units_are_what_bits_are_told_for() -> None:
    lm, ids = model(), text()
    per_token, per_unit = evaluate(lm, ids, block=64), evaluate(lm, ids, units=3.5 * N, block=64)
    assert per_unit.bits == pytest.approx(per_token.bits / 3.5) and per_unit.loss == per_token.loss


@pytest.mark.parametrize("paper_compat", [False, True])
@pytest.mark.parametrize(("lanes", "block", "length"), [(8, 5, 211), (4, 8, 211), (2, 26, 210), (3, 10, 63)])
def test_papers_protocol(lanes: int, block: int, length: int, paper_compat: bool) -> None:
    """Again, from its description: rows of equal length; block after block, while one more token than a block is left;
    the mean of the blocks' means."""
    lm = model(ModelConfig(vocab=V, dim=24, layers=2, heads=3, paper_compat=paper_compat,
                           attention=AttentionConfig(max_span=300, ramp=20.0)))  # fmt: skip
    lm.eval()
    ids = text(length)
    per_row = length // lanes
    rows = torch.stack([torch.from_numpy(ids[r * per_row : (r + 1) * per_row].astype(np.int64)) for r in range(lanes)])
    means, state, at = [], None, 0
    while at + block < per_row:
        with torch.no_grad():
            found = lm(rows[:, at : at + block], state)
        state, target = found.state, rows[:, at + 1 : at + block + 1]
        means.append(-found.logits.log_softmax(-1).gather(2, target[..., None]).mean())
        at += block
    score = evaluate_as_original(lm, ids, block=block, lanes=lanes)
    assert score.loss == pytest.approx(float(torch.stack(means).mean()), rel=1e-9)
    assert score.tokens == len(means) * lanes * block <= length


def test_papers_protocol_needs_a_block_in_each_lane() -> None:
    with pytest.raises(
        ValueError, match=r"^the split has 80 tokens; expected more than 8 lanes of one block each, 80$"
    ):
        evaluate_as_original(model(), text(80), block=10)


@pytest.mark.parametrize("training", [True, False])
def test_model_is_unchanged(training: bool) -> None:
    lm = model().train(training)
    before = {name: t.clone() for name, t in lm.state_dict().items()}
    random = torch.get_rng_state()
    first = evaluate(lm, text(), block=32)
    assert evaluate(lm, text(), block=32) == first  # no dropout in it
    evaluate_as_original(lm, text(), block=8)
    assert lm.training is training and all(p.grad is None for p in lm.parameters())
    assert all(torch.equal(t, before[name]) for name, t in lm.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_training_mode_comes_back_after_an_error() -> None:
    lm = model().train()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        evaluate(lm, text() + 5, block=32)
    assert lm.training


def test_evaluating_does_not_change_training(tmp_path: Path) -> None:
    losses = {}
    for often in (1, 0):
        out, seen = str(tmp_path / f"every-{often}"), []
        changes = {"out": out, "train.eval_every": often, "model.attention.dropout": 0.2, "train.save_every": 0}
        train(tiny(tmp_path, changes), watch=seen.append)
        losses[often] = [event.loss for event in seen if isinstance(event, StepEvent)]
        assert len([event for event in seen if isinstance(event, EvalEvent)]) == (13 if often else 2)
    assert losses[0] == losses[1]


def test_run_logs_the_result_of_evaluate(tmp_path: Path) -> None:
    """Of the whole validation split, with the model of the last step."""
    from spanformer.report.events import read_run
    from spanformer.train.checkpoint import Checkpoints

    config = tiny(tmp_path, {"train.eval_tokens": 0})
    result = train(config)
    path = Checkpoints(Path(config.out) / "checkpoints").newest(lambda text: None)
    assert path is not None
    meta, parts = Checkpoints(path.parent).load(path)
    data = prepare(config.data)
    from spanformer.core.fields import build

    lm = LM(build(ModelConfig, meta["model"]))
    lm.load_state_dict(parts["model"])
    split = data.splits["valid"]
    lanes = min(config.train.batch, split.tokens // (8 * config.train.block))
    score = evaluate(lm, split.ids, units=split.units, lanes=lanes, block=config.train.block)
    assert score.tokens == split.tokens and score.bits == result.bits == read_run(Path(config.out)).evals[-1].bits
