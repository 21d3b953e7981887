"""The rooms of src/spanformer and the doors between them: no import may take another way.

Every import counts, at the top of a file, inside a function or under TYPE_CHECKING, and so does a string that names
one of our modules, because importlib would be given it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "spanformer"
TOP = ""  # spanformer/__init__.py

DOORS: dict[str, set[str]] = {
    "core": set(),
    "ops": set(),
    "cost": set(),
    "kinds": {"cost"},
    "attention": {"ops", "kinds", "memory"},
    "position": {"ops", "kinds"},
    "memory": {"ops"},
    "depth": {"ops", "kinds"},
    "model": {"ops", "kinds", "attention", "position", "memory", "depth"},
    "inspect": {"ops", "attention", "memory", "model"},
    "convert": {"model"},
    "data": set(),
    "train": {"model", "data", "cost", "inspect", "retrieve"},
    "infer": {"model", "memory", "ops", "depth"},
    "retrieve": {"model", "memory", "ops"},
    "hf": {"model", "infer", "ops", "attention", "memory", "retrieve", "depth"},
    "rl": {"model", "memory", "attention", "kinds", "train", "infer", "inspect"},
    "report": {"cost"},
}
for _room in DOORS.keys() - {"core"}:
    DOORS[_room].add("core")
DOORS["bench"] = set(DOORS)
DOORS[TOP] = set(DOORS)
DOORS["cli"] = set(DOORS)
DOORS["__main__"] = {"cli"}  # python -m spanformer
BACKENDS = {"native", "triton", "flex", "banded", "reference"}
KERNELS = "spanformer.ops.backends.triton"
"""the only modules of ops that import anything but torch: triton"""


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a module imports; `from a import b` gives a.b, whether b is a module or not."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Also the constant start of an f-string: f"spanformer.ops.{name}".
            named = re.fullmatch(r"spanformer\.(\w+)[\w.]*", node.value)
            if named and named[1] in DOORS:
                yield node.lineno, node.value.rstrip(".")


def room_of(name: str) -> str:
    """The room of a dotted name of ours: spanformer.ops.rule → ops; spanformer and what it re-exports → TOP."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (parts[1] in DOORS or len(parts) > 2) else TOP


def backend_of(name: str) -> str | None:
    """The backend that a module belongs to: spanformer.ops.backends.banded_plan → banded."""
    parts = name.split(".")
    first = parts[3].split("_")[0] if parts[1:3] == ["ops", "backends"] and len(parts) > 3 else ""
    return first if first in BACKENDS else None


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """Every import of this module that has no door."""
    room = room_of(module)
    found = []
    if room not in DOORS:
        found.append(f"{module}: there is no room {room!r}; add it to the table of doors")
    for line, name in imported(source, module, is_package):
        where = f"{module}:{line}: "
        parts = name.split(".")
        if parts[0] == "spanformer":
            target = room_of(name)
            if target != room and target not in DOORS.get(room, set()):
                shown = f"the room {target!r}" if target != TOP else "the package's front door"
                found.append(f"{where}{room or 'spanformer/__init__.py'} must not import {name}, from {shown}")
            mine, theirs = backend_of(module), backend_of(name)
            if mine and theirs and mine != theirs:
                found.append(f"{where}the backend {mine!r} must not import the backend {theirs!r}")
        elif parts[0] == "triton" and module.startswith(KERNELS):
            continue
        elif room == "ops" and parts[0] != "torch" and parts[0] not in sys.stdlib_module_names:
            found.append(f"{where}ops stands on torch alone and must not import {name}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_import_is_allowed(path: Path) -> None:
    is_package = path.name == "__init__.py"
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = ".".join(parts[:-1] if is_package else parts)
    assert not faults(path.read_text(encoding="utf-8"), module, is_package)


def test_walk_finds_the_package() -> None:
    assert (PACKAGE / "ops" / "rule.py") in set(PACKAGE.rglob("*.py"))


REFUSED = {
    "upwards": ("spanformer.ops.rule", "import spanformer.attention.base", "'attention'"),
    "from": ("spanformer.attention.base", "from spanformer.model.lm import LM", "'model'"),
    "from the package": ("spanformer.data.lanes", "from spanformer import ops", "'ops'"),
    "relative": ("spanformer.cost.flops", "from ..ops import rule", "'ops'"),
    "relative, bare": ("spanformer.cost.flops", "from .. import ops", "'ops'"),
    "inside a function": ("spanformer.report.page", "def f():\n    import spanformer.bench.run", "'bench'"),
    "type checking": ("spanformer.ops.rule", "if TYPE_CHECKING:\n    from spanformer.cost import flops", "'cost'"),
    "importlib": ("spanformer.train.loop", "importlib.import_module('spanformer.infer.generate')", "'infer'"),
    "importlib f-string": ("spanformer.model.lm", "importlib.import_module(f'spanformer.hf.{x}')", "'hf'"),
    "a table of names": ("spanformer.model.lm", "LAZY = {'a': 'spanformer.hf'}", "'hf'"),
    "the command line": ("spanformer.bench.run", "import spanformer.cli.main", "'cli'"),
    "the command line, from the top": ("spanformer", "from spanformer.cli import main", "'cli'"),
    "the front door": ("spanformer.attention.base", "from spanformer import Rule", "front door"),
    "an unknown room": ("spanformer.cli.main", "import spanformer.attic.box", "'attic'"),
    "a module in an unknown room": ("spanformer.attic.box", "", "no room 'attic'"),
    "not torch": ("spanformer.ops.rule", "import numpy as np", "torch alone"),
    "triton elsewhere": ("spanformer.ops.backends.flex", "import triton", "torch alone"),
    "another backend": (
        "spanformer.ops.backends.flex",
        "from spanformer.ops.backends.reference import distances",
        "backend 'reference'",
    ),
    "another backend, from backends": (
        "spanformer.ops.backends.native",
        "from spanformer.ops.backends import banded",
        "backend 'banded'",
    ),
    "another backend's helper": (
        "spanformer.ops.backends.flex_mods",
        "from spanformer.ops.backends.banded_plan import Plan",
        "backend 'banded'",
    ),
    "another backend, relative": ("spanformer.ops.backends.banded", "from .native import run", "backend 'native'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_import_is_refused(name: str) -> None:
    module, source, expected = REFUSED[name]
    found = faults(source, module)
    assert len(found) == 1 and expected in found[0], found


ALLOWED = {
    "stdlib and torch": ("spanformer.ops.rule", "import math, torch.nn\nfrom torch import Tensor"),
    "its own room": ("spanformer.ops.attend", "from .rule import Rule\nimportlib.import_module(f'spanformer.ops.{n}')"),
    "a backend's helpers": (
        "spanformer.ops.backends.native",
        "from spanformer.ops import dropout\nfrom .base import Backend\nfrom spanformer.ops.lower import Lowered",
    ),
    "downwards": ("spanformer.hf.modeling", "from spanformer.attention import base\nimport transformers"),
    "the command line": ("spanformer.cli.main", "import spanformer\nfrom spanformer.bench import run"),
    "python -m spanformer": ("spanformer.__main__", "from spanformer.cli.main import main"),
    "a logger's name": ("spanformer.data.lanes", "logging.getLogger('spanformer')\nlog('spanformer.lanes.read')"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_import_is_accepted(name: str) -> None:
    module, source = ALLOWED[name]
    assert faults(source, module) == []
    assert faults("from spanformer.ops import attend\nfrom . import ops", "spanformer", is_package=True) == []
