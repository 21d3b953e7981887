"""Build the CPU kernel as a plain shared library, loaded by path: no Python and no torch headers are needed.

kernel.cpp is compiled once for each instruction set and dispatch.cpp, compiled for any processor, picks one when the
library is loaded. Used by setup.py and by `make sanitize`; by hand:

    python csrc/build.py --out PATH [--sanitize]
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).resolve().parent

# Never -ffast-math: rows that see nothing are −inf, and NaN must stay NaN. The three relaxations below change neither.
COMMON = ["-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"]
COMMON += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
FAST = ["-O3"]
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
LINK = ["-shared", "-fopenmp"]

PORTABLE = {"portable": []}
X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    # GCC 12 warns of its own AVX-512 header
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-Wno-maybe-uninitialized"],
}


class BuildError(Exception):
    """The kernel cannot be built here; the message says why."""


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else the first of c++, g++, clang++ that is installed."""
    if os.name == "nt":
        raise BuildError("building the kernel on Windows is not supported")
    given = shlex.split(os.environ.get("CXX", ""))
    candidates = [given] if given else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    raise BuildError(f"no C++ compiler found (looked for {', '.join(c[0] for c in candidates)})")


def variants() -> dict[str, list[str]]:
    """Instruction sets built on this machine, with their flags."""
    return PORTABLE | (X86 if platform.machine().lower() in ("x86_64", "amd64") else {})


def commands(cxx: list[str], objects: Path, sanitize: bool) -> dict[Path, list[str]]:
    """Each object file with the command that makes it."""
    flags = [*cxx, *(SANITIZE if sanitize else FAST), *COMMON]
    isas = variants()
    have = [f"-DSPANFORMER_HAVE_{isa.upper()}" for isa in isas if isa not in PORTABLE]
    made = {objects / "dispatch.o": [*flags, *have, "-c", str(CSRC / "dispatch.cpp")]}
    for isa, extra in isas.items():
        made[objects / f"kernel_{isa}.o"] = [
            *flags, *extra, f"-DSPANFORMER_ISA={isa}", "-c", str(CSRC / "kernel.cpp"),
        ]  # fmt: skip
    return made


def is_fresh(out: Path) -> bool:
    """True if no file of csrc, headers and this one among them, is newer than `out`."""
    files = [path for path in CSRC.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return out.exists() and all(path.stat().st_mtime <= out.stat().st_mtime for path in files)


def build(out: Path, sanitize: bool = False) -> None:
    """Make `out` unless it is fresh; raise BuildError, and leave no old library behind, if that fails."""
    if is_fresh(out):
        return
    out.unlink(missing_ok=True)  # a library that no longer matches its sources is worse than none
    cxx = compiler()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".kernel_") as folder:
        objects = commands(cxx, Path(folder), sanitize)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda item: _run([*item[1], "-o", str(item[0])]), objects.items()))
        linked = Path(folder) / out.name
        _run([*cxx, *(SANITIZE if sanitize else FAST), *LINK, *map(str, objects), "-o", str(linked)])
        linked.replace(out)


def warn(error: BuildError) -> None:
    """Say on stderr, so that it is seen, that there is no kernel and what that means."""
    line = "!" * 78
    print(
        f"\n{line}\nspanformer: THE CPU KERNEL WAS NOT BUILT; everything else works without it.\n"
        f"backend='native' will say so when asked for, and attention on the CPU will be slower.\n\n{error}\n{line}\n",
        file=sys.stderr,
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\nfailed with code {done.returncode}:\n{done.stderr}")
    if done.stderr:  # warnings
        print(done.stderr, file=sys.stderr, end="")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the CPU kernel as a plain shared library.")
    parser.add_argument("--out", type=Path, required=True, help="where to put the library")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    args = parser.parse_args()
    try:
        build(args.out, args.sanitize)
    except BuildError as error:
        warn(error)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
