"""The parts of `bench fit-spans`: surveys, fits and what they are compared with."""

from __future__ import annotations

import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import torch

from spanformer.bench.fit_spans import DIVISORS, DOMAINS, FitSpansBench
from spanformer.bench.kv_bits import kv_bits
from spanformer.bench.session import Bench
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

SINKS = 4


class Pieces:
    def __init__(self, bench: Bench[FitSpansBench]) -> None:
        self.bench, self.options = bench, bench.options
        self.context = self.options.quickly("context", 64)

    def plan(self, divisor: int = 4, measure: int = 0) -> FitPlan:
        o = self.options
        return FitPlan(
            budget=1 / divisor, context=self.context, sink_tokens=SINKS, survey=o.quickly("survey", 2),
            steps=o.quickly("steps", 2), measure=measure or o.quickly("measure", 2), baselines=False,
            far_features=o.far_features,
        )  # fmt: skip

    def run(self, domain: str, plan: FitPlan) -> FitRun:
        self.bench.report(f"loading {self.options.model}", 0, 0)
        return FitRun(self.options.model, *self.texts(domain), plan, named_dtype(self.options.dtype))

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
        found = self.run(domain, self.plan()).survey(self.show)
        self.bench.keep(f"survey:{domain}", {
            "grid": found.grid, "costs": found.costs.tolist(), "lost": found.lost.tolist(),
            "minutes": (time.monotonic() - begun) / 60,
        })  # fmt: skip
        self.bench.say(f"survey:{domain}: {len(found.grid)} windows of {found.costs[..., 0].numel()} heads")

    def fit(self, domain: str, divisor: str) -> None:
        surveyed, run, events = self.surveyed(domain), self.run(domain, self.plan(int(divisor), 2)), []
        outcome = run.fit(lambda event: (events.append(event), self.show(event)), surveyed)
        kls = [(event.step, event.kl) for event in events if isinstance(event, Trial)]
        self.bench.keep(f"fit:{domain}:{divisor}", {
            "windows": outcome.windows.tolist(), "share": outcome.share, "kl": kls, "minutes": outcome.seconds / 60,
        })  # fmt: skip
        self.bench.say(f"fit:{domain}:{divisor}: {outcome.share:.4f} of the KV cache")

    def far(self, domain: str, divisor: str) -> None:
        plan = replace(self.plan(int(divisor)), far="linear")
        surveyed, run, events = self.surveyed(domain), self.run(domain, plan), []
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
        run, key = self.run(domain, self.plan()), f"measure:{domain}"
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

    def lora(self, domain: str, divisor: str) -> None:
        from spanformer.hf.lora import learn_lora

        o = self.options
        windows, full = (
            torch.tensor(self._found(f"fit:{domain}:{divisor}")["windows"]),
            self._found(f"measure:{domain}"),
        )
        run = self.run(domain, self.plan(int(divisor)))
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

    def kv(self, domain: str) -> None:
        fits = {f"learned /{d}": self.bench.file.found(f"fit:{domain}:{d}") for d in self.options.divisors}
        windows = {name: torch.tensor(each["windows"]) for name, each in fits.items() if each}
        run, budget = self.run(domain, self.plan()), Budget(1, self.context, SINKS)
        rows, lines = kv_bits(run, windows, budget, self.show)
        self.bench.keep(f"kv:{domain}", rows)
        self.bench.say(lines)

    def probe(self, divisor: str) -> None:
        fitted = torch.tensor(self._found(f"fit:prose:{divisor}")["windows"])
        run = self.run("prose", self.plan(int(divisor)))
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
