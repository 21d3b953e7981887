"""A Hugging Face model with a datastore: its keys, and its predictions mixed, in `generate` as well."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spanformer.hf.attach import attach
from spanformer.hf.datastore import HfKeys, retrieving
from spanformer.retrieve import Settings, Store
from spanformer.retrieve.build import Plan, build_store
from spanformer.retrieve.fit import look
from spanformer.retrieve.mixture import Retrieval
from support.hf_models import VOCAB, tiny, tokens
from support.stores import knn_by_hand

TOKENIZER = SimpleNamespace(get_vocab=lambda: {str(n): n for n in range(VOCAB)})
NAMES = ["llama", "qwen3", "mistral", "gpt2", "gpt_neox"]


def text(count: int, seed: int = 1) -> np.ndarray:
    return tokens(count, seed=seed).numpy()


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_the_mixture(tmp_path: Path, name: str) -> None:
    model = tiny(name)
    keys, x = HfKeys(model, TOKENIZER), tokens(2, 30, seed=7)
    build_store(keys, text(90), tmp_path, Plan("float32", context=64))
    store = Store(tmp_path)
    with torch.no_grad():
        plain = model(x).logits
    queries = torch.stack([next(iter(keys.read(row, logits=False))).keys for row in x])
    near = torch.stack(
        [
            torch.stack([knn_by_hand(store.parts[0].keys, store.tokens, q, 5, 9.0, VOCAB) for q in row])
            for row in queries
        ]
    )
    truth = (0.3 * near + 0.7 * plain.double().softmax(-1)).log()
    with retrieving(keys, Retrieval(store, Settings(5, 9.0, 0.3))), torch.no_grad():
        assert torch.allclose(model(x).logits.double(), truth, atol=2e-4)
        assert torch.allclose(model(x, logits_to_keep=1).logits.double(), truth[:, -1:], atol=2e-4)
        made = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=4, do_sample=False)
    assert made[:, 30].tolist() == truth[:, -1].argmax(-1).tolist()
    with torch.no_grad():
        assert torch.equal(model(x).logits, plain)
    with retrieving(keys, Retrieval(store, Settings(5, 9.0, 0.0))), torch.no_grad():
        assert torch.equal(model(x).logits, plain)  # λ = 0, bit for bit


def test_the_key_is_the_normed_input_of_the_last_mlp(tmp_path: Path) -> None:
    model = tiny("llama")
    keys, ids = HfKeys(model, TOKENIZER), text(50)
    build_store(keys, ids, tmp_path, Plan("float32", context=64))
    with torch.no_grad():
        states = model.model(torch.from_numpy(ids[:-1])[None], output_hidden_states=True).hidden_states[-2]
        layer, position = model.model.layers[-1], torch.arange(49)[None]
        mask = torch.full((49, 49), -torch.inf).triu(1)[None, None]
        attended = layer.self_attn(
            layer.input_layernorm(states), position_embeddings=model.model.rotary_emb(states, position),
            attention_mask=mask,
        )[0]  # fmt: skip
        expected = layer.post_attention_layernorm(states + attended)[0]
    assert torch.allclose(Store(tmp_path).parts[0].keys, expected, atol=1e-4)


def test_held_out_text_is_read_in_windows(tmp_path: Path) -> None:
    model = tiny("llama")
    keys, ids = HfKeys(model, TOKENIZER), text(70, seed=4)
    build_store(keys, text(90), tmp_path, Plan("int8", context=32))
    seen = look(keys, Store(tmp_path), ids, 4)
    with torch.no_grad():
        log_probs = torch.cat([model(torch.from_numpy(ids[a : a + 32])[None]).logits[0] for a in (0, 32)]).log_softmax(
            -1
        )
    expected = -log_probs.gather(1, torch.from_numpy(ids[1:65])[:, None])[:, 0]
    assert torch.allclose(seen.nll[:64], expected.double(), atol=1e-4) and len(seen.nll) == 69


def test_spans_make_another_model(tmp_path: Path) -> None:
    """A span-fitted model makes other keys."""
    model = tiny("llama")
    build_store(HfKeys(model, TOKENIZER), text(40), tmp_path, Plan(context=32))
    attach(model, max_span=16)
    fitted = HfKeys(model, TOKENIZER)
    with (
        pytest.raises(ValueError, match="was built by a model with another set of weights, spans or settings"),
        retrieving(fitted, Retrieval(Store(tmp_path), Settings())),
    ):
        pass


def test_a_model_without_a_known_feedforward_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[-1].inner = model.model.layers[-1].mlp
    del model.model.layers[-1].mlp
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layers with a feed-forward named mlp"):
        HfKeys(model, TOKENIZER)
