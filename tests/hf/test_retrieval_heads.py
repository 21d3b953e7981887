"""Retrieval heads of Hugging Face models: against full attention, decoding against one pass, certificates, bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from spanformer import hf
from spanformer.hf.retrieval_cache import RetrievalCache
from spanformer.hf.retrieval_heads import retrieve, retriever_of, stop_retrieving
from support.hf_models import tiny, tokens


def made(share: float = 0.5, ring: int = 8, k: int = 5, name: str = "llama"):
    model = hf.attach(tiny(name), max_span=64, ramp=4, sink_tokens=3)
    torch.manual_seed(2)
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.uniform_(0.05, 0.6)
    return retrieve(model, share=share, ring=ring, k=k)


def test_heads_with_the_longest_spans_retrieve_and_get_a_short_ring() -> None:
    model = hf.attach(tiny("llama"), max_span=64, ramp=4, sink_tokens=3)
    layers = list(hf.head_spans(model).values())
    with torch.no_grad():
        for n, spans in enumerate(layers):
            spans.ratio.copy_(torch.linspace(0.1, 0.5, spans.groups) + 0.1 * n)
    before = [spans.keeps() for spans in layers]
    retrieve(model, share=1 / sum(map(len, before)), ring=8, k=5)
    longest = max(n for each in before for n in each)
    changed = [
        (n, g)
        for n, spans in enumerate(layers)
        for g in range(spans.groups)
        if spans.keeps()[g] != before[n][g]
    ]  # fmt: skip
    assert [before[n][g] for n, g in changed] == [longest]
    ((n, g),) = changed
    found = retriever_of(layers[n])
    assert found is not None and found.heads == [g] and layers[n].keeps()[g] == 8
    stop_retrieving(model)
    assert [spans.keeps() for spans in layers] == before and model.config._attn_implementation == "spanformer"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_retrieving_everything_is_full_attention(name: str) -> None:
    ids = tokens(2, 60)
    plain = tiny(name)
    with torch.no_grad():
        want = plain(ids, use_cache=False).logits
    model = hf.attach(tiny(name), max_span=64, ramp=4, sink_tokens=3)
    retrieve(model, share=1.0, ring=8, k=99)
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
        cache, parts = RetrievalCache(model), []
        for piece in ids.split([20, 1, 1, 9, 29], 1):
            parts.append(model(piece, past_key_values=cache).logits)
    assert (found - want).abs().max() < 2e-5 * want.abs().max()
    assert (torch.cat(parts, 1) - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize("where", [{}, {"folder": True}, {"folder": True, "codes": "file"}])
def test_decoding_equals_one_pass(where: dict, tmp_path: Path) -> None:
    model, ids = made(), tokens(2, 63)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache, parts = RetrievalCache(model, **where | ({"folder": tmp_path} if where else {})), []
        for piece in ids.split([17, 1, 1, 9, 1, 20, 1, 1, 12], 1):
            parts.append(model(piece, past_key_values=cache).logits)
    assert (torch.cat(parts, 1) - whole).abs().max() < 2e-5 * whole.abs().max()
    assert not list(tmp_path.iterdir())  # files vanish with the cache, whatever happens to the process
    detached = stop_retrieving(model)
    with torch.no_grad():
        assert (detached(ids, use_cache=False).logits - whole).abs().max() > 1e-3 * whole.abs().max()


def test_cache_generates_crops_and_counts_its_bytes(tmp_path: Path) -> None:
    model, ids = made(), tokens(1, 40)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    want = model.generate(ids, use_cache=False, **options)
    ram, files = RetrievalCache(model), RetrievalCache(model, folder=tmp_path)
    for cache in (ram, files):
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), want)
    assert files.bytes() < ram.bytes()
    mapped = RetrievalCache(model, folder=tmp_path, codes="file")
    assert torch.equal(model.generate(ids, past_key_values=mapped, **options), want)
    assert mapped.bytes() == sum(layer.rings.bytes() for layer in mapped.layers)  # type: ignore[attr-defined]
    plain = sum(layer.rings.bytes() for layer in files.layers)  # type: ignore[attr-defined]
    heads = sum(len(layer.retriever.heads) for layer in files.layers if hasattr(layer, "retriever"))
    head_dim = model.config.head_dim
    assert files.bytes() - plain == heads * (files.get_seq_length() - 3) * (head_dim + 4)  # without sink tokens
    beams = model.generate(ids, past_key_values=RetrievalCache(model), num_beams=3, **options)
    assert torch.equal(beams, model.generate(ids, use_cache=False, num_beams=3, **options))


def test_crop_forgets_what_was_read() -> None:
    model, ids, other = made(), tokens(1, 40), tokens(1, 9)
    with torch.no_grad():
        cache = RetrievalCache(model, slack=8)
        model(ids, past_key_values=cache)
        model(other, past_key_values=cache)
        cache.crop(-4)
        after = model(ids[:, :5], past_key_values=cache).logits
        whole = model(torch.cat([ids, other[:, :5], ids[:, :5]], 1), use_cache=False).logits
    assert (after - whole[:, -5:]).abs().max() < 2e-5 * whole.abs().max()


def test_certificates_hold_for_every_query() -> None:
    """The share that the bound gives, against full attention's weights of the keys that were left out."""
    model, ids = made(share=1.0, ring=8, k=4), tokens(1, 60)
    layers = list(hf.head_spans(model).values())
    calls: list[tuple] = []
    for spans in layers:
        found = retriever_of(spans)
        assert found is not None
        found.omitted = []
    from spanformer.hf import retrieval_heads as module

    original = module.attend_text

    def watch(q, k, v, spans, found, scale):
        calls.append((q, k, spans))
        return original(q, k, v, spans, found, scale)

    module.attend_text = watch
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        module.attend_text = original
    for q, k, spans in calls:
        found = retriever_of(spans)
        assert found is not None and found.omitted
        bound, at = found.omitted[0], torch.arange(60)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        s = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(at > at[:, None], -torch.inf)
        older = (at[None] <= at[:, None] - 8) & (at >= 3)
        best = s.masked_fill(~older, -torch.inf).topk(4, dim=3)
        read = ~older | torch.zeros_like(s, dtype=torch.bool).scatter(3, best.indices, best.values > -torch.inf)
        omitted = s.softmax(3).masked_fill(read, 0).sum(3)
        assert bool((omitted <= bound + 1e-6).all()) and float(bound.max()) < 1 and float(omitted.max()) > 0.05


@pytest.mark.parametrize(
    "options, said",
    [
        ({"share": 0.0}, "share is 0.0; expected a share of the KV heads"),
        ({"ring": 0}, "ring is 0 and k 5; expected at least 1 token each"),
        ({"k": 0}, "ring is 8 and k 0; expected at least 1 token each"),
    ],
)
def test_bad_options_are_refused(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**options)


def test_padding_and_a_second_time_are_refused() -> None:
    model, ids = made(), tokens(2, 20)
    with pytest.raises(ValueError, match="codes is 'file' and folder None; expected 'ram', or 'file' with a folder"):
        RetrievalCache(model, codes="file")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with pytest.raises(ValueError, match="a text has padding or is packed with others; retrieval heads read one text"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="retrieves already; call stop_retrieving first"):
        retrieve(model)


def test_folders_that_cannot_hold_a_store_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = made(), tokens(1, 20)
    with pytest.raises(ValueError, match=r"folder is '.*/none', which is no folder; create it, or pass None"):
        RetrievalCache(model, folder=tmp_path / "none")

    def full(*_of: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"has no room for [\d,]+ more bytes of a store \(No space left on device\)"):
        model(ids, past_key_values=RetrievalCache(model, folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_a_retrieval_cache_cannot_do_is_refused(tmp_path: Path) -> None:
    model, ids = made(), tokens(1, 20)
    options = {"attention_mask": torch.ones_like(ids), "num_beams": 2, "max_new_tokens": 4, "pad_token_id": 0}
    with pytest.raises(ValueError, match="a store in files cannot copy rows, as beams do; use folder=None"):
        model.generate(ids, past_key_values=RetrievalCache(model, folder=tmp_path), **options)
    queries = hf.attach(tiny("llama"), max_span=64, per="head")
    with pytest.raises(ValueError, match="a ring belongs to a KV head: attach them with per='kv_head'"):
        retrieve(queries)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="retrieval heads support neither dropout nor learned sinks"):
        model(ids, use_cache=False)


def test_a_text_shorter_than_ring_and_k_is_read_whole() -> None:
    """k above N, and a store that is empty."""
    model, plain, ids = made(share=1.0, ring=8, k=99), tiny("llama"), tokens(1, 12)
    with torch.no_grad():
        want, cache = plain(ids, use_cache=False).logits, RetrievalCache(model)
        parts = [model(piece, past_key_values=cache).logits for piece in ids.split(1, 1)]
    assert (torch.cat(parts, 1) - want).abs().max() < 2e-5 * want.abs().max()


@pytest.mark.parametrize("text", ['{"retrieve": {"share": 0.5}}', '{"retrieve": 3}', "[1]", "{"])
def test_damaged_settings_of_a_fit_are_named(text: str, tmp_path: Path) -> None:
    assert hf.fitted_retrieval(tmp_path) == {}
    (tmp_path / "spans.json").write_text(text)
    with pytest.raises(
        ValueError, match=r'"retrieve" in .*spans.json is not what fit-spans writes; expected share, ring'
    ):
        hf.fitted_retrieval(tmp_path)
