"""Images for tests: folders of PNG files, and a stand-in for scikit-learn's file of digits."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest


def stripes(count: int, seed: int = 0) -> np.ndarray:
    """[count, 8, 8] levels 0 … 16: vertical stripes, whose lower half follows from the upper one."""
    draw = np.random.default_rng(seed)
    return np.repeat(draw.integers(0, 2, (count, 1, 8)) * 16, 8, axis=1)


def fake_digits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Put a package `sklearn` with only its file of digits before all others; returns the images [60, 8, 8]."""
    monkeypatch.syspath_prepend(str(folder))
    return write_digits(folder)


def write_digits(folder: Path, count: int = 60) -> np.ndarray:
    data = folder / "sklearn" / "datasets" / "data"
    data.mkdir(parents=True)
    (folder / "sklearn" / "__init__.py").write_text("raise AssertionError('the file is read without its package')\n")
    images = stripes(count)
    with gzip.open(data / "digits.csv.gz", "wt") as file:
        for label, image in enumerate(images):
            file.write(",".join(map(str, [*image.reshape(-1), label % 10])) + "\n")
    return images


def write_png(path: Path, image: np.ndarray) -> Path:
    """image [H, W] or [H, W, 3], 0 … 255."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.astype(np.uint8)).save(path)
    return path
