"""What the launcher compiles: for each kernel its arguments' types and constants, so that a machine without a GPU can
compile the same programs ahead of time."""

from __future__ import annotations

from typing import Any, NamedTuple

from spanformer.ops.backends.triton import tiles
from spanformer.ops.backends.triton.backward_bias import backward_bias
from spanformer.ops.backends.triton.backward_kv import backward_kv
from spanformer.ops.backends.triton.backward_q import backward_q
from spanformer.ops.backends.triton.decode import decode
from spanformer.ops.backends.triton.forward import forward, merge

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOATS = (
    "LSE",
    "LSES",
    "DLSE",
    "DELTA",
    "SPAN",
    "BIAS",
    "KEY_BIAS",
    "SINK",
    "DSPAN",
    "DSINK",
    "DBIAS",
    "DKEY_BIAS",
    "PARTS",
)
"""pointers to float32"""
WHOLE = ("REACH", "Q_POS", "K_POS", "Q_DOC", "K_DOC", "FIRST", "CAPACITY", "NEWEST", "OLDEST")
"""pointers to int64"""
OPTIONAL = (
    "REACH",
    "Q_POS",
    "K_POS",
    "Q_DOC",
    "K_DOC",
    "OLDEST",
    "K_SCALES",
    "V_SCALES",
    "SPAN",
    "BIAS",
    "KEY_BIAS",
    "SINK",
    "DLSE",
)
"""pointers that are None if their term is absent"""
GRADIENTS = {"DSPAN": "SPAN", "DSINK": "SINK", "DKEY_BIAS": "KEY_BIAS"}
"""None where the other one is"""


class Variant(NamedTuple):
    name: str
    kernel: Any
    """the jit function"""
    signature: dict[str, str]
    """every argument in order: "*bf16", "*fp32", "*i64", "i32", "fp32" or "constexpr" """
    constants: dict[str, Any]
    """the value of each "constexpr"; None for an absent tensor"""
    divisible: frozenset[str]
    """arguments that the launcher finds divisible by 16"""
    warps: int
    stages: int
    tile: tuple[int, int]
    """queries and keys of one iteration of its loop"""
    products: int
    """matrix products over pairs in one iteration"""


def variants(head_size: int, arch: str, dtype: str = "bf16") -> list[Variant]:
    """The programs of a head size on an architecture such as "sm_80" or "gfx942": attention as spans use it, then once
    with all terms, which cost more. `arch` changes no tile so far."""
    found = [_merge(head_size, dtype)]
    for name, terms, flags in (("", ("SPAN",), {}), ("_reach", ("REACH",), {}), ("_all_terms", ALL, {"DYNAMIC": True})):
        given = terms, flags, head_size, dtype
        found.append(_of(f"forward{name}", forward, 2, *given))
        found.append(_of(f"forward_split{name}", forward, 2, terms, flags | {"SPLIT": True}, head_size, dtype, 1))
        found.append(_of(f"backward_q{name}", backward_q, 3, *given))
        found.append(_of(f"backward_kv{name}", backward_kv, 4, *given))
    found.append(_of("forward_long", forward, 2, ("SPAN",), {"SPLIT": True}, head_size, dtype))
    found.append(_of("decode", decode, 2, ("SPAN", "REACH"), {}, head_size, dtype, 1))
    found.append(_of("backward_bias", backward_bias, 0, ("SPAN", "BIAS"), {}, head_size, dtype))
    return found


ALL = tuple(name for name in OPTIONAL if name not in ("Q_POS", "K_POS"))


def _of(name, kernel, products, terms, flags, head_size, dtype, queries=1 << 20) -> Variant:
    split, size = flags.get("SPLIT", False), tiles.block(head_size)
    tile = tiles.tile(kernel.__name__, size, BYTES[dtype], queries, terms != ALL)
    constants = {
        "CAUSAL": True, "DYNAMIC": False, "SPLIT": split, "HEADS": 8, "D": head_size, "DV": head_size, "BD": size,
        "BDV": size, "BM": tile.queries, "BN": tile.keys, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    } | flags  # fmt: skip
    constants |= {each: None for each in OPTIONAL if each not in terms}
    constants |= {} if split else {"PARTS": None, "LSES": None}
    constants |= {each: None for each, term in GRADIENTS.items() if term not in terms}
    return _described(
        f"{name}_{head_size}", kernel, constants, {"OUT"} if kernel is decode else set(), dtype, tile, products
    )


def _merge(head_size: int, dtype: str) -> Variant:
    constants = {"SINK": None, "DV": head_size, "BDV": tiles.block(head_size), "BM": tiles.MERGED}
    tile = tiles.Tile(tiles.MERGED, 1, 4, 1)
    return _described(f"merge_{head_size}", merge, constants, set(), dtype, tile, 0)


def _described(name, kernel, constants, floats, dtype, tile: tiles.Tile, products) -> Variant:
    names = kernel.arg_names
    constants = {each: constants[each] for each in names if each in constants}
    signature = {each: "constexpr" if each in constants else _type(each, floats, dtype) for each in names}
    strides = {each for each in names if len(each) == 3 and each[0] == "s"}
    pointers = {each for each, kind in signature.items() if kind[0] == "*"}
    return Variant(
        name, kernel, signature, constants, frozenset(pointers | strides), tile.warps, tile.stages,
        (tile.queries, tile.keys), products,
    )  # fmt: skip


def _type(name: str, floats: set[str], dtype: str) -> str:
    if name in ("scale", "ramp"):
        return "fp32"
    if not name.isupper() or name in ("B", "H", "G", "N", "TQ", "TK", "T", "R"):
        return "i32"
    return "*i64" if name in WHOLE else "*fp32" if name in FLOATS or name in floats else f"*{dtype}"
