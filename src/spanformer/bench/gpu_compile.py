"""The compile gate: builds the Triton kernels for GPUs that are not here, and reads what the compilers made of them.

Each Triton runs in a process of its own, since a process imports one only; the kernels' variants come from the backend:

    python -m spanformer.bench.gpu_compile spanformer.ops.backends.triton.variants sm_80 64 128

prints one JSON row per kernel. `compile_kernels` calls it; `faults` says which bars a row misses.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from spanformer.bench.gpu_binary import ASYNC_COPIES, ATOMICS, LOCAL, Binary, pairs, read_amdgcn, read_cubin

VARIANTS = "spanformer.ops.backends.triton.variants"
ARCHS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SHARED = 99 << 10  # bytes of shared memory that a block may use on every GPU since sm_86
FULL, EDGE = 14.0, 30.0  # instructions a pair: without masks, and with them
SKIPPING = "backward_kv_all_terms"  # skips tiles inside its loop, which compilers then do not pipeline
GATED = "forward_64"  # whose loops have these bars on sm_80
WORDS = {"sm_80": "HMMA", "sm_90": "HGMMA", "gfx942": "v_mfma"}  # products on tensor cores
WARP_GROUP = 64  # queries that an HGMMA needs; with fewer, sm_90 has HMMA too


def compile_kernels(
    arch: str, head_sizes: tuple[int, ...], *, triton: Path | None = None, cache: Path | None = None,
    variants: str = VARIANTS, only: tuple[str, ...] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per kernel. triton: a folder with another Triton (`pip install --no-deps --target FOLDER triton==…`).
    variants: the module whose `variants` lists the kernels. only: names of kernels; all by default."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    paths = [str(triton)] if triton is not None else []
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *(path for path in sys.path if path)])
    command = [sys.executable, "-m", __name__, variants, arch, *map(str, head_sizes), *only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", done.stderr, flags=re.MULTILINE) or ["no message"]
        raise ValueError(f"compiling for {arch} failed: {said[0]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def faults(row: dict[str, Any]) -> list[str]:
    """The bars that a row misses, one sentence each."""
    name = f"triton {row['triton']}, {row['arch']}, {row['kernel']}"
    found = []
    if row["atomics"]:
        found.append(f"{row['atomics']} atomic operations; expected none")
    if row["spilled"] and row["arch"] != "gfx942":
        found.append(f"{row['spilled']} bytes of spilled registers; expected none")
    if row["shared"] > SHARED:
        found.append(f"{row['shared']} bytes of shared memory; expected at most {SHARED}")
    if row["products"] and not row["tensor_core"]:
        found.append(f"no {WORDS[row['arch']]} instruction; expected products on tensor cores")
    skips = SKIPPING in row["kernel"]
    if row["products"] and not row["async_copies"] and row["arch"] != "gfx942" and not skips:
        found.append("no asynchronous copy; expected keys to be loaded ahead")
    if row["kernel"] == GATED and row["arch"] == "sm_80":
        for loop, most in (("full", FULL), ("edge", EDGE)):
            if not (each := row["per_pair"][loop]) or each > most:
                found.append(f"{each} instructions a pair in the {loop} loop; expected at most {most:g}")
    return [f"{name}: {fault}" for fault in found]


# --- the process of one Triton ----------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    module, arch, *rest = arguments
    sizes = [int(word) for word in rest if word.isdigit()]
    only = [word for word in rest if not word.isdigit()]
    for size in sizes:
        for variant in importlib.import_module(module).variants(size, arch):
            if not only or variant.name in only:
                print(json.dumps(build(variant, size, arch)), flush=True)


def build(variant: Any, head_size: int, arch: str) -> dict[str, Any]:
    """Compile one variant and read the binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(variant.signature)
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    divisible: dict[Any, Any] = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible}
    source = ASTSource(variant.kernel, dict(variant.signature), constants, divisible)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    made: Any = triton.compile(source, target=GPUTarget(*ARCHS[arch]), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    amd, word = arch.startswith("gfx"), WORDS[arch]
    if arch == "sm_90" and min(variant.tile) < WARP_GROUP:
        word = "MMA"
    binary = read_amdgcn(made.asm["amdgcn"]) if amd else read_cubin(made.asm["cubin"], tools)
    return {
        "triton": triton.__version__, "arch": arch, "kernel": variant.name, "head_size": head_size,
        "tile": list(variant.tile), "warps": variant.warps, "stages": variant.stages, "products": variant.products,
        "registers": binary.registers, "spilled": binary.spilled, "shared": made.metadata.shared,
        "tensor_core": _count(binary, word), "async_copies": sum(binary.operations[n] for n in ASYNC_COPIES),
        "atomics": sum(binary.operations[n] for n in ATOMICS) if not amd else _count(binary, "atomic"),
        **_loops(binary, variant, head_size, arch),
    }  # fmt: skip


def _loops(binary: Binary, variant: Any, head_size: int, arch: str) -> dict[str, Any]:
    """Instructions a pair: of the shortest loop, which has no masks, and of the longest."""
    each = []
    for loop in binary.loops:
        of_tile = variant.tile[0] * variant.tile[1]
        done = pairs(loop, variant.tile, variant.products, head_size, variant.warps) if arch == "sm_80" else of_tile
        each.append(round(loop.instructions * variant.warps * 32 / done, 1))
    local = [loop.count(LOCAL) for loop in binary.loops]
    return {
        "loops": [loop.instructions for loop in binary.loops], "local_in_loops": sum(local),
        "per_pair": {"full": min(each, default=None), "edge": max(each, default=None)},
    }  # fmt: skip


def _count(binary: Binary, word: str) -> int:
    return sum(n for name, n in binary.operations.items() if word in name)


if __name__ == "__main__":
    main(sys.argv[1:])
