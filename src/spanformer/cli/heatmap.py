"""`spanformer heatmap CHECKPOINT --text "…"`: where every head looks while a model reads a sentence."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import tyro

from spanformer.cli.leaf import Leaf

SHOWN = {" ": "␣", "\n": "↵", "\t": "⇥"}


@dataclass(frozen=True)
class HeatmapOptions:
    """Draw the attention weights of every layer and head over a text, and one head with its tokens.

        spanformer heatmap out/demo --text "def main(argv):" --layer 2 --head 1

    A row is a query, a column a key. The weights are those that the model mixes values by, with spans, windows and
    biases in them, computed densely: a text of some dozens of tokens is best looked at.
    """

    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model: a language model or an encoder"""
    text: str
    """the text to read"""
    layer: int = 0
    """of the head that is shown on the terminal and with its tokens, counted from 1; 0: that of the farthest look"""
    head: int = 0
    """the head, counted from 1; 0: the one of the layer that looks farthest"""
    out: str = ""
    """folder to write the pictures to; by default `heatmap` in the checkpoint's folder"""

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text is empty; expected a sentence for the model to read")
        for name in ("layer", "head"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number from 1 on, or 0")


def run(options: HeatmapOptions) -> None:
    import numpy as np
    import torch

    from spanformer.cli.reading import model_vocabulary, prompt_ids
    from spanformer.model.load import load_any, load_meta
    from spanformer.model.looking import attention_maps
    from spanformer.model.seq2seq import Seq2Seq
    from spanformer.report.heatmap_pictures import farthest, head_picture, maps_picture
    from spanformer.report.terminal import shades

    vocab = model_vocabulary(load_meta(options.checkpoint), options.checkpoint)
    lm = load_any(options.checkpoint)
    if isinstance(lm, Seq2Seq):
        raise ValueError(f"{options.checkpoint} is an encoder–decoder, which reads two texts; expected a language "
                         "model or an encoder")  # fmt: skip
    ids = np.concatenate(list(prompt_ids(None, options.text, vocab))).astype(np.int64)
    maps = [found.float().numpy() for found in attention_maps(lm, torch.from_numpy(ids))]
    layers, heads = len(maps), len(maps[0])
    for name, number, most in (("layer", options.layer, layers), ("head", options.head, heads)):
        if number > most:
            raise ValueError(f"{name} is {number}; the model has {most}, counted from 1")
    layer, head = farthest(maps, options.layer, options.head)
    labels = ["".join(SHOWN.get(char, char) for char in vocab.decode([token])) for token in ids.tolist()]
    print(f"layer {layer}, head {head}: a line is a query, a column a key\n")
    print(shades(maps[layer - 1][head - 1], labels, shutil.get_terminal_size().columns))
    folder = Path(options.out) if options.out else Path(options.checkpoint) / "heatmap"
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(options.checkpoint).resolve().name
    pictures = [maps_picture(maps, labels, name), head_picture(maps[layer - 1][head - 1], labels, layer, head)]
    print(f"\n{pictures[0].sentence}")
    for picture in pictures:
        print(f"picture: {picture.save(folder / f'{picture.name}.png')}")


HEATMAP = Leaf(HeatmapOptions, run)
