"""Commands to suggest after a training run, ready to type."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from spanformer.core.text import printable
from spanformer.train.config import RunConfig

PROMPTS = {"stdlib": "def main("}
"""a suitable prompt for each named corpus; `the` is in the vocabulary of most others"""


def next_commands(out: Path, config: RunConfig, program: str) -> str:
    """One line per command. program: sys.argv[0]."""
    spanformer, folder = as_typed(program), shlex.quote(str(out))
    lines = [f"{spanformer} {words}" for words in _commands(folder, config)]
    report, opener = out / "report" / "report.html", "open" if sys.platform == "darwin" else "xdg-open"
    if report.is_file():
        page = shlex.quote(str(report))
        lines.append(f"{opener} {page}" if shutil.which(opener) else f"open {page} in a browser")
    return "\n".join(["", "Next:", *(f"  {printable(line)}" for line in lines)])


def as_typed(program: str) -> str:
    """The shortest way to call this program from the current folder."""
    path = Path(program)
    if path.name == "__main__.py":
        return shlex.join([sys.orig_argv[0], "-m", "spanformer"])
    if not path.name.startswith("spanformer"):  # called from Python
        return "spanformer"
    found = shutil.which("spanformer")
    return "spanformer" if found is not None and Path(found) == path.absolute() else shlex.quote(program)


def _commands(folder: str, config: RunConfig) -> list[str]:
    kind, source = config.objective, config.data.source
    if kind == "seq2seq":
        return [f"eval {folder} --split test", *([f"generate {folder} --prompt 31407"] if source == "numbers" else [])]
    if kind == "image":
        return [f"generate {folder}", f"generate {folder} --image test", f"eval {folder} --split test"]
    if kind in ("encoder", "task"):
        return [f"eval {folder} --split test", f"spans {folder}"]
    return [f'generate {folder} --prompt "{PROMPTS.get(source, "the")}"', f"spans {folder}"]
