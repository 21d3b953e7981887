"""Images as tokens: one token for each value of each pixel, in raster order, colours of a pixel after one another.

The source is `digits`, the 1,797 grey images of 8 × 8 pixels and 17 levels in the package scikit-learn, or a folder of
PNG files of one size. Images are stored as raw bytes, one after the other.

Shapes: H lines of W pixels of C channels; N = H · W · C values of an image.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spanformer.core.files import replace_file, write_text
from spanformer.data.vocab import Vocab

DIGITS, VERSION = "digits", 1
MOST = 1 << 16
"""values of an image"""
LEVELS = 256
"""of a PNG's channel"""


class Pixels(Vocab):
    """A token is a level, 0 … levels − 1; the last id begins an image, and is in no file."""

    kind, unit = "pixel", "dimension"

    def __init__(self, height: int, width: int, channels: int, levels: int) -> None:
        self.height, self.width, self.channels, self.levels = height, width, channels, levels
        self.size, self.begin = levels + 1, levels

    @property
    def values(self) -> int:
        """N"""
        return self.height * self.width * self.channels

    @property
    def line(self) -> int:
        """Values of a line."""
        return self.width * self.channels

    def stream(self, parts: Iterable[bytes]) -> Iterator[np.ndarray]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part in parts:
            yield np.frombuffer(part, np.uint8)

    def prompt(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        raise ValueError("the model reads images, not text; expected `spanformer generate` without a text")

    def encode(self, text: str | bytes) -> np.ndarray:
        raise ValueError("the model reads images, not text; expected a folder of PNG files, or digits")

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return " ".join(str(int(i)) for i in ids)

    def images(self, ids: np.ndarray) -> np.ndarray:
        """[n, H, W, C] of ids [n, N]."""
        return ids.reshape(-1, self.height, self.width, self.channels)

    def read(self, path: Path) -> np.ndarray:
        """[N] the levels of an image file."""
        found = read_image(path, self.channels == 3)
        if found.shape != (self.height, self.width, self.channels):
            raise ValueError(
                f"{path} has {found.shape[1]} × {found.shape[0]} pixels; expected {self.width} × {self.height}, as the "
                "images that the model was trained on"
            )
        return (found.reshape(-1).astype(np.int64) * (self.levels - 1) + (LEVELS - 1) // 2) // (LEVELS - 1)

    def to_json(self) -> dict[str, Any]:
        sizes = ("height", "width", "channels", "levels")
        return {"kind": self.kind, **{name: getattr(self, name) for name in sizes}}


def digits() -> np.ndarray:
    """[1797, 64] uint8, levels 0 … 16, in the file's order; reads scikit-learn's file without importing it."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ImportError("digits are in the package scikit-learn; install it with: pip install 'spanformer[images]'")
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected scikit-learn's file of digits: install the package again")
    with gzip.open(path, "rt") as file:
        return np.loadtxt(file, delimiter=",", dtype=np.int64)[:, :64].astype(np.uint8)


def deal_digits(valid: float, test: float) -> dict[str, np.ndarray]:
    """The splits, in an order that is shuffled once and for all: the file is sorted by writer."""
    images = digits()
    images = images[np.random.default_rng(0).permutation(len(images))]
    held = [max(1, round(share * len(images))) for share in (test, valid)]
    return {"test": images[: held[0]], "valid": images[held[0] : sum(held)], "train": images[sum(held) :]}


def read_image(path: Path, colour: bool) -> np.ndarray:
    """[H, W, 3 or 1] uint8."""
    image = _open(path)
    with image:
        if image.width * image.height * (3 if colour else 1) > MOST:
            raise ValueError(
                f"{path} has {image.width:,} × {image.height:,} pixels; expected images of at most {MOST:,} values: "
                "scale them down"
            )
        try:
            return np.atleast_3d(np.asarray(image.convert("RGB" if colour else "L"), dtype=np.uint8))
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as an image ({error}); expected a PNG file") from None


def is_coloured(path: Path) -> bool:
    with _open(path) as image:
        return image.mode not in ("1", "L", "LA", "I", "I;16", "F")


def _open(path: Path):
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("images need pillow; install it with: pip install 'spanformer[images]'") from None
    try:
        return Image.open(path, formats=("PNG",))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is not a PNG file ({error}); expected a folder of PNG files only") from None


def read_folder(files: dict[str, Sequence[Path]]) -> tuple[dict[str, np.ndarray], Pixels]:
    """The images [n, N] of each split; RGB for all as soon as one has colours."""
    every = [path for paths in files.values() for path in paths]
    colour = any(map(is_coloured, every))
    first = read_image(every[0], colour)
    found: dict[str, np.ndarray] = {}
    for split, paths in files.items():
        found[split] = np.empty((len(paths), first.size), np.uint8)
        for row, path in enumerate(paths):
            image = read_image(path, colour)
            if image.shape != first.shape:
                raise ValueError(
                    f"{path} has {image.shape[1]} × {image.shape[0]} pixels and {every[0]} {first.shape[1]} × "
                    f"{first.shape[0]}; expected images of one size"
                )
            found[split][row] = image.reshape(-1)
    height, width, channels = first.shape
    return found, Pixels(height, width, channels, LEVELS)


def write(folder: Path, name: str, images: dict[str, np.ndarray], pixels: Pixels) -> dict[str, Path]:
    """One file of raw levels per split, and last the sizes of an image."""
    paths = raw_files(folder, name, list(images))
    for split, path in paths.items():
        with replace_file(path) as new:
            new.write_bytes(images[split].tobytes())
    write_text(folder / f"{name}.json", json.dumps(pixels.to_json()))
    return paths


def raw_files(folder: Path, name: str, splits: Sequence[str]) -> dict[str, Path]:
    return {split: folder / f"{name}.{split}" for split in splits}


def written(folder: Path, name: str) -> Pixels | None:
    """The images' sizes, if they have been written there."""
    path = folder / f"{name}.json"
    return pixels_from(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def pixels_from(saved: dict[str, Any]) -> Pixels:
    sizes = [n for name in ("height", "width", "channels", "levels") if type(n := saved.get(name)) is int and n > 0]
    if len(sizes) < 4 or sizes[0] * sizes[1] * sizes[2] > MOST or sizes[3] > LEVELS:
        raise ValueError(f"{json.dumps(saved)[:80]} is no saved size of images; expected the result of to_json")
    return Pixels(*sizes)
