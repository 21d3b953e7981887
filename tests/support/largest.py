"""How large the largest tensor is that some work makes, so that a square of the sequence does not go unseen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def largest_tensor(work: Callable[[], object]) -> int:
    """The most numbers in one tensor that torch's operations give; what broadcasts without a copy counts as it is
    stored."""

    class Watch(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            for t in found if isinstance(found, tuple | list) else [found]:
                if isinstance(t, torch.Tensor):
                    self.most = max(self.most, t.untyped_storage().nbytes() // t.element_size())
            return found

    with Watch() as watch:
        work()
    return watch.most
