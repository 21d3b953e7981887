"""What the README and the docs promise is there: the example runs, the commands exist, the links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([")


EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{n}")
    for page in PAGES
    for n, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_every_example_runs_as_it_stands(code: str) -> None:
    exec(code, {})


def test_the_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {a or b for a, b in re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", README, flags=re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets


def test_the_subcommands_exist() -> None:
    for command in sorted(set(re.findall(r"spanformer ((?:bench|report) \w+)", README))):
        done = subprocess.run(
            [sys.executable, "-m", "spanformer.cli.main", *command.split(), "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]
