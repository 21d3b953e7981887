"""Train the classifiers of a pretrained model's exits, with the model as it is, and choose their threshold.

    loss = mean over exits of BCE(σ(w_n · norm(x^n) + b_n), 1[argmax of layer n = argmax of the last layer])

on greedy continuations of prompts by the model itself: the texts that exits will meet. States are those of all layers,
in one pass.

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
from spanformer.hf.exits import ExitHeads, Leaving, calibrated, check_layers, continuations, fingerprint, write
from spanformer.infer.exits import Consistency, choose_threshold

STEPS, RATE, RIDGE = 300, 2e-2, 1e-2


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
    """Train a classifier for each of these layers on continuations of prompts [N, T] by `most` tokens."""
    check_layers(layers, decoder.count)
    none = ExitHeads(layers, torch.zeros(len(layers), decoder.width), torch.zeros(len(layers)), "", "")
    never = Leaving(decoder, none, Confidence("classifier"))
    normed: list[list[Tensor]] = [[] for _ in layers]
    agrees: list[list[Tensor]] = [[] for _ in layers]
    for start in range(0, len(prompts), batch):
        on_progress("reading the training prompts", start, len(prompts))
        some = prompts[start : start + batch]
        made = torch.stack([token.ids for token in write(decoder, never, some, most)], 1)
        for n, (x, right) in enumerate(_states(decoder, layers, torch.cat([some, made], 1), some.shape[1])):
            normed[n].append(x)
            agrees[n].append(right)
    fitted = []
    for n in range(len(layers)):
        on_progress("training the classifiers", n, len(layers))
        fitted.append(_fit(torch.cat(normed[n]), torch.cat(agrees[n])))
    weight, bias = (torch.stack(each) for each in zip(*fitted, strict=True))
    return ExitHeads(layers, weight, bias, fingerprint(decoder), digest_text(prompts))


@torch.no_grad()
def _states(decoder: ExitLayers, layers: tuple[int, ...], ids: Tensor, start: int) -> list[tuple[Tensor, Tensor]]:
    """For each exit, norm(x) [M, E] of the tokens that predict those after `start`, and whether it predicts the last
    layer's token [M]."""
    kept: dict[int, Tensor] = {}

    def keep(n: int, x: Tensor) -> None:
        if n in layers or n == decoder.count:
            kept[n] = decoder.trunk.norm(x[:, start - 1 : -1]).flatten(0, 1)

    decoder.read(ids, decoder.cache(ids.shape[1]), keep)
    best = {n: _best(decoder, x) for n, x in kept.items()}
    return [(kept[n], (best[n] == best[decoder.count]).float()) for n in layers]


def _best(decoder: ExitLayers, normed: Tensor) -> Tensor:
    from spanformer.hf.text import logits_of

    return torch.cat([logits_of(decoder.model, part).argmax(-1) for part in normed.split(256)])


def _fit(x: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Logistic regression with a ridge: (w [E], b) for x [M, E] and right [M]."""
    x, right = x.float(), right.float()
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
