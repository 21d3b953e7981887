"""Parts of `bench fit-spans` about other forms of a fit: windows by layer, as other engines hold them, and windows that
grow with the text."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from spanformer.bench.fit_pieces import SINKS, Pieces
from spanformer.core.text import read_text
from spanformer.hf.baselines import uniform
from spanformer.hf.export import choose_windows
from spanformer.hf.fit import set_windows
from spanformer.hf.fit_events import Trial
from spanformer.hf.layer_fit import get_sinks, set_sinks
from spanformer.hf.layer_survey import LayerCosts
from spanformer.hf.plan import FitRun
from spanformer.hf.probe import as_rows, probe, table
from spanformer.hf.spans import cache_bytes
from spanformer.hf.survey import Survey
from spanformer.hf.text import bits_per_byte, make_chunks
from spanformer.model.budget import Budget


class Forms(Pieces):
    # ---- windows by layer

    def layered(self, domain: str) -> None:
        begun = time.monotonic()
        found = self.run(domain, replace(self.plan(), per="layer")).survey(self.show)
        assert found.layered is not None
        self.bench.keep(f"layered:{domain}", {
            "grid": found.grid, "costs": found.costs.tolist(), "lost": found.lost.tolist(),
            "layers": found.layered.costs.tolist(), "sink_logits": found.layered.sink_logits.tolist(),
            "minutes": (time.monotonic() - begun) / 60,
        })  # fmt: skip

    def layers(self, domain: str, divisor: str) -> None:
        kept, events = self._found(f"layered:{domain}"), []
        found = Survey(
            kept["grid"], torch.tensor(kept["costs"]), torch.tensor(kept["lost"]),
            layered=LayerCosts(torch.tensor(kept["layers"]), torch.tensor(kept["sink_logits"])),
        )  # fmt: skip
        run = self.run(domain, replace(self.plan(int(divisor)), per="layer"))
        outcome = run.fit(lambda event: (events.append(event), self.show(event)), found)
        self.bench.keep(f"layers:{domain}:{divisor}", {
            "form": outcome.form, "share": outcome.share, "windows": outcome.windows.tolist(),
            "sink_logits": get_sinks(run.layers).tolist(), "bits": outcome.bits, "beginnings": outcome.early,
            "kl": [(event.step, event.kl) for event in events if isinstance(event, Trial)],
            "minutes": outcome.seconds / 60,
        })  # fmt: skip
        self.bench.say(outcome.text())

    def exported(self, domain: str, divisor: str) -> None:
        """Spans by head as `export-windows` writes them: neither sink tokens nor sink logits."""
        fitted = torch.tensor(self._found(f"fit:{domain}:{divisor}")["windows"])
        run, rows = self.run(domain, replace(self.plan(), per="layer")), {}
        full = run.measure(None, "full", self.show)
        for how in ("longest", "mean", "shortest"):
            set_windows(run.model, fitted)
            found = choose_windows(run.layers, how=how, context=self.context)
            local = torch.tensor([kind == "sliding_attention" for kind in found.layer_types])
            windows = torch.where(local, found.sliding_window, self.context)[:, None].expand_as(fitted)
            set_sinks(run.layers, None)
            bits = run.measure(windows, f"exported, {how}", self.show)
            share = found.tokens / (len(local) * self.context)
            rows[how] = {"share": share, "window": found.sliding_window, "local": int(local.sum()), "bits": bits,
                         "rise": bits / full - 1}  # fmt: skip
            self.bench.say(f"exported, {how} of /{divisor}: {share:.4f} {bits:.4f} {100 * (bits / full - 1):+.2f} %")
        self.bench.keep(f"exported:{domain}:{divisor}", rows)

    # ---- windows that grow

    def long(self, domain: str, divisor: str) -> None:
        run = self._long_run(domain, divisor)
        outcome = run.fit(self.show, self.surveyed(domain))
        assert outcome.growth is not None
        made = {"context": run.plan.context, "start": run.plan.context // 2}
        texts = make_chunks(read_text(self.texts(domain)[1]), run.tokenizer, limit=run.plan.measure, **made)
        kept = {"windows": outcome.windows.tolist(), "growth": outcome.growth.tolist(), "short": outcome.bits,
                "minutes": outcome.seconds / 60, "rows": {}}  # fmt: skip
        for name, (windows, growth) in self._long_sets(run, outcome.windows, outcome.growth, int(divisor)).items():
            set_windows(run.model, windows, growth=growth)
            some, full = cache_bytes(run.model, run.plan.context)
            bits = bits_per_byte(
                run.model, texts, lambda done, total, name=name: self.bench.report(f"measuring: {name}", done, total)
            )
            rise = bits / (kept["rows"]["full"]["bits"] if kept["rows"] else bits) - 1
            kept["rows"][name] = {"share": some / full, "bits": bits, "rise": rise}
            self.bench.keep(f"long:{domain}:{divisor}", kept)
            self.bench.say(f"{made['context']:,} tokens, {name}: {some / full:.4f} {bits:.4f} {100 * rise:+.2f} %")

    def recall(self, domain: str, divisor: str) -> None:
        """Pass keys in texts of the length that a fit is for."""
        fitted, rows = self._found(f"long:{domain}:{divisor}"), {}
        run = self._long_run(domain, divisor)
        windows, growth = torch.tensor(fitted["windows"]), torch.tensor(fitted["growth"])
        for name, each in self._long_sets(run, windows, growth, int(divisor)).items():
            set_windows(run.model, each[0], growth=each[1])
            found = probe(
                run.model, run.tokenizer, contexts=(run.plan.context,), tasks=self.options.tasks,
                on_progress=lambda done, total, name=name: self.bench.report(f"probing {name}", done, total),
            )  # fmt: skip
            rows[name] = as_rows(found)
            self.bench.keep(f"recall:{domain}:{divisor}", rows)
            self.bench.say(table(found, name))

    def _long_run(self, domain: str, divisor: str) -> FitRun:
        return self.run(domain, replace(self.plan(int(divisor)), context=self.options.quickly("long", 200),
                                        text=self.context))  # fmt: skip

    def _long_sets(
        self, run: FitRun, windows: Tensor, growth: Tensor, divisor: int
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """(windows at the texts' length, growth)"""
        whole = run.budget(1.0).longest.expand_as(windows)
        even = uniform(windows.shape[0], windows.shape[1], Budget(1 / divisor, self.context, SINKS))
        return {
            "full": (whole, torch.ones_like(growth)),
            "windows that grow": (windows, growth),
            "uniform windows that grow": (even, torch.full_like(growth, 1 / divisor)),
        }
