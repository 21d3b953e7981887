"""Whether tensors are the ones a model has, before they are loaded into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def misfit(found: Mapping[str, Tensor], wanted: Mapping[str, Sequence[int]]) -> str | None:
    """The first way in which the tensors differ from the wanted names and shapes, as "it ...", or None."""
    for name, shape in wanted.items():
        if name not in found:
            return f"it has no {name}, expected with shape {list(shape)}"
        if list(found[name].shape) != list(shape):
            return f"its {name} has shape {list(found[name].shape)}, expected {list(shape)}"
    unknown = next((name for name in found if name not in wanted), None)
    return None if unknown is None else f"it has {unknown!r}, which such a model does not have"
