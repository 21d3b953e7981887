"""Check that tensors match a model's names and shapes before loading them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Sequence[int]]:
    return {name: t.shape for name, t in tensors.items()}


def misfit(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]]) -> str | None:
    """The first difference between names and shapes of tensors and the expected ones, as "it …", or None."""
    for name, shape in wanted.items():
        if name not in found:
            return f"it has no {name}, expected with shape {list(shape)}"
        if list(found[name]) != list(shape):
            return f"its {name} has shape {list(found[name])}, expected {list(shape)}"
    unknown = next((name for name in found if name not in wanted), None)
    return None if unknown is None else f"it has {unknown!r}, which such a model does not have"
