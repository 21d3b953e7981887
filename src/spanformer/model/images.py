"""The order in which a model reads an image's values: line by line, or block by block for `image_2d`."""

from __future__ import annotations

import numpy as np

from spanformer.attention.image_local import order
from spanformer.model.config import ModelConfig

BLOCKS = "image_2d"


def scan_order(config: ModelConfig, height: int, width: int) -> np.ndarray:
    """[height · width] the value, in raster order, of each token. width: values of a line, of all its colours."""
    given = {
        (spec.p.width, spec.p.high, spec.p.wide)
        for layer in config.layer_specs()
        for spec in layer
        if spec.kind == BLOCKS
    }
    if not given:
        return np.arange(height * width)
    (across, high, wide), *others = sorted(given)
    if others:
        raise ValueError(
            f"model.attention has {BLOCKS} heads with blocks {sorted(given)} (width, high, wide); expected one kind of "
            "block, since an image is read in one order"
        )
    if across != width:
        raise ValueError(
            f"model.attention has {BLOCKS} with width {across}, and a line of the images has {width} values; expected "
            f"{BLOCKS}(width={width}, …)"
        )
    return order(width, height, (high, wide)).numpy()
