"""Datastores for commands: the settings that were fitted or are given, a model that asks one, and explanations."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spanformer.core.fields import build
from spanformer.core.text import printable
from spanformer.model.lm import LM
from spanformer.retrieve.ivf import read_index
from spanformer.retrieve.mixture import FIT, Retrieval, Settings, mixed_log_probs, read_settings, weights
from spanformer.retrieve.model import KeyModel, LmKeys, retrieving
from spanformer.retrieve.search import search
from spanformer.retrieve.spalm import finding
from spanformer.retrieve.store import Store
from spanformer.train.config import RunConfig
from spanformer.train.neighbours import open_search

log = logging.getLogger("spanformer")


def chosen_settings(folder: Path, k: int, temperature: float | None, share: float | None) -> Settings:
    """The fitted settings, with those that are given in their place; a λ that is given replaces the gate."""
    fitted = (folder / FIT).is_file() or temperature is None or share is None
    settings = read_settings(folder) if fitted else Settings()
    if temperature is not None:
        settings = replace(settings, temperature=temperature)
    if share is not None:
        settings = replace(settings, share=share, gate=None)
    return replace(settings, k=k) if k else settings


@contextlib.contextmanager
def with_datastore(lm: object, vocab: Any, store: str, name: str) -> Iterator[Retrieval | None]:
    """Inside this block the model asks the datastore of a folder, if one is named."""
    if not store:
        yield None
        return
    if not isinstance(lm, LM):
        raise ValueError("--datastore is for language models; this one is an encoder or an encoder–decoder")
    opened = Store(store)
    retrieval = Retrieval(opened, read_settings(opened.folder), _odd, read_index(opened))
    with retrieving(lm, retrieval, LmKeys(lm, vocab, name).maker):
        yield retrieval


@contextlib.contextmanager
def with_neighbours(lm: object, meta: dict, checkpoint: str) -> Iterator[None]:
    """Inside this block a model with neighbours (SPALM) finds them itself, as in its run."""
    if not isinstance(lm, LM) or not lm.config.neighbours:
        yield
        return
    if not isinstance(meta.get("config"), dict):
        raise ValueError(f"{checkpoint} does not record the run that says how its neighbours are found; give the run")
    config = build(RunConfig, meta["config"], checkpoint)
    with finding(lm, open_search(config, meta.get("vocab"), Path(checkpoint))):
        yield


def _odd(count: int) -> None:
    log.warning(f"{count} contexts have keys that are not finite; their predictions are the model's alone")


def used(retrieval: Retrieval | None) -> list[str]:
    """A line for the end of a command."""
    if retrieval is None:
        return []
    entries, searched = len(retrieval.store), retrieval.searched
    return [f"datastore: {entries:,} entries; searched for {searched:,} of {retrieval.asked:,} tokens"]


def explanation(model: KeyModel, store: Store, prompt: str, show: int, around: int) -> list[str]:
    """Lines about the token after a prompt: what the model says, what the datastore says, and from where."""
    ids = torch.from_numpy(model.encode(prompt))
    if not len(ids):
        raise ValueError("the prompt is empty; expected at least one token")
    *_, piece = model.read(ids, logits=True)
    assert piece.logits is not None
    key, logits = piece.keys[-1:], piece.logits[-1:]
    settings = read_settings(store.folder)
    retrieval = Retrieval(store, settings)
    alone, together = logits.double().log_softmax(-1).exp()[0], mixed_log_probs(retrieval, key, logits).exp()[0]
    share = float(retrieval.shares(key, logits.double().log_softmax(-1))[0])
    found = search(store, key, settings.k)
    weight = weights(found, settings.temperature)[0]

    def best(p: torch.Tensor) -> str:
        top = p.topk(min(5, len(p)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return "  ".join(f"{model.decode([token])!r} {value:.3f}" for token, value in pairs)

    lines = [f"model alone:     {best(alone)}", f"with datastore:  {best(together)}"]
    proved = "proved to be the nearest" if bool(found.proved[0]) else "found by 8-bit codes, not proved"
    lines.append(f"λ {share:.3f}, temperature {settings.temperature:.4g}; {settings.k} neighbours, {proved}:")
    for n in range(min(show, settings.k)):
        entry = int(found.ids[0, n])
        if entry < 0:
            break
        before = model.decode(store.tokens[max(0, entry - around) : entry].tolist())
        token = model.decode([int(store.tokens[entry])])
        where = f"{float(weight[n]):.3f}  distance {float(found.distances[0, n]):10.4g}  entry {entry:>9,}"
        lines.append(f"  {where}  …{printable(before)!r} → {printable(token)!r}")
    return lines
