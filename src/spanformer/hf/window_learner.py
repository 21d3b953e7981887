"""What `learn` learns: log w of every key/value head at one length of text, or at two.

With two lengths n₁ < n₂ a window is the line through both, w(n) = w₂ + b·(n − n₂) with b = (w₂ − w₁) / (n₂ − n₁). Both
lengths have the same share of memory as their budget, so all lengths have it. With one, b is 0.

Shapes: L layers, H key/value heads of a layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.model.budget import Budget, Price

MOST = 1 - 2**-20
"""the growth of a head that is not unlimited"""


class WindowLearner:
    """budgets: of the texts' length, and of a shorter one if windows grow with the text. price: of a token at first."""

    def __init__(self, windows: Tensor, price: float, budgets: list[Budget], *, lr: float, shortest: float) -> None:
        self.budgets, self.shortest, self.lr = budgets, shortest, lr
        share = [b.context / budgets[0].context for b in budgets]
        self.theta = [nn.Parameter((windows * each).clamp(min=shortest).log()) for each in share]
        self.prices = [Price(price / len(budgets) if math.isfinite(price) else 0.0) for _ in budgets]
        self.adam = torch.optim.Adam(self.theta, lr=lr, betas=(0.8, 0.95))
        self.tables: list[Tensor] = []

    def soft(self, ramp: float) -> tuple[Tensor, Tensor]:
        """(windows at the texts' length, growth), each [L, H], within the budgets."""
        self.tables = [
            budget.fit(theta.detach().exp(), shortest=self.shortest, spare=ramp / 2)
            for budget, theta in zip(self.budgets, self.theta, strict=True)
        ]
        with torch.no_grad():
            for theta, table in zip(self.theta, self.tables, strict=True):
                theta.copy_(table.log())
        return self._line(self.tables)

    def step(self, slope: Tensor, growth_slope: Tensor, scale: float) -> tuple[float, float]:
        """Adam's step from the loss's derivatives by windows and growths [L, H]; scale: of the learning rate. Returns
        the price and the gradient's norm."""
        self.adam.param_groups[0]["lr"] = self.lr * scale
        slopes = [slope]
        if len(self.budgets) == 2:
            per_token = growth_slope / (self.budgets[0].context - self.budgets[1].context)
            slopes = [slope + per_token, -per_token]
        paid = [price.step(each) for price, each in zip(self.prices, slopes, strict=True)]
        for theta, each, price, table in zip(self.theta, slopes, paid, self.tables, strict=True):
            theta.grad = (each + price) * table
        self.adam.step()
        return sum(paid), math.hypot(*(float(t.grad.norm()) for t in self.theta if t.grad is not None))

    def whole(self, served: Budget | None = None) -> tuple[Tensor, Tensor]:
        """(whole windows int64, growth), each [L, H], within the budgets, and within that of texts of the length to be
        served."""
        tables = [b.whole(b.fit(t.detach().exp())).float() for b, t in zip(self.budgets, self.theta, strict=True)]
        windows, growth = self._line(tables)
        windows = windows.floor()
        if served is not None:
            growth = grow_within(windows, growth, self.budgets[0], served)
        return windows.long(), growth

    def _line(self, tables: list[Tensor]) -> tuple[Tensor, Tensor]:
        """A window neither shrinks with the text nor grows faster than it."""
        if len(tables) == 1:
            return tables[0], torch.zeros_like(tables[0])
        late, early = tables
        apart = self.budgets[0].context - self.budgets[1].context
        late = torch.minimum(late, early + apart)
        return late, (late - early).clamp(min=0) / apart


def grow_within(windows: Tensor, growth: Tensor, budget: Budget, served: Budget) -> Tensor:
    """The growths times one factor, so that windows [L, H] of texts of the budget's length take the served budget at
    its length. A head that keeps the whole text is unlimited (1) if there is room for that; others grow by less."""
    goal = (served.tokens - float(served.aside.double().mean())) * windows.numel()

    def tokens(growth: Tensor) -> float:
        kept = (windows + growth.double() * (served.context - budget.context)).ceil()
        return float(kept.clamp(min=1).minimum(served.longest).sum())

    whole = (windows >= budget.longest) & (growth >= 1)
    some = whole if tokens(whole.to(growth)) <= goal else torch.zeros_like(whole)

    def scaled(factor: float) -> Tensor:
        return torch.where(some, 1.0, (growth * factor).clamp(max=MOST)).to(growth)

    others = growth[~some]
    low, high = 0.0, 1 / max(float(others.min()) if len(others) else 1.0, 1e-3)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens(scaled(middle)) <= goal else (low, middle)
    return scaled(low)
