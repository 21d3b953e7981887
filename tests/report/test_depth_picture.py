"""Layers along a text: the event of a model, and its picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.data import Bytes
from spanformer.depth import Confidence, Exits
from spanformer.model.config import DepthConfig, ModelConfig
from spanformer.model.lm import LM
from spanformer.report.depth_pictures import depth_picture
from spanformer.report.events import read_run
from spanformer.train.dynamic_event import SHOWN, depth_event
from support import synthetic_runs as synthetic

ROW = {"event": "depth", "step": 5, "text": "if x:\n", "layers": [3, 1, 2, 4, 4, 1], "most": 4}
SMALL = dict(layers=2, heads=3)


def test_event_holds_the_layers_of_each_token() -> None:
    torch.manual_seed(0)
    lm = LM(ModelConfig(vocab=256, dim=32, layers=3, heads=2, depth=DepthConfig(kind="exits")))
    assert isinstance(lm.depth, Exits)
    lm.depth.confidence = Confidence("saturation", 0.8)
    ids = np.arange(32, 32 + 60, dtype=np.uint8)
    event = depth_event(lm, ids, Bytes(), 7)
    assert event is not None and len(ids) < SHOWN and lm.training
    assert event.layers == lm.depth.latest[0].tolist() and len(event.text) == 60  # type: ignore[index]
    assert depth_event(LM(ModelConfig(vocab=256, dim=32, layers=2, heads=2)), ids, Bytes(), 7) is None


def test_picture_names_the_mean_and_the_deepest(tmp_path: Path) -> None:
    run = read_run(synthetic.write(tmp_path, [*synthetic.events(), ROW]))
    picture = depth_picture(run)
    assert picture is not None and "takes 2.5 of 4 layers on average, from 1 to 4" in picture.sentence
    heights = [bar.get_height() for bar in picture.figure.axes[0].patches]
    assert heights == ROW["layers"]
    assert depth_picture(dataclasses.replace(run, depths=[])) is None


@pytest.mark.parametrize("change", [{"layers": [1, 2]}, {"layers": [9, 1, 1, 1, 1, 1]}])
def test_damaged_row_is_refused(tmp_path: Path, change: dict) -> None:
    folder = synthetic.write(tmp_path, [*synthetic.events(), json.loads(json.dumps(ROW | change))])
    with pytest.raises(ValueError, match="layers"):
        read_run(folder)
