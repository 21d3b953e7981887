"""Equality with the adaptive-span paper's code: four segments one after the other, every loss and every gradient.

Measured per tensor as the largest absolute difference divided by the largest absolute value. The oracle is written
from the equations; where SPANFORMER_ORIGINAL names a clone of facebookresearch/adaptive-span, its own code is held
against ours too, and `pytest -rP -k theirs` prints the differences.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from spanformer.convert.original import convert
from spanformer.convert.original_settings import Settings
from spanformer.model.lm import LM
from support.original_model import CURRENT, Dense, Shape, random_state

TOLERANCE = 1e-5  # their renormalisation adds 1e-8 to a sum that may be small
SEGMENTS = 4


@dataclass(frozen=True)
class Case:
    shape: Shape
    block: int
    steps: tuple[int, ...] = ()
    """segments after which an optimiser takes a step"""
    batch: int = 2


MIXED = (0.0213, 1.0, 0.3337, 0.0, 0.611, 0.0977)
WORDS = Shape(vocab=43, dim=26, heads=2, span=70, ratios=(0.513, 0.0123), cutoffs=(11, 29), divisor=3)
CASES = {
    "spans of 0": Case(Shape(span=128), block=40),
    "mixed spans": Case(Shape(span=131, ratios=MIXED), block=33),
    "a short ramp": Case(Shape(span=64, ratios=MIXED, ramp=5.0), block=30),
    "a long block": Case(Shape(span=20, ratios=MIXED, ramp=7.0), block=71),
    "a block longer than the memory": Case(Shape(span=20, ratios=(0.313, 0.747), ramp=7.0), block=141, batch=1),
    "heads far apart": Case(Shape(heads=4, span=500, ratios=(0.0117, 0.813, 0.0321, 0.2713)), block=61, batch=1),
    "a short block": Case(Shape(span=150, ratios=MIXED), block=7),
    "blocks of one token": Case(Shape(span=40, ratios=MIXED), block=1, batch=3),
    "one head": Case(Shape(heads=1, span=90, ratios=(0.437, 0.0456)), block=25, batch=1),
    "no spans": Case(Shape(span=37, ratios=None), block=25),
    "persistent memory": Case(Shape(persistent=13, span=131, ratios=MIXED), block=33),
    "persistent memory, no spans": Case(Shape(persistent=13, span=37, ratios=None), block=25),
    "adaptive input and output": Case(WORDS, block=37),
    "adaptive input and output, tied": Case(replace(WORDS, tied=True), block=37),
    "persistent memory and adaptive input": Case(replace(WORDS, tied=True, persistent=9), block=37),
    "spans that change": Case(Shape(span=131, ratios=(0.3513, 0.4337, 0.711)), block=33, steps=(0, 1)),
    "spans that change, persistent": Case(
        Shape(span=131, ratios=(0.3513, 0.4337, 0.711), persistent=13), block=33, steps=(0, 1)
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Among tensors this small, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Oracle:
    """The dense model, trained by hand."""

    def __init__(self, shape: Shape, state: dict[str, Tensor]) -> None:
        fresh = {id(t): t.clone().requires_grad_("mask_template" not in key) for key, t in state.items()}
        self.state = {key: fresh[id(t)] for key, t in state.items()}  # what was tied still is
        self.leaves = {key: t for key, t in first_names(self.state).items() if t.requires_grad}
        self.model = Dense(shape, self.state)
        self.optimizer = optimizer_of(self.leaves.items())

    def read(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.read(x, y), self.model.penalty()

    def gradients(self) -> dict[str, Tensor]:
        return {key: t.grad for key, t in self.leaves.items() if t.grad is not None}

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for key, t in self.leaves.items():
                if key.endswith(CURRENT):
                    t.clamp_(0, 1)


class Ours:
    """Our model, converted from the same state; its gradients are taken back through the conversion."""

    def __init__(self, shape: Shape, state: dict[str, Tensor]) -> None:
        oracle = Oracle(shape, state)
        self.leaves = oracle.leaves
        config, self.converted = convert(oracle.state, Settings(ramp=shape.ramp))
        config = replace(config, attention=replace(config.attention, penalty=shape.penalty))
        self.lm = LM(config).to(state["key_pe"].dtype)
        self.lm.load_state_dict(self.converted)
        self.optimizer = optimizer_of(self.lm.named_parameters())
        self.memory = None

    def read(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.lm(x, self.memory, targets=y)
        self.memory = found.state
        return found.nll, found.penalty

    def gradients(self) -> dict[str, Tensor]:
        names, parameters = zip(*self.lm.named_parameters(), strict=True)
        back = torch.autograd.grad(
            [self.converted[name] for name in names],
            list(self.leaves.values()),
            [p.grad for p in parameters],
            retain_graph=True,
        )
        return dict(zip(self.leaves, back, strict=True))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lm.after_step()


class Theirs:
    """The paper's own code."""

    def __init__(self, code: ModuleType, shape: Shape, state: dict[str, Tensor]) -> None:
        self.model = code.TransformerSeq(
            vocab_size=shape.vocab, hidden_size=shape.dim, nb_heads=shape.heads, nb_layers=shape.layers,
            attn_span=shape.span, emb_dropout=0, dropout=0, inner_hidden_size=shape.inner,
            adapt_io_params={
                "adapt_io_enabled": bool(shape.cutoffs), "adapt_io_cutoffs": list(shape.cutoffs),
                "adapt_io_divval": shape.divisor, "adapt_io_tied": shape.tied,
            },
            adapt_span_params={
                "adapt_span_enabled": shape.ratios is not None, "adapt_span_loss": shape.penalty,
                "adapt_span_ramp": int(shape.ramp), "adapt_span_init": 0, "adapt_span_cache": True,
            },
            pers_mem_params={"pers_mem_size": shape.persistent},
        )  # fmt: skip
        self.model.to(state["key_pe"].dtype).load_state_dict(state)
        self.spans = [layer.attn.attn.adaptive_span for layer in self.model.layers] if shape.ratios else []
        self.cache: list[Tensor] | None = None
        self.optimizer = optimizer_of(self.model.named_parameters())

    def read(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            lengths = [layer.attn.attn.get_cache_size() for layer in self.model.layers]
            dim, dtype = self.model.key_pe.shape[1] * self.model.layers[0].attn.nb_heads, self.model.key_pe.dtype
            self.cache = [torch.zeros(len(x), n, dim, dtype=dtype) for n in lengths]
        found, self.cache, _ = self.model(x, self.cache, target=y)
        nll = found if found.ndim == 2 else -found.gather(-1, y[..., None])[..., 0]
        return nll, sum((span.get_loss() for span in self.spans), torch.zeros(()))

    def gradients(self) -> dict[str, Tensor]:
        return {key: p.grad for key, p in self.model.named_parameters()}

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for span in self.spans:
            span.clamp_param()


def optimizer_of(named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """Quick enough to move spans by several tokens."""
    groups: dict[bool, list[Tensor]] = {False: [], True: []}
    for name, p in named:
        groups[name.endswith(("ratio", "current_val"))].append(p)
    return torch.optim.SGD([{"params": groups[False], "lr": 0.05}, {"params": groups[True], "lr": 1.0}])


def first_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under the first of its names."""
    names = {id(t): key for key, t in reversed(state.items())}
    return {key: t for key, t in state.items() if names[id(t)] == key}


def run(model: Oracle | Ours | Theirs, case: Case) -> dict[str, Tensor]:
    """Every segment's losses, and the gradients at every step and at the end, of all that was read since the last."""
    g = torch.Generator().manual_seed(7)
    text = torch.randint(0, case.shape.vocab, (case.batch, SEGMENTS * case.block + 1), generator=g)
    found: dict[str, Tensor] = {}
    total: Tensor | float = 0.0
    for n in range(SEGMENTS):
        at = n * case.block
        x, y = (text[:, at + ahead : at + ahead + case.block].contiguous() for ahead in (0, 1))
        nll, penalty = model.read(x, y)
        found[f"{n} nll"] = nll.detach().double()
        total = total + nll.mean() + penalty
        if n in case.steps or n == SEGMENTS - 1:
            total.backward()
            found |= {f"{n} {key}": t.detach().double() for key, t in model.gradients().items()}
        if n in case.steps:
            model.step()
            total = 0.0
    return found


def relative(got: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """By tensor: the largest absolute difference divided by the largest absolute value."""
    assert got.keys() == true.keys(), got.keys() ^ true.keys()
    return {name: float((got[name] - t).abs().max() / t.abs().max()) for name, t in true.items()}


def check(found: dict[str, float], allowed: float = TOLERANCE) -> None:
    wrong = {name: f"{error:.2g}" for name, error in found.items() if not error <= allowed}
    assert not wrong, wrong


def state_of(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """In float64, of numbers that float32 holds: rounding them is nobody's error."""
    state = random_state(case.shape)
    rounded = {id(t): t.float().to(dtype) for t in state.values()}
    return {key: rounded[id(t)] for key, t in state.items()}


@pytest.mark.parametrize("name", CASES)
def test_ours_equals_the_equations(name: str) -> None:
    case = CASES[name]
    state = state_of(case, torch.float64)
    true = run(Oracle(case.shape, state), case)
    assert all(t.abs().max() > 0 for t in true.values())
    check(relative(run(Ours(case.shape, state), case), true))


@pytest.mark.parametrize("name", CASES)
def test_ours_in_float32_is_as_exact_as_a_dense_run(name: str) -> None:
    case = CASES[name]
    as_exact(case, lambda state: Oracle(case.shape, state))


def as_exact(case: Case, dense: Callable[[dict[str, Tensor]], Oracle | Theirs], factor: float = 4.0) -> None:
    """Rounding to float32 costs us at most `factor` times what it costs a dense run, and a few last digits."""
    narrow, wide = state_of(case, torch.float32), state_of(case, torch.float64)
    costs = relative(run(dense(narrow), case), run(dense(wide), case))
    ours = relative(run(Ours(case.shape, narrow), case), run(Ours(case.shape, wide), case))
    say("float32, ours", ours)
    say("float32, theirs", costs)
    ulp = torch.finfo(torch.float32).eps
    wrong = {
        name: f"{e:.2g} > {costs[name]:.2g}" for name, e in ours.items() if not e <= factor * costs[name] + 16 * ulp
    }
    assert not wrong, wrong


def test_optimiser_moves_spans_by_more_than_a_token() -> None:
    case = CASES["spans that change"]
    ours = Ours(case.shape, state_of(case, torch.float64))
    before = torch.tensor(ours.lm.spans())
    run(ours, case)
    moved = (torch.tensor(ours.lm.spans()) - before).abs()
    assert moved.min() > 1 and moved.max() < 64, moved


@pytest.fixture(scope="module")
def code() -> Iterator[ModuleType]:
    clone = os.environ.get("SPANFORMER_ORIGINAL")
    if not clone:
        pytest.skip("SPANFORMER_ORIGINAL does not name a clone of facebookresearch/adaptive-span")
    files = {path.stem for path in Path(clone).glob("*.py")}
    assert "models" in files, f"{clone} has no models.py"
    sys.path.insert(0, clone)
    try:
        yield importlib.import_module("models")
    finally:
        sys.path.remove(clone)
        for module in files & set(sys.modules):
            if (sys.modules[module].__file__ or "").startswith(clone):
                del sys.modules[module]


def say(what: str, found: dict[str, float]) -> None:
    """The worst of each kind."""
    kinds = {"losses": "nll", "spans": CURRENT, "rest": ""}
    left = dict(found)
    for kind, ending in kinds.items():
        some = {name: left.pop(name) for name in list(left) if name.endswith(ending)}
        if some:
            worst = max(some, key=some.__getitem__)
            print(f"{what}, {kind}: {some[worst]:.1e} ({worst})")


@pytest.mark.parametrize("name", CASES)
def test_ours_equals_theirs(name: str, code: ModuleType) -> None:
    case = CASES[name]
    state = state_of(case, torch.float64)
    ours, theirs = run(Ours(case.shape, state), case), run(Theirs(code, case.shape, state), case)
    found = relative(ours, theirs)
    say("float64", found)
    check(found)


@pytest.mark.parametrize("name", CASES)
def test_ours_in_float32_is_as_exact_as_theirs(name: str, code: ModuleType) -> None:
    case = CASES[name]
    as_exact(case, lambda state: Theirs(code, case.shape, state))
