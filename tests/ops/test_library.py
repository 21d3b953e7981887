"""Loading the compiled kernel: a damaged file, another path, an instruction set that is not there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spanformer import Rule, attend, backends
from spanformer.ops import kernel, library

pytestmark = pytest.mark.skipif(kernel.problem() is not None, reason=f"native: {kernel.problem()}")
LIBRARY = library.find()
SIZES = kernel.CALL.size, kernel.DECODE.size


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the beginning of a process."""
    monkeypatch.setattr(kernel, "_library", None)
    monkeypatch.setattr(kernel, "_problem", None)


def damaged(path: Path, how: str) -> Path:
    content = bytearray(LIBRARY.read_bytes())
    if how == "changed":
        content[len(content) // 2] ^= 1
    elif how == "longer":
        content += b"\0"
    else:
        del content[int(how) :]
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("how", ["0", "10", "4096", "300000", "-1", "-1000", "changed", "longer"])
def test_damaged_library_is_not_loaded(tmp_path: Path, how: str) -> None:
    path = damaged(tmp_path / "_kernel.so", how)
    with pytest.raises(RuntimeError, match=r"the compiled kernel .*_kernel\.so is damaged.*; reinstall spanformer"):
        library.load(path, kernel.ABI, SIZES)


@pytest.mark.usefixtures("unloaded")
def test_damaged_library_is_warned_of_and_backends_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = damaged(tmp_path / "_kernel.so", "300000")
    monkeypatch.setattr(kernel, "find", lambda: path)
    with caplog.at_level(logging.WARNING, "spanformer"):
        assert "is damaged" in backends()["native"][0]
    assert "is damaged" in caplog.text


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("backend", ["native", "auto"])
def test_kernel_variable_names_no_file(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv("SPANFORMER_KERNEL", "/nonexistent.so")
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"SPANFORMER_KERNEL is '/nonexistent\.so', which is not a file"):
        attend(q, q, q, Rule(1), backend=backend)


@pytest.mark.usefixtures("unloaded")
def test_kernel_variable_names_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no library")
    monkeypatch.setenv("SPANFORMER_KERNEL", str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match=r"SPANFORMER_KERNEL is '.*notes\.txt', which cannot be used: .*damaged"):
        kernel.problem()


@pytest.mark.parametrize("isa", ["avx512", "bogus", "AVX2", "portable,avx2"])
def test_isa_variable_names_none_of_the_choices(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("SPANFORMER_ISA", isa)
    if isa == "avx512" and kernel.library().isa == "avx512":
        pytest.skip("this processor has it")
    with pytest.raises(ValueError, match=rf"SPANFORMER_ISA is '{isa}'; expected one that .* have: .*portable"):
        library.load(LIBRARY, kernel.ABI, SIZES)


COLD = """
import torch
from spanformer import Rule, attend
q = torch.randn(1, 1, 4, 8)
for _ in range(2):
    try:
        attend(q, q, q, Rule(1))
    except ValueError as error:
        print(error)
"""


def test_isa_variable_is_refused_by_every_call_of_a_process() -> None:
    environment = os.environ | {"SPANFORMER_ISA": "bogus", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", COLD], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("SPANFORMER_ISA is 'bogus'; expected") for line in lines), (
        done.stderr
    )


def test_sealing_again_replaces_the_digest(tmp_path: Path) -> None:
    path, build = damaged(tmp_path / "_kernel.so", "changed"), Path(__file__).parents[2] / "csrc" / "build.py"
    assert not library.is_whole(path)
    subprocess.run([sys.executable, str(build), "--seal", str(path)], check=True)
    assert library.is_whole(path) and path.stat().st_size == LIBRARY.stat().st_size
