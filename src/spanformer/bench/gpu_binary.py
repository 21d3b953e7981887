"""What is in a compiled GPU kernel: registers, spills, atomics, and the instructions of its inner loops.

NVIDIA's cuobjdump and nvdisasm come with triton's wheel; neither needs a GPU or a driver.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LANES = 32
MACS = {"HMMA": 16 * 8 * 16}
"""multiply-adds of one tensor-core instruction of a warp, on 16-bit numbers (m16n8k16)"""
PRODUCTS = ("HMMA", "HGMMA", "QGMMA", "UTCHMMA")
ASYNC_COPIES = ("LDGSTS", "UTMALDG", "UBLKCP")
ATOMICS = ("RED", "REDG", "ATOM", "ATOMG", "ATOMS", "SUATOM")
LOCAL = ("LDL", "STL")  # loads and stores of spilled registers


@dataclass(frozen=True)
class Loop:
    """An innermost loop with tensor-core instructions."""

    instructions: int
    """that each warp issues for one iteration"""
    operations: Counter[str]
    """instructions by their first word: HMMA, MUFU, FFMA, …"""

    def count(self, names: Iterable[str]) -> int:
        return sum(self.operations[name] for name in names)


@dataclass(frozen=True)
class Binary:
    registers: int
    spilled: int
    """bytes of stack and local memory that a thread uses; on AMD, spilled vector registers"""
    operations: Counter[str]
    loops: tuple[Loop, ...]


def read_cubin(cubin: bytes, tools: Path) -> Binary:
    """A cubin of one kernel. tools: the folder of cuobjdump and nvdisasm."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run(tools / "cuobjdump", "--dump-resource-usage", path)
        sass = _run(tools / "nvdisasm", "-c", path)
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    operations, loops = read_sass(sass)
    return Binary(used["REG"], used["STACK"] + used["LOCAL"], operations, loops)


def read_sass(sass: str) -> tuple[Counter[str], tuple[Loop, ...]]:
    """All operations of a disassembled kernel, and its innermost loops with products, in order."""
    names: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)(.*?);", line):
            if found[1].startswith("BRA") and (to := re.search(r"`\((\.L_\w+)\)", found[2])):
                jumps.append((len(names), to[1]))
            names.append(found[1])
    spans = sorted({(labels[to], at) for at, to in jumps if labels.get(to, len(names)) <= at})
    bodies = [(first, last) for first, last in spans if any(name in PRODUCTS for name in names[first : last + 1])]
    inner = [
        body for body in bodies
        if not any(other != body and body[0] <= other[0] and other[1] <= body[1] for other in bodies)
    ]  # fmt: skip
    return Counter(names), tuple(Loop(last + 1 - first, Counter(names[first : last + 1])) for first, last in inner)


def read_amdgcn(assembly: str) -> Binary:
    """AMD's assembly text. Its loops are not counted."""
    fields = {name: int(n) for name, n in re.findall(r"\.(\w+):\s+(\d+)", assembly)}
    words = Counter(re.findall(r"^\s+([a-z]\w+)", assembly, flags=re.MULTILINE))
    return Binary(fields["vgpr_count"], fields["vgpr_spill_count"], words, ())


def pairs(loop: Loop, tile: tuple[int, int], products: int, head_size: int, warps: int) -> int:
    """Pairs of query and key that one iteration computes: those of a tile, more if the compiler unrolled the loop."""
    made = loop.operations["HMMA"] * MACS["HMMA"] * warps
    needed = tile[0] * tile[1] * head_size * products
    return tile[0] * tile[1] * max(1, round(made / needed))


def _run(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, timeout=120).stdout
