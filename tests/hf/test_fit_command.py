"""fit-spans and probe from the command line, on a tiny model of bytes made here; tasks and texts as they are cut."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("transformers")

import tokenizers
import transformers

from spanformer import hf
from spanformer.cli.main import main
from spanformer.core import processor
from spanformer.core.events import NoteEvent
from spanformer.core.text import read_text
from spanformer.hf.attach import attach
from spanformer.hf.fit import growth_table, window_table
from spanformer.hf.plan import FitPlan, FitRun
from spanformer.hf.probe import make_task, probe, table
from spanformer.hf.saved import load_fitted, save_fitted
from spanformer.hf.spans import cache_bytes
from spanformer.hf.text import check_logits, chunk_bits, load_model, make_chunks
from support.byte_llama import PROSE
from support.products import Bfloat16Products


def test_fit_spans_from_text_to_report_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "fit"
    main(["fit-spans", str(folder), "--data", str(folder / "prose.txt"), "--out", str(out), "--budget", "0.4",
          "--context", "64", "--steps", "3", "--survey", "2", "--measure", "2", "--dtype", "float32"])  # fmt: skip
    shown = capsys.readouterr().out
    assert "of the key/value memory" in shown and "uniform windows" in shown and "by attention mass" in shown
    saved = json.loads((out / "spans.json").read_text())
    kept = sum(min(64, w + 4) for layer in saved["windows"] for w in layer) / (4 * 64)
    assert saved["share"] == pytest.approx(kept) and 0.38 < kept <= 0.4
    assert (out / "report").exists()
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events if e["event"] in ("start", "step", "stop")] == ["start", *["step"] * 3, "stop"]
    model, _, fitted = load_fitted(str(out))
    assert fitted and window_table(model).tolist() == saved["windows"]
    main(["probe", str(out), str(folder), "--contexts", "200", "--depths", "2", "--tasks", "1", "--budget", "0.4",
          "--save", str(tmp_path / "p.json"), "--picture", str(tmp_path / "p.png")])  # fmt: skip
    rows = json.loads((tmp_path / "p.json").read_text())
    assert list(rows) == [f"{out}, its spans", f"{folder}, full attention", f"{folder}, uniform windows of 0.4"]
    assert [(r["find"], r["depth"]) for r in rows[f"{out}, its spans"]] == [
        ("key", 0.0), ("key", 1.0), ("pair", 0.0), ("pair", 1.0),
    ]  # fmt: skip
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    windows = tmp_path / "windows"
    main(["export-windows", str(out), "--data", str(folder / "prose.txt"), "--out", str(windows), "--texts", "2"])
    shown = capsys.readouterr().out
    assert "layers have a window of" in shown and shown.count("bits per byte") == 2
    plain, tokenizer = load_model(str(windows))
    assert plain.config.model_type == "ministral" and len(plain.config.layer_types) == 2
    found = make_chunks(PROSE * 40, tokenizer, context=64, start=32, limit=2)
    assert f"{sum(chunk_bits(plain, found)) / float(found.bytes.sum()):.4f} bits per byte" in shown.splitlines()[2]
    for arguments, reason in (
        ([str(out), "--out", str(windows)], "already exists"),
        ([str(folder)], "has no spans"),
    ):
        with pytest.raises(SystemExit):
            main(["export-windows", *arguments, "--data", str(folder / "prose.txt")])
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("codes", ["ram", "file"])
def test_retrieval_heads_from_text_to_a_cache_of_the_saved_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, codes: str
) -> None:
    out = tmp_path / "fit"
    main(["fit-spans", str(folder), "--data", str(folder / "prose.txt"), "--out", str(out), "--budget", "0.7",
          "--context", "128", "--steps", "2", "--survey", "1", "--measure", "2", "--dtype", "float32",
          "--retrieve", "0.3", "--retrieve-k", "8", "--retrieve-codes", codes])  # fmt: skip
    shown = capsys.readouterr()
    assert "KV cache in 8 bits" in shown.err
    said = re.search(r"1 of 4 KV heads retrieve \(ring (\d+), k 8\): (0\.\d+) of an 8-bit KV cache", shown.out)
    assert said is not None and 0.4 < float(said[2]) <= 0.7 and shown.out.count("bits per byte ") == 4
    saved = json.loads((out / "spans.json").read_text())
    assert list(saved["bits_per_byte"]) == ["full", "retrieval heads", "uniform windows", "by attention mass"]
    windows, ring = saved["windows"], int(said[1])
    card = (out / "spans/README.md").read_text()
    assert f"hf.retrieve(model, share=0.25, ring={ring}, k=8)" in card and f'codes="{codes}"' in card
    assert sum(w == 124 for layer in windows for w in layer) == 1
    main(["probe", str(out), "--contexts", "200", "--depths", "2", "--tasks", "1"])
    assert "its spans and retrieval heads: pass keys" in capsys.readouterr().out
    model = hf.from_pretrained(out, dtype=torch.float32)
    hf.retrieve(model, **hf.fitted_retrieval(out))
    cache = hf.RetrievalCache(model, context=128, bits=8, folder=tmp_path, codes=codes)
    ids = torch.randint(0, 200, (1, 120), generator=torch.Generator().manual_seed(0))
    made = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=8,
                          min_new_tokens=8, do_sample=False)  # fmt: skip
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8,
                           do_sample=False, use_cache=False)  # fmt: skip
    assert torch.equal(made[:, 120:124], alone[:, 120:124])
    assert cache.bytes() < hf.cache_bytes(model, 128, dtype=torch.float32)[1] and ring < 124


def test_bfloat16_model_is_computed_in_float32_without_units(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted, probed and exported; what is saved keeps the dtype of the file. Only the two tokens by which `attach`
    finds a model's layers go through it in bfloat16: when fit-spans saves, and when either of the others loads."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: False)
    half, fit, windows = (tmp_path / name for name in ("half", "fit", "windows"))
    shutil.copytree(folder, half)
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(half)
    text = str(folder / "prose.txt")
    with Bfloat16Products() as products:
        main(["fit-spans", str(half), "--data", text, "--out", str(fit), "--budget", "0.4", "--context", "64",
              "--steps", "1", "--survey", "1", "--measure", "1"])  # fmt: skip
        main(["probe", str(fit), str(half), "--contexts", "200", "--depths", "2", "--tasks", "1"])
        main(["export-windows", str(fit), "--data", text, "--out", str(windows), "--texts", "1"])
    with Bfloat16Products() as attaching:
        attach(load_model(str(half), "auto")[0])
    assert products.counted.total() == 3 * attaching.counted.total() > 0
    for saved in (fit, windows):
        assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"


def test_tolerated_loss_takes_the_place_of_a_budget(folder: Path, tmp_path: Path) -> None:
    """The smallest memory tried that met it is the budget. (Notes have two digits: 0.025 % is between two of them.)"""
    shares = {}
    for tolerance in ("0.00025", "0.9"):
        out = tmp_path / tolerance
        main(["fit-spans", str(folder), "--data", str(folder / "prose.txt"), "--out", str(out),
              "--tolerance", tolerance, "--context", "64", "--steps", "0", "--survey", "1", "--measure", "2",
              "--no-baselines", "--dtype", "float32"])  # fmt: skip
        saved = json.loads((out / "spans.json").read_text())
        shares[tolerance] = saved["share"]
        notes = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        rises = re.findall(r"(\d\.\d+) of the memory raises the loss by (-?[\d.]+) %", str(notes))
        assert len(rises) == 6
        met = [float(share) for share, rise in rises if float(rise) <= 100 * float(tolerance)]
        assert saved["share"] == pytest.approx(min([*met, 1.0]), abs=0.01)
    assert shares["0.9"] < 0.12 <= shares["0.00025"]


def test_what_is_tolerated_is_not_chosen_on_held_out_text(folder: Path, tmp_path: Path) -> None:
    plan, found = FitPlan(tolerance=0.00025, context=64, steps=0, survey=1, measure=2, baselines=False), []
    (tmp_path / "numbers.txt").write_text(" ".join(map(str, range(1000))))
    for valid in (folder / "prose.txt", tmp_path / "numbers.txt"):
        notes: list[object] = []
        run = FitRun(str(folder), str(folder / "prose.txt"), str(valid), plan, torch.float32)
        outcome = run.fit(lambda event, notes=notes: notes.append(event) if isinstance(event, NoteEvent) else None)
        found.append((outcome.share, outcome.bits["full"], notes))
    assert found[0][1] != found[1][1]
    assert len(found[0][2]) == 6 and found[0][2] == found[1][2] and found[0][0] == found[1][0]


def test_short_context_and_texts_that_only_choose(folder: Path, tmp_path: Path) -> None:
    plan = FitPlan(budget=0.5, context=16, sink_tokens=1, steps=1, survey=1, measure=1, baselines=False)
    (tmp_path / "numbers.txt").write_text(" ".join(map(str, range(1000))))  # no part is there twice
    run = FitRun(str(folder), str(tmp_path / "numbers.txt"), "", plan, torch.float32)
    used = {tuple(row) for texts in (run.trials, run.train, run.held_out) for row in texts.ids.tolist()}
    assert len(used) == len(run.trials) + len(run.train) + len(run.held_out) == 4
    assert run.fit().share <= 0.5


@pytest.mark.slow
def test_models_of_other_kinds_are_fitted_and_probed(folder: Path, tmp_path: Path) -> None:
    """Windows of their own, and logits that are changed behind the output layer in ways that are known and not."""
    tokenizer, kept = transformers.AutoTokenizer.from_pretrained(folder), {}
    for config in (
        transformers.MistralConfig(sliding_window=20),
        transformers.CohereConfig(logit_scale=0.25),
        transformers.GraniteConfig(logits_scaling=8.0),
    ):
        config.update({"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 256,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
                       "pad_token_id": None, "head_dim": None if config.model_type == "mistral" else 8})  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config)
        check_logits(model)
        name = tmp_path / config.model_type
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        main(["fit-spans", str(name), "--data", str(folder / "prose.txt"), "--out", str(name / "fit"), "--budget",
              "0.5", "--context", "64", "--steps", "2", "--survey", "1", "--measure", "1",
              "--dtype", "float32"])  # fmt: skip
        saved = json.loads((name / "fit" / "spans.json").read_text())
        assert 0.45 < saved["share"] <= 0.5
        again, _, fitted = load_fitted(str(name / "fit"))
        assert fitted and window_table(again).tolist() == saved["windows"]
        kept[config.model_type] = max(map(max, saved["windows"]))
        main(["probe", str(name / "fit"), "--contexts", "200", "--depths", "2", "--tasks", "1", "--budget", "0.5"])
    assert kept["mistral"] <= 20 < kept["cohere"]
    plain = model.forward
    model.forward = lambda **options: _doubled(plain(**options))
    with pytest.raises(ValueError, match=r"GraniteForCausalLM changes its logits after the output layer"):
        check_logits(model)


def test_model_that_is_not_saved_whole_is_none(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json comes last, and without it a folder is no model."""
    model, tokenizer = load_model(str(folder))
    attach(model, max_span=64)
    monkeypatch.setattr(os, "fsync", fail_at := Mock(side_effect=[None] * 3 + [OSError(28, "No space left on device")]))
    with pytest.raises(OSError, match=r"could not be saved in .* \(No space left on device\); make room"):
        save_fitted(model, tokenizer, tmp_path, {})
    assert fail_at.call_count == 4 and not (tmp_path / "config.json").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    monkeypatch.undo()
    save_fitted(model, tokenizer, tmp_path, {})
    assert load_fitted(str(tmp_path))[2]


def _doubled(found):
    found.logits = found.logits * 2
    return found


def test_lora_is_measured_and_merged_into_plain_weights(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "lora"
    main(["fit-spans", str(folder), "--data", str(folder / "prose.txt"), "--out", str(out), "--budget", "0.2",
          "--context", "64", "--steps", "0", "--survey", "1", "--measure", "1", "--no-baselines", "--lora", "2",
          "--lora-steps", "3", "--dtype", "float32"])  # fmt: skip
    assert "fitted spans and LoRA" in capsys.readouterr().out
    model, _, fitted = load_fitted(str(out))
    assert fitted and not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all", "--data", "x"], "x names no text"),
        (["--data", "{prose}", "./nowhere"], "there is no folder ./nowhere; give a model's folder"),
        (["{empty}", "--data", "{prose}"], "holds no model (0 .gguf files and no config.json)"),
        (["{model}", "--data", "{prose}", "--out", "{model}"], "already holds a model; choose another folder"),
        (["{model}", "--data", "{prose}", "--context", "256"], "one window takes 256; give more text or a shorter"),
        (["{model}", "--data", "{prose}", "--context", "8192"], "context is 8192, and the model was made for 256"),
        (
            ["{model}", "--data", "{short}", "--valid", "{prose}", "--context", "32"],
            "2 of them are only for validation",
        ),
        (["{model}", "--data", "{prose}", "--lora-lr", "0"], "lora_lr is 0; expected a positive number"),
        (["{model}", "--data", "{prose}", "--minutes", "-1"], "minutes is -1; expected 0 (no limit) or more"),
        (
            ["{model}", "--data", "{prose}", "--budget", "0.002"],
            "4 sink tokens and the token itself take 5; ask for 0.0024",
        ),
        (["{model}", "--data", "{prose}", "--budget", "2"], "expected a share of the full key/value memory"),
        (["{model}", "--data", "{prose}", "--tolerance", "2"], "tolerance is 2; expected a share of the loss"),
    ],
)
def test_bad_input_gets_a_sentence(
    arguments: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text(PROSE[:70])
    places = {
        "{prose}": str(folder / "prose.txt"),
        "{short}": str(tmp_path / "short.txt"),
        "{model}": str(folder),
        "{empty}": str(tmp_path / "empty"),
    }
    with pytest.raises(SystemExit) as end:
        main(["fit-spans", "--out", str(tmp_path / "out"), *(places.get(a, a) for a in arguments)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_bits_are_counted_on_the_end_of_each_window_and_bytes_by_hand(folder: Path) -> None:
    model, tokenizer = load_model(str(folder))
    text = PROSE * 3
    windows = make_chunks(text, tokenizer, context=64, start=40)
    raw = text.encode()
    assert len(windows) == len(raw) // 64
    whole = [n for n in range(len(windows)) if raw[64 * n + 40 : 64 * n + 64].isascii()]
    assert len(whole) > 2 and all(int(windows.bytes[n]) == 24 for n in whole)  # a token is a byte here
    with torch.no_grad():
        logits = model(windows.ids[:1]).logits[0]
    by_hand = sum(-float(logits[t - 1].log_softmax(-1)[raw[t] and windows.ids[0, t]]) for t in range(40, 64))
    assert chunk_bits(model, windows[:1])[0] == pytest.approx(by_hand / 0.6931471805599453, rel=1e-5)


def test_tokenizer_s_beginning_stands_before_every_text(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <s>", special_tokens=[("<s>", bos)]
    )
    windows = make_chunks(PROSE * 4, tokenizer, context=64, start=40)
    assert windows.ids[:, 0].tolist() == [bos] * len(windows) and int((windows.ids == bos).sum()) == len(windows)
    raw = (PROSE * 4).encode()
    assert tokenizer.decode(windows.ids[:, 1:].flatten()) == raw[: 63 * len(windows)].decode(errors="ignore")
    assert windows.bytes.tolist() == [24] * len(windows)
    with pytest.raises(ValueError, match="one window takes 999; give more text"):
        make_chunks(PROSE * 4, tokenizer, context=1000, start=40)
    task, plain = (make_task(t, 256, 0.0, 3) for t in (tokenizer, transformers.AutoTokenizer.from_pretrained(folder)))
    assert task.ids[0] == bos and bos not in task.ids[1:] and len(task.ids) <= 256
    assert task.ids[1:5] == plain.ids[:4] and task.key == plain.key


def test_tasks_are_the_same_for_the_same_seed_and_hold_their_key_where_they_say(folder: Path) -> None:
    model, tokenizer = load_model(str(folder))
    first, again, other = (make_task(tokenizer, 256, 0.5, seed) for seed in (3, 3, 4))
    assert first == again and first.key != other.key
    text = tokenizer.decode(first.ids)
    assert len(first.ids) <= 256 and text.count(first.key) == 3 and text.endswith("The pass key is " + first.key)
    end = len(first.ids) - first.answer - first.distance + 1
    assert tokenizer.decode(first.ids[:end]).endswith(f"{first.key} is the pass key.")
    depths = [make_task(tokenizer, 256, d, 0).distance for d in (0.0, 0.5, 1.0)]
    assert depths[0] > depths[1] > depths[2]
    with pytest.raises(ValueError, match="context is 40, and the pass key with its question takes"):
        make_task(tokenizer, 40, 0.5, 0)
    pair = make_task(tokenizer, 256, 0.5, 3, "pair")
    text = tokenizer.decode(pair.ids)
    lines = re.findall(r" Box (\d{4}) holds (\d{5})", text)
    assert len(lines) > 8 and len(pair.ids) <= 256 and lines[-1][1] == pair.key and lines.count(lines[-1]) == 2
    assert abs(lines.index(lines[-1]) - (len(lines) - 2) / 2) <= 1
    assert len({name for name, _ in lines}) == len(lines) - 1
    assert make_task(tokenizer, 256, 0.0, 3, "pair").distance > pair.distance
    with pytest.raises(ValueError, match="find is 'fact'; expected 'key' or 'pair'"):
        make_task(tokenizer, 256, 0.5, 3, "fact")  # type: ignore[arg-type]
    found = probe(model, tokenizer, contexts=(160,), depths=2, tasks=2)
    assert [f.depth for f in found] == [0.0, 1.0] and "depth 1.00" in table(found)
    with pytest.raises(ValueError, match="context is 999, and the model was made for 256"):
        probe(model, tokenizer, contexts=(999,))


def test_text_of_a_folder_is_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert read_text(str(tmp_path)) == read_text(str(tmp_path / "*.txt")) == "one\ntwo"


def test_a_size_at_a_context_longer_than_the_texts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "fit"
    main(["fit-spans", str(folder), "--data", str(folder / "prose.txt"), "--out", str(out), "--bytes", "20kB",
          "--context", "200", "--text", "64", "--steps", "2", "--survey", "1", "--measure", "1", "--dtype", "float32",
          "--no-baselines"])  # fmt: skip
    model, _, _ = load_fitted(str(out))
    kept, full = cache_bytes(model, 200, dtype=torch.bfloat16)
    shown = "".join(capsys.readouterr())
    assert re.search(r"KV cache in 16 bits, [\d,]+ bytes a token:", shown)
    assert re.search(rf" 200 +{full / 1000:.1f} kB +{20 - full / 200 / 1000:.1f} kB", shown)
    saved = json.loads((out / "spans.json").read_text())
    assert saved["served"] == 200 and saved["context"] == 64
    assert growth_table(model).flatten().tolist() == pytest.approx([b for row in saved["growth"] for b in row])
    assert 17_000 < kept <= 20_000
    share = cache_bytes(model, 64)[0] / cache_bytes(model, 64)[1]
    assert share == pytest.approx(saved["share"]) and share == pytest.approx(kept / full, abs=0.03)


def test_a_head_that_keeps_the_whole_text_is_unlimited(folder: Path, tmp_path: Path) -> None:
    plan = FitPlan(budget=1.0, context=64, steps=0, survey=1, measure=1, baselines=False)
    run = FitRun(str(folder), str(folder / "prose.txt"), "", plan, torch.float32)
    outcome = run.fit()
    run.save(tmp_path, outcome)
    model, tokenizer, _ = load_fitted(str(tmp_path))
    assert bool((growth_table(model) == 1).all())
    ids = torch.tensor([tokenizer(PROSE * 2)["input_ids"][:150]])
    plain, _ = load_model(str(folder))
    with torch.no_grad():
        assert (model(ids).logits - plain(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options, said",
    [
        ({"bytes": "lots"}, "bytes is 'lots'; expected a positive size such as 2GiB or 500MB"),
        ({"bytes": "0GiB"}, "expected a positive size"),
        ({"bytes": "1GiB", "tolerance": 0.1}, "bytes is 1GiB beside a tolerance of 0.1; leave one of them out"),
        ({"context": 4096, "text": 8192}, "text is 8192; expected 8 tokens or more, at most the context of 4,096, or"),
        ({"context": 8192, "lora": 4}, "lora is 4, and the context of 8,192 is longer than the texts of 2,048"),
        ({"context": 8192, "far": "linear"}, "far is linear, and the context of 8,192 is longer"),
        ({"kv_bits": 5}, "kv_bits is 5; expected 16, 8 or 4"),
    ],
)
def test_bytes_and_lengths_that_make_no_plan(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FitPlan(**options)


@pytest.mark.parametrize(
    "size, said",
    [
        ("1GiB", r"bytes is 1GiB, and the whole KV cache of 64 tokens takes .* kB: nothing needs to be fitted"),
        ("100B", r"bytes is 100B, and 4 sink tokens and the token itself, .* take .*; ask for more memory, a shorter"),
    ],
)
def test_bytes_that_no_fit_takes(folder: Path, size: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FitRun(str(folder), str(folder / "prose.txt"), "", FitPlan(bytes=size, context=64), torch.float32)


def test_tokenizer_of_another_model(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = transformers.AutoConfig.from_pretrained(folder)
    config.vocab_size = 200
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    said = r"the tokenizer in .* has 256 tokens, and its model 200; they do not belong together"
    with pytest.raises(ValueError, match=said):
        load_model(str(tmp_path))
    model = attach(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    save_fitted(model, transformers.AutoTokenizer.from_pretrained(tmp_path), tmp_path / "fit", {})
    with pytest.raises(ValueError, match=said):
        load_fitted(str(tmp_path / "fit"))
