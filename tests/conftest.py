"""Uninitialised memory is NaN in every test, so that a kernel which forgets to write an element is caught."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # see below
from torch import Tensor

POISONED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

# torch.compile (when imported) and `with torch.device(...)` (when first used) remember torch's functions by identity:
# let both remember the real ones, or they would not recognise them while they are replaced.
with torch.device("cpu"):
    torch.zeros(())


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, with what it returns full of NaN where that is real memory of a floating dtype."""

    @functools.wraps(make)
    def empty(*args, **kwargs) -> Tensor:
        made = make(*args, **kwargs)
        if torch.compiler.is_compiling():
            return made
        # A fake or functional tensor is a subclass: it stands for a graph's value and has no memory.
        if type(made) is Tensor and made.dtype in POISONED and made.device.type != "meta":
            made.detach().fill_(math.nan)
        return made

    return empty


@pytest.fixture(autouse=True)
def nan_in_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
