"""The neighbours of a run's tokens (SPALM): a datastore of the training text, made with the keys of a frozen model,
and the tokens that followed the nearest contexts of each token, found once before training.

    DATASTORE                       in the run folder, or where retrieve.store says
    neighbours/train.bin, valid.bin int32 [n − 1, k], little-endian, memory-mapped
    neighbours/train.json, …        what they were found with: a run that is resumed refuses others

Shapes: B rows, T tokens, n tokens of a split, k neighbours.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spanformer.core.files import replace_file, write_text
from spanformer.core.progress import OnProgress
from spanformer.data import Prepared
from spanformer.data.vocab import from_json
from spanformer.model.load import load, load_meta
from spanformer.retrieve.build import Plan, build_store, text_digest
from spanformer.retrieve.fit import SHARED, shared_runs
from spanformer.retrieve.header import read_json
from spanformer.retrieve.model import LmKeys
from spanformer.retrieve.spalm import Search, neighbour_tokens
from spanformer.retrieve.store import Store
from spanformer.train.config import RunConfig

DATASTORE, FOLDER = "datastore", "neighbours"


@dataclass(frozen=True, eq=False)
class Neighbours:
    tokens: np.ndarray
    """[n − 1, k] int32, memory-mapped; −1 for none"""

    def at(self, starts: np.ndarray, length: int) -> Tensor:
        """[B, T, k] of the tokens from `starts` [B] on; after the text's end, those of its last token."""
        places = np.minimum(starts[:, None] + np.arange(length), len(self.tokens) - 1)
        return torch.from_numpy(self.tokens[places].astype(np.int64))


def store_folder(config: RunConfig, out: Path) -> Path:
    return Path(config.retrieve.store) if config.retrieve.store else out / DATASTORE


def frozen_keys(config: RunConfig, vocab: object) -> LmKeys:
    """The frozen model; vocab: of the run's text, as JSON."""
    name = config.retrieve.model
    meta = load_meta(name)
    if meta.get("vocab") != vocab or not isinstance(vocab, dict):
        raise ValueError(
            f"retrieve.model is {name}, which was trained on other tokens than {config.data.source} has; expected a "
            "model with the same vocabulary"
        )
    return LmKeys(load(name).requires_grad_(False), from_json(vocab), name)


def find_neighbours(
    config: RunConfig, data: Prepared, out: Path, report: OnProgress, splits: dict[str, np.ndarray]
) -> None:
    """Build the datastore of the training text, and find the neighbours of the splits [n] that have none yet."""
    keys, folder = frozen_keys(config, data.vocab.to_json()), store_folder(config, out)
    about = partial(report, "building the datastore")
    build_store(keys, data.splits["train"].ids, folder, Plan(config.retrieve.keys), on_count=about)
    store = Store(folder)
    for name, ids in splits.items():
        wanted = _about(config, store, ids)
        path = out / FOLDER / f"{name}.bin"
        if path.with_suffix(".json").exists():
            _check(path, wanted)
            continue
        if name != "train" and (shared := shared_runs(store, ids)) > SHARED:
            raise ValueError(
                f"{100 * shared:.0f} % of the {name} split is in the datastore {folder}, where it would find itself; "
                "use a datastore without it"
            )
        c = config.retrieve
        found = neighbour_tokens(
            keys, store, ids, config.model.neighbours, window=c.window, copy=c.copy,
            on_count=partial(report, f"finding neighbours of the {name} split among {len(store):,} entries"),
        )  # fmt: skip
        content = np.ascontiguousarray(found, "<i4").tobytes()
        path.parent.mkdir(exist_ok=True)
        with replace_file(path) as new:
            new.write_bytes(content)
        write_text(path.with_suffix(".json"), json.dumps(wanted | {"crc32": zlib.crc32(content)}) + "\n")


def read_neighbours(out: Path, name: str, tokens: int, k: int) -> Neighbours:
    """Those of a split with this many tokens, as `find_neighbours` has written them."""
    path, expected = out / FOLDER / f"{name}.bin", 4 * (tokens - 1) * k
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise ValueError(
            f"{path} has {size:,} bytes; expected {expected:,}, {k} neighbours of each token: remove {path.parent} to "
            "find them again"
        )
    return Neighbours(np.memmap(path, "<i4", "r", shape=(tokens - 1, k)))


def open_search(config: RunConfig, vocab: object, checkpoint: Path) -> Search:
    """What finds neighbours for a trained model while it reads; checkpoint: a run's folder or a folder in it."""
    places = [checkpoint, *checkpoint.parents[:2], Path(config.out)]
    out = next((place for place in places if (place / DATASTORE).is_dir()), Path(config.out))
    return Search(frozen_keys(config, vocab), Store(store_folder(config, out)), config.model.neighbours)


def _about(config: RunConfig, store: Store, ids: np.ndarray) -> dict:
    """What neighbours depend on."""
    c = config.retrieve
    return {
        "text": text_digest(ids), "k": config.model.neighbours, "window": c.window, "copy": c.copy,
        "entries": len(store), "made": asdict(store.header),
    }  # fmt: skip


def _check(path: Path, wanted: dict) -> None:
    said = read_json(path.with_suffix(".json"))
    if changed := [name for name, value in wanted.items() if said.get(name) != value]:
        raise ValueError(
            f"{path} was found with another {changed[0]} than this run has; change it back, or start another run with "
            "another --out"
        )
    if not path.is_file() or zlib.crc32(path.read_bytes()) != said.get("crc32"):
        raise ValueError(f"{path} does not fit its checksum: it is damaged; remove {path.parent} to find them again")
