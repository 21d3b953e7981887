"""Commands that are refused."""

from __future__ import annotations

import pytest

from spanformer.cli.main import main


def refusal(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """The one sentence that a command ends with, with exit code 2 and no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("spanformer: ")]
    assert end.value.code == 2 and len(lines) == 1 and "Traceback" not in said.err + said.out, said
    return lines[0].removeprefix("spanformer: ")
