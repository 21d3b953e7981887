"""Finding and loading the compiled CPU kernel: a plain C library, with no Python and no torch in it."""

from __future__ import annotations

import ctypes
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from spanformer.ops.c_layout import TABLES, Table, differs

ABI = 15  # the same number as in csrc/dispatch.cpp
SEAL = b"spanformer-sha256:"  # as in csrc/build.py: a library ends with this and the digest of all bytes before it


@dataclass(frozen=True)
class Library:
    """The kernel's entry points; each takes one packed argument."""

    forward: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    backward: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    span_edge_gradient: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    decode: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    linear_forward: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    linear_backward: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    delta_forward: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    delta_backward: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    gla_forward: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    gla_backward: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    scan: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    rescore: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    retrieve: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    bucket_decode: ctypes._NamedFuncPointer  # pyright: ignore[reportAttributeAccessIssue]
    isa: str
    """the instruction set chosen at run time"""


def find() -> Path:
    """SPANFORMER_KERNEL, or the library built at installation. Raises a ValueError if the variable names no file."""
    asked = os.environ.get("SPANFORMER_KERNEL")
    if not asked:
        return Path(__file__).with_name("_kernel.so")
    if not Path(asked).is_file():
        raise ValueError(
            f"SPANFORMER_KERNEL is {asked!r}, which is not a file; name a library that csrc/build.py built, or unset it"
        )
    return Path(asked)


def load(path: Path, tables: tuple[Table, ...] = TABLES) -> Library:
    """tables: the structs that the caller packs. Raises a RuntimeError if the library cannot be used, and a ValueError
    for a bad SPANFORMER_ISA."""
    if not path.exists():
        raise RuntimeError(
            "the compiled kernel is missing: it was not built when spanformer was installed; install a C++ compiler "
            "and reinstall spanformer"
        )
    if not is_whole(path):  # the loader trusts the headers: a truncated file would raise SIGBUS
        raise RuntimeError(f"the compiled kernel {path} is damaged or of an older version; reinstall spanformer")
    lib = ctypes.CDLL(str(path))
    if (found := lib.spanformer_abi_version()) != ABI:
        raise RuntimeError(
            f"the compiled kernel has interface version {found}; expected {ABI}. Reinstall spanformer to rebuild it"
        )
    for name in (lib.spanformer_isa, lib.spanformer_isas, lib.spanformer_layout):
        name.restype = ctypes.c_char_p
    if wrong := differs(lib.spanformer_layout().decode(), tables):
        raise RuntimeError(f"{wrong}; reinstall spanformer to rebuild it")
    asked, choices = os.environ.get("SPANFORMER_ISA"), lib.spanformer_isas().decode().split(",")
    if asked and asked not in choices:
        raise ValueError(
            f"SPANFORMER_ISA is {asked!r}; expected an instruction set that this processor and this build of the "
            "kernel have: "
            f"{', '.join(choices)}"
        )
    entries = (
        lib.spanformer_forward,
        lib.spanformer_backward,
        lib.spanformer_span_edge_gradient,
        lib.spanformer_decode,
        lib.spanformer_linear_forward,
        lib.spanformer_linear_backward,
        lib.spanformer_delta_forward,
        lib.spanformer_delta_backward,
        lib.spanformer_gla_forward,
        lib.spanformer_gla_backward,
        lib.spanformer_scan,
        lib.spanformer_rescore,
        lib.spanformer_retrieve,
        lib.spanformer_bucket_decode,
    )
    for entry in entries:
        entry.argtypes, entry.restype = [ctypes.c_void_p], None  # bytes, or a buffer
    return Library(*entries, isa=lib.spanformer_isa().decode())


def is_whole(path: Path) -> bool:
    """Whether the file ends with the digest of all bytes before it."""
    content = memoryview(path.read_bytes())
    end = len(content) - len(SEAL) - hashlib.sha256().digest_size
    return end > 0 and bytes(content[end:]) == SEAL + hashlib.sha256(content[:end]).digest()
