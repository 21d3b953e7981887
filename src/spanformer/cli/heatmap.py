"""`spanformer heatmap CHECKPOINT --text "…"`: draw the attention weights of every head over a text."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from spanformer.cli.command import Command
from spanformer.core.text import printable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from spanformer.data import Vocab
    from spanformer.model.seq2seq import Seq2Seq
    from spanformer.report.head_stats import HeadStats

LONGEST = 256  # tokens that an encoder–decoder generates
SHOWN = {" ": "␣", "\n": "↵", "\t": "⇥"}


@dataclass(frozen=True)
class HeatmapOptions:
    """Draw the attention weights of every layer and head over a text, and one head with its tokens.

        spanformer heatmap out/demo --text "def main(argv):" --layer 2 --head 1

    A row is a query, a column a key. The weights are the model's own, spans, windows and biases included. They are
    computed densely; texts of a few dozen tokens are the easiest to read. For an encoder–decoder, the cross-attention
    from target to source comes first:  spanformer heatmap out/seq2seq --text 31407
    """

    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model"""
    text: str
    """the input text; for an encoder–decoder, the source"""
    target: str = ""
    """for an encoder–decoder, the target text; by default the answer that the model generates"""
    layer: int = 0
    """layer of the head to print in the terminal and to draw with its tokens, counted from 1; 0: the layer of the
    head that looks farthest"""
    head: int = 0
    """that head, counted from 1; 0: the head of the layer that looks farthest, or, in cross-attention, moves most"""
    out: str = ""
    """folder for the pictures; by default `heatmap` in the checkpoint's folder"""

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text is empty; expected a text for the model to process")
        for name in ("layer", "head"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number from 1 on, or 0")


def run(options: HeatmapOptions) -> None:
    from spanformer.report.heatmap_pictures import head_picture, maps_picture
    from spanformer.report.terminal import shades

    stats = _head_stats(options)
    first = stats[0]
    for name, number, most in (("layer", options.layer, len(first.maps)), ("head", options.head, len(first.maps[0]))):
        if number > most:
            raise ValueError(f"{name} is {number}; the model has {most}, counted from 1")
    layer, head = first.chosen(options.layer, options.head)
    print(f"layer {layer}, head {head}: {first.rows}\n")
    width = shutil.get_terminal_size().columns
    print(shades(first.maps[layer - 1][head - 1], first.queries, first.keys, width))
    print(f"\n{first.of_all()}")
    folder = Path(options.out) if options.out else Path(options.checkpoint) / "heatmap"
    name = Path(options.checkpoint).resolve().name
    for each in stats:
        place = (layer, head) if each is first else each.chosen()
        for picture in (maps_picture(each, name), head_picture(each, *place)):
            print(f"picture: {printable(picture.save(folder / f'{picture.name}.png'))}")


def _head_stats(options: HeatmapOptions) -> list[HeadStats]:
    """Statistics of all heads; of an encoder–decoder, first cross-attention, then the self-attention of both halves."""
    import torch

    from spanformer.cli.text_input import model_vocabulary
    from spanformer.inspect.attention_maps import LONGEST as MOST
    from spanformer.inspect.attention_maps import attention_maps, pair_maps
    from spanformer.model.load import load_any, load_meta
    from spanformer.model.seq2seq import Seq2Seq
    from spanformer.report.head_stats import CrossHeadStats

    vocab = model_vocabulary(load_meta(options.checkpoint), options.checkpoint)
    model = load_any(options.checkpoint)
    ids = _ids(options.text, vocab)
    for name, tokens in (("text", ids), ("target", _ids(options.target, vocab))):
        if len(tokens) > MOST:
            raise ValueError(f"--{name} has {len(tokens):,} tokens; expected 1 … {MOST:,}, the limit of a picture")
    if not isinstance(model, Seq2Seq):
        if options.target:
            raise ValueError(
                f"--target is for encoder–decoders; {options.checkpoint} holds a model of kind {model.config.kind!r}, "
                "which takes --text only"
            )
        return [_of_text(_arrays(attention_maps(model, torch.tensor(ids))), _shown(ids, vocab))]
    written = _written(model, ids, _ids(options.target, vocab))
    source, x = [*ids, model.end], [model.begin, *written[:-1]]
    names = {model.begin: "<begin>", model.end: "<end>"}
    read, begun, made = (_shown(each, vocab, names) for each in (source, x, written))
    encoder, decoder, cross = map(_arrays, pair_maps(model, torch.tensor(source), torch.tensor(x)))
    return [
        CrossHeadStats(cross, made, read, "cross-attention"),
        _of_text(encoder, read, "encoder"),
        _of_text(decoder, begun, "decoder"),
    ]


def _of_text(maps: list[np.ndarray], tokens: list[str], part: str = "") -> HeadStats:
    from spanformer.report.head_stats import HeadStats

    above = len(maps[0][0]) - len(tokens)  # ETC's global tokens come first
    names = [*(f"Σ{n + 1}" for n in range(above)), *tokens]
    return HeadStats(maps, names, names, part, above)


def _arrays(maps: list[Tensor]) -> list[np.ndarray]:
    return [found.float().numpy() for found in maps]


def _ids(text: str, vocab: Vocab) -> list[int]:
    from spanformer.cli.text_input import prompt_ids

    return [int(token) for part in prompt_ids(None, text, vocab) for token in part]


def _written(model: Seq2Seq, source: list[int], target: list[int]) -> list[int]:
    """The target, or else the model's answer, with the end token; a truncated answer has none."""
    from spanformer.infer import answer

    if target:
        return [*target, model.end]
    (found,) = answer(model, [source], max_tokens=LONGEST)
    return found if len(found) == LONGEST else [*found, model.end]


def _shown(ids: list[int], vocab: Vocab, names: dict[int, str] | None = None) -> list[str]:
    """Each token's text in printable characters. names: labels of tokens without text."""
    texts = ((names or {}).get(token) or vocab.decode([token]) for token in ids)
    return [printable("".join(SHOWN.get(char, char) for char in text)) for text in texts]


HEATMAP = Command(HeatmapOptions, run)
