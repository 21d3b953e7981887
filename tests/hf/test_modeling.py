"""Our own language model in Hugging Face's form."""

from __future__ import annotations

import json

import pytest
import torch

from spanformer import LM, ModelConfig, hf
from spanformer.model.config import AttentionConfig, EmbeddingConfig
from support.hf_models import tokens, transformers

ATTENTION = AttentionConfig(max_span=48, ramp=4, init=0.3)


def model(seed: int = 0, **options):
    torch.manual_seed(seed)
    options = {"vocab": 97, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "attention": ATTENTION} | options
    lm = LM(ModelConfig(**options)).eval()
    with torch.no_grad():
        for p in lm.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.2)
    return hf.SpanformerForCausalLM.from_lm(lm)


def generate(made, ids, mask=None, **options):
    torch.manual_seed(5)
    mask = torch.ones_like(ids) if mask is None else mask
    return made.generate(ids, attention_mask=mask, max_new_tokens=10, pad_token_id=0, **options)


def test_it_is_the_model() -> None:
    made, ids = model(), tokens(2, 40)
    with torch.no_grad():
        want = made.lm(ids).logits
        assert torch.equal(made(ids).logits, want)
        assert torch.allclose(made(ids, use_cache=True).logits, want, atol=1e-5)
        assert torch.equal(made(ids, logits_to_keep=1).logits, want[:, -1:])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cutoffs", [(), (20, 60)])
def test_round_trip_by_auto_classes(tied: bool, cutoffs: tuple[int, ...], tmp_path) -> None:
    made, ids = model(embedding=EmbeddingConfig(tied=tied, cutoffs=cutoffs)), tokens(2, 30)
    made.save_pretrained(tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".json", ".json", ".safetensors"]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, hf.SpanformerForCausalLM) and again.lm.config == made.lm.config
    with torch.no_grad():
        assert torch.equal(again(ids).logits, made(ids).logits)
    assert len({p.data_ptr() for p in again.parameters()}) == len({p.data_ptr() for p in made.parameters()})


MODES: dict[str, dict] = {
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_generate_with_and_without_the_cache(mode: str) -> None:
    made, ids = model(), tokens(1, 15).repeat(1, 2)
    got = generate(made, ids, **MODES[mode])
    if mode == "prompt lookup":  # needs a cache; it writes what greedy decoding does
        assert torch.equal(got, generate(made, ids))
    else:
        assert torch.equal(got, generate(made, ids, use_cache=False, **MODES[mode]))


def test_greedy_is_one_pass_at_a_time_and_padding_changes_nothing() -> None:
    made, ids = model(), tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    alone, both = generate(made, ids[1:, 8:]), generate(made, ids, mask)
    assert torch.equal(both[1:, 21:], alone[:, 13:])
    for n in range(10):
        with torch.no_grad():
            assert torch.equal(made(alone[:, : 13 + n]).logits[:, -1].argmax(-1), alone[:, 13 + n])


def test_crop_behind_padding_takes_back_real_tokens_only_where_there_are() -> None:
    made, ids, more = model(), tokens(2, 20), tokens(2, 4, seed=9)
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    with torch.no_grad():
        cache = made(ids, attention_mask=mask, use_cache=True).past_key_values
        cache.crop(-5)
        cache.reorder_cache(torch.tensor([1, 0]))
        got = made(more, past_key_values=cache).logits
        for row, (old, length) in enumerate(((1, 12), (0, 15))):
            alone = made(torch.cat([ids[old, :length], more[row]])[None]).logits[0, length:]
            assert (got[row] - alone).abs().max() < 2e-5
    assert cache.get_seq_length() == 19


def test_loss_is_shifted_ignores_and_carries_the_penalty() -> None:
    made, ids = model(), tokens(2, 20)
    labels = ids.clone()
    labels[0, :5] = -100
    logits = made.lm(ids).logits
    shown = (labels != -100)[:, 1:]
    want = torch.nn.functional.cross_entropy(logits[:, :-1][shown], ids[:, 1:][shown])
    assert torch.allclose(made(ids, labels=labels).loss, want, atol=1e-6)
    made.train()
    penalty = made.lm(ids).penalty.detach()
    assert float(penalty) > 0 and torch.allclose(made(ids, labels=labels).loss, want + penalty, atol=1e-6)
    made.gradient_checkpointing_enable()
    assert made.lm.checkpointing
    made(ids, labels=labels).loss.backward()
    assert all(s.ratio.grad is not None for s in made.lm.spans_modules())
    made.after_step()


def test_trainer_accumulates_means(tmp_path) -> None:
    """Two small batches are one of twice the size: one SGD step ends at the same weights."""
    pytest.importorskip("accelerate", reason='Trainer needs accelerate: pip install "spanformer[dev]"')
    rows, ends = [{"input_ids": ids, "labels": ids} for ids in tokens(4, 24)], []
    for batch in (4, 2):
        made = model()
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=batch, optim="sgd", learning_rate=0.1,
            gradient_accumulation_steps=4 // batch, lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        transformers.Trainer(model=made, args=options, train_dataset=rows).train()
        ends.append(torch.cat([p.detach().flatten() for p in made.parameters()]))
    assert torch.allclose(ends[0], ends[1], atol=1e-5)


def test_refusals(tmp_path) -> None:
    made, ids = model(), tokens(1, 5)
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache; this model makes its own"):
        made(ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="a KV cache works in eval mode without labels, so leave it out"):
        made(ids, labels=ids, past_key_values=made(ids, use_cache=True).past_key_values)
    with pytest.raises(ValueError, match=r"attention_mask has shape .1, 1, 5, 5.; expected .batch, tokens."):
        made(ids, attention_mask=torch.ones(1, 1, 5, 5))
    with pytest.raises(ValueError, match="inputs_embeds is given; this model takes input_ids only"):
        made(ids, inputs_embeds=torch.zeros(1, 5, 32))
    with pytest.raises(
        ValueError, match="cache_implementation is 'static'; this model makes its own KV cache, so leave it out"
    ):
        generate(made, ids, cache_implementation="static")
    with pytest.raises(ValueError, match="every_n_layers is 2; this model recomputes all of its layers or none"):
        made.gradient_checkpointing_enable(every_n_layers=2)
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["heads"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model.dim is 32; expected a multiple of model.heads, 5"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
