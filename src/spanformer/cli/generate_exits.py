"""The exits that `spanformer generate` is asked for, by --exits or --draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanformer.cli.calibrate_exits import weights_digest
from spanformer.depth import Confidence, Exits
from spanformer.infer.draft import Draft
from spanformer.infer.exits import load
from spanformer.model.lm import LM
from spanformer.model.load import model_folder

if TYPE_CHECKING:
    from spanformer.cli.generate import GenerateOptions


def read_draft(text: str) -> Draft | None:
    """--draft LAYERS:TOKENS; None without it."""
    if not text:
        return None
    layers, _, tokens = text.partition(":")
    if not (layers.isdecimal() and tokens.isdecimal()):
        raise ValueError(f"--draft is {text!r}; expected LAYERS:TOKENS, such as 3:4")
    return Draft(int(layers), int(tokens))


def use_exits(lm: LM, meta: dict, options: GenerateOptions) -> Exits:
    """The model's exits, by which tokens now leave."""
    exits = lm.exits()
    if options.lookup or options.draft or options.beams > 1:
        raise ValueError("--exits decides token by token; expected neither --lookup nor --draft, and 1 beam")
    if options.exits == "calibrated":
        if options.temperature != 0:
            raise ValueError(
                "--exits calibrated guarantees greedy text only; add --temperature 0, or give a measure and a "
                "threshold, such as softmax:0.3"
            )
        exits.confidence = load(model_folder(options.checkpoint), weights_digest(meta)).confidence()
        return exits
    exits.confidence = parse_confidence(options.exits)
    return exits


def parse_confidence(text: str) -> Confidence:
    """A measure and a threshold, such as softmax:0.3."""
    measure, colon, threshold = text.partition(":")
    try:
        return Confidence(measure, float(threshold))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        why = f" ({error})" if colon else ""
        raise ValueError(
            f"--exits is {text!r}; expected calibrated, or a measure and a threshold such as softmax:0.3{why}"
        ) from error
