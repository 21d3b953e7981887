"""Train the exits of a pretrained model, with the model as it is, and choose their threshold.

    A_n, a_n = argmin Σ |A z^n + a − z^L|² + ridge        z^n = norm(x^n), by the normal equations
    loss     = mean BCE(σ(w_n · z^n + b_n), 1[argmax W (A_n z^n + a_n) = argmax W z^L])

on prompts and their greedy continuations by the model itself: the texts that exits will meet. States are those of all
layers, in one pass.

Shapes: N prompts of T tokens, M tokens, E width, X exits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.core.progress import OnProgress
from spanformer.depth.confidence import Confidence, Measure
from spanformer.hf.exit_layers import ExitLayers
from spanformer.hf.exits import (
    ExitHeads,
    Leaving,
    calibrated,
    check_layers,
    continuations,
    fingerprint,
    no_heads,
    write,
)
from spanformer.infer.exits import Consistency, choose_threshold

STEPS, RATE, RIDGE, MAP_RIDGE = 300, 2e-2, 1e-2, 1e-2


def split_prompts(ids: Sequence[int], train: int, test: int, prompt: int, more: int) -> tuple[Tensor, Tensor, Tensor]:
    """Training prompts [train, prompt], then calibration prompts [test, prompt] and what follows each [test, more];
    at equal distances, the first from the beginning of the text and the others from the rest of it."""
    each = prompt + more
    if len(ids) < (train + test) * each:
        raise ValueError(
            f"the text has {len(ids):,} tokens; expected {(train + test) * each:,}, {train} prompts for training and "
            f"{test} for calibration of {each} tokens that do not overlap (fewer prompts need less)"
        )
    split = len(ids) * train // (train + test)
    starts = [split * n // train for n in range(train)]
    starts += [split + (len(ids) - split) * n // test for n in range(test)]
    rows = torch.tensor(np.stack([np.asarray(ids[at : at + each], np.int64) for at in starts]))
    return rows[:train, :prompt], rows[train:, :prompt], rows[train:, prompt:]


def digest_text(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def fit_heads(
    decoder: ExitLayers, layers: tuple[int, ...], prompts: Tensor, most: int, *, batch: int = 16,
    on_progress: OnProgress = lambda text, done, total: None,
) -> ExitHeads:  # fmt: skip
    """Train a map and a classifier for each of these layers on continuations of prompts [N, T] by `most` tokens."""
    check_layers(layers, decoder.count)
    never = Leaving(decoder, no_heads(decoder.width), Confidence("classifier"))
    found: dict[int, list[Tensor]] = {n: [] for n in (*layers, decoder.count)}
    for start in range(0, len(prompts), batch):
        on_progress("reading the training prompts", start, len(prompts))
        some = prompts[start : start + batch]
        made = torch.stack([token.ids for token in write(decoder, never, some, most)], 1)
        for n, normed in _states(decoder, layers, torch.cat([some, made], 1)).items():
            found[n].append(normed)
    last = torch.cat(found.pop(decoder.count))
    half = torch.arange(len(last)) // (len(last) // len(prompts)) % 2 == 0  # every second prompt
    best, fitted = _best(decoder, last), []
    for states in found.values():
        on_progress("training the exits", len(fitted), len(layers))
        normed = torch.cat(states)
        right = torch.empty_like(half)
        for part in (half, ~half):  # by a map that did not see them, or they would seem righter than others
            matrix = _fit_map(normed[~part], last[~part])
            right[part] = _best(decoder, _map(matrix, normed[part])) == best[part]
        fitted.append((*_fit_classifier(normed, right), _fit_map(normed, last)))
    weight, bias, maps = (torch.stack(each) for each in zip(*fitted, strict=True))
    return ExitHeads(layers, weight, bias, maps, fingerprint(decoder), digest_text(prompts))


@torch.no_grad()
def _states(decoder: ExitLayers, layers: tuple[int, ...], ids: Tensor) -> dict[int, Tensor]:
    """norm(x) [M, E] after these layers and the last."""
    kept: dict[int, Tensor] = {}

    def keep(n: int, x: Tensor) -> None:
        if n in layers or n == decoder.count:
            kept[n] = decoder.trunk.norm(x).flatten(0, 1).float()

    decoder.read(ids, decoder.cache(ids.shape[1]), keep)
    return kept


@torch.no_grad()
def _best(decoder: ExitLayers, normed: Tensor) -> Tensor:
    """[M, E] → [M], part by part: all logits at once would be M × vocabulary numbers."""
    return torch.cat([decoder.output(part).argmax(-1) for part in normed.split(256)])


def _map(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.addmm(matrix[-1], x, matrix[:-1])


def _fit_map(x: Tensor, y: Tensor) -> Tensor:
    """[E + 1, E] the linear map from x [M, E] to y [M, E], in float64."""
    x, y = torch.cat([x, x.new_ones(len(x), 1)], 1).double(), y.double()
    gram = x.T @ x
    gram.diagonal().add_(MAP_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, x.T @ y).float()


def _fit_classifier(x: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Logistic regression with a ridge: (w [E], b) for x [M, E] and right [M] bool."""
    right = right.float()
    mean, spread = x.mean(0), x.std(0) + 1e-4
    scaled = (x - mean) / spread
    w, b = torch.zeros(x.shape[1], requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([w, b], lr=RATE)
    with torch.enable_grad():
        for _ in range(STEPS):
            loss = F.binary_cross_entropy_with_logits(scaled @ w + b, right) + RIDGE * w.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    own = (w / spread).detach()
    return own, (b - own @ mean).detach()


def calibrate(
    decoder: ExitLayers, heads: ExitHeads, prompts: Tensor, references: Tensor, *, measure: Measure = "classifier",
    consistency: Consistency = "textual", delta: float = 0.1, epsilon: float = 0.05, end: int | None = None,
    on_progress: OnProgress = lambda text, done, total: None,
) -> ExitHeads:  # fmt: skip
    """The heads with the threshold that Learn then Test accepts on prompts [N, T] and what truly follows them."""
    if digest_text(prompts) == heads.text:
        raise ValueError(
            "the calibration prompts trained the classifiers, so their losses would be too low; give other text"
        )
    most = references.shape[1]
    found = choose_threshold(
        lambda confidence, report: continuations(decoder, heads, prompts, most, confidence, report, end=end),
        references.tolist(), weights=heads.weights, measure=measure, consistency=consistency, delta=delta,
        epsilon=epsilon, max_tokens=most, on_progress=on_progress,
    )  # fmt: skip
    return calibrated(heads, found)
