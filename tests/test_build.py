"""csrc/build.py: what it compiles, and what it leaves behind when it cannot."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, working on a folder of tiny sources instead of on csrc."""
    spec = importlib.util.spec_from_file_location("spanformer_build", CSRC / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "dispatch.cpp").write_text("int answer() { return 42; }\n")
    (sources / "kernel.cpp").write_text('#include "kernel.h"\n')
    (sources / "kernel.h").write_text("\n")
    monkeypatch.setattr(module, "CSRC", sources)
    return module


def needs_compiler(build: ModuleType) -> None:
    try:
        build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("sanitize", ["", "address", "thread"])
def test_flags(build: ModuleType, sanitize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    made = {path.stem: command for path, command in build.commands(["c++"], Path("o"), sanitize).items()}
    assert set(made) == {"dispatch", "kernel_portable", "kernel_avx2", "kernel_avx512"}
    assert not [flag for command in made.values() for flag in command if "fast-math" in flag or "march" in flag]
    assert {"-DSPANFORMER_HAVE_AVX2", "-DSPANFORMER_HAVE_AVX512"} < set(made["dispatch"])
    for baseline in ("dispatch", "kernel_portable"):  # they must run on any processor
        assert not [flag for flag in made[baseline] if flag.startswith("-m")]
    for flag, kind in (("-fsanitize=address,undefined", "address"), ("-fsanitize=thread", "thread"), ("-O3", "")):
        assert (flag in made["kernel_avx2"]) == (sanitize == kind)
    assert ("-fopenmp" in made["kernel_avx2"]) == (sanitize != "thread")


def test_other_processors_get_the_portable_kernel_only(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    made = build.commands(["c++"], Path("o"))
    assert {path.stem for path in made} == {"dispatch", "kernel_portable"}
    assert not [flag for command in made.values() for flag in command if "SPANFORMER_HAVE" in flag]


def test_builds_again_only_when_a_source_or_header_is_newer(build: ModuleType, tmp_path: Path) -> None:
    needs_compiler(build)
    out = tmp_path / "ops" / "_kernel.so"
    build.build(out)
    assert [path.name for path in out.parent.iterdir()] == ["_kernel.so"]  # no objects are left
    first = out.stat().st_mtime_ns
    build.build(out)
    assert out.stat().st_mtime_ns == first
    later = out.stat().st_mtime + 10
    os.utime(tmp_path / "csrc" / "kernel.h", (later, later))
    assert not build.is_fresh(out)


def test_library_ends_with_its_digest(build: ModuleType, tmp_path: Path) -> None:
    from spanformer.ops import library

    needs_compiler(build)
    assert library.SEAL == build.SEAL
    build.build(tmp_path / "_kernel.so")
    assert library.is_whole(tmp_path / "_kernel.so")


def test_compile_error_is_reported_and_removes_the_old_library(build: ModuleType, tmp_path: Path) -> None:
    needs_compiler(build)
    out = tmp_path / "_kernel.so"
    out.touch()
    os.utime(out, (0, 0))
    (tmp_path / "csrc" / "kernel.cpp").write_text("not C++\n")
    with pytest.raises(build.BuildError, match=r"kernel\.cpp[\s\S]*failed with code 1[\s\S]*error:"):
        build.build(out)
    assert not out.exists()


def test_no_compiler(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler found \\(looked for no-such-compiler\\)"):
        build.build(tmp_path / "_kernel.so")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="looked for c\\+\\+, g\\+\\+, clang\\+\\+") as refused:
        build.build(tmp_path / "_kernel.so")
    build.warn(refused.value)
    assert "THE CPU KERNEL WAS NOT BUILT" in capsys.readouterr().err
