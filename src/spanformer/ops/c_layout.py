"""The structs that the compiled kernel receives, each as one table of field names and kinds.

csrc/call.h declares the same fields in the same order, and csrc/layout.h lists the offsets that the compiler chose;
`differs` compares the two when a library is loaded. Every field is 8 bytes wide; a `rows` field (a [B, heads, T, size]
tensor) is 32: its address and the strides of its first three axes. Strides count elements.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from functools import cached_property
from typing import Any

KINDS = {
    "int": ("q", ctypes.c_int64), "float": ("d", ctypes.c_double), "address": ("q", ctypes.c_void_p),
}  # fmt: skip
ROWS = (("data", "address"), ("batch", "int"), ("head", "int"), ("row", "int"))


class Table:
    """A struct's name, and its fields in order: lines of a kind and names of that kind."""

    def __init__(self, name: str, *lines: str) -> None:
        self.name = name
        self.fields = [(field, kind) for kind, *names in map(str.split, lines) for field in names]

    @cached_property
    def struct(self) -> struct.Struct:
        """Packs the values of all numbers, in order."""
        return self._format(self.numbers())

    def until(self, last: str) -> struct.Struct:
        """Packs the values of the first fields, up to `last`."""
        names = [field for field, _ in self.fields]
        return self._format(self.numbers(names.index(last) + 1))

    @cached_property
    def structure(self) -> type[ctypes.Structure]:
        """A ctypes struct that reads packed bytes by field name; a `rows` field q becomes q_data, q_batch, q_head,
        q_row."""
        fields: Any = [(name, KINDS[kind][1]) for name, kind in self.numbers()]
        return type(self.name, (ctypes.Structure,), {"_fields_": fields})

    def numbers(self, fields: int | None = None) -> Iterator[tuple[str, str]]:
        """(name, kind) of every 8-byte word of the first fields, or of all."""
        for name, kind in self.fields[:fields]:
            if kind == "rows":
                yield from ((f"{name}_{part}", of) for part, of in ROWS)
            else:
                yield name, kind

    def layout(self) -> dict[str, str]:
        """The offset of each field, in the form in which the library reports it: {"Call.scale": "float at byte 96", …,
        "Call": "736 bytes"}."""
        found, at = {}, 0
        for name, kind in self.fields:
            found[f"{self.name}.{name}"] = f"{kind} at byte {at}"
            at += 8 * len(ROWS) if kind == "rows" else 8
        return found | {self.name: f"{at} bytes"}

    @staticmethod
    def _format(numbers: Iterator[tuple[str, str]]) -> struct.Struct:
        return struct.Struct("=" + "".join(KINDS[kind][0] for _, kind in numbers))


CALL = Table(
    "Call",
    "int dtype threads B H Hkv Tq Tk D Dv causal shift max_future",
    "float scale ramp dropout",
    "rows q k v out",
    "address lse reach span",
    "int dynamic",
    "address distance_bias",
    "int bias_length",
    "address distance_vec",
    "int vec_length vec_head",
    "address key_bias",
    "int key_bias_batch key_bias_head key_bias_group",
    "address key_span",
    "int key_span_batch key_span_head",
    "address q_positions k_positions",
    "int q_positions_batch k_positions_batch",
    "address q_documents k_documents",
    "int q_documents_batch k_documents_batch",
    "address q_orders k_orders",
    "int orders q_orders_order q_orders_batch k_orders_order k_orders_batch",
    "address sink_logits block_offsets block_columns block_mask_ids block_masks",
    "int block_size block_rows block_head",
    "address seed drop_heads drop_queries drop_keys",
    "int drop_queries_batch drop_keys_batch",
    "rows g dq dk dv",
    "address g_lse d_span d_distance_bias d_distance_vec d_key_bias d_sink_logits d_key_span",
)
"""one attention call, from `Lowered`; the backward pass alone uses the fields from `g` on"""

DECODE = Table(
    "Decode",
    "int threads",
    "rows q out",
    "address lse",
    "rows new_k new_v",
    "address span",
    "int dtype bits B H Hkv D Dv shift sink_tokens",
    "float scale ramp",
    "rows k v",
    "address k_scale v_scale",
    "int slots",
    "address first capacity newest oldest reach",
    "int dynamic",
    "address distance_bias",
    "int bias_length",
    "address distance_vec",
    "int vec_length vec_head",
    "address sink_logits recent",
    "int recent_tokens",
    "address recent_since",
)
"""one query per row over rings; the fields up to `span` change from token to token"""

LINEAR = Table(
    "Linear",
    "int dtype threads B H Hkv Tq T M Dv normalize elu",
    "float ramp eps",
    "rows a b v out",
    "address den decay",
    "int decay_batch decay_head decay_row",
    "address near",
    "int near_batch near_head near_row",
    "address starts s0 z0 s1 z1",
    "rows g da db dv",
    "address g_den g_s1 g_z1 d_decay d_near d_s0 d_z0",
)
"""linear attention with a state; from `g` on, for the backward pass alone"""
DELTA = Table(
    "Delta",
    "int dtype threads B H Hkv T D Dv segment",
    "rows q k v out",
    "address beta decay starts state final_state marks",
    "int conv",
    "float eps",
    "address conv_q conv_k conv_v tail_q tail_k tail_v padding",
    "rows gate",
    "address norm",
    "rows g dq dk dv d_gate",
    "address g_state d_beta d_decay d_state d_conv_q d_conv_k d_conv_v d_norm",
)
"""the gated delta rule over a text, with what a layer has around it; from `g` on, for the backward pass alone"""

GLA = Table(
    "Gla",
    "int dtype threads B H Hkv T D Dv segment",
    "rows q k v out",
    "address gates starts state final_state marks",
    "float eps",
    "rows gate",
    "address norm",
    "rows g dq dk dv d_gate",
    "address g_state d_gates d_state d_norm",
)
"""gated linear attention over a text; from `g` on, for the backward pass alone"""
SCAN = Table(
    "Scan",
    "int threads bits B N Q D k",
    "address keys",
    "int keys_batch keys_row",
    "address scales bias",
    "int row_batch",
    "address counts queries",
    "int padded",
    "address query_scales scores ids",
)
"""the best rows of a matrix for each query"""

RESCORE = Table(
    "Rescore",
    "int threads bits Q D m",
    "address keys",
    "int keys_row",
    "address scales queries ids out",
)
"""squared distances to chosen rows"""

RETRIEVE = Table(
    "Retrieve",
    "int threads B G H Hkv D Dv k count at",
    "float scale",
    "address groups codes",
    "int codes_store",
    "address scales",
    "int scales_store",
    "address error longest keys",
    "int keys_store",
    "address values",
    "int values_store",
    "rows q new_k new_v out",
    "address lse share",
)
"""one query of each head over stored keys and values"""

BUCKETS = Table(
    "BucketDecode",
    "int write dtype threads N R C buckets slots D Dv gap reach itself",
    "float scale ramp",
    "address span q k v ids documents keys values marks counts out lse",
)
"""one query per row over the rings of its buckets"""
TABLES = (CALL, DECODE, LINEAR, DELTA, GLA, SCAN, RESCORE, RETRIEVE, BUCKETS)


def differs(layout: str, tables: tuple[Table, ...] = TABLES) -> str | None:
    """A sentence about the first field at another offset in the library (lines of "Call.q rows at byte 120"); None
    if all agree."""
    theirs = dict(line.split(" ", 1) for line in layout.splitlines())
    ours = {name: where for table in tables for name, where in table.layout().items()}
    for name in (*ours, *theirs):
        mine, its = ours.get(name, "missing"), theirs.get(name, "missing")
        if mine != its:
            return f"{name} is {its} in the compiled kernel and {mine} in this version of spanformer"
    return None
