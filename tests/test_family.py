"""The whole product: every mechanism × every position × every backend, trained and read with a cache, in one direction
and in both; every scoring of an encoder's states; layers of different kinds. Each equals the dense float64 oracle
(tests/family.py) or is refused with a reason. A new kind goes into `MECHANISMS`, and into `refusal` where it is
refused. docs/compatibility.md is written from this:

    python tests/test_family.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import pytest
import torch

from family import lm_logits, seq2seq_logits
from family_heads import MECHANISMS, RAMP, SPAN, TWO_STREAMS, WINDOW
from family_positions import SCALED
from spanformer import LM, Encoder, Seq2Seq
from spanformer.model.config import (
    CROSS,
    AttentionConfig,
    EncoderConfig,
    FeedForwardConfig,
    ModelConfig,
    PositionConfig,
)
from spanformer.model.kinds import KINDS, parse_layer

T, SOURCE = 37, 26
MODELS = {"lm": LM, "encoder": Encoder, "seq2seq": Seq2Seq}
POSITIONS = (*get_args(get_type_hints(PositionConfig)["kind"]), *SCALED)
BACKENDS = ("reference", "banded", "native", "flex")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
EXACT = {"reference": torch.float64, "banded": torch.float64, "native": torch.float32, "flex": torch.float32}
PIECES = {name: [20, *[1] * 9, 8] for name in BACKENDS} | {"flex": [34, 1, 2]}  # flex takes long for each, on a CPU
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # of the largest number in a tensor
ABSOLUTE = ("sinusoidal", "sinusoidal_per_layer", "learned", "learned_per_layer")
BEFORE = (*ABSOLUTE, *SCALED)
STACKS = {
    "Window(6), Every(5)": ("Window(6)", "Every(5)"),
    "Block(6), Summary(6, 2)": ("Block(6)", "Summary(6, 2)"),
    "window:9, adaptive_span": ("window:9", "adaptive_span"),
}
"""layers that differ: strided and fixed attention with a factor in each, and a window below learned spans"""


@dataclass(frozen=True)
class Table:
    """One of the page: of models of one kind, every row with every position."""

    title: str
    kind: Literal["lm", "encoder", "seq2seq"]
    rows: tuple[str, ...]
    positions: tuple[str, ...] = POSITIONS
    uses: tuple[str, ...] = ("trained", "cached")

    scorings: bool = False
    """of seq2seq: a row says how a decoder listens, and not what it is made of"""

    def layers(self, row: str) -> tuple[str, ...]:
        """What the heads of each layer are; of seq2seq, of each of the decoder's."""
        return STACKS.get(row) or (("adaptive_span",) if self.scorings else (row,))

    def backends(self, position: str) -> tuple[str, ...]:
        """All, but that encoders are run on flex, which takes long, only with positions that get as far as a backend:
        the others are added or turned before, by what language models have too."""
        return BACKENDS if self.kind != "encoder" or position not in BEFORE else BACKENDS[:3]


HEADS = (*MECHANISMS, *TWO_STREAMS)
TABLES = (
    Table("Language models", "lm", HEADS),
    Table("Encoders", "encoder", HEADS, uses=("trained",)),
    Table("Decoders", "seq2seq", HEADS, ("sinusoidal", "rotary")),
    Table("Scorings of a source", "seq2seq", CROSS, ("sinusoidal", "rotary"), scorings=True),
    Table(
        "Layers that differ", "lm", tuple(STACKS),
        ("none", "sinusoidal_per_layer", "learned_per_layer", "table", "shaw", "transformer_xl", "rotary", "t5",
         "da_transformer"),
    ),
)  # fmt: skip
CASES = [(table, row, position) for table in TABLES for row in table.rows for position in table.positions]


def model(table: Table, row: str, position: str, backend: str) -> LM | Encoder | Seq2Seq:
    torch.manual_seed(7)
    layers = table.layers(row)
    attention = AttentionConfig(
        kind=layers[0], stack=layers if len(layers) > 1 else (), max_span=SPAN, ramp=RAMP, window=WINDOW, init=0.3,
        backend=backend, penalty=0.0,
    )  # fmt: skip
    config = ModelConfig(
        vocab=13, dim=24, layers=len(layers), heads=4, feedforward=FeedForwardConfig(kind="none"), attention=attention,
        position=place(position), kind=table.kind,
    )  # fmt: skip
    if table.kind == "seq2seq":
        half = EncoderConfig(1, replace(attention, kind="adaptive_span", stack=()), config.position)
        config = replace(config, encoder=half, cross=row if table.scorings else "scaled")
    made = MODELS[table.kind](config).double().eval()
    with torch.no_grad():
        for p in made.parameters():  # what starts at zero would hide what is behind it
            p.add_(torch.randn_like(p), alpha=0.1)
        for module in made.spans_modules():
            module.ratio.copy_(torch.linspace(0.03, 0.71, module.kv_heads))
    return made


def place(position: str) -> PositionConfig:
    if position in SCALED:
        scaling, factor, trained = SCALED[position]
        return PositionConfig(kind="rotary", scaling=scaling, factor=factor, length=trained)  # pyright: ignore
    return PositionConfig(kind=position, length=T if position.startswith("learned") else 0, clip=5)  # pyright: ignore


def text(length: int = T) -> torch.Tensor:
    return torch.randint(0, 13, (2, length), generator=torch.Generator().manual_seed(3))


def source() -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts, of which the second is shorter, and their padding."""
    return text(SOURCE), torch.arange(SOURCE) >= torch.tensor([SOURCE, 19])[:, None]


def train(made: torch.nn.Module, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and the gradients of every parameter."""
    weight = torch.randn(2, T, 13, generator=torch.Generator().manual_seed(4))
    (out * weight.to(out.dtype)).sum().backward()
    return {"logits": out.detach(), **{n: p.grad for n, p in made.named_parameters() if p.grad is not None}}


@functools.cache
def oracle(table: Table, row: str, position: str) -> dict[str, torch.Tensor]:
    made, layers = model(table, row, position, "reference"), table.layers(row)
    if isinstance(made, Seq2Seq):
        return train(made, seq2seq_logits(made, layers, position, *source(), text()))
    return train(made, lm_logits(made, layers, position, text()))


def run(made: LM | Encoder | Seq2Seq, backend: str, use: str) -> dict[str, torch.Tensor]:
    """What the code makes of it: logits, and gradients where it is trained."""
    if use == "cached":
        assert not isinstance(made, Encoder)
        cache = made.start(*source()) if isinstance(made, Seq2Seq) else made.cache(2)
        pieces = [made.read(piece, cache) for piece in text().split(PIECES[backend], 1)]
        return {"logits": torch.cat([p for p in pieces if p is not None], 1)}
    if isinstance(made, Seq2Seq):
        tokens, padding = source()
        out = made(tokens, text(), source_padding=padding)
    else:
        out = made(text())
    return train(made, out.logits)


def outcome(table: Table, row: str, position: str, backend: str, use: str) -> str:
    """ "" if it equals the oracle, else the sentence of the refusal."""
    try:
        found = run(model(table, row, position, backend).to(EXACT[backend]), backend, use)
    except ValueError as refusal:
        return str(refusal)
    wanted = oracle(table, row, position)
    same(found, wanted if use == "trained" else {"logits": wanted["logits"]})
    return ""


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, right in wanted.items():
        if not bool(right.any()):
            continue  # a gradient that is nothing: left out, or zeros
        assert name in found, f"{name} has no gradient"
        left = found[name]
        error = (left.double() - right).abs().max() / right.abs().max()
        assert error < CLOSE[left.dtype], f"{name} is off by {float(error):.1e} of its largest number"


def test_every_kind_is_here() -> None:
    tested = {part.kind for name in HEADS for part in parse_layer(name, 4)}
    assert tested - {"pattern"} == set(KINDS)


@pytest.mark.parametrize(("table", "row", "position"), CASES, ids=[f"{t.title}-{r}-{p}" for t, r, p in CASES])
def test_equals_the_oracle_or_says_why_not(table: Table, row: str, position: str) -> None:
    """On every backend; where flex is left out, `Table.backends` says."""
    for backend in table.backends(position):
        for use in table.uses:
            said = outcome(table, row, position, backend, use)
            known = refusal(table, row, position, backend, use)
            assert bool(said) == bool(known), f"{backend}, {use}: {said or 'it works, and is said not to'}"
            assert known in said, f"{backend}, {use}: {said}"


def refusal(table: Table, row: str, position: str, backend: str, use: str) -> str:
    """A piece of the sentence that a combination is refused with; "" for one that works."""
    layers = table.layers(row)
    alone = all(layer in ("additive", "chunked") for layer in layers)
    if table.kind == "encoder" and "forgetting" in layers:
        return "looks back only"
    if row in TWO_STREAMS and table.kind != "encoder":
        return "reads a text whole, in both directions"
    if row in TWO_STREAMS and position not in ("none", *ABSOLUTE):
        return "tells distances by labels of its own"
    if (alone or "longformer:6:2" in layers) and use == "cached":
        return "mixes values in its own way, which a cache does not know"
    if "additive" in layers:
        if position in TURNED:
            return "would feel where turned queries and keys stand"
        if position in ("table", "shaw"):
            return "distance_vec is a term of the product of query and key"
        if position == "da_transformer":
            return "distance_scale"
    if any(layer in ("sink_window:6:2", "sink_span:2") for layer in layers) and position in TABLES_OF_DISTANCES:
        return "kept is 2 beside"
    if "expire_span" in layers and backend == "flex":
        return "key_span is not served by flex"
    if position == "da_transformer" and backend == "native" and not alone:
        return "distance_scale is not served by the native kernel"
    if position == "shaw" and backend == "native" and use == "cached" and not laid_out(table, row):
        return "distance_value is not served by the native kernel"
    return ""


REASONS = {
    "looks back only": "It looks back only, and an encoder's heads look in both directions.",
    "reads a text whole, in both directions": "It reads a text whole, in both directions, as encoders do.",
    "tells distances by labels of its own": (
        "ETC tells distances by labels of its own; absolute positions may be added to the tokens."
    ),
    "mixes values in its own way, which a cache does not know": (
        "It mixes values in its own way, which a cache does not know: read the text by segments."
    ),
    "would feel where turned queries and keys stand": (
        "Additive scores are no product of queries and keys, so that turned ones would not tell their distance."
    ),
    "distance_vec is a term of the product of query and key": (
        "A vector for each distance joins the product of query and key, and additive scores have none."
    ),
    "distance_scale": "Additive scores are not multiplied by distance.",
    "kept is 2 beside": (
        "Kept first tokens may be any distance away, and a table over distances ends. Learned sinks alone "
        "(`sink_window:64:0`) go with every position."
    ),
    "key_span is not served by flex": "FlexAttention does not serve spans of keys.",
    "distance_scale is not served by the native kernel": (
        "The native kernel does not multiply scores by distance; `auto` takes `banded`."
    ),
    "distance_value is not served by the native kernel": (
        "The native kernel adds no values by distance while it decodes; `auto` takes PyTorch."
    ),
}
"""by a piece of the sentence in which it is refused"""
TURNED = ("rotary", *SCALED, "transformer_xl")
TABLES_OF_DISTANCES = ("table", "shaw", "transformer_xl", "alibi", "t5", "distance_bias", "da_transformer")


@functools.cache
def laid_out(table: Table, row: str) -> bool:
    """Whether a cache lays keys out in order for every layer, instead of reading its rings."""
    made = model(table, row, "none", "reference").mechanisms()
    return all(m.placed for m in made[len(made) - len(table.layers(row)) :])  # an encoder's come first


def test_the_page_is_written_from_this() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/test_family.py writes it anew"


SAID = {
    "Language models": "Trained, and read with a cache.",
    "Encoders": (
        "Trained, in both directions: windows and spans reach as far ahead as back. `alibi`, `table`, `distance_bias` "
        "and `da_transformer` go by |i − j|, the others tell ahead from behind."
    ),
    "Decoders": (
        "Self-attention of an encoder–decoder's writing half, trained, and decoding from a cache; the reading half has "
        "learned spans."
    ),
    "Scorings of a source": (
        "`model.cross` of an encoder–decoder, trained, and decoding from a cache; the second source is shorter, with "
        "padding behind it. Positions are those of the two halves: they take no part in listening."
    ),
    "Layers that differ": (
        '`attention.stack`, a layer of each, trained, and read with a cache: `["Window(6)", "Every(5)"]` is strided '
        "attention with its factors in turn, `Block` and `Summary` are those of fixed attention."
    ),
}


def page() -> str:
    """docs/compatibility.md."""
    lines = [
        "# What goes with what",
        "",
        "Every kind of attention with every position encoding, on every backend. `yes`: equal to a dense float64 "
        "oracle, values and all gradients. Otherwise the number of the reason below, with the backends it is about. "
        "Written by `python tests/test_family.py`, and held to the code by that test.",
        "",
    ]
    reasons: dict[str, int] = {}
    for table in TABLES:
        lines += [f"## {table.title}", "", SAID[table.title], ""]
        lines += ["| | " + " | ".join(f"`{position}`" for position in table.positions) + " |"]
        lines += ["|---" * (len(table.positions) + 1) + "|"]
        for row in table.rows:
            cells = [_cell(table, row, position, reasons) for position in table.positions]
            shown = ", ".join(f"`{name}`" for name in STACKS.get(row, (row,))).replace("|", chr(92) + "|")
            lines.append(f"| {shown} | " + " | ".join(cells) + " |")
        lines += [""]
    lines += ["## Reasons", "", *(f"{number}. {REASONS[reason]}" for reason, number in reasons.items()), ""]
    lines += [
        'A backend that refuses is passed over by `backend="auto"`, which takes the next one that can. `flex` and '
        "`native` are held to the oracle in float32, `reference` and `banded` in float64. In encoders `flex` is run "
        f"without {', '.join(f'`{position}`' for position in BEFORE)}: these are added or turned before a backend is "
        "called, as in language models.",
    ]
    return "\n".join(lines) + "\n"


def _cell(table: Table, row: str, position: str, reasons: dict[str, int]) -> str:
    where: dict[str, list[tuple[str, str]]] = {}
    for use in table.uses:
        for backend in BACKENDS:
            if reason := refusal(table, row, position, backend, use):
                where.setdefault(reason, []).append((backend, use))
    if not where:
        return "yes"
    parts = []
    for reason, places in where.items():
        number = reasons.setdefault(reason, len(reasons) + 1)
        uses = {use for _, use in places}
        backends = [b for b in BACKENDS if any(b == other for other, _ in places)]
        words = [] if len(backends) == len(BACKENDS) else backends
        words += [] if len(uses) == len(table.uses) else sorted(uses)
        parts.append(f"{number}" + (f" ({', '.join(words)})" if words else ""))
    return ", ".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
