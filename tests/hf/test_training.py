"""Learning spans through PEFT and through transformers' Trainer."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from spanformer import hf
from spanformer.hf.trainer import SpanCallback
from support.hf_models import tiny, tokens, transformers


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, n: int) -> dict:
        ids = tokens(32, seed=n)
        return {"input_ids": ids, "labels": ids}


def train(model, tmp_path, penalty: float, steps: int = 6, **options):
    pytest.importorskip("accelerate", reason='Trainer needs accelerate: pip install "spanformer[dev]"')
    options = {
        "max_steps": steps, "per_device_train_batch_size": 2, "learning_rate": 5e-3, "logging_steps": 2,
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "weight_decay": 0.0,
    } | options  # fmt: skip
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(tmp_path), **options),
        train_dataset=Texts(),
        callbacks=[SpanCallback(penalty)],
    )
    trainer.train()
    return trainer


def test_trainer_learns_clamps_and_logs(tmp_path) -> None:
    model = hf.attach(tiny("llama"), max_span=64, init=0.98, ramp=8)
    trainer = train(model, tmp_path, penalty=1.0, gradient_checkpointing=True)
    ratios = torch.cat([s.ratio.detach() for s in hf.head_spans(model).values()])
    assert bool(((ratios >= 0) & (ratios <= 1)).all()) and float(ratios.max()) < 0.98
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 3 and all(e["spans_mean"] <= 68 and e["spans_penalty"] > 0 for e in logs)
    assert logs[-1]["spans_penalty"] < logs[0]["spans_penalty"]
    kept, full = hf.cache_bytes(model, 128)
    assert logs[-1]["spans_mean"] == pytest.approx(kept / full * 128, rel=0.05)


def test_callback_is_the_loss_with_the_penalty(tmp_path) -> None:
    """One SGD step by Trainer and one by hand; all texts are one batch, so their order does not matter."""
    ends = []
    for by_hand in (False, True):
        model = hf.attach(tiny("llama"), max_span=64, init=0.4, ramp=8)
        if by_hand:
            texts = Texts()
            ids = torch.stack([texts[n]["input_ids"] for n in range(16)])
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            (model(ids, labels=ids).loss + hf.span_penalty(model, 0.1)).backward()
            optimizer.step()
            hf.clamp_spans(model)
        else:
            train(
                model, tmp_path, 0.1, 1, per_device_train_batch_size=16, optim="sgd", learning_rate=1e-3,
                lr_scheduler_type="constant", max_grad_norm=0.0,
            )  # fmt: skip
        ends.append(torch.cat([s.ratio.detach() for s in hf.head_spans(model).values()]))
    assert not torch.equal(ends[0], torch.full_like(ends[0], 0.4))
    assert torch.allclose(ends[0], ends[1], atol=1e-6)


def test_trainer_checkpoints_keep_spans(tmp_path) -> None:
    model = hf.attach(tiny("llama"), max_span=64, init=0.5, ramp=8)
    train(model, tmp_path, 0.1, 2, save_strategy="steps", save_steps=2)
    again = hf.from_pretrained(tmp_path / "checkpoint-2")
    pairs = zip(hf.head_spans(model).values(), hf.head_spans(again).values(), strict=True)
    assert all(torch.equal(a.ratio, b.ratio) for a, b in pairs)


def test_callback_refuses() -> None:
    with pytest.raises(ValueError, match="penalty is -1; expected at least 0"):
        SpanCallback(-1)
    model = hf.attach(tiny("llama"))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"spans.ratio does not require a gradient \(3 of 3.*modules_to_save"):
        SpanCallback(0.0).on_train_begin(None, None, None, model=model)  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [False, True])
def test_lora(after: bool, tmp_path) -> None:
    """Adapters and spans learn, the rest does not; before or after attaching."""
    peft = pytest.importorskip("peft", reason='needs peft: pip install "spanformer[dev]"')
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, modules_to_save=None if after else ["spans"])
    model, ids = tiny("llama"), tokens(2, 40)
    if after:
        model = hf.attach(peft.get_peft_model(model, config), max_span=64, init=0.3, ramp=8)
    else:
        model = peft.get_peft_model(hf.attach(model, max_span=64, init=0.3, ramp=8), config)
    layers = list(hf.head_spans(model).values())
    assert len(layers) == 3 and all(s.ratio.requires_grad for s in layers)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    (model(input_ids=ids, labels=ids).loss + hf.span_penalty(model, 0.01)).backward()
    learning = {n for n, p in model.named_parameters() if p.grad is not None}
    assert learning and all("lora_" in n or "ratio" in n for n in learning)
    optimizer.step()
    hf.clamp_spans(model)
    assert all(bool((s.ratio != 0.3).all()) for s in layers)
    with torch.no_grad():
        short = model(input_ids=ids).logits
        for s in layers:
            s.ratio.fill_(0.0)
        assert not torch.allclose(model(input_ids=ids).logits, short)  # the copy that learns is the one that is used
    if not after:
        with torch.no_grad():
            for s in layers:
                s.ratio.fill_(0.125)
            want = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(hf.attach(tiny("llama"), max_span=64, init=0.3, ramp=8), tmp_path)
        with torch.no_grad():
            assert torch.allclose(again(input_ids=ids).logits, want, atol=1e-6)


def test_example_runs(capsys, monkeypatch) -> None:
    """attach, a plain loop and generate: what docs/huggingface.md points at."""
    path = Path(__file__).parents[2] / "examples" / "attach_spans.py"
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    shares = re.findall(r"cache (\d+)% of full", out := capsys.readouterr().out)
    assert len(shares) == 3 and int(shares[-1]) < int(shares[0]) and "and 4 sink tokens" in out
    held, full = (int(n.replace(",", "")) for n in re.findall(r"(?:from|of them:) ([\d,]+)", out))
    assert held < full
