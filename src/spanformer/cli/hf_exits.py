"""`calibrate-exits` and `generate` for a pretrained model of Hugging Face."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanformer.cli.progress import Progress
from spanformer.core.text import printable, read_text
from spanformer.model.folder import META

if TYPE_CHECKING:
    from spanformer.cli.calibrate_exits import CalibrateExitsOptions
    from spanformer.cli.generate import GenerateOptions
    from spanformer.hf.exit_layers import ExitLayers
    from spanformer.hf.exits import Leaving

SHARES = (1 / 3, 1 / 2, 2 / 3, 5 / 6)
"""of the layers, for default exits: 10, 15, 20 and 25 of 30"""


def is_hf(name: str) -> bool:
    """Whether it is a folder in Hugging Face's format, a .gguf file, or a folder with one."""
    path = Path(name)
    if (path / META).exists() or (path / "checkpoints").is_dir():
        return False
    return path.suffix == ".gguf" or (path / "config.json").is_file() or any(path.glob("*.gguf"))


def calibrate_hf(options: CalibrateExitsOptions) -> None:
    """Train classifiers of the exits, choose their threshold, and write both into one small file."""
    from spanformer.hf.exit_fit import calibrate, fit_heads, split_prompts
    from spanformer.hf.exit_layers import ExitLayers
    from spanformer.hf.exits import check_layers, save
    from spanformer.hf.saved import load_fitted
    from spanformer.infer.exits import table

    if not options.data:
        raise ValueError(f"{options.checkpoint} is a model of Hugging Face, whose text is not known; give --data")
    if options.decay:
        raise ValueError(f"decay is {options.decay}; expected 0 for a model of Hugging Face")
    path = exits_path(options.checkpoint, options.out)
    with Progress() as report:
        report(f"loading {options.checkpoint}", 0, 0)
        model, tokenizer, _ = load_fitted(options.checkpoint)
        decoder = ExitLayers(model)
        layers = options.exit_layers or default_layers(decoder.count)
        check_layers(layers, decoder.count)
        ids = tokenizer(read_text(options.data), add_special_tokens=False, verbose=False)["input_ids"]
        train, prompts, references = split_prompts(
            ids, options.train_prompts, options.prompts, options.prompt_tokens, options.max_tokens
        )
        heads = fit_heads(decoder, layers, train, options.max_tokens, on_progress=report)
        found = calibrate(
            decoder, heads, prompts, references, measure=options.measure or "classifier",
            consistency=options.consistency, delta=options.delta, epsilon=options.epsilon,
            end=tokenizer.eos_token_id, on_progress=report,
        )  # fmt: skip
    assert found.calibration is not None
    print(table(found.calibration, decoder.count))
    print(f"exits after layers {', '.join(map(str, layers))}, saved in {printable(save(found, path))}")


def exits_path(model: str, given: str) -> Path:
    """The file with a model's exits: as given, or in the model's folder."""
    from spanformer.hf.exits import FILE

    folder = Path(model)
    return Path(given) if given else (folder.parent if folder.suffix == ".gguf" else folder) / FILE


def generate_hf(options: GenerateOptions) -> None:
    """Continue one prompt greedily and print the text as it is generated."""
    from spanformer.hf.exit_layers import ExitLayers
    from spanformer.hf.saved import load_fitted

    _check(options)
    with Progress(transient=True) as report:
        report(f"loading {options.checkpoint}", 0, 0)
        model, tokenizer, _ = load_fitted(options.checkpoint)
        decoder = ExitLayers(model)
        leaving = _leaving(decoder, options)
    _print(decoder, leaving, tokenizer, options)


def _print(decoder: ExitLayers, leaving: Leaving, tokenizer: Any, options: GenerateOptions) -> None:
    import torch

    from spanformer.hf.exits import write

    ids = tokenizer(options.prompt[0])["input_ids"]
    if not ids:
        raise ValueError("the prompt is empty; expected at least one token")
    made: list[int] = []
    layers: list[int] = []
    shown, begun = "", time.perf_counter()
    for token in write(decoder, leaving, torch.tensor([ids]), options.max_tokens):
        if int(token.ids) == tokenizer.eos_token_id:
            break
        made.append(int(token.ids))
        layers += [] if token.layers is None else [int(token.layers)]
        begun = time.perf_counter() if len(made) == 1 else begun  # the first token came with the prompt
        text = tokenizer.decode(made)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character of several tokens is incomplete
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    rest = tokenizer.decode(made)[len(shown) :]
    sys.stdout.write(rest + "\n" * (not (shown + rest).endswith("\n")))
    seconds = time.perf_counter() - begun
    rate = f", {len(layers) / seconds:,.1f} tokens/s" if layers else ""
    print(f"prompt: {len(ids):,} tokens\ngenerated: {len(made):,} tokens{rate}", file=sys.stderr)
    if layers:
        print(f"layers: {sum(layers) / len(layers):.2f} of {decoder.count} per token", file=sys.stderr)


def _check(options: GenerateOptions) -> None:
    from spanformer.cli.generate import GenerateOptions

    default, taken = GenerateOptions(options.checkpoint), {"checkpoint", "prompt", "max_tokens", "temperature", "exits"}
    unfit = [f.name for f in fields(options) if f.name not in taken]
    if unfit := [name for name in unfit if getattr(options, name) != getattr(default, name)]:
        named = ", ".join("--" + name.replace("_", "-") for name in unfit)
        raise ValueError(
            f"{named} is for models of spanformer; with one of Hugging Face use --prompt, --max-tokens, --temperature "
            "0 and --exits only"
        )
    if options.temperature != 0:
        raise ValueError(
            f"{options.checkpoint} is a model of Hugging Face, which generate continues greedily, and its exits are "
            "calibrated for greedy text only; add --temperature 0"
        )
    if len(options.prompt) != 1:
        raise ValueError(f"{len(options.prompt)} prompts are given; expected one --prompt")


def _leaving(decoder: ExitLayers, options: GenerateOptions) -> Leaving:
    """Who leaves, as --exits says: nothing, "calibrated", a file of calibrate-exits, or a measure and a threshold."""
    import math

    from spanformer.cli.generate_exits import parse_confidence
    from spanformer.depth.confidence import Confidence
    from spanformer.hf.exits import Leaving, fingerprint, load, no_heads

    given = options.exits
    if not given:
        return Leaving(decoder, no_heads(decoder.width), Confidence("classifier", math.inf))
    own = given == "calibrated" or ":" in given
    heads = load(exits_path(options.checkpoint, "" if own else given), decoder, fingerprint(decoder))
    if own and given != "calibrated":
        return Leaving(decoder, heads, parse_confidence(given))
    if heads.calibration is None:
        raise ValueError("its exits have no calibrated threshold; run spanformer calibrate-exits again")
    return Leaving(decoder, heads, heads.calibration.confidence())


def default_layers(count: int) -> tuple[int, ...]:
    """The exits of a model of `count` layers."""
    return tuple(dict.fromkeys(max(1, min(count - 1, round(count * each))) for each in SHARES))
