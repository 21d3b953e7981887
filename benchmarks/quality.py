"""800 steps of the adaptive-span paper's code and of ours, same data and recipe; how soon the modern recipe is there.

    python benchmarks/quality.py --original PATH_OF_A_CLONE --data enwik8.gz --out results/quality

The first 10 MB of enwik8's training split; 4 layers, d 256, 4 heads, span 1024, block 256, batch 8; Adagrad 0.07 with
clipping 0.03, warm-up 200. Validation: the first 256 Ki bytes of the validation split, by the protocol of the paper's
code (8 lanes, whole blocks). Seconds are those of training steps alone. The modern recipe has the same number of
parameters within 1 %; its time is that of the first evaluation that is as good as the original's last.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch

from spanformer.core.processor import best_dtype
from spanformer.data import DataConfig, Lanes, prepare
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.load import load
from spanformer.report.events import read_run
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.evaluate import evaluate_as_original
from spanformer.train.optim import OptimConfig
from spanformer.train.run import train

BATCH, BLOCK, SPAN, DIM, LAYERS, HEADS = 8, 256, 1024, 256, 4, 4
VALID = 1 << 18
TRAIN = TrainConfig(batch=BATCH, block=BLOCK, steps=800, eval_every=0, save_every=0, measure=False, threads=2)
PAPER = ModelConfig(
    vocab=256, dim=DIM, layers=LAYERS, heads=HEADS, norm="layer", order="post", original=True,
    attention=AttentionConfig(max_span=SPAN), position=PositionConfig(kind="table"),
    feedforward=FeedForwardConfig(kind="relu", dim=4 * DIM, bias=True), embedding=EmbeddingConfig(bias=True),
)  # fmt: skip
PAPER_OPTIM = OptimConfig(kind="adagrad", lr=0.07, clip=0.03, schedule="constant", warmup=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", required=True, type=Path, help="a clone of facebookresearch/adaptive-span")
    parser.add_argument("--data", required=True, help="a copy of enwik8")
    parser.add_argument("--out", type=Path, default=Path("results/quality"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--only", nargs="*", default=["original", "ours", "modern"])
    options = parser.parse_args()
    torch.set_num_threads(2)
    data = DataConfig(source="enwik8", copy=options.data, limit=10_000_000)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "quality.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for name in options.only:
        results[name] = {"original": run_original, "ours": run_ours, "modern": run_modern}[name](data, options, results)
        print(name, json.dumps(results[name]), flush=True)
        file.write_text(json.dumps(results, indent=1) + "\n")


def run_original(config: DataConfig, options: argparse.Namespace, _results: dict) -> dict:
    """Its model, its optimiser, its order of things in a step; our lanes, which read as its batches do."""
    sys.path.insert(0, str(options.original))
    from adagrad_with_grad_clip import AdagradWithGradClip  # pyright: ignore[reportMissingImports]
    from models import TransformerSeq  # pyright: ignore[reportMissingImports]

    data = prepare(config)
    torch.manual_seed(1)
    model = TransformerSeq(
        vocab_size=256, hidden_size=DIM, nb_heads=HEADS, nb_layers=LAYERS, attn_span=SPAN, emb_dropout=0.0,
        adapt_io_params={"adapt_io_enabled": False}, inner_hidden_size=4 * DIM, dropout=0.0,
        adapt_span_params={"adapt_span_enabled": True, "adapt_span_loss": 2e-6, "adapt_span_ramp": 32,
                           "adapt_span_init": 0.0, "adapt_span_cache": True},
        pers_mem_params={"pers_mem_size": 0},
    )  # fmt: skip
    spans = [layer.attn.attn.adaptive_span for layer in model.layers]
    optimizer = AdagradWithGradClip(model.parameters(), lr=0.07, grad_clip=0.03)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, n / 200))
    lanes = Lanes(data.splits["train"].ids, BATCH, BLOCK, seed=1)

    def empty(rows: int) -> list[torch.Tensor]:
        return [torch.zeros(rows, s.get_cache_size(), DIM) for s in spans]

    def loss_of(x: torch.Tensor, y: torch.Tensor, cache: list) -> tuple[torch.Tensor, list]:
        out, cache, _ = model(x, cache, target=y)
        return torch.nn.functional.nll_loss(out.view(-1, 256), y.reshape(-1)), cache

    cache, seconds = empty(BATCH), 0.0
    for _ in range(options.steps):
        batch = next(lanes)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss, cache = loss_of(torch.from_numpy(batch.x), torch.from_numpy(batch.y), cache)
        (loss + sum(s.get_loss() for s in spans)).backward()
        schedule.step()
        optimizer.step()
        for s in spans:
            s.clamp_param()
        seconds += time.perf_counter() - began
    model.eval()
    rows = data.splits["valid"].ids[:VALID].astype(np.int64).reshape(8, -1)
    cache, losses = empty(8), []
    with torch.no_grad():
        for at in range(0, rows.shape[1] - BLOCK, BLOCK):
            piece = torch.from_numpy(rows[:, at : at + BLOCK + 1])
            loss, cache = loss_of(piece[:, :-1], piece[:, 1:], cache)
            losses.append(float(loss))
    parameters = sum(p.numel() for p in model.parameters())
    average = sum(float(s._mask.current_val.mean()) for s in spans) / LAYERS * SPAN
    return {"bits": float(np.mean(losses)) / math.log(2), "seconds": seconds, "steps": options.steps,
            "parameters": parameters, "average_span": average}  # fmt: skip


def run_ours(config: DataConfig, options: argparse.Namespace, results: dict) -> dict:
    found = run(config, options, "ours", PAPER, PAPER_OPTIM)
    if "original" in results:
        found["bits_over_original"] = found["bits"] - results["original"]["bits"]
        found["times_as_fast"] = results["original"]["seconds"] / found["seconds"]
    return found


def run_modern(config: DataConfig, options: argparse.Namespace, results: dict) -> dict:
    """Pre-norm, RMSNorm, SwiGLU, rotary, Muon and AdamW, bfloat16 where the processor has units for it; the position
    table's weights go into the feed-forward."""
    model = ModelConfig(
        vocab=256, dim=DIM, layers=LAYERS, heads=HEADS, attention=AttentionConfig(max_span=SPAN),
        feedforward=FeedForwardConfig(kind="swiglu", dim=704),
    )  # fmt: skip
    optim = OptimConfig(kind="muon", lr=4e-3, span_lr=2e-2, warmup=30, weight_decay=0.1)
    target = results.get("original", {})
    found = run(
        config, options, "modern", model, optim, steps=350, minutes=target.get("seconds", 350) / 3 / 60, eval_every=50,
        dtype=str(best_dtype()).removeprefix("torch."),
    )  # fmt: skip
    rows = [e for e in read_run(options.out / "modern").evals if e.split == "valid"]
    there = [e for e in rows if e.bits <= target.get("bits", 0)]
    found["seconds_to_original"] = there[0].seconds if there else None
    found["share_of_original_time"] = there[0].seconds / target["seconds"] if there else None
    return found


def run(
    config, options, name, model, optim, *, steps: int = 0, minutes: float = 0.0, eval_every: int = 0, dtype="float32"
) -> dict:
    out = options.out / name
    shutil.rmtree(out, ignore_errors=True)
    settings = TrainConfig(**{**vars(TRAIN), "steps": steps or options.steps, "minutes": minutes, "dtype": dtype,
                              "eval_every": eval_every, "eval_tokens": VALID})  # fmt: skip
    train(RunConfig(out=str(out), data=config, model=model, optim=optim, train=settings))
    rows = read_run(out)
    lm = load(out)
    ids = prepare(config).splits["valid"].ids[:VALID]
    score = evaluate_as_original(lm, ids, block=BLOCK)
    last = rows.steps[-1]
    return {"bits": score.loss / math.log(2), "seconds": last.seconds, "steps": last.step,
            "parameters": rows.start.parameters, "average_span": float(np.nanmean(last.spans))}  # fmt: skip


if __name__ == "__main__":
    main()
