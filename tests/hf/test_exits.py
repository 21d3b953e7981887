"""Exits of a pretrained model: the same tokens without them, and with them those of a dense oracle of the rule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.byte_llama import save_byte_llama
from support.hf_models import tiny, tokens

pytest.importorskip("transformers")

from spanformer.cli.main import main
from spanformer.depth.confidence import Confidence
from spanformer.hf.exit_fit import calibrate, fit_heads, split_prompts
from spanformer.hf.exit_layers import ExitLayers
from spanformer.hf.exits import (
    ExitHeads,
    Leaving,
    continuations,
    fingerprint,
    load,
    no_heads,
    save,
    write,
)

LAYERS = 6


@pytest.fixture(scope="module")
def decoder() -> ExitLayers:
    return ExitLayers(tiny("llama", num_hidden_layers=LAYERS).requires_grad_(False))


def heads(decoder: ExitLayers, *layers: int) -> ExitHeads:
    draw = torch.Generator().manual_seed(3)
    weight = 0.3 * torch.randn(len(layers), decoder.width, generator=draw)
    return replace(no_heads(decoder.width, *layers), weight=weight, weights="w", text="t")


def oracle(model, ids: Tensor, exits: Tensor) -> Tensor:
    """[B, T, V] logits of one pass without a cache: token t keeps its state after layer exits[b, t], and every layer
    sees all states."""
    trunk = model.model
    x, at = trunk.embed_tokens(ids), torch.arange(ids.shape[1])[None]
    positions = trunk.rotary_emb(x, at)
    t = ids.shape[1]
    hidden = torch.full((t, t), -math.inf, dtype=x.dtype).triu(1)[None, None]
    for n, layer in enumerate(trunk.layers, 1):
        new = layer(x, attention_mask=hidden, position_embeddings=positions, position_ids=at)
        x = torch.where((exits >= n)[..., None], new, x)
    return model.lm_head(trunk.norm(x))


@pytest.mark.parametrize("measure", ["classifier", "softmax", "saturation"])
def test_never_is_the_models_own_text(measure) -> None:
    model, ids = tiny("llama", num_hidden_layers=LAYERS), tokens(3, 11)
    own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=15, pad_token_id=0, do_sample=False)
    decoder = ExitLayers(model)
    leaving = Leaving(decoder, heads(decoder, 2, 4), Confidence(measure))
    found = list(write(decoder, leaving, ids, 15))
    assert torch.equal(torch.stack([token.ids for token in found], 1), own[:, 11:])
    assert all((token.layers == LAYERS).all() for token in found[1:])


def test_exits_by_cache_are_the_dense_oracles() -> None:
    """Rows leave after different layers at every token; float64, so that only the rule can differ."""
    model, ids = tiny("llama", num_hidden_layers=LAYERS).double(), tokens(4, 26)
    decoder, prompt = ExitLayers(model), 9
    exits = torch.full_like(ids, LAYERS)
    exits[:, prompt:] = torch.randint(1, LAYERS + 1, (4, 26 - prompt), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = oracle(model, ids, exits)
    model.set_attn_implementation("spanformer")
    cache = decoder.cache()
    decoder.read(ids[:, :prompt], cache)
    for t in range(prompt, 26):
        x, taken = decoder.step(ids[:, t], cache, lambda n, x, before, t=t: exits[:, t] <= n)
        assert torch.equal(taken, exits[:, t])
        torch.testing.assert_close(decoder.logits(x), wanted[:, t].float(), rtol=1e-5, atol=1e-6)


def test_all_skipped_layers_are_not_run(decoder: ExitLayers) -> None:
    ran: list[int] = []
    hooks = [layer.register_forward_hook(lambda *_, n=n: ran.append(n)) for n, layer in enumerate(decoder.layers, 1)]
    cache = decoder.cache()
    decoder.read(tokens(1, 5), cache)
    ran.clear()
    decoder.step(tokens(1), cache, lambda n, x, before: torch.tensor([n >= 2]))
    for hook in hooks:
        hook.remove()
    assert ran == [1, 2] and cache.get_seq_length(LAYERS - 1) == 6


@pytest.mark.parametrize("measure", ["classifier", "softmax", "saturation"])
def test_rows_write_as_if_alone(decoder: ExitLayers, measure) -> None:
    own, prompts = heads(decoder, 2, 3, 5), tokens(5, 7, seed=4)
    threshold = {"classifier": 0.5, "softmax": 0.05, "saturation": 0.9}[measure]
    together, layers = continuations(decoder, own, prompts, 8, Confidence(measure, threshold))
    alone = [continuations(decoder, own, row[None], 8, Confidence(measure, threshold)) for row in prompts]
    assert together == [texts[0] for texts, _ in alone]
    assert layers == pytest.approx(sum(mean for _, mean in alone) / 5)
    assert 2 < layers < LAYERS


@pytest.mark.parametrize("measure", ["classifier", "softmax"])
def test_output_layer_reads_the_map_of_the_exit(decoder: ExitLayers, measure) -> None:
    """Rows leave after different layers, each read through its own map; the softmax measure keeps what it computed."""
    draw = torch.Generator().manual_seed(8)
    own = heads(decoder, 2, 4)
    own = replace(own, maps=own.maps + 0.2 * torch.randn(own.maps.shape, generator=draw))
    leaving, x = Leaving(decoder, own, Confidence(measure, 0.0)), torch.randn(3, decoder.width, generator=draw)
    assert bool((gone := leaving(4, x, x)) is not None and gone.all())
    taken = torch.tensor([4, 4, 4])
    if measure == "classifier":
        taken = torch.tensor([2, 4, LAYERS])
    normed = decoder.trunk.norm(x)
    wanted = [
        normed[row] if n == LAYERS else normed[row] @ own.maps[n // 2 - 1, :-1] + own.maps[n // 2 - 1, -1]
        for row, n in enumerate(taken.tolist())
    ]
    torch.testing.assert_close(leaving.logits(x, taken), decoder.output(torch.stack(wanted)))


def test_text_ends_at_its_end_token(decoder: ExitLayers) -> None:
    own, prompts = heads(decoder, 2), tokens(2, 7, seed=4)
    whole, _ = continuations(decoder, own, prompts, 8, Confidence("classifier"))
    end = whole[0][3]
    cut, layers = continuations(decoder, own, prompts, 8, Confidence("classifier"), end=end)
    assert cut[0] == whole[0][: whole[0].index(end)] and layers == LAYERS


def test_classifiers_learn_which_layers_agree() -> None:
    """In a model whose layers after the third change nothing, exits from there on always agree."""
    model = tiny("llama", num_hidden_layers=LAYERS).requires_grad_(False)
    for layer in model.model.layers[3:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    decoder = ExitLayers(model)
    own = fit_heads(decoder, (1, 3, 4), tokens(20, 6), 10)
    cache = decoder.cache()
    states: list[Tensor] = []
    decoder.read(tokens(5, 20, seed=9), cache, lambda n, x: states.append(x))
    sure = [own.score(n, model.model.norm(states[at - 1])).sigmoid().mean() for n, at in enumerate((1, 3, 4))]
    assert sure[1] > 0.9 and sure[2] > 0.9 and sure[0] < 0.5
    found = calibrate(decoder, own, tokens(20, 6, seed=5), tokens(20, 10, seed=6), delta=0.2).calibration
    assert found is not None and found.threshold is not None and found.threshold <= 0.95
    accepted = next(row for row in found.tested if row["threshold"] == found.threshold)
    assert accepted["loss"] <= 0.05 and accepted["layers"] < 5


def test_saved_exits_load_for_the_same_weights_only(decoder: ExitLayers, tmp_path: Path) -> None:
    own = replace(heads(decoder, 2, 4), weights=fingerprint(decoder))
    path = save(own, tmp_path / "exits.safetensors")
    again = load(path, decoder, fingerprint(decoder))
    assert again.layers == (2, 4) and torch.equal(again.weight, own.weight) and again.calibration is None
    other = ExitLayers(tiny("llama", seed=1, num_hidden_layers=LAYERS))
    assert fingerprint(other) != own.weights
    with pytest.raises(ValueError, match="was made for other weights; run spanformer calibrate-exits again"):
        load(path, other, fingerprint(other))
    with pytest.raises(ValueError, match=r"there are no exits in .*; run spanformer calibrate-exits"):
        load(tmp_path / "none", decoder, "")
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"cannot be read .*; run spanformer calibrate-exits again"):
        load(path, decoder, "")


def test_unsuitable_models_are_refused() -> None:
    for name, sentence in {
        "gpt2": "GPT2LMHeadModel has no embed_tokens, so exits cannot be made for it",
        "mistral": "has sliding windows of its own, with which exits do not work",
        "qwen3": "changes its states between layers, or its keys and values, in a way that exits do not know",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            ExitLayers(tiny(name))


@pytest.mark.parametrize("layers", [(), (0, 2), (2, LAYERS), (4, 2), (3, 3)])
def test_exits_beyond_the_last_layer_are_refused(decoder: ExitLayers, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected rising numbers from 1 to 5, since layer 6 is the last"):
        fit_heads(decoder, layers, tokens(2, 4), 2)


def test_prompts_that_trained_the_classifiers_are_refused(decoder: ExitLayers) -> None:
    prompts = tokens(14, 4)
    own = fit_heads(decoder, (2,), prompts, 2)
    with pytest.raises(ValueError, match="the calibration prompts trained the classifiers"):
        calibrate(decoder, own, prompts, prompts, delta=0.25)


def test_short_text_and_few_prompts_are_refused(decoder: ExitLayers) -> None:
    with pytest.raises(ValueError, match="the text has 20 tokens; expected 30, 2 prompts for training and 4 for"):
        split_prompts(range(20), 2, 4, 3, 2)
    with pytest.raises(ValueError, match=r"there are 3 prompts; delta 0\.1 with epsilon 0.05 needs at least 29"):
        calibrate(decoder, heads(decoder, 2), tokens(3, 4), tokens(3, 2))


def test_training_and_calibration_prompts_do_not_overlap() -> None:
    train, prompts, references = split_prompts(range(1000), 8, 12, 6, 4)
    assert train.shape == (8, 6) and prompts.shape == (12, 6) and references.shape == (12, 4)
    assert int(train.max()) + 4 < int(prompts.min())
    assert torch.equal(references[:, 0], prompts[:, -1] + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_byte_llama(path, 512)
    (path / "text.txt").write_text("The history of the lighthouse begins with fires on hills. " * 40)
    return path


def call(*words: object) -> None:
    main([str(word) for word in words])


def test_calibrate_then_generate(folder: Path, capsys: pytest.CaptureFixture) -> None:
    call(
        "calibrate-exits", folder, "--data", folder / "text.txt", "--exit-layers", 1, "--prompts", 30,
        "--train-prompts", 8, "--prompt-tokens", 8, "--max-tokens", 6, "--delta", 0.3,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "threshold    loss    p-value    layers" in said and "exits.safetensors" in said
    greedy = ["generate", folder, "--prompt", "The ", "--max-tokens", 9, "--temperature", 0]
    call(*greedy)
    plain = capsys.readouterr()
    assert "layers: 2.00 of 2 per token" in plain.err
    call(*greedy, "--exits", "calibrated")
    assert "of 2 per token" in capsys.readouterr().err
    call(*greedy, "--exits", "classifier:0.0")
    assert "layers: 1.00 of 2 per token" in capsys.readouterr().err
    call(*greedy, "--exits", folder / "exits.safetensors")
    assert "of 2 per token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--temperature", "0.7", "--exits", "calibrated"], "calibrated for greedy text only; add --temperature 0"),
        (["--temperature", "0", "--beams", "2"], "--beams is for models of spanformer"),
        (["--temperature", "0", "--exits", "classifier:2"], "threshold is 2.0; expected 0 … 1"),
        (["--temperature", "0", "--exits", "other.safetensors"], "there are no exits in other.safetensors"),
        (["--temperature", "0", "--prompt", "a", "b"], "2 prompts are given; expected one --prompt"),
    ],
)
def test_bad_options_are_one_sentence(
    folder: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture
) -> None:
    decoder = ExitLayers(_model(folder))
    save(replace(no_heads(decoder.width, 1), weights=fingerprint(decoder)), folder / "exits.safetensors")
    with pytest.raises(SystemExit):
        call("generate", folder, "--prompt", "ab", *words)
    assert sentence in capsys.readouterr().err


def _model(folder: Path):
    from spanformer.hf.text import load_model

    return load_model(str(folder))[0]


def test_calibration_needs_text(folder: Path, capsys: pytest.CaptureFixture) -> None:
    for words, sentence in (
        ([], "is a model of Hugging Face, whose text is not known; give --data"),
        (["--data", folder / "text.txt", "--decay", 1], "decay is 1.0; expected 0 for a model of Hugging Face"),
    ):
        with pytest.raises(SystemExit):
            call("calibrate-exits", folder, *words)
        assert sentence in capsys.readouterr().err
