"""Windows written into GGUF files: nothing quantised changes, and what cannot be written is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from spanformer import hf
from spanformer.cli.main import main
from spanformer.hf.gguf_export import export_gguf
from spanformer.hf.gguf_file import read_gguf, write_gguf
from support.gguf_models import gguf, model_of, save_gguf, spread, unpacked
from support.hf_models import tiny, transformers


@pytest.fixture
def llama(tmp_path: Path):
    """(the folder, its model with spans): model.gguf and the folder `spans`"""
    model = model_of("llama")
    save_gguf(model, tmp_path / "model.gguf")
    hf.save_spans(spread(model), tmp_path / "spans")
    return tmp_path, model


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_1", "Q5_0"])
def test_a_llama_keeps_every_byte(quantisation: str, llama) -> None:
    folder, model = llama
    hf.detach(model)
    source, out = folder / "m.gguf", folder / "out.gguf"
    save_gguf(model, source, quantisation)
    found = export_gguf(source, folder / "spans", out)
    assert found.windows.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert found.windows.sliding_window == 19
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(out)
    names = [t.name for t in before.tensors]
    assert [t.name for t in after.tensors] == names + [f"blk.{n}.attn_sinks.weight" for n in range(3)]
    for a, b in zip(before.tensors, after.tensors, strict=False):
        assert (
            a.tensor_type == b.tensor_type and a.data.tobytes() == b.data.tobytes() and list(a.shape) == list(b.shape)
        )
    for n in range(3):
        sinks = torch.linspace(-2, 1, 4) - int(n == 1)
        assert torch.equal(unpacked(out)[f"blk.{n}.attn_sinks.weight"], sinks)

    def value(reader, name: str):
        return reader.fields[name].contents()

    assert value(after, "general.architecture") == "granite_swa"
    assert value(after, "granite_swa.attention.sliding_window_pattern") == [True, False, True]
    assert value(after, "granite_swa.attention.sliding_window") == 19
    assert value(after, "granite_swa.logit_scale") == 1.0
    for name in before.fields:
        if not name.startswith(("GGUF.", "general.architecture")):
            assert value(before, name) == value(after, name.replace("llama.", "granite_swa.", 1)), name
    assert not [name for name in after.fields if name.startswith("llama.")]


def rotate(x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """x [T, D] at positions 0 … T − 1; pairs [D/2, 2]: the numbers that turn together."""
    t, d = x.shape
    angle = torch.arange(t).double()[:, None] * 10000 ** (-2 * torch.arange(d // 2).double() / d)
    a, b = x[:, pairs[:, 0]], x[:, pairs[:, 1]]
    out = torch.empty_like(x)
    out[:, pairs[:, 0]] = a * angle.cos() - b * angle.sin()
    out[:, pairs[:, 1]] = b * angle.cos() + a * angle.sin()
    return out


def test_rows_of_qwen2_make_the_same_scores(tmp_path: Path) -> None:
    """Its rotation turns i with i + D/2, the written file's turns 2i with 2i + 1: scores are the same."""
    model = model_of("qwen2")
    save_gguf(model, tmp_path / "m.gguf", "Q8_0")
    hf.save_spans(spread(model, sink_logits=False), tmp_path / "spans")
    export_gguf(tmp_path / "m.gguf", tmp_path / "spans", tmp_path / "out.gguf")
    before, after = unpacked(tmp_path / "m.gguf"), unpacked(tmp_path / "out.gguf")
    assert set(after) - set(before) == {f"blk.{n}.attn_sinks.weight" for n in range(3)}
    assert float(after["blk.0.attn_sinks.weight"].max()) == -1e4
    x = torch.randn(9, 64, dtype=torch.float64)
    for n in range(3):
        for held, pairs in (
            (before, torch.stack([torch.arange(8), torch.arange(8) + 8], 1)),
            (after, torch.arange(16).view(8, 2)),
        ):
            q, k = (
                (x @ held[f"blk.{n}.attn_{one}.weight"].double().T + held[f"blk.{n}.attn_{one}.bias"].double())
                .unflatten(1, (-1, 16)).transpose(0, 1)
                for one in "qk"
            )  # fmt: skip
            q, k = (torch.stack([rotate(head, pairs) for head in each]) for each in (q, k))
            scores = q @ k.repeat_interleave(2, 0).transpose(1, 2)
            if held is before:
                want = scores
        assert (scores - want).abs().max() < 1e-9 * want.abs().max()
    for name in before:
        if "attn_q" not in name and "attn_k" not in name:
            assert torch.equal(before[name], after[name]), name


def test_memory_is_that_of_llama_cpp_s_cells(llama) -> None:
    folder, _ = llama
    found = export_gguf(folder / "model.gguf", folder / "spans", folder / "out.gguf")
    token = 2 * 2 * 16 * 2  # keys and values, two KV heads of 16 numbers in 16 bits
    assert found.kv_bytes(4096, 100) == ((2 * 256 + 4096) * token, 3 * 4096 * token)  # 19 + 100 cells are 256
    assert found.kv_bytes(4000, 512) == ((2 * 768 + 4096) * token, 3 * 4096 * token)
    assert found.kv_bytes(200, 512) == (3 * 256 * token, 3 * 256 * token)


def test_granite_computes_what_the_spans_do(tmp_path: Path) -> None:
    """A form of its own in transformers, with sink logits: the same logits, and what a folder of it says."""
    ids = torch.randint(2, 97, (2, 60), generator=torch.Generator().manual_seed(1))
    for kind in ("llama", "qwen2"):
        model = spread(model_of(kind))
        with torch.no_grad():
            for n, spans in enumerate(hf.head_spans(model).values()):
                spans.ratio.fill_(1.0 if n == 1 else 0.3)
            other, windows = hf.to_granite(model, context=60)
            assert windows.sliding_window == 19 and windows.layer_types[1] == "full_attention"
            want = model(ids).logits
            assert (other(ids).logits - want).abs().max() < 2e-5 * want.abs().max()
            other.save_pretrained(tmp_path / kind)
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
            assert torch.equal(again(ids).logits, other(ids).logits) and again.config.model_type == "granite_swa"
    with pytest.raises(ValueError, match="has learned sink logits, which only the form of GraniteSWA holds"):
        hf.to_windows(model, context=60)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM cannot become a GraniteSWA; expected a model of type llama"):
        hf.to_granite(hf.attach(tiny("qwen3")), context=60)
    with pytest.raises(ValueError, match=r"heads of 32 numbers, and a GraniteSWA's have hidden_size / heads = 8"):
        hf.to_granite(hf.attach(tiny("llama", head_dim=32)), context=60)


def test_sink_logits_are_saved_and_cached(tmp_path: Path) -> None:
    model, ids = spread(model_of("llama")), torch.randint(2, 97, (1, 60))
    with torch.no_grad():
        whole, cache = model(ids, use_cache=False).logits, hf.SpanCache(model)
        parts = [model(part, past_key_values=cache).logits for part in ids.split((30, 1, 1, 28), 1)]
        assert (torch.cat(parts, 1) - whole).abs().max() < 2e-5 * whole.abs().max()
        model.save_pretrained(tmp_path)
        assert torch.equal(hf.from_pretrained(tmp_path).eval()(ids).logits, whole)
    with pytest.raises(ValueError, match=r"sink_logits are given beside far_features=2; linear states have none"):
        hf.attach(model_of("llama"), sink_logits=True, far_features=2)
    with pytest.raises(ValueError, match=r"has learned sink logits of its own \(s_aux\); attach spans without"):
        hf.attach(tiny("gpt_oss"), sink_logits=True)(ids)


def test_command_says_what_it_wrote(llama, capsys: pytest.CaptureFixture) -> None:
    folder, _ = llama
    main(
        ["export-gguf", str(folder / "model.gguf"), str(folder / "spans"), str(folder / "out.gguf"), "--ubatch", "100"]
    )
    shown = capsys.readouterr().out
    assert "2 of 3 layers have a window of 19 tokens, the others see all" in shown
    assert "8,192 tokens: a KV cache of 1.1 MB of 3.1 MB, in 16 bits" in shown and "llama-server -m" in shown
    assert "not in the file: windows of heads that differ in a layer. fit-spans --per layer" in shown


def test_what_the_file_cannot_hold_is_named(tmp_path: Path) -> None:
    model = model_of("llama")
    save_gguf(model, tmp_path / "model.gguf")
    spread(model, sink_logits=False)
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.fill_(0.2)
            spans.growth.fill_(0.5)
    hf.save_spans(model, tmp_path / "spans")
    found = export_gguf(tmp_path / "model.gguf", tmp_path / "spans", tmp_path / "out.gguf")
    assert found.lost == ("4 sink tokens, without sink logits in their place", "windows that grow with the text")
    far = hf.attach(hf.detach(model), max_span=60, far_features=2)
    hf.save_spans(far, tmp_path / "far")
    with pytest.raises(ValueError, match=r"far.* has linear states, which no other engine computes; fit without them"):
        export_gguf(tmp_path / "model.gguf", tmp_path / "far", tmp_path / "no.gguf")
    assert not (tmp_path / "no.gguf").exists()


def test_what_cannot_be_exported(llama, tmp_path: Path) -> None:
    folder, model = llama
    source, spans, out = folder / "model.gguf", folder / "spans", folder / "new.gguf"

    def refused(said: str, source: Path = source, spans: Path = spans) -> None:
        with pytest.raises(ValueError, match=said):
            export_gguf(source, spans, out)
        assert not out.exists() and not list(folder.glob(".*"))

    whole = source.read_bytes()
    for length in (10, 200, 2000, len(whole) - 100):
        (folder / "cut.gguf").write_bytes(whole[:length])
        refused(r"cut.gguf.*(damaged|not a GGUF)", folder / "cut.gguf")
    (folder / "cut.gguf").write_bytes(b"GGML" + whole[4:])
    refused("is not a GGUF file of version 2 or 3; give another one", folder / "cut.gguf")
    refused("has no spans.safetensors; expected a folder that fit-spans or save_spans wrote", spans=folder / "none")
    gemma = read_gguf(source)
    gemma.values["general.architecture"] = type(gemma.values["general.architecture"])(8, b"\6\0\0\0\0\0\0\0gemma3")
    write_gguf(folder / "gemma.gguf", gemma)
    refused("is of architecture 'gemma3'; windows can be written into llama and qwen2", folder / "gemma.gguf")
    hf.detach(model)
    save_gguf(model, folder / "moe.gguf", expert_count=4)
    refused("is of architecture a 'llama' with experts", folder / "moe.gguf")
    save_gguf(model_of("llama", seed=5), folder / "other.gguf")
    refused("learned for another model: sampled attention weights correlate by", folder / "other.gguf")
    at = whole.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    (folder / "unknown.gguf").write_bytes(whole[:at] + b"\xee\0\0\0" + whole[at + 4 :])
    refused(r"blk.0.attn_q.weight has quantisation 238, which is unknown here; expected F32", folder / "unknown.gguf")
    out.write_text("")
    with pytest.raises(ValueError, match=r"new.gguf already exists; choose another file"):
        export_gguf(source, spans, out)
