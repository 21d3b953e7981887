"""An LSTM over windows that hold several episodes, in one call.

Long Short-Term Memory (Hochreiter and Schmidhuber, 1997), with forget gates

    c_t = σ(f) c_{t−1} + σ(i) tanh(g)        h_t = σ(o) tanh(c_t)        i, f, g, o of x_t and h_{t−1}

PyTorch runs a whole batch by one call of oneDNN, which knows nothing of episodes; a packed batch runs step by step,
some ten times as slow. So a step whose gates are all shut (i, f, o → −∞) is put in before each episode: it leaves h = 0
and c = 0. Rows with fewer episodes end in padding that keeps the cell (f → ∞, i → −∞); h is taken from the last real
step.

Shapes: B rows, T steps, L steps with those put in, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spanformer.model.config import ModelConfig
from spanformer.rl.memory import Carried

SURE = 1e4
"""a gate's input at which it is 0 or 1"""


class LSTMCore(nn.Module):
    """One LSTM layer, whose state begins at 0 with each episode."""

    remembers = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.dim
        self.lstm = nn.LSTM(d, d, batch_first=True)
        # of the gates i, f, g, o: an episode begins, and padding
        gates = SURE * torch.tensor([[-1.0, -1.0, 0.0, -1.0], [-1.0, 1.0, 0.0, 0.0]])
        self.register_buffer("shut", gates.repeat_interleave(d, 1).t().contiguous(), persistent=False)

    def start(self, rows: int) -> Carried:
        zeros = torch.zeros(rows, self.lstm.hidden_size)
        return Carried({"hidden": zeros, "cell": zeros.clone(), "episode": torch.full((rows,), -1)})

    def forward(self, h: Tensor, episode: Tensor, memory: Carried) -> tuple[Tensor, Carried, Tensor]:
        hidden, cell, before = (memory.carried[name] for name in ("hidden", "cell", "episode"))
        h, steps = h.relu(), h.shape[1]
        begins = episode != torch.cat([before[:, None], episode[:, :-1]], 1)
        if steps == 1:  # acting
            same = (~begins).to(h.dtype)
            hidden, cell = torch.lstm_cell(h[:, 0], (hidden * same, cell * same), *self._weights())
            after = {"hidden": hidden.detach(), "cell": cell.detach(), "episode": episode[:, -1]}
            return hidden[:, None], Carried(after), h.new_zeros(())
        at = torch.arange(steps) + begins.cumsum(1)  # where each step stands among those put in
        length = int(at[:, -1].max()) + 1
        index = at[..., None].expand_as(h)
        x = h.new_zeros(len(h), length, h.shape[2]).scatter(1, index, h)
        gates = h.new_zeros(len(h), length, 2)
        row, step = begins.nonzero(as_tuple=True)
        gates[row, at[row, step] - 1, 0] = 1
        gates[..., 1] = torch.arange(length) > at[:, -1:]
        found, cell = self._run(torch.cat([x, gates], 2), hidden, cell)
        out = found.gather(1, index)
        after = {"hidden": out[:, -1].detach(), "cell": cell.detach(), "episode": episode[:, -1]}
        return out, Carried(after), h.new_zeros(())

    def _weights(self) -> list[Tensor]:
        lstm = self.lstm
        return [lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0]  # pyright: ignore

    def _run(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, L, D + 2] → h of every step [B, L, D], the last cell [B, D]."""
        first, *others = self._weights()
        weights = [torch.cat([first, self.get_buffer("shut")], 1), *others]
        found, _, cells = torch.lstm(
            x, (hidden[None], cell[None]), weights, True, 1, 0.0, self.training, False, True
        )  # fmt: skip
        return found, cells[0]
