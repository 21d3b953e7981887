"""What a checkpoint of the adaptive-span paper's code does not hold.

No torch here: the command line reads these fields for its help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Options of the paper's code that change a model and that its checkpoints do not hold."""

    ramp: float = 32.0
    """tokens of a span's soft edge: --adapt-span-ramp of that code, 32 in every published model"""
    penalty: float = 2e-6
    """loss per token of a layer's average span, for further training: --adapt-span-loss of that code"""
    dropout: float = 0.0
    """of attention weights and inner activations, for further training: --dropout of that code"""
    embedding_dropout: float = 0.0
    """of embedded tokens and the last hidden states, for further training: --emb-dropout of that code"""

    def __post_init__(self) -> None:
        if not 0 < self.ramp < math.inf:
            raise ValueError(f"ramp is {self.ramp}; expected a positive, finite number of tokens")
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"penalty is {self.penalty}; expected a finite number, 0 or more")
        for name in ("dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a share, 0 … 1 without 1")
