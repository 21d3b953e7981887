"""What keeps the package easy to add to: one table of mechanisms, one forward pass, no flags on classes, short files
and functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from spanformer.kinds import KINDS, POSITIONS

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "spanformer"
NAMED = 2
"""how many names of kinds one expression elsewhere may hold: a default and what it is compared with"""
LINES, FUNCTION = 300, 60
LONG_FILES: dict[str, str] = {}
"""longer than LINES, with the reason; a file whose first lines say "longer than 300 lines" and why needs no entry"""
LONG_FUNCTIONS: dict[str, str] = {
    "ops/backends/banded.py:_backward": "one sweep over blocks; its dozen gradients share every intermediate",
}
"""longer than FUNCTION, with the reason"""


@cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package, parsed, by its path in it."""
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def collections(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """(line, strings) of every dict, by its keys, and of every list, tuple and set."""
    for node in ast.walk(tree):
        elements = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        found = {e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)}
        if found:
            yield node.lineno, found  # pyright: ignore


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@pytest.mark.parametrize("known", [KINDS, POSITIONS], ids=["kinds", "positions"])
def test_no_table_of_mechanisms_outside_kinds(known) -> None:
    found = [
        f"{path}:{line}: {sorted(names & set(known))}"
        for path, tree in trees().items()
        if not path.startswith("kinds/")
        for line, names in collections(tree)
        if len(names & set(known)) > NAMED
    ]
    assert not found, "read spanformer.kinds instead"


def test_table_of_mechanisms_is_found() -> None:
    table = "MADE = {'window': Window, 'full': Full, 'big_bird': BigBird}\nNAMES = ['window', 'full', 'big_bird']"
    assert [(line, len(names & set(KINDS))) for line, names in collections(ast.parse(table))] == [(1, 3), (2, 3)]


def test_one_loop_runs_blocks() -> None:
    """Every loop in which a block is called, by itself or handed to another function."""

    def runs(loop: ast.For) -> bool:
        target = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)} & {"block", "layer"}
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        by_itself = any(isinstance(call.func, ast.Name) and call.func.id in target for call in calls)
        handed = any(
            isinstance(call.func, ast.Attribute) and any(isinstance(a, ast.Name) and a.id in target for a in call.args)
            for call in calls
        )
        return by_itself or handed

    found = [
        f"{path}:{function.name}"
        for path, tree in trees().items()
        if path.startswith(("model/", "infer/", "hf/"))
        for function in functions(tree)
        for loop in ast.walk(function)
        if isinstance(loop, ast.For) and "blocks" in ast.unparse(loop.iter) and runs(loop)
    ]
    assert found == ["model/stack.py:run_blocks"]


def test_one_block_has_a_forward() -> None:
    found = [
        f"{path}:{node.name}"
        for path, tree in trees().items()
        if path.startswith(("model/", "infer/", "hf/", "memory/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "Block" in node.name
        and any(function.name == "forward" for function in functions(node))
    ]  # fmt: skip
    assert found == ["model/block.py:Block"]


def test_attention_classes_have_no_flags() -> None:
    """Modules say what they can by `supports()`, `rule_needs()` and what they return. A pattern is a dataclass, and its
    fields are no flags."""
    found = [
        f"{path}:{statement.lineno}: {ast.unparse(statement)}"
        for path, tree in trees().items()
        if path.startswith("attention/") and not path.startswith("attention/pattern/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.decorator_list
        for statement in node.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, (bool, int, str))
    ]
    assert not found


def test_files_are_short_or_say_why() -> None:
    sources = {path: (PACKAGE / path).read_text(encoding="utf-8") for path in trees()}
    long = {path: text for path, text in sources.items() if text.count("\n") > LINES}
    unsaid = {path for path, text in long.items() if not re.search(rf"longer than\s+{LINES}\s+lines", text[:1500])}
    assert unsaid - LONG_FILES.keys() == set(), f"split it by idea, or say why not; at most {LINES} lines"
    assert LONG_FILES.keys() - unsaid == set(), "is short again: take it off the list"


def test_functions_are_short() -> None:
    long = {
        f"{path}:{function.name}"
        for path, tree in trees().items()
        for function in functions(tree)
        if (function.end_lineno or 0) - function.lineno + 1 > FUNCTION
    }
    assert long - LONG_FUNCTIONS.keys() == set(), f"split it; at most {FUNCTION} lines"
    assert LONG_FUNCTIONS.keys() - long == set(), "is short again: take it off the list"
