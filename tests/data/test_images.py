"""Images as tokens: raster order, splits, levels, and each mistake in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")

from spanformer.data import DataConfig, Pixels, from_json, prepare
from support.images import fake_digits, write_png


def folder_of(path: Path, *images: np.ndarray) -> str:
    for n, image in enumerate(images):
        write_png(path / "pictures" / f"{n}.png", image)
    return str(path / "pictures")


def config(tmp_path: Path, source: str, **more: object) -> DataConfig:
    return DataConfig(source, tokens="pixel", cache=str(tmp_path / "cache"), **more)  # pyright: ignore


def test_digits_are_dealt_whole_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = fake_digits(tmp_path / "fake", monkeypatch)
    data = prepare(config(tmp_path, "digits", valid=0.1, test=0.2))
    assert isinstance(data.vocab, Pixels) and data.vocab.size == 18 and data.unit == "dimension"
    assert {name: split.tokens for name, split in data.splits.items()} == {"train": 2688, "valid": 384, "test": 768}
    assert all(split.tokens == split.units for split in data.splits.values())
    found = np.concatenate([split.ids.reshape(-1, 64) for split in data.splits.values()])
    assert sorted(map(bytes, found)) == sorted(image.astype(np.uint8).tobytes() for image in images)
    again = prepare(config(tmp_path, "digits", valid=0.1, test=0.2))
    assert again.folder == data.folder and from_json(data.vocab.to_json()).to_json() == data.vocab.to_json()
    assert "sklearn" not in sys.modules


def test_colours_follow_one_another_in_raster_order(tmp_path: Path) -> None:
    grey, colour = np.arange(6).reshape(2, 3), np.arange(18).reshape(2, 3, 3)
    data = prepare(config(tmp_path, folder_of(tmp_path, grey, colour, colour)))
    assert isinstance(data.vocab, Pixels) and data.vocab.to_json() == {
        "kind": "pixel", "height": 2, "width": 3, "channels": 3, "levels": 256,
    }  # fmt: skip
    every = [split.ids.tolist() for split in data.splits.values()]
    assert sorted(every) == sorted([np.repeat(np.arange(6), 3).tolist(), list(range(18)), list(range(18))])
    only_grey = prepare(config(tmp_path / "grey", folder_of(tmp_path / "grey", grey, grey, grey)))
    assert isinstance(only_grey.vocab, Pixels) and only_grey.vocab.channels == 1
    assert only_grey.splits["train"].ids.tolist() == list(range(6))


def test_a_png_is_read_into_the_models_levels(tmp_path: Path) -> None:
    pixels = Pixels(1, 4, 1, 17)
    path = write_png(tmp_path / "a.png", np.array([[0, 255, 128, 16]]))
    assert pixels.read(path).tolist() == [0, 16, 8, 1]
    with pytest.raises(ValueError, match=r"a\.png has 4 × 1 pixels; expected 8 × 8, as the images that the model"):
        Pixels(8, 8, 1, 17).read(path)


def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"source is 'digits' and tokens is 'byte'; expected tokens 'pixel'"):
        prepare(DataConfig("digits"))
    with pytest.raises(ValueError, match=r"source is 'stdlib' and tokens is 'pixel'; expected digits, or a folder of"):
        prepare(config(tmp_path, "stdlib"))
    with pytest.raises(ValueError, match=r"has 2 files; expected PNG files for 3 splits"):
        prepare(config(tmp_path, folder_of(tmp_path / "two", image, image)))
    with pytest.raises(
        ValueError, match=r"2 × 2 pixels and .*; expected images of one size|expected images of one size"
    ):
        prepare(config(tmp_path, folder_of(tmp_path / "sizes", image, image, np.zeros((2, 2)))))
    text = Path(folder_of(tmp_path / "text", image, image, image))
    (text / "notes.txt").write_text("not an image")
    with pytest.raises(ValueError, match=r"notes\.txt is not a PNG file .*; expected a folder of PNG files only"):
        prepare(config(tmp_path, str(text)))
    large = folder_of(tmp_path / "large", *[np.zeros((300, 300))] * 3)
    with pytest.raises(ValueError, match=r"300 × 300 pixels; expected images of at most 65,536 values: scale them"):
        prepare(config(tmp_path, large))
    cut = Path(folder_of(tmp_path / "cut", *[np.arange(2500).reshape(50, 50) % 251] * 3))
    for path in cut.iterdir():
        path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ValueError, match=r"cannot be read as an image .*; expected a PNG file"):
        prepare(config(tmp_path, str(cut)))
    with pytest.raises(ValueError, match=r"vocab is 9; expected 0, since the tokens of images are their levels"):
        config(tmp_path, "digits", vocab=9)
    with pytest.raises(ValueError, match=r"the model reads images, not text"):
        Pixels(8, 8, 1, 17).encode("text")
    for saved in ({"height": 0}, {"height": 1 << 20, "width": 1, "channels": 1, "levels": 17}):
        with pytest.raises(ValueError, match="is no saved size of images"):
            from_json({"kind": "pixel", **saved})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"scikit-learn; install it with: pip install 'spanformer\[images\]'"):
        prepare(config(tmp_path, "digits"))


def test_a_model_refuses_images_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_digits(tmp_path / "fake", monkeypatch)
    with pytest.raises(ValueError, match=r"source 'digits' has .*; expected images as the model's"):
        prepare(config(tmp_path, "digits"), vocab=Pixels(4, 4, 1, 17))
