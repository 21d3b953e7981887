"""Exits: a token may leave the stack after any layer, and the output layer reads the state it left with.

Depth-Adaptive Transformer (Elbayad, Gu, Grave, Auli, 2019), https://arxiv.org/abs/1910.10073
Confident Adaptive Language Modeling (Schuster et al., 2022), https://arxiv.org/abs/2207.07061

    aligned training   loss = Σ_n ω_n NLL_n / Σ_n ω_n, every layer with true states, in one pass
    mixed training     each token leaves at a random layer, and its state is copied upwards, as in decoding

All exits share the model's last norm and output layer. With `maps` each but the last reads its states through a matrix
of its own first, A_n x, which gives it the output layer W A_n: any of its own, if the vocabulary is no larger than the
width. A token that left keeps its state; each later layer projects it to keys and values of its own, because copied
keys and values of another layer ruin the text.

Shapes: L layers, B batch, T tokens, N tokens that still run, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from spanformer.depth.base import Depth, all_tokens, replace_rows
from spanformer.depth.classifiers import Decided, Geometric, Kind
from spanformer.depth.confidence import Confidence, Predict, saturation, softmax_response
from spanformer.depth.oracle import oracle_exits

Training = Literal["aligned", "mixed"]


class Targets(NamedTuple):
    """What the exits' loss needs to know of the next tokens."""

    nll: Callable[[Tensor], Tensor]
    """states [B, T, dim] → [B, T]"""
    predict: Predict
    ids: Tensor
    """[B, T]"""


class Exits(Depth):
    """In training, all layers run (aligned) or random ones (mixed). In evaluation, `confidence` or the classifier
    decides; without either, all layers run. `latest` holds the layers of each token of the last pass."""

    def __init__(
        self, dim: int, layers: int, *, training: Training = "aligned", rising: bool = False,
        classifier: Kind | None = None, oracle: Literal["likelihood", "correctness"] = "correctness",
        price: float = 0.05, smoothing: float = 0.0, weight: float = 1.0, maps: bool = False,
    ) -> None:  # fmt: skip
        """rising: ω_n = n instead of 1. price: λ of a layer; smoothing: σ of the oracle. weight: α of the classifier's
        loss. maps: A_n, which starts as the identity."""
        super().__init__()
        if layers < 2:
            raise ValueError(f"layers is {layers}; expected at least 2, the last layer is no exit")
        self.layers, self.mode, self.oracle = layers, training, oracle
        self.price, self.smoothing, self.weight, self.kind = price, smoothing, weight, classifier
        self.omega = [float(n) if rising else 1.0 for n in range(1, layers + 1)]
        self.classifier: Decided | Geometric | None = None
        if classifier is not None:
            decided = classifier in ("sequence", "multinomial")
            self.classifier = Decided(dim, layers, whole=classifier == "sequence") if decided else Geometric(dim)
        self.maps = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers - 1)) if maps else None
        for each in self.maps or ():
            nn.init.eye_(each.weight)  # pyright: ignore[reportArgumentType]
        self.confidence: Confidence | None = None
        """when tokens leave in evaluation; None: as the classifier says, if it is not `calm`"""
        self._fixed: int | None = None
        self.lazy = True
        """in decoding, a skipped layer stores keys and values of a token only when a later token reads them"""
        self.token = 0
        """the number of generated tokens, for a threshold that decays"""
        self.states: list[Tensor] = []

    @property
    def fixed(self) -> int | None:
        """In evaluation, every token leaves after this many layers."""
        return self._fixed

    @fixed.setter
    def fixed(self, layer: int | None) -> None:
        if layer is not None and not 1 <= layer <= self.layers:
            raise ValueError(f"fixed is {layer}; expected an exit after layer 1 … {self.layers}, the last, or None")
        self._fixed = layer

    def start(self, x: Tensor, padding: Tensor | None = None, predict: Predict | None = None) -> ExitRun:
        """A pass of the tokens x [B, T, dim]. predict: the model's logits of states, for `softmax`."""
        return ExitRun(self, x, padding, predict)

    def read(self, layer: int, states: Tensor) -> Tensor:
        """What the last norm gets of states [..., dim] after a layer, counted from 0."""
        return states if self.maps is None or layer + 1 == self.layers else self.maps[layer](states)

    def read_all(self, x: Tensor) -> Tensor:
        """The same of the last pass's states x [B, T, dim], each after the layer that it left at."""
        if self.maps is None:
            return x
        assert self.latest is not None
        taken, rows = self.latest.flatten(), x.flatten(0, 1)
        for n in range(self.layers - 1):
            if len(at := (taken == n + 1).nonzero()[:, 0]):
                x = replace_rows(x, at, self.read(n, rows.index_select(0, at)))
        return x

    def loss(self, last: Tensor, targets: Targets) -> Tensor:
        """What to add to the mean of last [B, T], the last layer's NLL, for the states of the pass before."""
        states, self.states = self.states, []
        if not states:
            return last.new_zeros(())
        every = [*(targets.nll(self.read(n, x)) for n, x in enumerate(states[:-1])), last]
        total = sum(self.omega)
        loss = sum(((w / total) * nll.mean() for w, nll in zip(self.omega, every, strict=True)), -last.mean())
        if self.classifier is None:
            return loss
        return loss + self.weight * self._classifier_loss(states, torch.stack([nll.detach() for nll in every]), targets)

    def _classifier_loss(self, states: list[Tensor], nll: Tensor, targets: Targets) -> Tensor:
        if isinstance(self.classifier, Geometric) and self.kind == "calm":
            return self.classifier.consistency_loss(states, self._agrees(states, targets.predict))
        scores = -nll
        if self.oracle == "correctness":
            with torch.no_grad():
                best = torch.stack([self._best(targets.predict, n, x) for n, x in enumerate(states)])
            scores = (best == targets.ids).to(nll.dtype)
        assert self.classifier is not None
        return self.classifier.loss(states, oracle_exits(scores, self.price, self.smoothing))

    @torch.no_grad()
    def _agrees(self, states: list[Tensor], predict: Predict) -> Tensor:
        """[L − 1, B, T] whether each layer predicts the last layer's token."""
        best = [self._best(predict, n, x) for n, x in enumerate(states)]
        return torch.stack([each == best[-1] for each in best[:-1]])

    def _best(self, predict: Predict, layer: int, x: Tensor) -> Tensor:
        """Of states [B, T, dim] after a layer, the likeliest token [B, T]."""
        return predict(self.read(layer, x.detach().flatten(0, 1))).argmax(-1).view(x.shape[:2])


class ExitRun:
    """One pass; see `DepthRun`."""

    def __init__(self, exits: Exits, x: Tensor, padding: Tensor | None, predict: Predict | None) -> None:
        self.exits, self.index, self.predict = exits, all_tokens(x, padding), predict
        self.count, self.shape = x.shape[0] * x.shape[1], x.shape[:2]
        self.taken = torch.full((self.count,), exits.layers, device=x.device)
        if padding is not None:
            self.taken = torch.zeros_like(self.taken).index_fill_(0, self.index, exits.layers)
        self.leave: Tensor | None = None
        """[B · T] the layer, counted from 0, after which a token leaves, where it is known beforehand"""
        if exits.training and exits.mode == "mixed":
            self.leave = torch.randint(exits.layers, (self.count,), device=x.device)
        elif not exits.training and exits.fixed is not None:
            self.leave = torch.full((self.count,), exits.fixed - 1, device=x.device)
        exits.states = []

    def active(self) -> Tensor | None:
        return None if len(self.index) == self.count else self.index

    def after(self, layer: int, before: Tensor, x: Tensor) -> Tensor:
        exits, now = self.exits, self.index
        if exits.training and exits.mode == "aligned":
            exits.states.append(x)
        if not len(now):
            return before
        whole, flat = len(now) == self.count, x.flatten(0, 1)
        rows = flat if whole else flat.index_select(0, now)
        if layer + 1 < exits.layers:
            ends = self._ends(layer, rows, before, x)
            if ends is not None and bool(ends.any()):
                self.taken[now[ends]] = layer + 1
                self.index = now[~ends]
        return x if whole else replace_rows(before, now, rows)

    def _ends(self, layer: int, rows: Tensor, before: Tensor, x: Tensor) -> Tensor | None:
        """[N] whether each token that ran leaves; None: none does."""
        exits = self.exits
        if self.leave is not None:
            return self.leave[self.index] <= layer
        if exits.training:
            return None
        if exits.confidence is not None:
            return self._confident(exits.confidence, layer, rows, before)
        if isinstance(exits.classifier, Decided):
            self.leave = exits.classifier.logits(x).argmax(-1).flatten()
            return self.leave[self.index] <= layer
        if isinstance(exits.classifier, Geometric) and exits.kind == "geometric":
            return exits.classifier(rows) > 0
        return None

    def _confident(self, confidence: Confidence, layer: int, rows: Tensor, before: Tensor) -> Tensor | None:
        threshold = confidence.at(self.exits.token)
        if threshold == float("inf"):
            return None
        if confidence.measure == "saturation":
            if not layer:
                return None
            return saturation(rows, before.flatten(0, 1).index_select(0, self.index)) >= threshold
        if confidence.measure == "softmax":
            assert self.predict is not None
            return softmax_response(self.predict(self.exits.read(layer, rows))) >= threshold
        if not isinstance(self.exits.classifier, Geometric):
            raise ValueError(
                f"measure is 'classifier', and the model's exits have {self.exits.kind or 'no classifier'}; train one "
                "with model.depth.classifier 'calm' or 'geometric', or use 'softmax' or 'saturation'"
            )
        return self.exits.classifier(rows).sigmoid() >= threshold

    def finish(self, x: Tensor) -> tuple[Tensor, None]:
        self.exits.note(self.taken.view(self.shape))
        return x, None
