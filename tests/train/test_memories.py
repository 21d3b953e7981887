"""Training with compressed and retrieved memories: resumed to the last bit; checkpointing changes no gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spanformer import LM
from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.train.run import train
from support.same_runs import final
from support.tiny_runs import tiny

KINDS = ["compressive(4, 8, 4, 2)", "compressive(8, 8, 4, 2, most_used)", "memorizing(32, 4, 8, 8)"]


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path: Path, kind: str) -> None:
    changes = {"model.attention.kind": kind, "model.position.kind": "rotary", "train.save_every": 0}
    ends = []
    for name, steps in (("straight", [8]), ("parts", [3, 5, 8])):
        for n, last in enumerate(steps):
            more = {"out": str(tmp_path / name), "train.steps": last, "resume": n > 0}
            train(tiny(tmp_path, changes | more))
        ends.append(final(tmp_path / name)[1])
    for part in ("model", "memory", "optimizer"):
        assert ends[0][part] and list(ends[0][part]) == list(ends[1][part])
        for name, t in ends[0][part].items():
            assert torch.equal(t.nan_to_num(7.0), ends[1][part][name].nan_to_num(7.0)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stack", ["residual", "reversible"])
def test_recomputed_blocks_have_the_same_gradients(kind: str, stack: str) -> None:
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        attention = AttentionConfig(kind=kind)
        lm = LM(ModelConfig(vocab=31, dim=32, layers=2, heads=4, attention=attention, stack=stack)).double().train()  # type: ignore[arg-type]
        lm.checkpointing = checkpointing
        state = None
        for _ in range(3):
            x = torch.randint(31, (2, 20))
            found = lm(x, state, targets=x)
            assert found.nll is not None
            (found.nll.mean() + found.penalty).backward()
            state = found.state
        grads.append({name: p.grad for name, p in lm.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=lambda s, n=name: f"{n}: {s}")
