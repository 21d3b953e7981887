"""The part pairs of `spanformer bench depth`: three classifiers × two oracles, beside static exits.

The model of the part exits stays as it is: each classifier is trained on its states, so that a price can be chosen for
each pair. (The paper trains both together.) Prices are chosen on validation text, and the figures are of test text.

Shapes: L layers, N segments of T tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from spanformer.bench.depth import DepthBench
from spanformer.bench.depth_text import LANES, base, bits, load_exits
from spanformer.bench.session import Bench
from spanformer.data import Prepared, prepare
from spanformer.depth.classifiers import Decided, Geometric, Kind
from spanformer.depth.oracle import oracle_exits
from spanformer.model.lm import LM

CLASSIFIERS: tuple[Kind, ...] = ("sequence", "multinomial", "geometric")
PRICES = {"likelihood": (0.01, 0.03, 0.06), "correctness": (0.001, 0.003, 0.01)}
"""of a layer, in nats or correct tokens, for weights of neighbours that sum to 1"""
SMOOTHING = 4.0
SEGMENTS, EACH, UPDATES, RATE = 128, 32, 400, 1e-2
"""of training text, of an update"""
ALLOWED = 1.02
"""of the bits of all layers"""


class Seen(NamedTuple):
    """What the layers made of the training text."""

    states: list[Tensor]
    """L of [N, T, dim]"""
    scores: dict[str, Tensor]
    """by oracle, [L, N, T]"""


def measure_pairs(bench: Bench[DepthBench]) -> dict:
    """Bits and layers of each pair at its best price, and of every static exit."""
    o, lm = bench.options, load_exits(bench, "pairs")
    exits = lm.exits()
    data = prepare(base(bench).data, on_progress=bench.report)
    found: dict = {"static": {}, "pairs": {}, "tried": []}
    for n in range(1, exits.layers + 1):
        exits.fixed = n
        found["static"][str(n)] = bits(bench, lm, data, "test")
    exits.fixed = None
    full = found["static"][str(exits.layers)]
    seen, whole = look(bench, lm, data), measured(bench, lm, data, "valid", None)[0]
    for name in PRICES:
        for kind in CLASSIFIERS:
            rows = []
            for price in PRICES[name]:
                bench.report(f"{kind}, {name}, price {price}", 0, 0)
                classifier = learn(seen, kind, name, price)
                loss, layers = measured(bench, lm, data, "valid", classifier, kind)
                rows.append((loss / whole > ALLOWED, layers if loss / whole <= ALLOWED else loss, price, classifier))
                found["tried"].append([kind, name, price, loss / whole, layers])
            _, _, price, classifier = min(rows, key=lambda row: row[:2])
            loss, layers = measured(bench, lm, data, "test", classifier, kind)
            static = interpolate(found["static"], layers)
            found["pairs"][f"{kind} {name}"] = {
                "price": price, "layers": layers, "bits": loss, "full": full, "excess": loss / full - 1,
                "static": static / full - 1,
            }  # fmt: skip
    return found | {"updates": o.size(UPDATES, 2)}


@torch.no_grad()
def look(bench: Bench[DepthBench], lm: LM, data: Prepared) -> Seen:
    """States and scores of training text, all layers run."""
    o, exits = bench.options, lm.exits()
    rows, block = o.size(SEGMENTS, 2), o.size(256, 16)
    ids = torch.from_numpy(data.splits["train"].ids[: rows * (block + 1)].astype("int64")).view(rows, -1)
    states: list[list[Tensor]] = [[] for _ in range(exits.layers)]

    def keep(n: int, _block: object, _given: object, out: Any) -> None:
        states[n].append(out[0])

    hooks = [each.register_forward_hook(partial(keep, n)) for n, each in enumerate(lm.ordered_blocks())]
    exits.fixed = exits.layers
    for part in ids.split(LANES):
        lm(part[:, :-1])
    exits.fixed = None
    for hook in hooks:
        hook.remove()
    every, targets = [torch.cat(each) for each in states], ids[:, 1:]
    logits = [lm.head.logits(lm.norm(exits.read(n, x))).log_softmax(-1) for n, x in enumerate(every)]
    right = torch.stack([(each.argmax(-1) == targets).float() for each in logits])
    likely = torch.stack([each.gather(-1, targets[..., None])[..., 0] for each in logits])
    return Seen(every, {"likelihood": likely, "correctness": right})


def learn(seen: Seen, kind: Kind, oracle: str, price: float) -> Decided | Geometric:
    """A classifier that imitates the oracle at this price."""
    assert kind in get_args(Kind)
    torch.manual_seed(0)
    dim, layers = seen.states[0].shape[2], len(seen.states)
    classifier = Geometric(dim) if kind == "geometric" else Decided(dim, layers, whole=kind == "sequence")
    total = sum(torch.exp(-(torch.arange(-20.0, 21.0) ** 2) / SMOOTHING)).item()  # type: ignore[union-attr]
    exits = oracle_exits(seen.scores[oracle] / total, price, SMOOTHING)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=RATE)
    for n in range(UPDATES if len(exits) > 2 else 2):
        some = torch.arange(n * EACH, (n + 1) * EACH) % len(exits) if len(exits) > EACH else torch.arange(len(exits))
        loss = classifier.loss([states[some] for states in seen.states], exits[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return classifier.eval()


def measured(
    bench: Bench[DepthBench], lm: LM, data: Prepared, split: str, classifier: Decided | Geometric | None,
    kind: Kind | None = None,
) -> tuple[float, float]:  # fmt: skip
    """Bits per byte and layers of a split, tokens leaving by this classifier; None: none does."""
    exits = lm.exits()
    before = exits.classifier, exits.kind
    exits.classifier, exits.kind = classifier, kind
    exits.count_from_here()
    try:
        return bits(bench, lm, data, split), exits.mean_run()
    finally:
        exits.classifier, exits.kind = before


def interpolate(static: dict[str, float], layers: float) -> float:
    """The bits of static exits of this mean depth: tokens divided between the two next to it."""
    low = min(int(layers), len(static) - 1)
    share = layers - low
    return (1 - share) * static[str(low)] + share * static[str(low + 1)]
