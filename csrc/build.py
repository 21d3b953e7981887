"""Build the CPU kernel as a plain shared library, loaded by path: no Python and no torch headers are needed.

kernel.cpp is compiled once for each instruction set and dispatch.cpp, compiled for any processor, picks one when the
library is loaded. A digest of the library is appended to it (loaders ignore bytes after the end of an ELF or Mach-O
file), because loading a truncated file ends the process instead of raising an error.
After a tool that changes the library (strip, patchelf, auditwheel), run `--seal`.

Used by setup.py, `make sanitize` and `make tsan`; by hand:

    python csrc/build.py --out PATH [--sanitize address|thread]
    python csrc/build.py --seal PATH
"""

from __future__ import annotations

import argparse
import hashlib
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
COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
COMMON += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
CHECKED = ["-O1", "-g", "-fno-omit-frame-pointer"]
KINDS = {
    "": ["-O3", "-fopenmp"],
    "address": [*CHECKED, "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    # Without OpenMP: libgomp is not instrumented, so every end of a parallel region would be reported as a race.
    "thread": [*CHECKED, "-pthread", "-fsanitize=thread", "-DSPANFORMER_STD_THREADS", "-DSPANFORMER_SMALL=0"],
}
KINDS["thread"].append("-Wno-maybe-uninitialized")  # GCC 12 warns of vectors that a loop fills, once instrumented
"""compiler and linker flags of a build, by the sanitizer it has"""

SEAL = b"spanformer-sha256:"  # followed by the digest of all that comes before: the library's last bytes

PORTABLE = {"portable": []}
X86 = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
}
X86["avx512"] += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # GCC 12 warns of its own AVX-512 header


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


def commands(cxx: list[str], objects: Path, sanitize: str = "") -> dict[Path, list[str]]:
    """Each object file with the command that makes it."""
    flags = [*cxx, *KINDS[sanitize], *COMMON]
    isas = variants()
    have = [f"-DSPANFORMER_HAVE_{isa.upper()}" for isa in isas if isa not in PORTABLE]
    made = {objects / "dispatch.o": [*flags, *have, "-c", str(CSRC / "dispatch.cpp")]}
    for isa, extra in isas.items():
        made[objects / f"kernel_{isa}.o"] = [
            *flags, *extra, f"-DSPANFORMER_ISA={isa}", "-c", str(CSRC / "kernel.cpp"),
        ]  # fmt: skip
    return made


def is_fresh(out: Path) -> bool:
    """True if no file of csrc, including headers and this script, is newer than `out`."""
    files = [path for path in CSRC.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return out.exists() and all(path.stat().st_mtime <= out.stat().st_mtime for path in files)


def build(out: Path, sanitize: str = "") -> None:
    """Build `out` unless it is fresh; on failure raise BuildError and remove an old library."""
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
        _run([*cxx, *KINDS[sanitize], "-shared", *map(str, objects), "-o", str(linked)])
        seal(linked)
        linked.replace(out)


def seal(library: Path) -> None:
    """Append the digest that ops/kernel.py checks before it loads the library, replacing an older one."""
    content = library.read_bytes()
    at = len(content) - len(SEAL) - hashlib.sha256().digest_size
    if at > 0 and content[at:].startswith(SEAL):
        content = content[:at]
    library.write_bytes(content + SEAL + hashlib.sha256(content).digest())


def warn(error: BuildError) -> None:
    """Print on stderr that the kernel is missing, and the consequences."""
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
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="build the library there")
    task.add_argument("--seal", type=Path, help="append a new digest to a library that a tool has changed")
    parser.add_argument(
        "--sanitize", choices=("address", "thread"), default="", help="with AddressSanitizer and UBSan, or with TSan"
    )
    args = parser.parse_args()
    if args.seal:
        seal(args.seal)
        return 0
    try:
        build(args.out, args.sanitize)
    except BuildError as error:
        warn(error)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
