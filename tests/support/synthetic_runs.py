"""Event files as training writes them, made up: a small model whose upper layers learn long spans."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

RAMP = 32
SIZES = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
TEXT = "The span grows at the start of a word.\nInside it, little\tis needed: overthrown, overthrown again."


def events(
    *,
    name: str = "enwik8 tiny",
    layers: int = 6,
    heads: int = 4,
    steps: int = 200,
    max_span: int = 1024,
    kind: str = "adaptive_span",
    unit: str = "byte",
    floor: float = 1.6,
    pace: float = 0.4,
    cost: bool = True,
    evals: bool = True,
    dynamic: bool = False,
    seed: int = 0,
    objective: str = "",
) -> list[dict]:
    """The rows of a run that went well. floor: the bits it tends to; pace: seconds a step."""
    noise = np.random.default_rng(seed)
    shape = {
        "layers": layers, "dim": 256, "heads": heads, "kv_heads": heads, "head_dim": 64, "feedforward": 2 * 256 * 1024,
        "persistent": 0, "vocab": 256, "block": 256, "batch": 8, "max_span": max_span,
    }  # fmt: skip
    attention = {"kind": kind, "max_span": max_span, "ramp": RAMP, "penalty": 2e-6}
    rows: list[dict] = [
        {
            "event": "start", "format": 1, "version": "0.2.0", "time": 1_790_000_000.0, "run": name,
            "config": {"model": {"layers": layers, "attention": attention}, "data": {"path": "enwik8"},
                       "optim": {"lr": 0.07}, "train": {"steps": 10 * steps}},
            "parameters": 4_912_384, "unit": unit, "tokens": SIZES, "units": SIZES, "shape": shape,
            "machine": {"cores": 2, "threads": 2, "device": "cpu", "torch": "2.13.0"},
        }
    ]  # fmt: skip
    if objective:  # older files do not say
        rows[0]["objective"] = objective
    # An eighth of the heads, more of them higher up, tends to a long span; the rest stays near 0.
    tendency = noise.random((layers, heads)) ** 6 * np.linspace(0.02, 1.0, layers)[:, None] * 0.9 * max_span
    tendency += noise.random((layers, heads)) * 12
    for n in range(steps):
        step, seconds = 10 * (n + 1), pace * 10 * (n + 1)
        bits = floor + 5.5 * math.exp(-step / (1.2 * steps)) + 1.2 / (1 + step / 300)
        spans = np.minimum(tendency * (1 - math.exp(-3 * (n + 1) / steps)), max_span)
        reach = np.minimum(np.ceil(spans + RAMP), max_span)
        learned = kind != "full"
        shown = spans.round(3).tolist() if learned else [[None] * heads] * layers
        reach = reach.astype(int) if learned else np.full_like(reach, max_span, dtype=int)
        rows.append(
            {
                "event": "step", "step": step, "seconds": seconds, "tokens": 2048 * step,
                "loss": math.log(2) * (bits + 0.06 * float(noise.standard_normal())),
                "penalty": 2e-6 * float(spans.mean()), "lr": 0.07, "grad_norm": 0.4,
                "tokens_per_second": 2048 / pace, "spans": shown,
                "reach": reach.tolist(), "memory": (reach.max(axis=1) - 1).tolist(), "resident_bytes": 700_000_000,
            }
        )  # fmt: skip
        if evals and (n + 1) % max(1, steps // 10) == 0:
            rows.append(evaluation(step, seconds, "valid", bits + 0.05))
    last = rows[-1]["step"] if steps else 0
    if cost:
        rows.append(
            {
                "event": "cost", "step": last, "flops": {"learned": 6.1e10, "full": 1.9e11},
                "step_seconds": {"learned": pace, "full": 2.6 * pace},
                "attention_seconds": {"learned": 0.2 * pace, "full": 1.8 * pace},
                "products_seconds": {"learned": 0.4 * pace, "full": 0.4 * pace},
                "optimizer_seconds": {"learned": 0.3 * pace, "full": 0.3 * pace},
                "peak_bytes": {"learned": 5.1e8, "full": 1.3e9},
            }
        )  # fmt: skip
    if dynamic:
        rows.append(dynamics(last, noise))
    rows.append({"event": "note", "step": last, "text": "2 of 24 heads look at nothing but the ramp."})
    if evals:
        rows.append(evaluation(last, last * pace, "test", floor + 0.3))
    rows.append({"event": "checkpoint", "step": last, "path": "checkpoints/last"})
    rows.append({"event": "stop", "step": last, "reason": "all steps are done", "seconds": last * pace})
    return rows


def evaluation(step: int, seconds: float, split: str, bits: float) -> dict:
    return {"event": "eval", "step": step, "seconds": seconds, "split": split, "loss": bits * math.log(2), "bits": bits,
            "tokens": 5_000_000}  # fmt: skip


def dynamics(step: int, noise: np.random.Generator) -> dict:
    """Heads that look far where a word begins, and ever less inside it."""
    spans, names = [], []
    for layer in range(3, 6):
        for head in (1, 2):
            since, line = 0, []
            for before, char in zip(" " + TEXT, TEXT, strict=False):
                since = 0 if before.isspace() else since + 1
                peak = 40 * (layer - 2) if head == 1 else 6
                line.append(round(float(peak * math.exp(-since / 2) * (not char.isspace()) + 4 + noise.random()), 2))
            spans.append(line)
            names.append(f"layer {layer} head {head}")
    return {"event": "dynamic", "step": step, "text": TEXT, "spans": spans, "names": names}


def write(folder: Path, rows: list[dict], *, after: str = "") -> Path:
    """The rows as a run's event file, with this text after the last line; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "events.jsonl").write_text(text + after, encoding="utf-8")
    return folder
