"""The command line: finds a command by its two words, reads its options from a dataclass, and runs it.

A command module is imported only when its command is asked for, so `spanformer --help` answers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Command:
    module: str
    """holds `options`, a dataclass, and `run`, a function of it, as attributes of the object named below"""
    name: str
    help: str


COMMANDS = {
    "bench": {
        "attention": Command("spanformer.cli.bench", "ATTENTION", "time attention against everything comparable"),
    },
    "report": {
        "attention": Command("spanformer.cli.report", "ATTENTION", "tables and pictures of an attention benchmark"),
    },
}
ABOUT = "spanformer: attention heads that learn how far to look, and cost only that much."
FIRST = "Begin with:  spanformer bench attention --quick      (how fast is it here, against what exists? a minute)"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command. A mistake in its options ends with one sentence and exit code 2, never with a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command, rest = _find(arguments)
        leaf = getattr(importlib.import_module(command.module), command.name)
        leaf.run(_parse(leaf.options, " ".join(["spanformer", *arguments[:2]]), rest))
    except (ValueError, OSError, ImportError) as error:
        _refuse(str(error))


def _find(arguments: list[str]) -> tuple[Command, list[str]]:
    """The command of the first two words, and the options after them; prints help where it is asked for."""
    group = arguments[0] if arguments else "--help"
    if group in ("-h", "--help"):
        _help(COMMANDS)
    if group not in COMMANDS:
        _refuse(f"there is no command {group!r}; expected one of {', '.join(COMMANDS)} (see spanformer --help)")
    name = arguments[1] if len(arguments) > 1 else "--help"
    if name in ("-h", "--help"):
        _help({group: COMMANDS[group]})
    if name not in COMMANDS[group]:
        _refuse(f"there is no command '{group} {name}'; expected {group} {' or '.join(COMMANDS[group])}")
    return COMMANDS[group][name], arguments[2:]


def _help(groups: dict[str, dict[str, Command]]) -> NoReturn:
    lines = [f"{group} {name}".ljust(20) + c.help for group, names in groups.items() for name, c in names.items()]
    print(ABOUT, "", "Commands:", *("  spanformer " + line for line in lines), "", sep="\n")
    print(FIRST, "Every command explains its options:  spanformer bench attention --help", sep="\n")
    raise SystemExit(0)


def _parse(options: type, program: str, arguments: list[str]) -> object:
    """The options as their dataclass; tyro's complaint, if there is one, becomes one sentence."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(options, prog=program, args=arguments)
    except SystemExit as end:
        if not end.code:
            raise
        _refuse(f"{_sentence(complaint.getvalue())} (see {program} --help)")


def _sentence(box: str) -> str:
    """What stands in the first part of tyro's box, on one line."""
    words = []
    for line in box.splitlines():
        text = line.strip().strip("│").strip()
        if text.startswith("─"):  # the rule between the message and its hints
            break
        if not text.startswith(("╭", "╰")):
            words.append(text)
    text = " ".join(" ".join(words).split()).rstrip(".") or "these options could not be read"
    return re.sub(r"^Error parsing [A-Z]\w*: ", "", text)  # the dataclass's own check: its name says nothing here


def _refuse(sentence: str) -> NoReturn:
    print("spanformer: " + " ".join(sentence.split()), file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
