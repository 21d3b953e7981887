"""`spanformer calibrate-exits CHECKPOINT --delta 0.1`: choose the threshold at which tokens leave a model's layers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from spanformer.cli.command import Command

if TYPE_CHECKING:
    import numpy as np

    from spanformer.core.progress import OnProgress
    from spanformer.data.prepare import Prepared


@dataclass(frozen=True)
class CalibrateExitsOptions:
    """Choose the lowest exit threshold whose text stays within a tolerance, with a guarantee (Learn then Test).

    For example:  spanformer calibrate-exits out/exits --delta 0.25
    Then:         spanformer generate out/exits --prompt "def " --temperature 0 --exits calibrated
    """

    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), or a checkpoint, of a model with exits; or a pretrained model of Llama's
    form (a folder in Hugging Face's format, a .gguf file), whose exits are trained first"""
    delta: float = 0.1
    """tolerated mean loss, 0 … 1"""
    epsilon: float = 0.05
    """probability that the loss exceeds delta after all"""
    consistency: Literal["textual", "risk"] = "textual"
    """textual: loss = 1 − ROUGE-L of the text with and without exits; risk: how much farther from the true continuation
    the text with exits is"""
    measure: Literal["", "softmax", "saturation", "classifier"] = ""
    """confidence of a token after a layer, see docs/depth.md; empty: softmax, and classifier for a pretrained model"""
    decay: float = 0.0
    """τ of a threshold that decays along the text, 0.9 λ + 0.1 exp(−τ t / max_tokens); 0: it stays"""
    prompts: int = 200
    """number of prompts, taken at equal distances from the text"""
    prompt_tokens: int = 64
    """tokens of each prompt"""
    max_tokens: int = 48
    """generated tokens of each prompt"""
    data: str = ""
    """a file, folder or named corpus that did not train the model; empty: the model's own corpus"""
    copy: Annotated[str, tyro.conf.arg(name="from")] = ""
    """a copy of the named corpus that is already on disk"""
    split: Literal["train", "valid", "test"] = "test"
    """split of the corpus"""
    exit_layers: tuple[int, ...] = ()
    """pretrained model: layers after which a token may leave; default: a third, a half, two thirds and five sixths"""
    train_prompts: int = 128
    """pretrained model: prompts from the beginning of the text whose continuations train the classifiers"""
    out: str = ""
    """pretrained model: the file to write; default: exits.safetensors in its folder"""

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.train_prompts < 2:
            raise ValueError(f"train_prompts is {self.train_prompts}; expected 2 or more, half of them for labels")
        for name in ("delta", "epsilon"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number between 0 and 1")
        if self.split == "train" and not self.data:
            raise ValueError("split is 'train', whose text trained the exits; expected 'valid' or 'test'")


def run(options: CalibrateExitsOptions) -> None:
    from spanformer.cli.hf_exits import calibrate_hf, is_hf

    if is_hf(options.checkpoint):
        calibrate_hf(options)
        return
    if options.exit_layers or options.out:
        raise ValueError(
            "--exit-layers and --out are for pretrained models of Hugging Face; this model has exits after every layer "
            "and keeps its threshold in its folder"
        )
    _calibrate(options)


def _calibrate(options: CalibrateExitsOptions) -> None:
    from spanformer.cli.eval import EvalOptions, check_vocabulary, data_config, vocabulary
    from spanformer.cli.progress import Progress
    from spanformer.data import prepare
    from spanformer.infer.exits import calibrate, save, table
    from spanformer.model.load import load, load_meta, model_folder

    with Progress() as report:
        report(f"loading {options.checkpoint}", 0, 0)
        meta, lm = load_meta(options.checkpoint), load(options.checkpoint)
        asked = EvalOptions(options.checkpoint, data=options.data, copy=options.copy, split=options.split)
        data = prepare(data_config(asked, meta), on_progress=report, vocab=vocabulary(asked, meta))
        check_vocabulary(meta, data.vocab.to_json(), lm.config.vocab, data.vocab.size)
        ids, each = data.splits[options.split].ids, options.prompt_tokens + options.max_tokens
        if len(ids) < options.prompts * each:
            raise ValueError(
                f"the {options.split} split has {len(ids):,} tokens; expected {options.prompts * each:,}, "
                f"{options.prompts} prompts of {each} tokens that do not overlap (fewer --prompts need less)"
            )
        starts = [len(ids) * n // options.prompts for n in range(options.prompts)]
        if options.data:
            _check_unseen(options, meta, data, [ids[at : at + each] for at in starts], report)
        found = calibrate(
            lm, [ids[at : at + options.prompt_tokens] for at in starts],
            [ids[at + options.prompt_tokens : at + each] for at in starts], weights=weights_digest(meta),
            measure=options.measure or "softmax", consistency=options.consistency, delta=options.delta,
            epsilon=options.epsilon, max_tokens=options.max_tokens, decay=options.decay, on_progress=report,
        )  # fmt: skip
    print(table(found, lm.config.layers))
    print(f"saved in {save(found, model_folder(options.checkpoint))}")


def _check_unseen(
    options: CalibrateExitsOptions, meta: dict, data: Prepared, prompts: list[np.ndarray], report: OnProgress
) -> None:
    """Refuse prompts that occur in the text that trained the model, whatever the names of the two."""
    from spanformer.cli.eval import EvalOptions, data_config
    from spanformer.data import prepare
    from spanformer.data.overlap import found_in

    if not meta.get("config", {}).get("data"):
        print(
            f"{options.checkpoint} does not record its training text, so the prompts were not compared with it",
            file=sys.stderr,
        )
        return
    try:
        trained = prepare(data_config(EvalOptions(options.checkpoint), meta), on_progress=report).splits["train"]
    except ValueError as error:
        raise ValueError(
            f"the training text of {options.checkpoint} cannot be read ({error}), so it is not known whether --data "
            "trained the exits; put it back where the run found it, or omit --data"
        ) from error
    if data.splits["train"].sha256 == trained.sha256 and options.split != "train":
        return  # the same corpus under any name: its splits do not overlap
    report("comparing the prompts with the training text", 0, 0)
    if seen := found_in(trained.ids, prompts):
        raise ValueError(
            f"--data {options.data} trained the exits: {len(seen)} of {len(prompts)} prompts of its {options.split} "
            "split occur in the training text; give a text that the model has not seen"
        )


def weights_digest(meta: dict) -> str:
    """The SHA-256 of a model's weights, as its folder lists them."""
    return "+".join(f"{file['sha256']}" for name, file in sorted(meta["files"].items()) if name.startswith("model"))


CALIBRATE_EXITS = Command(CalibrateExitsOptions, run)
