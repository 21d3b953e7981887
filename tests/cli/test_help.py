"""What `--help` says."""

from __future__ import annotations

import re

import pytest

from spanformer.cli.main import main


@pytest.mark.parametrize("command", ["train", "eval", "sweep", "data"])
def test_every_option_is_explained(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(re.sub(r"\x1b\[[\d;]*m|│", " ", capsys.readouterr().out).split())
    value = r"(, --[\w.-]+| [A-Z]+| \{[^}]*\}| \[[^()]*?\])?"
    assert len(re.findall(rf"--[\w.-]+{value} (?!\(default)\S", text)) > 5
    assert [found[0] for found in re.findall(rf"(--[\w.-]+){value} \(default", text)] == []
