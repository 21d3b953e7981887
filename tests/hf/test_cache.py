"""SpanCache: the tokens a model without it would write, from as many bytes as its spans promise."""

from __future__ import annotations

import pytest
import torch

from spanformer import hf
from spanformer.hf.rounded import rounded_kv
from spanformer.ops.decode.codes import Bits
from support.hf_models import CONFIGS, tiny, tokens, transformers


def short(name: str, **options):
    """A model whose heads have forgotten most of 60 tokens, each another part of them."""
    model = hf.attach(tiny(name), **({"max_span": 64, "ramp": 4, "sink_tokens": 3} | options))
    torch.manual_seed(2)
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.uniform_(0.05, 0.6)
    return model


def generate(model, ids, mask=None, new=20, **options):
    torch.manual_seed(5)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **options)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("per", ["kv_head", "head"])
def test_text_read_in_pieces_is_the_text_read_at_once(name: str, per: str) -> None:
    model, ids = short(name, per=per), tokens(2, 63)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache, parts, at = hf.SpanCache(model), [], 0
        for n in (17, 1, 1, 9, 1, 20, 1, 1, 12):
            parts.append(model(ids[:, at : at + n], past_key_values=cache).logits)
            at += n
    assert cache.get_seq_length() == at == 63
    assert (torch.cat(parts, 1) - whole).abs().max() < 2e-5 * whole.abs().max()


MODES: dict[str, dict] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "several": {"do_sample": True, "top_k": 20, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


def test_beams_over_rows_with_padding() -> None:
    """Rows stand at different places, and change places."""
    model, ids = short("llama"), tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    want = generate(model, ids, mask, num_beams=3)
    assert torch.equal(generate(model, ids, mask, num_beams=3, past_key_values=hf.SpanCache(model)), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_generate(name: str, mode: str) -> None:
    model, ids = short(name), tokens(1, 20).repeat(1, 2)
    want = generate(model, ids, **MODES[mode])
    cache = hf.SpanCache(model)
    assert torch.equal(generate(model, ids, past_key_values=cache, **MODES[mode]), want)
    assert cache.get_seq_length() >= 59


def test_assisted_by_another_model() -> None:
    model, ids = short("llama"), tokens(1, 40)
    helper = tiny("llama", seed=7)
    got = generate(model, ids, past_key_values=hf.SpanCache(model), assistant_model=helper)
    assert torch.equal(got, generate(model, ids))


def test_cache_that_was_read_into_can_then_be_assisted() -> None:
    model, ids = short("llama"), tokens(1, 80)
    cache = hf.SpanCache(model)
    read = torch.cat([generate(model, ids, past_key_values=cache), tokens(1, 7, seed=4)], 1)
    got = generate(model, read, past_key_values=cache, prompt_lookup_num_tokens=5)
    assert torch.equal(got, generate(model, read))


@pytest.mark.parametrize("side", ["left", "right, then more"])
def test_padding(side: str) -> None:
    model, ids = short("llama"), tokens(3, 40)
    mask = torch.ones_like(ids)
    mask[1, :11], mask[2, :25] = 0, 0
    with torch.no_grad():
        if side == "left":
            got = generate(model, ids, mask, past_key_values=hf.SpanCache(model))
            assert torch.equal(got, generate(model, ids, mask))
            return
        # rows of different lengths, padded behind, then read on: padding takes no place, in either cache
        mask, more = mask.flip(1), tokens(3, 4, seed=9)
        both = torch.cat([mask, torch.ones_like(more)], 1)
        positions = (both.cumsum(1) - 1)[:, 40:]
        for cache in (hf.SpanCache(model), transformers.DynamicCache(config=model.config)):
            model(ids, attention_mask=mask, past_key_values=cache)
            got = model(more, attention_mask=both, position_ids=positions, past_key_values=cache).logits
            for row, length in enumerate(mask.sum(1).tolist()):
                alone = model(torch.cat([ids[row, :length], more[row]])[None]).logits[0, length:]
                assert (got[row] - alone).abs().max() < 2e-5


def test_bytes_are_those_promised() -> None:
    model, ids = short("llama"), tokens(2, 100)
    kept, full = hf.cache_bytes(model, 110, batch=2)
    cache = hf.SpanCache(model, context=110)
    generate(model, ids, past_key_values=cache, new=11)  # the last token is not read
    assert cache.bytes() == kept < full / 2 and cache.full_bytes() == full
    own = transformers.DynamicCache(config=model.config)
    generate(model, ids, past_key_values=own, new=11)
    assert full == sum(t.nbytes for layer in own.layers for t in (layer.keys, layer.values))
    for bits in (8, 4):
        cache = hf.SpanCache(model, context=110, bits=bits)
        generate(model, ids, past_key_values=cache, new=11)
        assert cache.bytes() == hf.cache_bytes(model, 110, batch=2, bits=bits)[0] < kept


@pytest.mark.parametrize("bits", [8, 4])
def test_few_bits_read_token_by_token_equal_a_pass_over_rounded_keys(bits: Bits) -> None:
    """Also after beams chose rows, and after the last tokens were taken back. The first token of a cache sees itself
    unrounded; 3 layers that see 23 tokens each have forgotten it after 66."""
    model, ids = short("llama", sink_tokens=0), tokens(3, 100)
    with torch.no_grad():
        for spans in hf.head_spans(model).values():
            spans.ratio.fill_(0.3)
        with rounded_kv(bits):
            whole = model(ids, use_cache=False).logits[:, 70:]
        assert (model(ids, use_cache=False).logits[:, 70:] - whole).abs().max() > 1e-4
        cache = hf.SpanCache(model, bits=bits, slack=5)
        got = [model(ids[:, n : n + 1], past_key_values=cache).logits for n in range(90)]
        assert (torch.cat(got[70:], 1) - whole[:, :20]).abs().max() < 3e-5
        cache.crop(-5)
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        got = [model(ids[[2, 0, 2], n : n + 1], past_key_values=cache).logits for n in range(85, 100)]
        assert (torch.cat(got, 1) - whole[[2, 0, 2], 15:]).abs().max() < 3e-5
        with rounded_kv(bits), pytest.raises(ValueError, match="without a KV cache; expected use_cache=False"):
            model(ids[:, :1], past_key_values=hf.SpanCache(model))


def test_four_bits_generate_with_beams_padding_and_lookup() -> None:
    model, ids = short("llama"), tokens(2, 40)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        some = ids[:1] if "prompt_lookup_num_tokens" in options else ids
        mask = torch.ones_like(some)
        mask[0, :3] = len(some) == 1
        out = model.generate(
            some, attention_mask=mask, past_key_values=hf.SpanCache(model, bits=4), max_new_tokens=6, min_new_tokens=6,
            do_sample=False, **options,
        )  # fmt: skip
        assert out.shape == (len(some), 46)


def test_memory_follows_a_short_text() -> None:
    """Long spans take memory only as the text grows."""
    model, cache = hf.attach(tiny("llama"), max_span=100_000), None
    cache = hf.SpanCache(model)
    with torch.no_grad():
        whole = model(tokens(1, 40), use_cache=False).logits
        model(tokens(1, 40)[:, :30], past_key_values=cache)
        assert cache.bytes() == cache.full_bytes() == 30 * 6 * 2 * 8 * 4
        last = [model(tokens(1, 40)[:, n : n + 1], past_key_values=cache).logits for n in range(30, 40)]
    assert (torch.cat(last, 1) - whole[:, 30:]).abs().max() < 1e-5
    assert cache.bytes() <= (31 + 256) * 6 * 2 * 8 * 4


def test_crop_and_rows() -> None:
    model, ids = short("llama"), tokens(3, 50)
    cache = hf.SpanCache(model, slack=8)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.crop(-6)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.batch_repeat_interleave(2)
        assert cache.get_seq_length() == 44 and cache.batch_size == 4
        rows = ids[torch.tensor([2, 2, 0, 0])]
        got = model(rows[:, 44:], past_key_values=cache).logits
        assert (got - model(rows).logits[:, 44:]).abs().max() < 2e-5
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.bytes() == 0 and cache.full_bytes() == 0


@pytest.mark.parametrize("back", [5, 9, 12])
def test_crop_behind_padding_takes_back_real_tokens_only_where_there_are(back: int) -> None:
    """Of row 1 the last 8 of 20 are padding, of row 0 none; then 3 more of both are read."""
    model, ids, more = short("llama"), tokens(2, 20), tokens(2, 3, seed=9)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    both = torch.cat([mask, torch.ones_like(more)], 1)
    read, length = torch.cat([ids, more], 1), 23 - back
    for cache in (hf.SpanCache(model, slack=16), transformers.DynamicCache(config=model.config)):
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            model(more, attention_mask=both, position_ids=(both.cumsum(1) - 1)[:, 20:], past_key_values=cache)
            cache.crop(-back)
            cache.reorder_cache(torch.tensor([1, 0]))
            left, new = both[[1, 0], :length], tokens(2, 4, seed=3)
            shown = torch.cat([left, torch.ones_like(new)], 1)
            places = (shown.cumsum(1) - 1)[:, length:]
            got = model(new, attention_mask=shown, position_ids=places, past_key_values=cache).logits
            assert cache.get_seq_length() == length + 4
            for row, old in enumerate((1, 0)):
                alone = torch.cat([read[old, :length][both[old, :length].bool()], new[row]])
                assert (got[row] - model(alone[None]).logits[0, -4:]).abs().max() < 2e-5


def test_crop_that_one_layer_refuses_changes_none() -> None:
    model, ids = short("llama"), tokens(1, 60)
    with torch.no_grad():
        for spans, ratio in zip(hf.head_spans(model).values(), (1.0, 1.0, 0.1), strict=True):
            spans.ratio.fill_(ratio)
        cache = hf.SpanCache(model)
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="cannot be cropped from 60 to 50 tokens"):
            cache.crop(-10)
        got = model(tokens(1, 2, seed=3), past_key_values=cache).logits
        want = model(torch.cat([ids, tokens(1, 2, seed=3)], 1), use_cache=False).logits[:, -2:]
        assert (got - want).abs().max() < 2e-5


def test_spans_that_change_are_followed() -> None:
    model, ids = short("llama"), tokens(1, 50)
    cache = hf.SpanCache(model)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        before = cache.bytes()
        for spans in hf.head_spans(model).values():
            spans.ratio.mul_(0.5)
        got = model(ids[:, 40:41], past_key_values=cache).logits
        assert cache.bytes() < before
        # the earlier tokens were read with the longer spans
        own = transformers.DynamicCache(config=model.config)
        for spans in hf.head_spans(model).values():
            spans.ratio.mul_(2)
        model(ids[:, :40], past_key_values=own)
        for spans in hf.head_spans(model).values():
            spans.ratio.mul_(0.5)
        assert (got - model(ids[:, 40:41], past_key_values=own).logits).abs().max() < 2e-5


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no spans; call spanformer.hf.attach on it first"):
        hf.SpanCache(tiny("llama"))
    model = short("llama")
    cache = hf.SpanCache(model)
    with torch.no_grad():
        model(tokens(1, 60), past_key_values=cache)
    with pytest.raises(ValueError, match=r"cannot be cropped from 60 to 50 tokens.*a slack above 0"):
        cache.crop(-10)
    with pytest.raises(ValueError, match="crop was given 3; expected a negative number"):
        cache.crop(3)
    with pytest.raises(ValueError, match=r"a SpanCache has no gradients; use torch.no_grad"):
        model(tokens(1, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="does not support offloading to the CPU; leave it on its device"):
        cache.offload(0, only_non_sliding=False)
    for options, reason in (
        ({"bits": 5}, "bits is 5; expected 0, for the model's dtype, 8 or 4"),
        ({"slack": -1}, "slack is -1; expected a number of tokens, at least 0"),
        ({"context": -1}, "context is -1; expected a number of tokens, at least 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            hf.SpanCache(model, **options)
    cache = hf.SpanCache(model)
    hf.detach(model)
    with pytest.raises(ValueError, match="expected a model with spans attached"):
        generate(model, tokens(1, 8), past_key_values=cache)
