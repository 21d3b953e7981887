"""Spans without the model's weights; and a folder with spans that transformers loads alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spanformer import hf
from spanformer.hf.presets import FOLDER
from spanformer.hf.span_file import FILE, read_layers
from support.hf_models import tiny, tokens, transformers


def spread(model):
    torch.manual_seed(4)
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.uniform_(0, 1)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"per": "head"}, {"far_features": 3}])
def test_spans_alone_are_the_spans(name: str, options: dict, tmp_path) -> None:
    model, ids = spread(hf.attach(tiny(name), max_span=40, ramp=4, **options)), tokens(2, 50)
    hf.save_spans(model, tmp_path)
    again = hf.load_spans(tiny(name), tmp_path)
    assert again.config.spanformer == model.config.spanformer
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert (tmp_path / FILE).stat().st_size < 16_000
    hf.load_spans(tiny(name), tmp_path / FILE)  # the file itself, too


def test_spans_fit_the_same_model_in_fewer_bits_and_no_other(tmp_path) -> None:
    hf.save_spans(hf.attach(tiny("llama"), max_span=40), tmp_path)
    rounded = tiny("llama")
    with torch.no_grad():
        for p in rounded.parameters():
            scale = p.abs().max() / 7  # 4 bits for a whole matrix: coarser than any GGUF
            p.copy_((p / scale).round() * scale)
    hf.load_spans(rounded, tmp_path)
    hf.load_spans(tiny("llama").bfloat16(), tmp_path)
    before = tiny("llama", seed=3)
    with pytest.raises(ValueError, match=r"learned for another model: sampled attention weights correlate by -?0\.\d"):
        hf.load_spans(before, tmp_path)
    assert not any("spans" in name for name, _ in before.named_modules())
    with pytest.raises(ValueError, match="spans of a model of type 'llama', and this one is a 'qwen3'"):
        hf.load_spans(tiny("qwen3"), tmp_path)
    with pytest.raises(ValueError, match=r"correlate by 0.00, expected 0.8 or more"):
        hf.load_spans(tiny("llama", num_hidden_layers=2), tmp_path)
    with pytest.raises(ValueError, match="has spans already; detach them first"):
        hf.load_spans(hf.attach(tiny("llama")), tmp_path)


def test_damaged_files(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"has no spans.safetensors; expected a folder that save_spans or fit-spans"):
        hf.load_spans(tiny("llama"), tmp_path)
    hf.save_spans(hf.attach(tiny("llama"), max_span=40), tmp_path)
    file = tmp_path / FILE
    whole, held = file.read_bytes(), {name: t.clone() for name, t in load_file(file).items()}
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cannot be read .*; the file is damaged"):
        hf.load_spans(tiny("llama"), tmp_path)
    save_file(held, file)
    with pytest.raises(ValueError, match=r"is not a file of spans; expected one that save_spans or fit-spans wrote"):
        hf.load_spans(tiny("llama"), tmp_path)
    settings = {"max_span": 40, "ramp": 32.0, "per": "kv_head", "sink_tokens": 4}

    def write(tensors: dict, settings: dict = settings) -> None:
        about = json.dumps({"model_type": "llama", "settings": settings})
        save_file(tensors, file, {"format": "pt", "spanformer": about})

    write({name: t for name, t in held.items() if name != "fingerprint"})
    with pytest.raises(ValueError, match="holds no fingerprint of its model"):
        hf.load_spans(tiny("llama"), tmp_path)
    write(held, settings | {"ramp": "long"})
    with pytest.raises(ValueError, match=r'"spanformer" in .*spans.safetensors is .*expected max_span, ramp, per'):
        hf.load_spans(tiny("llama"), tmp_path)
    write(held | {"model.layers.1.self_attn.spans.ratio": torch.tensor([0.5, 2.0])})
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"expected \[2\] ratios from 0 to 1"):
        hf.load_spans(model, tmp_path)
    with pytest.raises(ValueError, match="has no spans"):  # nothing half attached
        hf.head_spans(model)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        hf.save_spans(hf.attach(tiny("llama")), tmp_path / "file")
    with pytest.raises(ValueError, match="has no spans"):
        hf.save_spans(tiny("llama"), tmp_path)


def test_card_names_memory_windows_and_what_was_measured(tmp_path) -> None:
    model = spread(hf.attach(tiny("llama"), max_span=40, ramp=1))
    hf.save_spans(model, tmp_path)
    card = (tmp_path / "README.md").read_text()
    kept, full = hf.cache_bytes(model, 160)
    assert f"| 160 | {kept / 1000:.1f} kB | {full / 1000:.1f} kB | {kept / full:.3f} |" in card
    for n, spans in enumerate(hf.head_spans(model).values()):
        assert f"| {n} | {', '.join(map(str, spans.keeps()))} |" in card
    assert "was not measured" in card and "base_model" not in card
    model.config._name_or_path = "someone/tiny-llama"
    hf.save_spans(model, tmp_path, {"context": 40, "bits_per_byte": {"full": 1.0, "fitted spans": 1.01}})
    card = (tmp_path / "README.md").read_text()
    assert "base_model: someone/tiny-llama\n" in card and "| fitted spans | 1.0100 | +1.00 % |" in card
    assert "was not measured" not in card


ALONE = """
import sys, transformers
try:
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    print("said:", error)
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa")
assert not any(name.startswith("spanformer") for name in sys.modules)
"""


def test_transformers_alone_says_that_it_has_not_the_spans(tmp_path) -> None:
    model, ids = spread(hf.attach(tiny("llama"), max_span=40)), tokens(1, 50)
    model.save_pretrained(tmp_path)
    found = subprocess.run([sys.executable, "-c", ALONE, tmp_path], capture_output=True, text=True, check=True)
    assert 'said: Specified `attn_implementation="spanformer"` is not supported' in found.stdout
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)  # here spanformer.hf is imported
    with pytest.raises(ValueError, match=r"has no spans.* load a folder with spans by spanformer.hf.from_pre"):
        loaded(ids)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    hf.detach(model)
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "detached")
    assert "spanformer" not in (tmp_path / "detached" / "config.json").read_text()


def test_presets_are_the_published_windows() -> None:
    """SmolLM2's, and they fit no other model."""
    results = Path(__file__).parents[2] / "docs" / "results" / "fit-spans.json"
    parts = json.loads(results.read_text())["parts"]
    for name in hf.presets():
        model, found = re.fullmatch(r"(SmolLM2-135M-Instruct)-1of(\d)", name).groups()  # type: ignore[union-attr]
        layers, fingerprint = read_layers(f"preset:{name}", 9, 3)
        assert [spans.keeps() for spans in layers] == parts[f"fit:prose:{found}"]["found"]["windows"]
        whole = [[n >= 2044 for n in spans.keeps()] for spans in layers]
        assert whole == [[b == 1 for b in spans.growths()] for spans in layers]
        assert fingerprint.isfinite().all() and model in (FOLDER / name / "README.md").read_text()
    assert len(hf.presets()) == 4
    with pytest.raises(ValueError, match=r"were learned for another model|spans of a model of type"):
        hf.load_spans(tiny("llama"), f"preset:{name}")
    with pytest.raises(ValueError, match=r"there is no preset 'none'; expected one of SmolLM2-135M-Instruct-1of2, "):
        hf.load_spans(tiny("llama"), "preset:none")
