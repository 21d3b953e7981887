"""The KV cache under random sequences of operations; `make torture` tries many more of them."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

from support.cache_machine import CacheMachine

torch.set_num_threads(1)


class TestCacheMachine(CacheMachine.TestCase):
    settings = settings(
        max_examples=20, stateful_step_count=25, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
