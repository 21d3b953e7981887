"""The memory available to a process on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int:
    """Upper limit of a process's memory in bytes: RAM and swap, or the limit of the container or process if lower."""
    known = [_physical(), *_cgroup_limits(), _process_limit()]
    return min(n for n in known if n)


def shown_bytes(count: float) -> str:
    """'3.2 GB'"""
    units = ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.0f} bytes" if units[0] == "bytes" else f"{count:,.1f} {units[0]}"


def parse_bytes(text: str) -> int:
    """'2GiB' → 2147483648. Units: B, kB, MB, GB, KiB, MiB, GiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kMG]?)B|([KMG])iB)?\s*", text)
    if found is None or not (count := int(float(found[1]) * _SCALE[found[2] or ""] * _BINARY[found[3] or ""])):
        raise ValueError(f"bytes is {text!r}; expected a positive size such as 2GiB or 500MB")
    return count


_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _physical() -> int:
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return sum(int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limits() -> list[int]:
    found = []
    for name in CGROUPS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        found += [int(text)] if text.isdecimal() else []  # "max" is no limit
    return found


def _process_limit() -> int:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if soft == resource.RLIM_INFINITY else soft
