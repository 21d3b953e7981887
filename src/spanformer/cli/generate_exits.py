"""The exits that `spanformer generate --exits` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanformer.cli.calibrate_exits import weights_digest
from spanformer.depth import Confidence, Exits
from spanformer.infer.exits import exits_of, load
from spanformer.model.lm import LM
from spanformer.model.load import model_folder

if TYPE_CHECKING:
    from spanformer.cli.generate import GenerateOptions


def use_exits(lm: LM, meta: dict, options: GenerateOptions) -> Exits:
    """The model's exits, by which tokens now leave."""
    exits = exits_of(lm)
    if options.lookup or options.beams > 1:
        raise ValueError("--exits decides token by token; expected no --lookup and 1 beam")
    if options.exits == "calibrated":
        if options.temperature != 0:
            raise ValueError(
                "--exits calibrated guarantees greedy text only; add --temperature 0, or give a measure and a "
                "threshold, such as softmax:0.3"
            )
        exits.confidence = load(model_folder(options.checkpoint), weights_digest(meta)).confidence()
        return exits
    measure, colon, threshold = options.exits.partition(":")
    try:
        exits.confidence = Confidence(measure, float(threshold))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        why = f" ({error})" if colon else ""
        raise ValueError(
            f"--exits is {options.exits!r}; expected calibrated, or a measure and a threshold such as softmax:0.3{why}"
        ) from error
    return exits
