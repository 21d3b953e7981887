"""Temperature, λ and the gate λ(c), fitted on held-out text by maximum likelihood.

    max over T, λ of  Σ_t log(λ p_kNN(y_t; T) + (1 − λ) p_LM(y_t))

For each T of a grid the best λ is found by expectation and maximisation, since the sum is concave in it. Text that is
in the datastore would find itself, and λ would come out near 1: such text is refused by the runs of tokens it shares.

Shapes: n tokens, k neighbours, D numbers of a key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spanformer.core.progress import OnCount
from spanformer.retrieve.mixture import Gate, Settings, features, weights
from spanformer.retrieve.model import KeyModel
from spanformer.retrieve.search import Neighbours, search
from spanformer.retrieve.store import Store

RUN, BYTES_RUN = 32, 128
"""tokens in a row that two texts share only if one is a part of the other; more if tokens are bytes or characters"""
FEW = 1024  # tokens of a vocabulary of bytes or characters, at most
SHARED = 0.02  # share of such runs from which on a text counts as being in the datastore
TEMPERATURES = 25
STEPS = 300
PENALTIES = (0.03, 0.1, 0.3, 1.0, 100.0)
"""on the gate's weights of the key; the last leaves the model's certainty alone"""


@dataclass(frozen=True, eq=False)
class Seen:
    """Held-out tokens: what the LM and the datastore say of each."""

    nll: Tensor
    """[n] float64 of the LM, nats"""
    found: Neighbours
    right: Tensor
    """[n, k] bool: the neighbour's token is the target"""
    features: Tensor
    """[n, 2 + D] float64, of the gate"""

    def near(self, temperature: float) -> Tensor:
        """[n] float64: p_kNN of each target."""
        return (weights(self.found, temperature) * self.right).sum(1)


def windows(ids: np.ndarray, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs [n] and targets [n] of consecutive windows; the last may be shorter."""
    whole = torch.from_numpy(ids.astype(np.int64))
    for at in range(0, len(ids) - 1, context):
        end = min(at + context, len(ids) - 1)
        yield whole[at:end], whole[at + 1 : end + 1]


@torch.inference_mode()
def look(model: KeyModel, store: Store, ids: np.ndarray, k: int, on_count: OnCount | None = None) -> Seen:
    """Read a text ids [n] and search the neighbours of every token."""
    tokens, done, parts = torch.from_numpy(store.tokens), 0, []
    for inputs, targets in windows(ids, store.header.context):
        at = 0
        for piece in model.read(inputs, logits=True):
            assert piece.logits is not None
            log_probs, y = piece.logits.double().log_softmax(-1), targets[at : at + len(piece.keys)]
            found = search(store, piece.keys, k)
            there = (tokens[found.ids.clamp_min(0)] == y[:, None]) if len(tokens) else found.ids > 0
            nll = -log_probs.gather(1, y[:, None])[:, 0]
            parts.append((nll, *found, there, features(piece.keys, log_probs)))
            at += len(piece.keys)
        done += len(inputs)
        if on_count is not None:
            on_count(done, len(ids) - 1)
    nll, distances, neighbours, exact, right, x = (torch.cat(each) for each in zip(*parts, strict=True))
    return Seen(nll, Neighbours(distances, neighbours, exact), right, x)


def shared_runs(store: Store, ids: np.ndarray) -> float:
    """The share of a text's runs of tokens that are in the datastore, too."""
    run = RUN if store.header.vocab > FEW else BYTES_RUN
    if min(len(ids), len(store)) < run:
        return 0.0
    return float(np.isin(run_hashes(ids, run)[::run], run_hashes(store.tokens, run)).mean())


def run_hashes(ids: np.ndarray, run: int) -> np.ndarray:
    """[n − run + 1] uint64: a polynomial over each run, modulo 2⁶⁴."""
    factor, x = np.uint64(0x9E3779B97F4A7C15), ids.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93) + np.uint64(1)
    x ^= x >> np.uint64(29)
    found = np.zeros(len(ids) - run + 1, np.uint64)
    with np.errstate(over="ignore"):
        for n in range(run):
            found = found * factor + x[n : n + len(found)]
    return found


def fit(seen: Seen, k: int, *, adaptive: bool, loss: float = 5e-4) -> tuple[Settings, float, float]:
    """Settings, and the mean nats without and with them. adaptive: also learn λ(c), with the highest threshold that
    spends half of what it gains over the constant λ, or `loss` of the nats. If nothing helps, λ is 0."""
    plain = float(seen.nll.mean())
    distances = seen.found.distances[seen.found.distances.isfinite()]
    if not len(distances):
        return Settings(k, 1.0, 0.0), plain, plain
    middle = max(float(distances.median()), 1e-12)
    best = (plain, 1.0, 0.0)
    for temperature in (middle * 2.0 ** (n / 2) for n in range(-16, TEMPERATURES - 16)):
        share, mean = best_share(seen.nll, seen.near(temperature))
        best = min(best, (mean, temperature, share))
    mean, temperature, share = best
    gate = None
    if adaptive and share:
        gate, mean = fit_gate(seen, temperature, share, mean, loss)
    return Settings(k, temperature, share, gate), plain, mean


def best_share(nll: Tensor, near: Tensor) -> tuple[float, float]:
    """λ and the mean nats of the mixture, by expectation and maximisation."""
    p, share = (-nll).exp(), 0.25
    for _ in range(60):
        share = float((share * near / (share * near + (1 - share) * p).clamp_min(1e-300)).mean())
    mean = float(mixed(nll, near, torch.tensor(share)).mean())
    return (share, mean) if share > 1e-6 and mean < float(nll.mean()) else (0.0, float(nll.mean()))


def mixed(nll: Tensor, near: Tensor, share: Tensor) -> Tensor:
    """[n] nats of λ p_kNN + (1 − λ) p_LM."""
    return -(share * near + (1 - share) * (-nll).exp()).clamp_min(1e-300).log()  # with a gradient where near is 0


def fit_gate(seen: Seen, temperature: float, share: float, constant: float, loss: float) -> tuple[Gate | None, float]:
    """A logistic λ(c), by Adam on two thirds of the text; the last third chooses the penalty on the key's weights and
    the threshold. None, and the mean nats of the constant λ, if it does not beat that."""
    x, nll, near = (t.clone() for t in (seen.features, seen.nll, seen.near(temperature)))
    cut = 2 * len(x) // 3
    mean, spread = x[:cut].mean(0), x[:cut].std(0).clamp_min(1e-6)
    z = (x - mean) / spread
    fitted = [_logistic(z[:cut], nll[:cut], near[:cut], share, penalty) for penalty in PENALTIES]
    weight, bias = min(fitted, key=lambda w: float(mixed(nll[cut:], near[cut:], _shares(z[cut:], *w)).mean()))
    shares = _shares(z[cut:], weight, bias)
    held = mixed(nll[cut:], near[cut:], shares)
    order = shares.argsort()
    skipped = float(held.mean()) + (nll[cut:] - held)[order].cumsum(0) / len(held)  # without the n lowest
    always = float(mixed(nll[cut:], near[cut:], torch.tensor(share)).mean())
    # half of what λ(c) gains over the constant λ may be spent on skipping: all of it left +0.46 % on other text
    fine = (skipped <= max((float(held.mean()) + always) / 2, float(held.mean()) * (1 + loss))).nonzero()
    fine = fine if float(held.mean()) <= always * (1 + loss) else fine[:0]
    if not len(fine):
        return None, constant
    threshold = float(shares[order[int(fine[-1])]]) + 1e-12
    gate = Gate(mean.tolist(), spread.tolist(), weight.tolist(), float(bias), threshold)
    every = _shares(z, weight, bias)
    return gate, float(torch.where(every < threshold, nll, mixed(nll, near, every)).mean())


def _shares(z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.sigmoid(z @ weight + bias)


@torch.inference_mode(False)
@torch.enable_grad()
def _logistic(z: Tensor, nll: Tensor, near: Tensor, share: float, penalty: float) -> tuple[Tensor, Tensor]:
    """Weight and bias of λ(c), from λ everywhere on; penalty: of the squared weights of the key."""
    weight = torch.zeros(z.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor(math.log(share / (1 - share)), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = mixed(nll, near, _shares(z, weight, bias)).mean() + penalty * weight[2:].square().sum()
        losses.backward()
        optimizer.step()
    return weight.detach(), bias.detach()
