"""Settings that a checkpoint of the adaptive-span paper's code does not hold.

No torch import here: the command line reads these fields for its help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Options of the paper's code that affect the model but are not in its checkpoints."""

    ramp: float = 32.0
    """length of a span's ramp in tokens: --adapt-span-ramp of the paper's code, 32 in every published model"""
    penalty: float = 2e-6
    """loss per token of a layer's average span, for further training: --adapt-span-loss of the paper's code"""
    dropout: float = 0.0
    """dropout of attention weights and inner activations, for further training: --dropout of the paper's code"""
    embedding_dropout: float = 0.0
    """dropout of embedded tokens and last hidden states, for further training: --emb-dropout of the paper's code"""

    def __post_init__(self) -> None:
        if not 0 < self.ramp < math.inf:
            raise ValueError(f"ramp is {self.ramp}; expected a positive, finite number of tokens")
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"penalty is {self.penalty}; expected a finite number, 0 or more")
        for name in ("dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a share, 0 … 1 without 1")
