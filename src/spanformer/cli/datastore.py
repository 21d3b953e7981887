"""`spanformer datastore build | fit | eval | explain`: a datastore of contexts and the tokens that followed them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.core.text import printable, read_text
from spanformer.retrieve.build import Plan

if TYPE_CHECKING:
    import numpy as np

    from spanformer.retrieve.model import KeyModel


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Plan):
    """Store the keys of a text's contexts, each with the token that followed (kNN-LM).

    For example:  spanformer datastore build out/demo --data src --out out/store

    Then fit temperature and λ on other text:  spanformer datastore fit out/demo out/store --data held-out.txt

    A build that was stopped continues where it was; another text is appended.
    """

    model: tyro.conf.Positional[str]
    """a run's folder or a checkpoint; or a folder in Hugging Face's format, a .gguf file, a name on the Hub"""
    data: str
    """the text: a file, a folder or a glob"""
    out: str
    """folder of the datastore"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """what a Hugging Face model computes in; auto: bfloat16 if the CPU has instructions for its products"""


@dataclass(frozen=True)
class FitOptions:
    """Fit temperature and λ of a datastore on held-out text, and print the bits per byte before and after.

    For example:  spanformer datastore fit out/demo out/store --data held-out.txt --adaptive
    """

    model: tyro.conf.Positional[str]
    """the model that built it"""
    store: tyro.conf.Positional[str]
    """folder of the datastore"""
    data: str
    """text that is not in the datastore: a file, a folder or a glob"""
    k: int = 64
    """neighbours of a token"""
    adaptive: bool = False
    """also learn a λ that depends on the context; where it is small, no search is made"""
    limit: int = 0
    """use only the first tokens of the text; 0: all"""
    allow_overlap: bool = False
    """fit on text that is in the datastore: λ will be far too high"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """as for build"""


@dataclass(frozen=True)
class EvalStoreOptions:
    """Measure the bits per byte of a text with and without a datastore.

    For example:  spanformer datastore eval out/demo out/store --data test.txt
    """

    model: tyro.conf.Positional[str]
    """the model that built it"""
    store: tyro.conf.Positional[str]
    """folder of the datastore"""
    data: str
    """a file, a folder or a glob"""
    k: int = 0
    """neighbours of a token; 0: as fitted"""
    temperature: float | None = None
    """instead of the fitted one"""
    share: float | None = None
    """λ instead of the fitted one, 0 … 1"""
    limit: int = 0
    """use only the first tokens of the text; 0: all"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """as for build"""


@dataclass(frozen=True)
class ExplainOptions:
    """Print what a datastore contributes to the next token: its neighbours with their text, distances and weights.

    For example:  spanformer datastore explain out/demo out/store --prompt "def main("
    """

    model: tyro.conf.Positional[str]
    """the model that built it"""
    store: tyro.conf.Positional[str]
    """folder of the datastore"""
    prompt: str
    """the context"""
    show: int = 8
    """neighbours to print"""
    around: int = 12
    """tokens of text to print before each neighbour"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """as for build"""


@dataclass(frozen=True)
class IndexOptions:
    """Make an inverted index for a datastore of more than some 3,000,000 entries; smaller ones are scanned exactly.

    For example:  spanformer datastore index out/store --nprobe 32        (needs pip install "spanformer[knn]")
    """

    store: tyro.conf.Positional[str]
    """folder of the datastore"""
    lists: int = 0
    """lists of keys; 0: four times the square root of the entries"""
    nprobe: int = 32
    """lists that a query reads"""


def open_model(name: str, dtype: str = "auto") -> KeyModel:
    """A spanformer model if the folder holds one, else one of Hugging Face."""
    from spanformer.model.folder import META

    if (Path(name) / META).exists() or (Path(name) / "checkpoints").is_dir():
        from spanformer.cli.text_input import model_vocabulary
        from spanformer.model.load import load, load_meta
        from spanformer.retrieve.model import LmKeys

        return LmKeys(load(name), model_vocabulary(load_meta(name), name), name)
    from spanformer.core.processor import named_dtype
    from spanformer.hf.datastore import HfKeys
    from spanformer.hf.text import load_model

    return HfKeys(*load_model(name, named_dtype(dtype)), name)


def read_ids(model: KeyModel, source: str, limit: int) -> np.ndarray:
    """The tokens of a text; limit: how many entries to make of it."""
    if limit < 0:
        raise ValueError(f"limit is {limit}; expected a number of tokens, or 0 for all")
    ids = model.encode(read_text(source))
    if len(ids) < 2:
        raise ValueError(f"{source} has {len(ids)} tokens; expected 2 or more: a context and the token after it")
    return ids[: limit + 1] if limit else ids


def build(options: BuildOptions) -> None:
    from spanformer.retrieve.build import build_store
    from spanformer.retrieve.model import header_of
    from spanformer.retrieve.store import Store

    with Progress() as report:
        report(f"loading {options.model}", 0, 0)
        model = open_model(options.model, options.dtype)
        report(f"encoding {options.data}", 0, 0)
        ids = read_ids(model, options.data, options.limit)
        header = header_of(model, options.keys, options.pca, options.context)
        title = (
            f"{len(ids) - 1:,} entries of {header.entry_bytes:,} bytes: {len(ids) * header.entry_bytes / 1e6:,.0f} MB"
        )
        report(title, 0, 0)
        begun, first = time.monotonic(), -1

        def on_count(done: int, total: int) -> None:
            nonlocal begun, first
            if first < 0:
                begun, first = time.monotonic(), done
            rate = (done - first) / max(time.monotonic() - begun, 1e-9)
            report(f"{title} · {rate:,.0f} tokens/s", done, total)

        made = build_store(model, ids, Path(options.out), options, on_count=on_count)
        store = Store(options.out)
    shown = printable(options.out)
    print(f"{made.added:,} entries added" + f", {made.before:,} were there" * bool(made.before))
    size, error = store.bytes() / 1e6, f"a stored key is at most {store.error:.4g} from the model's"
    print(f"{shown}: {len(store):,} entries, {size:,.1f} MB; {error}")
    print(f"to fit temperature and λ: spanformer datastore fit {printable(options.model)} {shown} --data TEXT")


def fit_store(options: FitOptions) -> None:
    import functools
    from dataclasses import replace

    from spanformer.retrieve.build import text_digest
    from spanformer.retrieve.fit import SHARED, fit, look, shared_runs
    from spanformer.retrieve.model import check_made
    from spanformer.retrieve.store import Store

    with Progress() as report:
        report(f"loading {options.model}", 0, 0)
        model, store = open_model(options.model, options.dtype), Store(options.store)
        check_made(store, model.maker, model.dim, model.vocab)
        ids = read_ids(model, options.data, options.limit)
        shared = shared_runs(store, ids)
        if shared > SHARED and not options.allow_overlap:
            raise ValueError(
                f"{100 * shared:.0f} % of {options.data} is in the datastore, where it would find itself, and λ would "
                "be far too high; fit on other text, or pass --allow-overlap"
            )
        seen = look(model, store, ids, options.k, functools.partial(report, f"searching {len(store):,} entries"))
        report("fitting", 0, 0)
        settings, before, after = fit(seen, options.k, adaptive=options.adaptive)
        about = {"tokens": len(ids) - 1, "text": text_digest(ids), "entries": len(store), "shared": shared}
        settings = replace(settings, fitted_on=about)
        settings.write(store.folder)
    bits = (len(ids) - 1) / math.log(2) / len(model.decode(ids[1:].tolist()).encode())
    gate = settings.gate
    print(
        f"temperature {settings.temperature:.4g}, λ {settings.share:.3f}" + ", adaptive" * (gate is not None) +
        f": {before * bits:.4f} → {after * bits:.4f} bits per byte ({100 * (after / before - 1):+.2f} %) on "
        f"{len(ids) - 1:,} held-out tokens"
    )  # fmt: skip
    if not settings.share:
        print("the datastore does not help on this text: λ is 0, and predictions stay the model's")


def evaluate(options: EvalStoreOptions) -> None:
    from spanformer.cli.retrieval import chosen_settings
    from spanformer.retrieve.fit import windows
    from spanformer.retrieve.ivf import read_index
    from spanformer.retrieve.mixture import Retrieval, mixed_nll
    from spanformer.retrieve.model import check_made
    from spanformer.retrieve.store import Store

    with Progress() as report:
        report(f"loading {options.model}", 0, 0)
        model, store = open_model(options.model, options.dtype), Store(options.store)
        check_made(store, model.maker, model.dim, model.vocab)
        ids = read_ids(model, options.data, options.limit)
        settings = chosen_settings(store.folder, options.k, options.temperature, options.share)
        retrieval, before, after, done = Retrieval(store, settings, None, read_index(store)), 0.0, 0.0, 0
        for inputs, targets in windows(ids, store.header.context):
            at = 0
            for piece in model.read(inputs, logits=True):
                assert piece.logits is not None
                y = targets[at : at + len(piece.keys)]
                nll = -piece.logits.double().log_softmax(-1).gather(1, y[:, None])[:, 0]
                before += float(nll.sum())
                gate = piece.logits if settings.gate is not None else None
                after += float(nll.sum() if retrieval.idle else mixed_nll(retrieval, piece.keys, nll, y, gate).sum())
                at += len(piece.keys)
            done += len(inputs)
            report(f"{len(store):,} entries · {100 * (after / before - 1):+.2f} %", done, len(ids) - 1)
    size = len(model.decode(ids[1:].tolist()).encode()) * math.log(2)
    print(f"{before / size:.4f} bits per byte without, {after / size:.4f} with ({100 * (after / before - 1):+.2f} %)")
    skipped = 1 - retrieval.searched / max(retrieval.asked, 1)
    adaptive = ", adaptive" * (settings.gate is not None)
    print(
        f"{done:,} tokens; {len(store):,} entries, k {settings.k}, temperature {settings.temperature:.4g}, "
        f"λ {settings.share:.3f}{adaptive}; {100 * skipped:.0f} % of searches skipped"
    )


def explain(options: ExplainOptions) -> None:
    from spanformer.cli.retrieval import explanation
    from spanformer.retrieve.model import check_made
    from spanformer.retrieve.store import Store

    with Progress(transient=True) as report:
        report(f"loading {options.model}", 0, 0)
        model, store = open_model(options.model, options.dtype), Store(options.store)
        check_made(store, model.maker, model.dim, model.vocab)
        lines = explanation(model, store, options.prompt, options.show, options.around)
    print("\n".join(lines))


def index(options: IndexOptions) -> None:
    import functools

    from spanformer.retrieve.ivf import FILE, build_index
    from spanformer.retrieve.store import Store

    with Progress() as report:
        report(f"opening {options.store}", 0, 0)
        store = Store(options.store)
        build_index(store, lists=options.lists, nprobe=options.nprobe, on_count=functools.partial(report, "indexing"))
    print(f"{printable(store.folder / FILE)}: {len(store):,} entries; candidates are rescored from the stored keys")


INDEX = Command(IndexOptions, index)
BUILD = Command(BuildOptions, build)
FIT = Command(FitOptions, fit_store)
EVAL = Command(EvalStoreOptions, evaluate)
EXPLAIN = Command(ExplainOptions, explain)
