"""generate() with attached spans in every decoding mode."""

from __future__ import annotations

import pytest
import torch

from support.hf_models import CONFIGS, tiny, tokens

pytest.importorskip("transformers")

from spanformer import hf

MODES: dict[str, dict] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True, "top_k": 20},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
}


def generate(model, ids, mask=None, **options):
    torch.manual_seed(5)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, pad_token_id=0, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_every_mode_at_full_span_is_the_models_own(name: str, mode: str) -> None:
    model, ids = tiny(name), tokens(1, 13).repeat(1, 2)
    own = generate(model, ids, **MODES[mode])
    hf.attach(model)
    assert torch.equal(generate(model, ids, **MODES[mode]), own)


@pytest.mark.parametrize("name", CONFIGS)
def test_short_spans_greedy_is_one_pass_at_a_time(name: str) -> None:
    model, ids = tiny(name), tokens(2, 21)
    hf.attach(model, max_span=40, init=0.1, ramp=4, sink_tokens=2)
    made = generate(model, ids)
    for n in range(12):
        with torch.no_grad():
            last = model(made[:, : 21 + n]).logits[:, -1]
        assert torch.equal(last.argmax(-1), made[:, 21 + n])


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_left_padding_changes_nothing(mode: str) -> None:
    model, ids = tiny("llama"), tokens(2, 21)
    hf.attach(model, max_span=40, init=0.1, ramp=4, sink_tokens=2)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    alone = generate(model, ids[1:, 8:], **MODES[mode])[:, 13:]
    assert torch.equal(generate(model, ids, mask, **MODES[mode])[1:, 21:], alone)


def test_assisted_by_another_model() -> None:
    model, ids = tiny("llama"), tokens(1, 15)
    hf.attach(model, max_span=40, init=0.1, ramp=4, sink_tokens=2)
    assert torch.equal(generate(model, ids, assistant_model=tiny("llama", seed=7)), generate(model, ids))
