"""The LSTM over a window equals a cell that runs step by step: values, gradients, and the state that it leaves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spanformer.model.config import ModelConfig
from spanformer.rl.lstm import LSTMCore
from spanformer.rl.memory import Carried

ROWS, STEPS, DIM = 5, 40, 16


def by_cell(core: LSTMCore, h, episode, memory):
    """Step by step, as the equation has it."""
    cell = nn.LSTMCell(DIM, DIM).to(h.dtype)
    weights = dict(core.lstm.named_parameters())
    named: dict[str, torch.Tensor] = {name.removesuffix("_l0"): weight for name, weight in weights.items()}
    hidden, state, before = (memory.carried[name] for name in ("hidden", "cell", "episode"))
    found = []
    for t in range(h.shape[1]):
        same = (episode[:, t] == before)[:, None].to(h.dtype)
        hidden, state = torch.func.functional_call(cell, named, (h[:, t].relu(), (hidden * same, state * same)))
        before = episode[:, t]
        found.append(hidden)
    return torch.stack(found, 1), hidden, state


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_window_gives_what_single_steps_give(share: float, dtype: torch.dtype, most: float) -> None:
    torch.manual_seed(0)
    core = LSTMCore(ModelConfig(dim=DIM)).to(dtype)
    h = torch.randn(ROWS, STEPS, DIM, dtype=dtype, requires_grad=True)
    episode = (torch.rand(ROWS, STEPS) < share).long().cumsum(1)
    state = torch.randn(2, ROWS, DIM, dtype=dtype)
    memory = Carried({"hidden": state[0], "cell": state[1], "episode": torch.zeros(ROWS, dtype=torch.int64)})
    out, after, _ = core(h, episode, memory)
    expected, hidden, cell = by_cell(core, h, episode, memory)
    assert (out - expected).abs().max() < most
    assert (after.carried["hidden"] - hidden).abs().max() < most and (after.carried["cell"] - cell).abs().max() < most
    weight = torch.randn_like(out)
    parameters = [h, *core.parameters()]
    mine, theirs = (torch.autograd.grad((y * weight).sum(), parameters) for y in (out, expected))
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() < 100 * most


def test_padding_after_the_last_episode_changes_nothing() -> None:
    """A row with many episodes makes the others longer."""
    torch.manual_seed(0)
    core = LSTMCore(ModelConfig(dim=DIM))
    h, episode = torch.randn(2, STEPS, DIM), torch.zeros(2, STEPS, dtype=torch.int64)
    episode[1] = torch.arange(STEPS)
    alone, left, _ = core(h[:1], episode[:1], core.start(1))
    both, after, _ = core(h, episode, core.start(2))
    assert (both[:1] - alone).abs().max() < 1e-6
    for name in ("hidden", "cell"):
        assert (after.carried[name][:1] - left.carried[name]).abs().max() < 1e-6
