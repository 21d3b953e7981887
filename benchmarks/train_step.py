"""A training step beside that of the adaptive-span paper's code, on the same weights' shapes, tokens and spans.

    python benchmarks/train_step.py --original PATH_OF_A_CLONE            all profiles, in turn
    python benchmarks/train_step.py --original PATH --profiles small-ramp

Profiles: small (4 layers, d 256, 4 heads, span 1024, block 256, batch 8) with all spans at the ramp or with one head a
layer at its maximum; large (12 layers, d 512, 8 heads, span 8192, block 512, batch 1) with one long head a layer, or
with spans as the paper reports them (one head in the upper third of the layers at the maximum, the rest short).

Each contender runs in a process of its own, which tells seconds a step and peak memory; processes take turns, and the
ratio is the median over rounds. A step is forward, backward, clipping and Adagrad, with a learning rate of 0, so that
spans stay where they are put.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Profile:
    layers: int
    dim: int
    heads: int
    span: int
    block: int
    batch: int
    spans: str
    steps: int


PROFILES = {
    "small-ramp": Profile(4, 256, 4, 1024, 256, 8, "ramp", 12),
    "small-long": Profile(4, 256, 4, 1024, 256, 8, "long", 8),
    "large-long": Profile(12, 512, 8, 8192, 512, 1, "long", 2),
    "large-paper": Profile(12, 512, 8, 8192, 512, 1, "paper", 2),
}
VOCAB = 205


def ratios(p: Profile) -> list[list[float]]:
    """[layers][heads] spans as shares of the maximum."""
    rows = [[0.0] * p.heads for _ in range(p.layers)]
    if p.spans == "long":
        for row in rows:
            row[0] = 1.0
    if p.spans == "paper":
        for n, row in enumerate(rows):
            row[:] = [share / p.span for share in (8, 16, 24, 32, 48, 64, 96, 128)][: p.heads]
            row[-1] = 0.72 if n >= p.layers - p.layers // 3 else row[-1]  # 300 on average
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", required=True, type=Path, help="a clone of facebookresearch/adaptive-span")
    parser.add_argument("--profiles", nargs="*", default=list(PROFILES), choices=list(PROFILES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true", help="ours recomputes activations in the backward pass")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        contender, name = options.child.split("/")
        print(json.dumps(measure(contender, PROFILES[name], options)))
        return
    results = {}
    for name in options.profiles:
        rounds: dict[str, list[dict]] = {"original": [], "ours": []}
        for _ in range(options.rounds if PROFILES[name].layers < 12 else 1):
            for contender in rounds:
                command = [sys.executable, __file__, "--original", str(options.original), "--threads",
                           str(options.threads), "--child", f"{contender}/{name}"]  # fmt: skip
                command += ["--checkpointing"] if options.checkpointing else []
                rounds[contender].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        ratio = statistics.median(
            a["seconds"] / b["seconds"] for a, b in zip(rounds["original"], rounds["ours"], strict=True)
        )
        seconds = {c: statistics.median(r["seconds"] for r in found) for c, found in rounds.items()}
        peak = {c: max(r["peak_bytes"] for r in found) for c, found in rounds.items()}
        share = rounds["ours"][-1]["attention_share"]
        results[name] = {"profile": asdict(PROFILES[name]), "speedup": ratio, "seconds": seconds, "peak_bytes": peak,
                         "attention_share": share}  # fmt: skip
        print(
            f"{name:<12} original {seconds['original']:.3f} s, ours {seconds['ours']:.3f} s a step: {ratio:.2f} times "
            f"as fast; peak memory {peak['original'] / 2**20:,.0f} and {peak['ours'] / 2**20:,.0f} MiB, "
            f"{peak['original'] / peak['ours']:.1f} times less; attention is {share:.0%} of our step",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


def measure(contender: str, p: Profile, options: argparse.Namespace) -> dict:
    """Median seconds of a step, and the peak of resident memory above what was resident before there was a model."""
    import torch

    from spanformer.core.malloc import keep_freed_memory
    from spanformer.core.peak import resident_bytes

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if contender == "original":
        sys.path.insert(0, str(options.original))
        import adagrad_with_grad_clip  # noqa: F401  # pyright: ignore[reportMissingImports]
        import models  # noqa: F401  # pyright: ignore[reportMissingImports]
    else:
        import spanformer.model.lm
        import spanformer.train.measure
        import spanformer.train.optim  # noqa: F401
    before = resident_bytes()
    step, share = original_steps(p) if contender == "original" else our_steps(p, options.checkpointing)
    x, y = torch.randint(0, VOCAB, (2, p.batch, p.block))
    times: list[float] = []

    def run() -> None:
        for _ in range(p.steps + 1):
            began = time.perf_counter()
            step(x, y)
            times.append(time.perf_counter() - began)

    if contender == "ours":  # as `spanformer train` does; theirs runs as it is
        keep_freed_memory(not options.checkpointing)
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"seconds": statistics.median(times[1:]), "peak_bytes": peak, "attention_share": share(x, y)}


def original_steps(p: Profile):
    import torch
    from adagrad_with_grad_clip import AdagradWithGradClip  # pyright: ignore[reportMissingImports]
    from models import TransformerSeq  # pyright: ignore[reportMissingImports]

    model = TransformerSeq(
        vocab_size=VOCAB, hidden_size=p.dim, nb_heads=p.heads, nb_layers=p.layers, attn_span=p.span, emb_dropout=0.0,
        adapt_io_params={"adapt_io_enabled": False}, inner_hidden_size=4 * p.dim, dropout=0.0,
        adapt_span_params={"adapt_span_enabled": True, "adapt_span_loss": 2e-6, "adapt_span_ramp": 32,
                           "adapt_span_init": 0.0, "adapt_span_cache": True},
        pers_mem_params={"pers_mem_size": 0},
    )  # fmt: skip
    with torch.no_grad():
        for layer, row in zip(model.layers, ratios(p), strict=True):
            layer.attn.attn.adaptive_span._mask.current_val.copy_(torch.tensor(row)[:, None, None])
    spans = [layer.attn.attn.adaptive_span for layer in model.layers]
    optimizer = AdagradWithGradClip(model.parameters(), lr=0.0, grad_clip=0.03)
    cache = [torch.zeros(p.batch, s.get_cache_size(), p.dim) for s in spans]

    def step(x, y) -> None:
        nonlocal cache
        optimizer.zero_grad()
        out, cache, _ = model(x, cache, target=y)
        loss = torch.nn.functional.nll_loss(out.view(-1, out.size(-1)), y.view(-1))
        (loss + sum(s.get_loss() for s in spans)).backward()
        optimizer.step()

    return step, lambda x, y: 0.0


def our_steps(p: Profile, checkpointing: bool = False):
    import torch

    from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig
    from spanformer.model.lm import LM
    from spanformer.train.clocks import AttentionClock
    from spanformer.train.measure import in_steady_state, one_step
    from spanformer.train.optim import ClippedAdagrad

    lm = LM(ModelConfig(
        vocab=VOCAB, dim=p.dim, layers=p.layers, heads=p.heads, norm="layer", order="post", original=True,
        attention=AttentionConfig(max_span=p.span), position=PositionConfig(kind="table"),
        feedforward=FeedForwardConfig(kind="relu", bias=True), embedding=EmbeddingConfig(bias=True),
    ))  # fmt: skip
    with torch.no_grad():
        for module, row in zip(lm.spans_modules(), ratios(p), strict=True):
            module.ratio.copy_(torch.tensor(row))
    lm.checkpointing = checkpointing
    optimizer = ClippedAdagrad(lm.parameters(), lr=0.0, clip=0.03)
    state = lm.start(p.batch)

    def step(x, y) -> None:
        nonlocal state
        optimizer.zero_grad()
        found = lm(x, state, targets=y)
        state = found.state
        (found.nll.mean() + found.penalty).backward()
        optimizer.step()
        lm.after_step()

    def share(x, y) -> float:
        shares = []
        for _ in range(3):
            arguments = in_steady_state(lm, {"x": x, "targets": y})
            began = time.perf_counter()
            with AttentionClock(lm) as clock:
                one_step(lm, arguments)
            shares.append(clock.seconds / (time.perf_counter() - began))
        return statistics.median(shares)

    return step, share


if __name__ == "__main__":
    main()
