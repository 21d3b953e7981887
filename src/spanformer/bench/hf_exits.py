"""The part exits of `spanformer bench hf`: a pretrained model whose tokens leave early, with a calibrated threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spanformer.core.text import read_text
from spanformer.depth.confidence import Confidence
from spanformer.hf import detach
from spanformer.hf.exit_fit import fit_heads, split_prompts
from spanformer.hf.exit_layers import ExitLayers
from spanformer.hf.exits import ExitHeads, Leaving, continuations, write
from spanformer.infer.exits import Consistency, choose_threshold

if TYPE_CHECKING:
    from spanformer.bench.hf import HfBench
    from spanformer.bench.session import Bench

DELTA = 0.25
SHARES = (1 / 2, 2 / 3, 5 / 6)
"""of the layers, of exits: 15, 20 and 25 of 30"""
SOFTMAX = 0.5


def exits(bench: Bench[HfBench], model: Any, tokenizer: Any) -> dict:
    """Layers and tokens per second with exits calibrated for both consistencies, and by softmax response, whose output
    layer at every check costs more than it saves; the full model in turn."""
    o = bench.options
    if not o.text:
        raise ValueError("the part exits needs a text to train the exits and to calibrate them; give --text")
    train, test, prompt, more = (o.size(*each) for each in ((160, 4), (64, 12), (24, 4), (16, 3)))
    decoder = ExitLayers(model)
    layers = tuple(dict.fromkeys(max(1, min(decoder.count - 1, round(decoder.count * each))) for each in SHARES))
    ids = tokenizer(read_text(o.text), add_special_tokens=False, verbose=False)["input_ids"]
    prompts = split_prompts(ids, train, test, prompt, more)
    heads = fit_heads(decoder, layers, prompts[0], more, batch=32, on_progress=bench.report)
    texts = Texts(decoder, heads, prompts[1], more)
    found: dict = {"exits": layers, "layers": decoder.count, "prompts": test, "tokens": more, "rows": {}}
    ways = {"full": Confidence("classifier")}
    for consistency in o.consistency:
        chosen = texts.calibrated(consistency, prompts[2], bench.report)
        found["rows"][consistency] = {"threshold": chosen.threshold, "tested": chosen.tested}
        if chosen.threshold is not None:
            ways[consistency] = chosen.confidence()
    ways["softmax"] = Confidence("softmax", SOFTMAX)
    long = prompts[1][:1]
    runs = {name: partial(texts.write_one, long, o.size(48, 3), each) for name, each in ways.items()}
    taken = {name: run() for name, run in runs.items()}
    times = bench.compare(f"generating {o.size(48, 3)} tokens", runs, shortest=0.0, wait=False)
    bench.say(f"exits after layers {layers}, generate() after {prompt} tokens:")
    for name, timing in times.items():
        row = found["rows"].setdefault(name, {})
        row |= {"layers_timed": taken[name], "times_as_fast": timing.times_as_fast_as(times["full"])}
        row["tokens_per_second"] = o.size(48, 3) / timing.median
        bench.say(f"  {name:8} {taken[name]:6.2f} layers   {row['times_as_fast']:5.2f} times")
    detach(model)
    return found


@dataclass
class Texts:
    """Greedy continuations of the prompts by confidence, each written once."""

    decoder: ExitLayers
    heads: ExitHeads
    prompts: Tensor
    more: int
    known: dict[Confidence, tuple[list[list[int]], float]] = field(default_factory=dict)

    def calibrated(self, consistency: Consistency, references: Tensor, report: Callable) -> Any:
        return choose_threshold(
            self.write, references.tolist(), weights="", measure="classifier", consistency=consistency, delta=DELTA,
            max_tokens=self.more, on_progress=report,
        )  # fmt: skip

    def write(self, confidence: Confidence, report: Callable[[int, int], None]) -> tuple[list[list[int]], float]:
        if confidence not in self.known:
            self.known[confidence] = continuations(
                self.decoder, self.heads, self.prompts, self.more, confidence, report, batch=32
            )
        return self.known[confidence]

    @torch.no_grad()
    def write_one(self, prompt: Tensor, tokens: int, confidence: Confidence) -> float:
        """Continue one prompt; the mean layers of its tokens."""
        leaving = Leaving(self.decoder, self.heads, confidence)
        every = [token.layers for token in write(self.decoder, leaving, prompt, tokens)]
        return float(torch.stack([each for each in every if each is not None]).double().mean())
