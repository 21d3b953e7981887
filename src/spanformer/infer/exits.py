"""Generate with exits, and choose their threshold on prompts: CALM with Learn then Test.

    textual   loss = 1 − ROUGE-L(early text, full text): the text stays as the full model's
    risk      loss = max(0, R(early) − R(full)), R = 1 − ROUGE-L(text, reference): it is not much worse

Both hold for greedy decoding only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from spanformer.core.files import write_text
from spanformer.depth import Confidence, Exits
from spanformer.depth.calibrate import NEVER, choose, p_value, prompts_needed
from spanformer.depth.confidence import Measure
from spanformer.infer.decode import Piece
from spanformer.infer.generate import generate_batch
from spanformer.infer.sampling import Sampling
from spanformer.model.lm import LM

FILE = "exits.json"
GRID = (0.99, 0.975, 0.95, 0.925, *(round(0.9 - 0.05 * n, 2) for n in range(19)))
"""thresholds in the order of the test: finer near 1, where a small tolerance ends"""
Consistency = Literal["textual", "risk"]
OnProgress = Callable[[str, int, int], None]
Write = Callable[[Confidence, Callable[[int, int], None]], tuple[list[list[int]], float]]
"""(when tokens leave, progress of prompts) → a greedy continuation of every prompt, and the mean layers of a token"""


@dataclass(frozen=True)
class Calibration:
    """The threshold of a model's exits, and what it guarantees."""

    weights: str
    """SHA-256 of the model's weights"""
    measure: Measure
    threshold: float | None
    """None: no threshold was accepted, so every token runs through all layers"""
    consistency: Consistency
    delta: float
    epsilon: float
    prompts: int
    max_tokens: int
    decay: float
    tested: list[dict[str, float]]
    """threshold, mean loss, p-value and mean layers of each threshold that was tested"""

    def confidence(self) -> Confidence:
        threshold = math.inf if self.threshold is None else self.threshold
        return Confidence(self.measure, threshold, self.decay, self.max_tokens)


@contextmanager
def exits_by(model: LM, confidence: Confidence | None) -> Iterator[Exits]:
    """While it is open, tokens leave the model's layers by this confidence."""
    exits = model.exits()
    before, exits.confidence = exits.confidence, confidence
    try:
        yield exits
    finally:
        exits.confidence, exits.token = before, 0


def rouge_l(a: Sequence[int], b: Sequence[int]) -> float:
    """The F-measure of the longest common subsequence of two texts."""
    if not a or not b:
        return float(not a and not b)
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for n, y in enumerate(b, 1):
            diagonal, row[n] = row[n], diagonal + 1 if x == y else max(row[n], row[n - 1])
    return 2 * row[-1] / (len(a) + len(b))


def continuations(
    model: LM, prompts: Sequence[np.ndarray], max_tokens: int, confidence: Confidence | None, batch: int = 16,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[list[int]], float]:  # fmt: skip
    """Greedy continuations of the prompts, and the mean number of layers of a generated token."""
    texts: list[list[int]] = [[] for _ in prompts]
    layers = tokens = 0
    with exits_by(model, confidence) as exits:
        for start in range(0, len(prompts), batch):
            some = list(prompts[start : start + batch])
            for piece in by_exits(
                exits, generate_batch(model, some, sampling=Sampling(temperature=0), max_tokens=max_tokens, seed=0)
            ):  # fmt: skip
                texts[start + piece.row].append(piece.id)
            more = exits.counted()
            layers, tokens = layers + more[0], tokens + more[1]
            on_progress(min(start + batch, len(prompts)), len(prompts))
    return texts, layers / tokens if tokens else math.nan


def by_exits(exits: Exits, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces; counts layers after the prompt, and the tokens of the first row for a threshold that decays."""
    exits.token = 0
    for n, piece in enumerate(pieces):
        if not n:  # the prompt was read
            exits.count_from_here()
        exits.token += piece.row == 0
        yield piece


def calibrate(
    model: LM, prompts: Sequence[np.ndarray], references: Sequence[np.ndarray], *, weights: str, measure: Measure,
    consistency: Consistency = "textual", delta: float = 0.1, epsilon: float = 0.05, max_tokens: int = 48,
    decay: float = 0.0, on_progress: OnProgress = lambda text, done, total: None,
) -> Calibration:  # fmt: skip
    """Choose the threshold of a model's exits. prompts: independent of each other and of the training; references: the
    true continuation of each."""
    model.exits()
    return choose_threshold(
        lambda confidence, report: continuations(model, prompts, max_tokens, confidence, on_progress=report),
        references, weights=weights, measure=measure, consistency=consistency, delta=delta, epsilon=epsilon,
        max_tokens=max_tokens, decay=decay, on_progress=on_progress,
    )  # fmt: skip


def choose_threshold(
    write: Write, references: Sequence[Sequence[int] | np.ndarray], *, weights: str, measure: Measure,
    consistency: Consistency = "textual", delta: float = 0.1, epsilon: float = 0.05, max_tokens: int = 48,
    decay: float = 0.0, on_progress: OnProgress = lambda text, done, total: None,
) -> Calibration:  # fmt: skip
    """Test thresholds in descending order until one fails."""
    if len(references) < (needed := prompts_needed(delta, epsilon)):
        raise ValueError(
            f"there are {len(references)} prompts; delta {delta} with epsilon {epsilon} needs at least {needed}, even "
            "if no text changes"
        )
    never = Confidence(measure)  # without a confidence, a trained classifier would let tokens leave
    full, _ = write(never, lambda d, n: on_progress("all layers", d, n))
    tested, losses = [], []
    for threshold in GRID:
        early, layers = write(
            Confidence(measure, threshold, decay, max_tokens),
            lambda d, n, t=threshold: on_progress(f"threshold {t}", d, n),
        )
        losses.append([loss(consistency, *each) for each in zip(early, full, references, strict=True)])
        p = p_value(losses[-1], delta)
        tested.append({"threshold": threshold, "loss": float(np.mean(losses[-1])), "p": p, "layers": layers})
        if p > epsilon:
            break
    found = choose(GRID[: len(losses)], losses, delta, epsilon)
    threshold = None if found == NEVER else found
    return Calibration(
        weights, measure, threshold, consistency, delta, epsilon, len(references), max_tokens, decay, tested
    )


def loss(consistency: Consistency, early: list[int], full: list[int], reference: Sequence[int] | np.ndarray) -> float:
    """Of a text with exits, beside that of all layers and the true continuation."""
    if consistency == "textual":
        return 1 - rouge_l(early, full)
    truth = [int(token) for token in reference]
    return max(0.0, rouge_l(full, truth) - rouge_l(early, truth))


def table(found: Calibration, layers: int) -> str:
    """The thresholds that were tested, and the one that was accepted. layers: of the model."""
    rows = ["threshold    loss    p-value    layers"]
    rows += [f"{r['threshold']:9.3f} {r['loss']:7.3f} {r['p']:10.2g} {r['layers']:9.2f}" for r in found.tested]
    if found.threshold is None:
        return "\n".join([*rows, f"no threshold passes: every token runs through all {layers} layers"])
    last = next(row for row in reversed(found.tested) if row["threshold"] == found.threshold)
    return "\n".join([*rows, f"threshold {found.threshold}: {last['layers']:.2f} of {layers} layers a token"])


def save(calibration: Calibration, folder: Path) -> Path:
    """Write it into the model's folder."""
    path = folder / FILE
    write_text(path, json.dumps(asdict(calibration), indent=1))
    return path


def load(folder: Path, weights: str) -> Calibration:
    """The calibration in a model's folder, which must be of these weights."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no calibrated exits; run spanformer calibrate-exits {folder} first")
    try:
        found = Calibration(**json.loads(path.read_text()))
        found.confidence()
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); run spanformer calibrate-exits again") from error
    if found.weights != weights:
        raise ValueError(f"{path} was made for other weights; run spanformer calibrate-exits again")
    return found
