"""What the package says of itself: one version everywhere, and types for type checkers."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import spanformer
from spanformer.core import version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_version_is_a_literal_in_one_place() -> None:
    """setuptools reads a literal without importing anything."""
    tree = ast.parse(Path(version.__file__).read_text(encoding="utf-8"))
    (value,) = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    assert value == version.VERSION == spanformer.__version__
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "spanformer.core.version.VERSION"}
    assert "version" in PROJECT["project"]["dynamic"]


def test_citation_and_changelog_name_the_version() -> None:
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    newest = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
    assert cited == [spanformer.__version__] and newest == spanformer.__version__


def test_types_are_shipped() -> None:
    assert (Path(spanformer.__file__).parent / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["spanformer"]
