"""An LSTM over windows that hold several episodes, as one batch of stretches that do not cross an episode's end.

Long Short-Term Memory (Hochreiter and Schmidhuber, 1997), with forget gates

    c_t = σ(f) c_{t−1} + σ(i) tanh(g)        h_t = σ(o) tanh(c_t)        i, f, g, o of x_t and h_{t−1}

PyTorch runs a padded batch by one call of oneDNN and a packed one step by step, some ten times as slow. The end of a
padded stretch is not its last step, so its last state would be lost: one more input, 1 in padding, holds the cell there
(f → ∞, i → −∞), and h is taken from the last real step.

Shapes: B rows, T steps, S stretches of at most L steps, D hidden size.
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
        self.register_buffer("holds", SURE * torch.tensor([-1.0, 1.0, 0.0, 0.0]).repeat_interleave(d)[:, None], False)

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
        row, start, end = stretches(begins)
        keep = ~begins[row, start][:, None]
        token = start[:, None] + torch.arange(int((end - start).max()))
        padding = (token >= end[:, None])[..., None].to(h.dtype)
        x = torch.cat([h[row[:, None], token.clamp(max=steps - 1)], padding], 2)
        found, cells = self._run(x, hidden[row] * keep, cell[row] * keep)
        number = torch.zeros_like(episode).index_put((row, start), torch.ones_like(row)).flatten().cumsum(0) - 1
        number = number.view_as(episode)
        out = found[number, torch.arange(steps) - start[number]]
        after = {"hidden": out[:, -1].detach(), "cell": cells[number[:, -1]].detach(), "episode": episode[:, -1]}
        return out, Carried(after), h.new_zeros(())

    def _weights(self) -> list[Tensor]:
        lstm = self.lstm
        return [lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_ih_l0, lstm.bias_hh_l0]  # pyright: ignore

    def _run(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """x [S, L, D + 1] → h of every step [S, L, D], the last cell [S, D]."""
        first, *others = self._weights()
        weights = [torch.cat([first, self.get_buffer("holds")], 1), *others]
        found, _, cells = torch.lstm(
            x, (hidden[None], cell[None]), weights, True, 1, 0.0, self.training, False, True
        )  # fmt: skip
        return found, cells[0]


def stretches(begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[S] the row, first step and end of each stretch, in order; begins [B, T]: where an episode does."""
    first = begins.clone()
    first[:, 0] = True
    row, start = first.nonzero(as_tuple=True)
    follows = (row.roll(-1) == row) & (start.roll(-1) > start)
    return row, start, torch.where(follows, start.roll(-1), begins.shape[1])
