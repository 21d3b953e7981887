"""Run a model with another attention function for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from spanformer.hf.attention import make_mask


@contextmanager
def attention_replaced(model: PreTrainedModel, name: str, function: Callable) -> Iterator[None]:
    """While it runs, `function` is called in the place of the model's attention function, registered under `name`."""
    before = model.config._attn_implementation
    assert before is not None
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, make_mask)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)
