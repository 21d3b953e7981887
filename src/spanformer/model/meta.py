"""A module's shapes without its memory: build it on the meta device, up to a limit.

A configuration from a file may ask for any number of layers and any width. Building on the meta device takes no memory,
but still takes time for each module, so the build stops at the first parameter beyond the limit.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

M = TypeVar("M", bound=nn.Module)


class TooLarge(ValueError):
    """The module has more parameters than the limit."""


def build_on_meta(make: Callable[[], M], *, tensors: int | None = None, numbers: int | None = None) -> M:
    """The module that `make` builds, on the meta device. Raises TooLarge if it has more parameters than `tensors`, or
    if they hold more numbers than `numbers`."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _counted(tensors, numbers):
        try:
            return make()
        except (RuntimeError, OverflowError, MemoryError, TypeError) as error:
            if isinstance(error, TypeError) and "Overflow when unpacking" not in str(error):
                raise
            raise TooLarge(f"a tensor has a size that no tensor can have: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def _counted(tensors: int | None, numbers: int | None) -> Iterator[None]:
    """Raise TooLarge at the first parameter that this thread registers beyond one of the limits."""
    count, held, thread = 0, 0, threading.get_ident()

    def watch(_module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, held
        if parameter is None or threading.get_ident() != thread:
            return
        count, held = count + 1, held + parameter.numel()
        if (tensors is not None and count > tensors) or (numbers is not None and held > numbers):
            raise TooLarge(f"there are {count:,} parameters of {held:,} numbers by {name}, and more to come")

    handle = register_module_parameter_registration_hook(watch)
    try:
        yield
    finally:
        handle.remove()
