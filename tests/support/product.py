"""Mechanisms × positions × backends × uses, as small models: what the code makes of a combination, what the dense
oracle makes of it, and why `supports()` and the specs say that it is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch

from spanformer import LM, Encoder, Seq2Seq
from spanformer.kinds import KINDS
from spanformer.kinds import POSITIONS as POSITION_KINDS
from spanformer.model.config import (
    AttentionConfig,
    EncoderConfig,
    FeedForwardConfig,
    ModelConfig,
    PositionConfig,
    cross_scorings,
)
from spanformer.ops import Rule
from support.dense_models import lm_logits, seq2seq_logits
from support.oracles import HEADS, RAMP, SPAN, WINDOW, parts
from support.position_oracles import SCALED

T, SOURCE = 37, 26
MODELS = {"lm": LM, "encoder": Encoder, "seq2seq": Seq2Seq}
POSITIONS = (*POSITION_KINDS, *SCALED)
BACKENDS = ("reference", "banded", "native", "flex")
EXACT = {"reference": torch.float64, "banded": torch.float64, "native": torch.float32, "flex": torch.float32}
PIECES = {name: [20, *[1] * 9, 8] for name in BACKENDS} | {"flex": [34, 1, 2]}  # flex takes long for each, on a CPU
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # of the largest number in a tensor
BEFORE = (*(name for name, kind in POSITION_KINDS.items() if kind.absolute and name != "none"), *SCALED)
"""positions that are added or rotated before a backend is called"""
STACKS = {
    "Window(6), Every(5)": ("Window(6)", "Every(5)"),
    "Block(6), Summary(6, 2)": ("Block(6)", "Summary(6, 2)"),
    "window(9), adaptive_span": ("window(9)", "adaptive_span"),
}
"""layers that differ: strided and fixed attention with a factor in each, and a window below learned spans"""
COMPOSED = ("Window(4) | Global([0, 9])", "2 window(9) + 2 adaptive_span")
TERMS = re.compile(rf"\b({'|'.join(field.name for field in fields(Rule))})\b")
"""what the refusal of a backend names"""


@dataclass(frozen=True)
class Table:
    """One table of docs/compatibility.md: models of one kind, every row with every position."""

    title: str
    kind: Literal["lm", "encoder", "seq2seq"]
    rows: tuple[str, ...]
    positions: tuple[str, ...] = POSITIONS
    uses: tuple[str, ...] = ("trained", "cached")

    scorings: bool = False
    """a row is the scoring of cross-attention, and not the decoder's self-attention"""

    def layers(self, row: str) -> tuple[str, ...]:
        """What the heads of each layer are; of seq2seq, of each layer of the decoder."""
        return STACKS.get(row) or (("adaptive_span",) if self.scorings else (row,))

    def backends(self, position: str) -> tuple[str, ...]:
        """Encoders run on flex, which is slow on CPUs, only with positions that reach a backend."""
        return BACKENDS if self.kind != "encoder" or position not in BEFORE else BACKENDS[:3]


class Case(NamedTuple):
    """One combination of the product."""

    title: str
    row: str
    position: str
    backend: str
    use: str


KIND_ROWS = tuple(text for kind in KINDS.values() for text in kind.tested)
ROWS = (*KIND_ROWS, *COMPOSED)
TABLES = {
    table.title: table
    for table in (
        Table("Language models", "lm", ROWS),
        Table("Encoders", "encoder", ROWS, uses=("trained",)),
        Table("Decoders", "seq2seq", ROWS, ("sinusoidal", "rotary")),
        Table("Cross-attention", "seq2seq", tuple(cross_scorings()), ("sinusoidal", "rotary"), scorings=True),
        Table(
            "Layers that differ", "lm", tuple(STACKS),
            ("none", "sinusoidal_per_layer", "learned_per_layer", "table", "shaw", "transformer_xl", "rotary", "t5",
             "da_transformer"),
        ),
    )
}  # fmt: skip


def cases(table: Table) -> Iterator[Case]:
    for row in table.rows:
        for position in table.positions:
            for backend in table.backends(position):
                for use in table.uses:
                    yield Case(table.title, row, position, backend, use)


def product() -> list[Case]:
    return [case for table in TABLES.values() for case in cases(table)]


# ---- what the code makes of a combination


def model(table: Table, row: str, position: str, backend: str) -> LM | Encoder | Seq2Seq:
    torch.manual_seed(7)
    made = MODELS[table.kind](configured(table, row, position, backend)).double().eval()
    with torch.no_grad():
        for p in made.parameters():  # what starts at zero would hide what is behind it
            p.add_(torch.randn_like(p), alpha=0.1)
        for module in made.spans_modules():
            module.ratio.copy_(torch.linspace(0.03, 0.71, module.kv_heads))
    return made


def configured(table: Table, row: str, position: str, backend: str, persistent: int = 0) -> ModelConfig:
    layers = table.layers(row)
    attention = AttentionConfig(
        kind=layers[0], stack=layers if len(layers) > 1 else (), max_span=SPAN, ramp=RAMP, window=WINDOW, init=0.3,
        backend=backend, penalty=0.0,
    )  # fmt: skip
    config = ModelConfig(
        vocab=13, dim=24, layers=len(layers), heads=HEADS, feedforward=FeedForwardConfig(kind="none"),
        attention=attention, position=place(position), kind=table.kind, persistent=persistent,
    )  # fmt: skip
    if table.kind != "seq2seq":
        return config
    half = EncoderConfig(1, replace(attention, kind="adaptive_span", stack=()), config.position)
    return replace(config, encoder=half, cross=row if table.scorings else "scaled")


def place(position: str) -> PositionConfig:
    if position in SCALED:
        scaling, factor, trained = SCALED[position]
        return PositionConfig(kind="rotary", scaling=scaling, factor=factor, length=trained)  # pyright: ignore
    length = T if POSITION_KINDS[position].needs_length else 0
    return PositionConfig(kind=position, length=length, clip=5)


def text(length: int = T) -> torch.Tensor:
    return torch.randint(0, 13, (2, length), generator=torch.Generator().manual_seed(3))


def source() -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts, of which the second is shorter, and their padding."""
    return text(SOURCE), torch.arange(SOURCE) >= torch.tensor([SOURCE, 19])[:, None]


def run(made: LM | Encoder | Seq2Seq, use: str, pieces: list[int]) -> torch.Tensor:
    """Logits of a text; decoding reads it in pieces of these lengths."""
    tokens = text(sum(pieces))
    if use == "cached":
        assert not isinstance(made, Encoder)
        cache = made.start(*source()) if isinstance(made, Seq2Seq) else made.cache(2)
        found = [made.decode(piece, cache) for piece in tokens.split(pieces, 1)]
        return torch.cat([p for p in found if p is not None], 1)
    if isinstance(made, Seq2Seq):
        heard, padding = source()
        return made(heard, tokens, source_padding=padding).logits
    return made(tokens).logits


def train(made: torch.nn.Module, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and the gradients of every parameter."""
    weight = torch.randn(2, T, 13, generator=torch.Generator().manual_seed(4))
    (out * weight.to(out.dtype)).sum().backward()
    return {"logits": out.detach(), **{n: p.grad for n, p in made.named_parameters() if p.grad is not None}}


def refused(case: Case, table: Table | None = None) -> str:
    """The sentence in which a combination is refused, without what stands before it; "" for one that runs. A short
    text tells: backends refuse terms, not lengths."""
    table = table or TABLES[case.title]
    try:
        made = model(table, case.row, case.position, case.backend).to(EXACT[case.backend])
        with torch.no_grad():
            run(made, case.use, [3, 1])
    except ValueError as said:
        return sentence(said)
    return ""


def outcome(case: Case, table: Table | None = None) -> str:
    """ "" if it equals the oracle, else the sentence of the refusal."""
    table = table or TABLES[case.title]
    try:
        made = model(table, case.row, case.position, case.backend).to(EXACT[case.backend])
        logits = run(made, case.use, PIECES[case.backend])
    except ValueError as said:
        return sentence(said)
    wanted = oracle(table, case.row, case.position)
    if case.use == "cached":
        same({"logits": logits}, {"logits": wanted["logits"]})
    else:
        same(train(made, logits), wanted)
    return ""


def sentence(said: ValueError) -> str:
    return re.sub(r"^(backend '\w+' cannot serve this call: |model\.position\.kind is '\w+'; )", "", str(said))


@functools.lru_cache(maxsize=8)
def oracle(table: Table, row: str, position: str) -> dict[str, torch.Tensor]:
    made, layers = model(table, row, position, "reference"), table.layers(row)
    if isinstance(made, Seq2Seq):
        return train(made, seq2seq_logits(made, layers, position, *source(), text()))
    return train(made, lm_logits(made, layers, position, text()))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, right in wanted.items():
        if not bool(right.any()):
            continue  # a gradient that is nothing: left out, or zeros
        assert name in found, f"{name} has no gradient"
        left = found[name]
        error = (left.double() - right).abs().max() / right.abs().max()
        assert error < CLOSE[left.dtype], f"{name} is off by {float(error):.1e} of its largest number"


# ---- why it is refused, whatever the backend


def unbuildable(case: Case, table: Table | None = None) -> bool:
    """Whether the specs say that no such model exists."""
    table = table or TABLES[case.title]
    specs = [spec for layer in table.layers(case.row) for spec in parts(layer) if spec.kind in KINDS]
    kinds = [KINDS[spec.kind] for spec in specs]
    if table.kind == "encoder":
        made = [KINDS[s.kind].make()(replace(s, causal=False, dim=24, head_dim=6, kv_heads=s.heads)) for s in specs]
        if any(getattr(m, "causal", True) for m in made):
            return True  # it looks back only
    elif any(kind.cost.cached is None for kind in kinds):
        return True  # it reads a text whole
    absolute = POSITION_KINDS[place(case.position).kind].absolute
    return any(kind.absolute_positions for kind in kinds) and not absolute


def unsupported(case: Case, table: Table | None = None) -> list[str]:
    """What `supports()` says of a model's layers with its positions, trained or decoding from a KV cache."""
    table = table or TABLES[case.title]
    made = model(table, case.row, case.position, "reference")
    return [
        reason
        for block, position in zip(made.blocks, made.positions(), strict=True)
        for reason in block.attention.mechanism.supports(position=position, cache=case.use == "cached")
    ]
