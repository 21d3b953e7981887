"""Draw the layers that each character of a text takes: docs/img/ponder.png and docs/img/exits.png.

python docs/depth_picture.py out/universal ponder.png
python docs/depth_picture.py out/bench/depth/chase-2 docs/img/ponder.png             of a pointer chase
python docs/depth_picture.py out/bench/depth/exits-1 docs/img/exits.png softmax:0.5        with exits, at a threshold

The text is the beginning of the run's validation split; the picture is that of `spanformer report`. Nodes of a pointer
chase are written as letters, hops as digits.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from spanformer.cli.eval import EvalOptions, data_config
from spanformer.cli.generate_exits import parse_confidence
from spanformer.data import prepare
from spanformer.data.tasks import parse_task
from spanformer.data.tasks.chase import FIRST_NODE, Chase
from spanformer.model.load import load, load_meta
from spanformer.report.depth_pictures import depth_picture
from spanformer.report.events import read_run
from spanformer.train.dynamic_event import depth_event


def main(folder: str, picture: str, exits: str = "") -> None:
    lm, meta, run = load(folder), load_meta(folder), read_run(Path(folder))
    if exits:
        lm.exits().confidence = parse_confidence(exits)
    config = data_config(EvalOptions(folder), meta)
    data = prepare(config)
    ids = data.splits["valid"].ids[: run.start.shape.block]
    found = depth_event(lm, ids, data.vocab, run.steps[-1].step)
    if found is not None and isinstance(parse_task(config.source), Chase):
        found = replace(found, text="".join(chr(48 + n) if n < FIRST_NODE else chr(97 + n - FIRST_NODE) for n in ids))
    drawn = None if found is None else depth_picture(replace(run, depths=[found]))
    if drawn is None:
        raise ValueError(f"every token of {folder} runs through all layers; expected a run with model.depth")
    print(drawn.sentence)
    drawn.save(Path(picture))


if __name__ == "__main__":
    main(*sys.argv[1:])
