"""`import spanformer` is cheap: what is heavy or optional loads when it is first used."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import spanformer

HEAVY = ("transformers", "matplotlib", "triton", "torch.nn.attention.flex_attention", "spanformer.ops.backends.native")

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


def test_importing_spanformer_loads_no_torch() -> None:
    probe = "import sys, spanformer; print({'torch', 'numpy', 'spanformer.ops'} & set(sys.modules), dir(spanformer))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout.startswith("set()") and "'attend'" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["--version"]], ids=" ".join)
def test_help_loads_neither_torch_nor_numpy(arguments: list[str]) -> None:
    probe = (
        "import sys\nfrom spanformer.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: print({{'torch', 'numpy', 'tyro'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stdout + done.stderr


@pytest.mark.parametrize("room", ["kinds", "cost"])
def test_arithmetic_needs_no_torch(room: str) -> None:
    """Specs and costs are computed without it, in every module of these rooms."""
    folder = Path(spanformer.__file__).parent
    modules = [
        "spanformer." + ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in (folder / room).rglob("*.py")
    ]
    probe = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m.removesuffix('.__init__'))\n"
    done = subprocess.run(
        [sys.executable, "-c", probe + "print({'torch', 'numpy'} & set(sys.modules))"], capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_using_spanformer_loads_nothing_heavy() -> None:
    assert loaded_by("from spanformer import *\nassert attend and AdaptiveSpan") == []


def test_every_public_name_is_found_where_it_lives() -> None:
    for name, module in spanformer._HOME.items():
        assert getattr(spanformer, name) is getattr(importlib.import_module(module), name)
        assert vars(spanformer)[name] is getattr(spanformer, name)  # found once


def test_star_imports_every_public_name_and_no_other() -> None:
    names: dict[str, object] = {}
    exec("from spanformer import *", names)
    names.pop("__builtins__")
    assert set(names) == set(spanformer.__all__) == set(spanformer._HOME)


def test_dir_names_what_is_there() -> None:
    assert {*spanformer.__all__, "__version__", "__doc__", "__path__"} <= set(dir(spanformer))
    assert dir(spanformer) == sorted(set(dir(spanformer)))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'spanformer' has no attribute 'nonsense'$"):
        spanformer.nonsense  # noqa: B018
    with pytest.raises(ImportError, match="nonsense"):
        exec("from spanformer import nonsense")


def test_type_checkers_are_told_the_same_names() -> None:
    tree = ast.parse(Path(spanformer.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {(alias.asname, node.module) for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert told == set(spanformer._HOME.items())


def test_no_public_name_is_also_a_modules() -> None:
    """Importing spanformer.x would put the module where the name x was."""
    inside = {path.stem for path in Path(spanformer.__file__).parent.iterdir()}
    assert not inside & set(spanformer._HOME)


@pytest.mark.slow
def test_probe_detects_a_torch_import(tmp_path: Path) -> None:
    for name in ("transformers", "matplotlib"):  # stand-ins, so that neither needs to be installed
        (tmp_path / f"{name}.py").touch()
    assert loaded_by("import transformers, matplotlib", tmp_path) == ["transformers", "matplotlib"]
    load = "import ctypes, contextlib\nwith contextlib.suppress(OSError): ctypes.CDLL('/nowhere/_kernel.so')"
    assert loaded_by(load) == ["/nowhere/_kernel.so"]


def test_probe_detects_a_flex_attention_import() -> None:
    flex = "torch.nn.attention.flex_attention"
    assert loaded_by(f"by_torch.discard({flex!r})\nimport {flex}") == [flex]
