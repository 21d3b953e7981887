"""Sphinx: these pages, and the API reference from docstrings. `make docs` builds it; any warning fails the build."""

from __future__ import annotations

import re
from itertools import groupby

from spanformer.core.version import VERSION

project, author, release = "spanformer", "spanformer contributors", VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "contents"
exclude_patterns = ["results/*/*.md"]  # tables without a title
html_theme = "furo"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": True}
autodoc_inherit_docstrings = False


def to_rst(lines: list[str]) -> list[str]:
    """Docstrings are plain text: `code`, and equations and tables in indented lines. Nothing else in them is markup."""
    found: list[str] = []
    for indented, group in groupby(lines, lambda line: line.startswith("  ") if line.strip() else None):
        if indented:
            found += ["", "::", "", *(f"    {line}" for line in group), ""]
        else:
            found += [_escape(line) for line in group]
    return found


def _escape(line: str) -> str:
    pieces = re.split(r"`([^`]+)`", line)
    return "".join(f"``{piece}``" if n % 2 else re.sub(r"([\\*|_`])", r"\\\1", piece) for n, piece in enumerate(pieces))


def plain_links(source: list[str]) -> None:
    """Links to Markdown files that are no pages here become their text; in the repository they lead to the file."""
    source[0] = re.sub(r"\[([^\]]+)\]\((?:\.\./CONTRIBUTING|compare[\w-]*/compare)\.md\)", r"\1", source[0])


def setup(app) -> None:
    app.connect("source-read", lambda app, name, source: plain_links(source))
    app.connect("autodoc-process-docstring", lambda app, what, name, thing, options, lines: _replace(lines))


def _replace(lines: list[str]) -> None:
    lines[:] = to_rst(lines)
