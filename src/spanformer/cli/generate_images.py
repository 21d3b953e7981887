"""`spanformer generate` for a model of images: samples, or completions of half an image, as one PNG.

Shapes: n images of N values.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from spanformer.cli.generate import GenerateOptions
    from spanformer.core.progress import OnProgress
    from spanformer.data import Pixels
    from spanformer.model.lm import LM

OWN = ("image", "images", "out")
SAMPLING = ("checkpoint", "temperature", "top_k", "top_p", "min_p", "seed", "chunk", "cache_bits")
SAMPLES, COMPLETED, TIMES = 16, 8, 3
"""images drawn; images completed, and how many times each"""


def drawn(options: GenerateOptions) -> bool:
    """Whether the checkpoint is a model of images, for which the picture is written here."""
    from spanformer.cli.progress import Progress
    from spanformer.data import Pixels, from_json
    from spanformer.model.load import load_any, load_meta

    meta = load_meta(options.checkpoint)
    saved = meta.get("vocab")
    if not isinstance(saved, dict) or saved.get("kind") != Pixels.kind:
        if named := [name for name in OWN if getattr(options, name)]:
            raise ValueError(f"--{named[0]} is for models of images, and {options.checkpoint} reads text; omit it")
        return False
    check(options)
    pixels = from_json(saved)
    assert isinstance(pixels, Pixels)
    with Progress(transient=True) as report:
        report(f"loading {options.checkpoint}", 0, 0)
        lm = load_any(options.checkpoint)
        print(write_picture(lm, pixels, meta, options, report))  # pyright: ignore[reportArgumentType]
    return True


def check(options: GenerateOptions) -> None:
    """Refuse options that are for text."""
    default = type(options)(options.checkpoint)
    others = [f.name for f in fields(options) if f.name not in (*OWN, *SAMPLING)]
    if named := [name for name in others if getattr(options, name) != getattr(default, name)]:
        raise ValueError(
            f"--{named[0].replace('_', '-')} is for text, and {options.checkpoint} draws images; expected --image, "
            "--images, --out, --seed and options of sampling only"
        )
    if options.images < 0:
        raise ValueError(f"images is {options.images}; expected 1 or more, or 0 for the default")
    if options.images and options.image not in ("", "test"):
        raise ValueError(f"images is {options.images} with the one image {options.image}; omit --images")


def write_picture(lm: LM, pixels: Pixels, meta: dict, options: GenerateOptions, report: OnProgress) -> str:
    """Draw, write the PNG, and say where."""
    import numpy as np

    from spanformer.report.image_pictures import draw_completions, draw_samples

    temperature = 1.0 if options.temperature is None else options.temperature
    seed = "" if options.seed is None else f", seed {options.seed}"
    name, how = Path(options.checkpoint).name, f"temperature {temperature:g}{seed}"
    path = Path(options.out or Path(options.checkpoint) / ("completions.png" if options.image else "samples.png"))
    if path.suffix.lower() != ".png":
        raise ValueError(f"out is {options.out!r}; expected the path of a PNG file, such as samples.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not options.image:
        empty = np.empty((options.images or SAMPLES, 0), np.int64)
        found = sample(lm, pixels, empty, options, report)
        return f"{len(found)} images: {draw_samples(pixels.images(found), pixels.levels, name, how, path)}"
    originals, half = given_images(pixels, meta, options), pixels.height // 2 * pixels.line
    found = sample(lm, pixels, np.repeat(originals[:, :half], TIMES, 0), options, report)
    completed = [pixels.images(found[n::TIMES]) for n in range(TIMES)]
    draw_completions(pixels.images(originals), completed, pixels.levels, name, how, path)
    return f"{len(originals)} images, each completed {TIMES} times: {path}"


def given_images(pixels: Pixels, meta: dict, options: GenerateOptions) -> np.ndarray:
    """[n, N] int64: the image of --image, or images of the test split."""
    import numpy as np

    from spanformer.cli.eval import run_config
    from spanformer.data import prepare
    from spanformer.train.objective import images_of

    if options.image != "test":
        return pixels.read(Path(options.image))[None]
    data = prepare(run_config(meta, options.checkpoint).data, vocab=pixels)
    images = images_of(pixels, data.splits["test"].ids, "test")
    count = options.images or COMPLETED
    if count > len(images):
        raise ValueError(f"images is {count}; expected at most {len(images)}, those of the test split")
    return images[:count].astype(np.int64)


def sample(lm: LM, pixels: Pixels, given: np.ndarray, options: GenerateOptions, report: OnProgress) -> np.ndarray:
    """[n, N] images that continue the first values given [n, some], in raster order."""
    import numpy as np

    from spanformer.infer import Sampling, generate_batch
    from spanformer.model.images import scan_order

    order, known = scan_order(lm.config, pixels.height, pixels.line), given.shape[1]
    if order[:known].max(initial=-1) >= known:
        raise ValueError(
            f"image is {options.image}, and the model reads blocks that are partly in the lower half; expected an "
            f"image_2d whose `high` divides {pixels.height // 2}, or no --image"
        )
    sampling = Sampling(1.0 if options.temperature is None else options.temperature, options.top_k, options.top_p,
                        options.min_p)  # fmt: skip
    found, left = [list(row[order[:known]]) for row in given], pixels.values - known
    prompts = [np.array([pixels.begin, *row]) for row in found]
    pieces = generate_batch(
        lm, prompts, max_tokens=left, sampling=sampling, seed=options.seed, chunk=options.chunk,
        cache=lm.cache(len(prompts), bits=options.cache_bits),
    )  # fmt: skip
    for n, piece in enumerate(pieces):
        found[piece.row].append(min(piece.id, pixels.levels - 1))  # the id that begins an image was never a target
        if n % 64 == 0:
            report("drawing", n, left * len(prompts))
    images = np.empty((len(found), pixels.values), dtype=np.int64)
    images[:, order] = found
    return images
