"""What the README and the docs name exists: make targets, subcommands, links. test_docs_commands.py runs the blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spanformer.cli.main import find, main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {a or b for a, b in re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", README, flags=re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def commands(text: str) -> set[tuple[str, ...]]:
    """The words after `spanformer` wherever code, in a line or in a block that is not Python, runs it. Blocks of
    `py` are Python that does not run as it stands."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    lines = [line for kind, block in blocks if kind not in ("python", "py") for line in block.splitlines()]
    code = [re.sub(r"\s#.*", "", line) for line in lines] + inline
    run = r"(?:^|[\s/])spanformer((?: +[a-z][\w./-]*){1,2})"
    return {tuple(words.split()) for line in code for words in re.findall(run, line)}


SUBCOMMANDS = sorted({words for page in PAGES for words in commands(page.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("words", SUBCOMMANDS, ids=" ".join)
def test_subcommands_exist(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    command, _ = find(list(words))
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert not end.value.code and f"spanformer {command}" in capsys.readouterr().out


def test_commands_are_found_in_text() -> None:
    text = """Run `spanformer train runs/demo.toml --steps 3`, `spanformer --help` or `.venv/bin/spanformer spans`; with
`spanformer` alone, `from spanformer.ops import x`, or spanformer in prose, nothing runs.
```python
from spanformer import attend
```
```sh
torchrun -m spanformer sweep runs/a.toml   # spanformer on the PATH
$ spanformer bench attention --quick
spanformer eval
```
"""
    assert commands(text) == {
        ("train", "runs/demo.toml"), ("spans",), ("sweep", "runs/a.toml"), ("bench", "attention"), ("eval",)
    }  # fmt: skip
    assert ("bench", "attention") in SUBCOMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]
