"""A class that is used without its spec has the same defaults."""

from __future__ import annotations

import inspect

import pytest

from spanformer.kinds import KINDS, Section


@pytest.mark.parametrize("name", list(KINDS))
def test_class_has_the_defaults_of_its_spec(name: str) -> None:
    kind = KINDS[name]
    cls = getattr(kind.make(), "__self__", None)
    taken = inspect.signature(cls.__init__).parameters if cls is not None else {}
    for param, default in kind.params.items():
        own = taken[param].default if param in taken else inspect.Parameter.empty
        if own is not inspect.Parameter.empty and own is not None:
            assert own == (getattr(Section(), param) if default is None else default), param


def test_big_bird_is_among_them() -> None:
    """One that has defaults in both places, so that the test above compares something."""
    cls = KINDS["big_bird"].make().__self__  # pyright: ignore[reportFunctionMemberAccess]
    assert inspect.signature(cls.__init__).parameters["block"].default == KINDS["big_bird"].params["block"] == 16
