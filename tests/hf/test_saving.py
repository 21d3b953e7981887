"""Saved and loaded again with spans, and exported as plain windows."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from spanformer import hf
from spanformer.hf.export import mean_loss, plan_windows
from support.hf_models import tiny, tokens, transformers


def spread(model, low: float = 0.0, high: float = 1.0, seed: int = 4):
    """Different spans for all heads."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.uniform_(low, high)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("shards", [False, True])
def test_round_trip(name: str, shards: bool, tmp_path) -> None:
    model, ids = spread(hf.attach(tiny(name), max_span=40, ramp=4, per="head", sink_tokens=2)), tokens(2, 50)
    model.save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if shards else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == shards
    assert not [p for p in tmp_path.iterdir() if p.suffix not in (".json", ".safetensors")]
    again = hf.from_pretrained(tmp_path).eval()
    assert type(again) is type(model) and again.config.spanformer == model.config.spanformer
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    again.save_pretrained(tmp_path / "again")
    twice = hf.from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        assert torch.equal(twice(ids).logits, model(ids).logits)
    hf.detach(again)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, again(ids).logits)  # without us: the model without spans
    with pytest.raises(ValueError, match="has no spans to detach"):
        hf.detach(plain)
    kind = type(model)
    assert not any("spans" in key for key in kind._keys_to_ignore_on_load_unexpected or [])


def test_ratios_stay_exact_in_a_small_dtype(tmp_path) -> None:
    model = spread(hf.attach(tiny("llama").bfloat16(), max_span=40))
    model.save_pretrained(tmp_path)
    again = hf.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    pairs = zip(hf.head_spans(model).values(), hf.head_spans(again).values(), strict=True)
    assert all(torch.equal(a.ratio, b.ratio) for a, b in pairs)


def test_what_cannot_be_loaded(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"has no config.json; expected a folder that save_pretrained wrote"):
        hf.from_pretrained(tmp_path)
    tiny("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"holds no spans.*load it with AutoModelForCausalLM, then attach"):
        hf.from_pretrained(tmp_path / "plain")
    folder = tmp_path / "spans"
    hf.attach(tiny("llama")).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    key = "model.layers.1.self_attn.spans.ratio"
    for wrong in (torch.tensor([0.5, 1.5]), torch.tensor([0.5, torch.nan]), torch.tensor([0.5])):
        save_file(weights | {key: wrong}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"layers.1.self_attn.spans.ratio in .* expected \[2\] ratios from 0 to 1"):
            hf.from_pretrained(folder)
    save_file({k: t for k, t in weights.items() if k != key}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"do not fit its model: model.layers.1.self_attn has spans in only one of the two"
    ):
        hf.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["spanformer"]["max_span"] = "long"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r'"spanformer" in .*config.json is .*expected max_span, ramp, per, sink_tokens'
    ):
        hf.from_pretrained(folder)


def test_one_window_keeps_the_fewest_tokens() -> None:
    model = hf.attach(tiny("llama"), max_span=100, ramp=4, sink_tokens=0)
    for spans, ratios in zip(hf.head_spans(model).values(), ([0.0, 0.06], [0.16, 0.125], [0.96, 0.01]), strict=True):
        with torch.no_grad():
            spans.ratio.copy_(torch.tensor(ratios))
    longest = plan_windows(model, how="longest", context=90)
    assert longest.wanted == [10, 20, 100] and longest.sliding_window == 20 and longest.tokens == 20 + 20 + 90
    assert longest.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert plan_windows(model, how="mean", context=90).wanted == [7, 19, 53]
    assert plan_windows(model, how="shortest", context=90).wanted == [4, 17, 5]
    by_hand = {w: sum(w if n <= w else 90 for n in longest.wanted) for w in (10, 20, 100)}
    assert min(by_hand, key=by_hand.__getitem__) == 20


ALL = {"layer_types": ["full_attention"] * 3}


@pytest.mark.parametrize("name, changes", [("llama", {}), ("qwen3", {}), ("gemma3", ALL)])
def test_windows_are_a_model_any_engine_reads(name: str, changes: dict, tmp_path) -> None:
    """A uniform span with the sharpest ramp is a window, so the exported model must then agree."""
    model, ids = tiny(name, **changes), tokens(1, 60)
    hf.attach(model, max_span=64, init=0.25, ramp=1e-3, sink_tokens=0)
    other, windows = hf.to_windows(model, context=60)
    assert windows.sliding_window == 17 and windows.layer_types == ["sliding_attention"] * 3
    with torch.no_grad():
        assert (other(ids).logits - model(ids).logits).abs().max() < 2e-5
    other.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.sliding_window == 17 and loaded.config.layer_types == windows.layer_types
    assert "spanformer" not in json.loads((tmp_path / "config.json").read_text())
    assert getattr(loaded.config, "max_window_layers", 0) == 0  # vLLM's Qwen would show all layers everything
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, other(ids).logits)
    losses = hf.compare_losses(model, ids)
    own = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).detach()
    assert losses["spans"] == pytest.approx(float(own), abs=1e-5) == pytest.approx(losses["windows"], abs=1e-4)


def test_price_of_windows_is_measured() -> None:
    model, ids = spread(hf.attach(tiny("llama"), max_span=64, ramp=4)), tokens(2, 60)
    found = hf.compare_losses(model, ids, how="shortest")
    other, _ = hf.to_windows(model, how="shortest", context=60)
    assert found == {"spans": mean_loss(model, ids), "windows": mean_loss(other, ids)}
    assert found["spans"] != found["windows"]


def test_what_cannot_be_exported() -> None:
    for name, reason in (
        ("gpt2", "GPT2LMHeadModel has no windows by layer"),
        ("gemma3", "Gemma3ForCausalLM has a sliding window besides its spans"),
    ):
        with pytest.raises(ValueError, match=reason):
            hf.to_windows(hf.attach(tiny(name)))
    config = transformers.Cohere2Config(
        hidden_size=32, num_hidden_layers=3, vocab_size=97, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, pad_token_id=0, initializer_range=0.3, **ALL,
    )  # fmt: skip
    with pytest.raises(ValueError, match="Cohere2ForCausalLM has layers with a window that differ from others in more"):
        hf.to_windows(hf.attach(transformers.AutoModelForCausalLM.from_config(config), max_span=64, init=0.3))
    peft = pytest.importorskip("peft", reason='needs peft: pip install "spanformer[dev]"')
    adapted = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match=r"the model has PEFT adapters; export model.merge_and_unload\(\)"):
        hf.to_windows(hf.attach(adapted))
    model = hf.attach(tiny("llama"))
    with pytest.raises(ValueError, match="how is 'median'; expected 'longest', 'mean' or 'shortest'"):
        hf.to_windows(model, how="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ids has shape \[3\]; expected \[N, T\]"):
        mean_loss(model, torch.zeros(3, dtype=torch.long))
