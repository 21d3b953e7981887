"""`import spanformer` is cheap: what is heavy or optional loads when it is first used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HEAVY = ("transformers", "matplotlib", "torch.nn.attention.flex_attention", "spanformer.ops.native")

# Runs in a fresh interpreter. What plain `import torch` has already imported is no fault of ours. Every way python has
# of loading a shared library by path (ctypes, torch.ops.load_library) raises the audit event ctypes.dlopen.
PROBE = """
import json, sys
import torch
by_torch, opened = set(sys.modules), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "ctypes.dlopen" else None)
STATEMENTS
print(json.dumps({"modules": sorted(set(sys.modules) - by_torch), "opened": opened}))
"""


def loaded_by(statements: str, extra_path: Path | None = None) -> list[str]:
    """Which of the heavy things these statements load, beyond what torch itself does."""
    paths = [str(extra_path)] if extra_path else []
    paths += [inherited] if (inherited := os.environ.get("PYTHONPATH")) else []
    done = subprocess.run(
        [sys.executable, "-c", PROBE.replace("STATEMENTS", statements)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    return [name for name in HEAVY if name in seen["modules"]] + [p for p in seen["opened"] if "_kernel" in p]


def test_importing_spanformer_loads_nothing_heavy() -> None:
    assert loaded_by("import spanformer") == []


def test_the_probe_would_notice(tmp_path: Path) -> None:
    for name in ("transformers", "matplotlib"):  # stand-ins, so that neither needs to be installed
        (tmp_path / f"{name}.py").touch()
    assert loaded_by("import transformers, matplotlib", tmp_path) == ["transformers", "matplotlib"]
    load = "import ctypes, contextlib\nwith contextlib.suppress(OSError): ctypes.CDLL('/nowhere/_kernel.so')"
    assert loaded_by(load) == ["/nowhere/_kernel.so"]


def test_the_probe_would_notice_flex_attention() -> None:
    flex = "torch.nn.attention.flex_attention"
    assert loaded_by(f"by_torch.discard({flex!r})\nimport {flex}") == [flex]
