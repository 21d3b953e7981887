"""kNN-LM: a language model mixed with the tokens that followed similar contexts.

Generalization through Memorization: Nearest Neighbor Language Models, https://arxiv.org/abs/1911.00172

    p_kNN(y) ∝ Σ_n 1[token_n = y] exp(−‖q − k_n‖² / T)        over the k nearest entries n
    p(y)     = λ p_kNN(y) + (1 − λ) p_LM(y)

The paper has T = 1, which suits the scale of its own model's keys only: on others p_kNN becomes the nearest entry's
token. With λ = 0, without entries, and for a query that is not finite, p is p_LM, bit for bit. λ(c) may depend on the
context: a logistic gate on the key and on the LM's own certainty (Efficient Nearest Neighbor Language Models,
https://arxiv.org/abs/2109.04212). Below its threshold λ(c) is 0, and no search is made.

Shapes: Q tokens to predict, k neighbours, V vocabulary, D numbers of a key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from spanformer.core.checks import finite_number, whole_number
from spanformer.core.files import write_text
from spanformer.retrieve.header import read_json
from spanformer.retrieve.search import Index, Neighbours, search
from spanformer.retrieve.store import Store

FIT = "fit.json"


@dataclass(frozen=True)
class Gate:
    """λ(c) = σ(weight·x + bias), with x the LM's entropy, its largest log-probability and the key, standardised."""

    mean: list[float]
    spread: list[float]
    weight: list[float]
    bias: float
    threshold: float
    """below it λ is 0, and nothing is searched"""

    def __post_init__(self) -> None:
        for name in ("mean", "spread", "weight"):
            numbers = getattr(self, name)
            if not isinstance(numbers, list) or len(numbers) != len(self.weight):
                raise ValueError(f"gate.{name} has not {len(self.weight)} numbers; expected one for each feature")
            for number in numbers:
                finite_number(f"gate.{name}", number)
        finite_number("gate.bias", self.bias)
        finite_number("gate.threshold", self.threshold)

    def __call__(self, keys: Tensor, log_probs: Tensor) -> Tensor:
        """[Q] float64 λ of each token, from keys [Q, D] and log-probabilities [Q, V]."""
        x = features(keys, log_probs)
        if x.shape[1] != len(self.weight):
            raise ValueError(f"the gate has {len(self.weight)} weights; expected {x.shape[1]}, for keys of this width")
        mean, spread, weight = (
            torch.tensor(each, dtype=torch.float64) for each in (self.mean, self.spread, self.weight)
        )
        share = torch.sigmoid(((x - mean) / spread) @ weight + self.bias)
        return torch.where(share < self.threshold, 0.0, share)


def features(keys: Tensor, log_probs: Tensor) -> Tensor:
    """[Q, 2 + D] float64."""
    p = log_probs.double()
    entropy = -(p.exp() * p.clamp_min(-1e4)).sum(-1)
    return torch.cat([entropy[:, None], p.amax(-1)[:, None], keys.double()], 1)


@dataclass(frozen=True)
class Settings:
    k: int = 64
    """neighbours of a token"""
    temperature: float = 1.0
    """0: the nearest entry alone (with equally near ones); inf: all k alike"""
    share: float = 0.25
    """λ; 0: the LM alone, 1: the datastore alone"""
    gate: Gate | None = None
    """λ(c) instead of `share`"""
    fitted_on: dict = field(default_factory=dict)
    """what `spanformer datastore fit` saw"""

    def __post_init__(self) -> None:
        whole_number("k", self.k, 1)
        if type(self.temperature) not in (int, float) or math.isnan(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature!r}; expected 0 or more (inf: all neighbours alike)")
        if not 0 <= finite_number("share", self.share) <= 1:
            raise ValueError(f"share is {self.share}; expected λ from 0 (the LM alone) to 1 (the datastore alone)")

    def write(self, folder: Path) -> None:
        said = asdict(self)
        said["temperature"] = str(self.temperature)  # JSON has no infinity
        write_text(folder / FIT, json.dumps(said) + "\n")


def read_settings(folder: Path) -> Settings:
    """What `spanformer datastore fit` has written into a datastore."""
    if not (folder / FIT).is_file():
        raise ValueError(
            f"{folder} has no {FIT}: temperature and λ depend on the model's keys; fit them on held-out text with "
            "spanformer datastore fit, or give both"
        )
    said = read_json(folder / FIT)
    try:
        gate = None if said.get("gate") is None else Gate(**said["gate"])
        return Settings(said["k"], float(said["temperature"]), said["share"], gate, dict(said.get("fitted_on", {})))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / FIT} is damaged ({error}); fit it again with spanformer datastore fit") from None


def weights(found: Neighbours, temperature: float) -> Tensor:
    """[Q, k] float64: the share of each neighbour, 0 where there is none; a row sums to 1, or to 0 without any."""
    d = found.distances
    there = d.isfinite()
    nearest = torch.where(there, d, torch.inf).amin(1, keepdim=True)
    off = torch.where(there, d - nearest, 0.0)  # the smallest distance is taken out: exp never underflows for all
    scores = torch.zeros_like(off).masked_fill(off != 0, -torch.inf) if temperature == 0 else -off / temperature
    raw = torch.where(there, scores.exp(), 0.0)
    return raw / raw.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)


class Retrieval:
    """Mixes a datastore into the predictions of the model that built it. Counts what it does."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        on_odd: Callable[[int], None] | None = None,
        index: Index | None = None,
    ) -> None:
        """on_odd: called with the number of queries that are not finite, whose predictions stay the LM's. index:
        instead of a scan of all entries."""
        self.store, self.settings, self.on_odd, self.index = store, settings, on_odd, index
        self.asked = self.searched = 0
        """tokens predicted, and searches made for them"""
        self.tokens = torch.from_numpy(store.tokens)

    @property
    def idle(self) -> bool:
        """Whether predictions are the LM's, whatever the context."""
        return not len(self.store) or (self.settings.gate is None and self.settings.share == 0)

    def shares(self, keys: Tensor, log_probs: Tensor | None) -> Tensor:
        """[Q] float64: λ of each token."""
        gate = self.settings.gate
        if gate is None:
            return torch.full((len(keys),), float(self.settings.share), dtype=torch.float64)
        assert log_probs is not None
        return gate(keys, log_probs)

    def look_up(self, keys: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """λ [Q], and the tokens [Q, k] and weights [Q, k] of neighbours, searched where λ is above 0."""
        finite = keys.isfinite().all(-1)
        if self.on_odd is not None and not bool(finite.all()):
            self.on_odd(int((~finite).sum()))
        rows = (finite & (shares > 0) & (len(self.store) > 0)).nonzero()[:, 0]
        self.asked, self.searched = self.asked + len(keys), self.searched + len(rows)
        if not len(rows):
            return (
                torch.zeros_like(shares),
                torch.zeros(len(keys), 1, dtype=torch.int64),
                shares.new_zeros(len(keys), 1),
            )
        found = search(self.store, keys[rows], self.settings.k, index=self.index)
        some = weights(found, self.settings.temperature)
        share = torch.zeros_like(shares).index_copy(0, rows, torch.where(some.sum(1) > 0, shares[rows], 0.0))
        shape = (len(keys), self.settings.k)
        tokens = torch.zeros(shape, dtype=torch.int64).index_copy(0, rows, self.tokens[found.ids.clamp_min(0)])
        return share, tokens, torch.zeros(shape, dtype=torch.float64).index_copy(0, rows, some)


def mixed_log_probs(retrieval: Retrieval, keys: Tensor, logits: Tensor) -> Tensor:
    """[Q, V] float64 log p, from keys [Q, D] and the LM's logits [Q, V]."""
    log_probs = logits.double().log_softmax(-1)
    share, tokens, weight = retrieval.look_up(keys, retrieval.shares(keys, log_probs))
    near = torch.zeros_like(log_probs).scatter_add_(1, tokens, weight)
    return torch.logaddexp((1 - share).log()[:, None] + log_probs, (share[:, None] * near).log())


def mixed_nll(retrieval: Retrieval, keys: Tensor, nll: Tensor, targets: Tensor, logits: Tensor | None = None) -> Tensor:
    """[Q] float64 −log p(target), from the LM's nll [Q]; logits [Q, V] only if λ depends on the context."""
    log_probs = None if logits is None else logits.double().log_softmax(-1)
    share, tokens, weight = retrieval.look_up(keys, retrieval.shares(keys, log_probs))
    near = (weight * (tokens == targets[:, None])).sum(1)
    mixed = -torch.logaddexp((1 - share).log() - nll.double(), (share * near).log())
    return torch.where(share > 0, mixed, nll.double())
