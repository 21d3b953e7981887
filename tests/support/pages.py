"""The fenced blocks of a page of Markdown, and the command lines in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    line: int
    """where it begins"""
    language: str
    """empty: command lines; python: a program; py: a program that continues those above it; toml: a run file; text"""
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(page.count("\n", 0, at.start()) + 1, at[1], at[2]) for at in FENCE.finditer(page)]


def command_lines(block: Block) -> list[str]:
    """Without comments and empty lines; a line that ends in a backslash goes on in the next."""
    joined = block.text.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", each).strip() for each in joined) if line]


def words(line: str) -> list[str]:
    return shlex.split(line)


def all_lines(pages: list[Path]) -> dict[str, list[str]]:
    """The command lines of each page, by its name."""
    return {
        page.name: [
            line
            for block in blocks(page.read_text(encoding="utf-8"))
            if not block.language
            for line in command_lines(block)
        ]
        for page in pages
    }
