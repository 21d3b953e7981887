"""Which dtype a processor multiplies well, by what PyTorch and the environment say of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from spanformer.core import processor
from spanformer.core.processor import best_dtype, computing_dtype, multiplies_bfloat16, named_dtype


@pytest.fixture
def sapphire(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A processor with AVX512_BF16 and AMX, and nothing in the environment."""
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_avx512_bf16_or_amx_multiplies_bfloat16(sapphire: pytest.MonkeyPatch) -> None:
    assert multiplies_bfloat16()
    sapphire.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # Cooper Lake, Zen 4
    assert multiplies_bfloat16()
    sapphire.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # Skylake: AVX-512 without them
    assert not multiplies_bfloat16()


@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
def test_aten_cpu_capability_hides_the_units(sapphire: pytest.MonkeyPatch, capability: str) -> None:
    sapphire.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert not multiplies_bfloat16()


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("limit", "units"),
    [("AVX2", False), ("avx2", False), ("AVX512_CORE", False), ("AVX512_CORE_BF16", True), ("ALL", True), ("", True)],
)
def test_onednn_limits_below_bfloat16_hide_the_units(
    sapphire: pytest.MonkeyPatch, variable: str, limit: str, units: bool
) -> None:
    sapphire.setenv(variable, limit)
    assert multiplies_bfloat16() == units


@pytest.mark.parametrize("units", [True, False])
def test_arm_needs_the_bf16_extension(sapphire: pytest.MonkeyPatch, units: bool) -> None:
    sapphire.setattr(processor.platform, "machine", lambda: "aarch64")
    sapphire.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: units)
    assert multiplies_bfloat16() == units


def test_environment_of_a_process_hides_the_units() -> None:
    """On a processor that has them, too: the variable is read by PyTorch itself, before the first product."""
    code = "from spanformer.core.processor import multiplies_bfloat16 as m; print(m())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}, capture_output=True, text=True
    )
    assert found.stdout == "False\n", found.stderr


@pytest.mark.parametrize("units", [True, False])
def test_dtypes_follow_the_units_unless_they_are_named(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: units)
    best = torch.bfloat16 if units else torch.float32
    assert best_dtype() == best_dtype(torch.device("cpu")) == named_dtype("auto") == best
    assert named_dtype("bfloat16") == torch.bfloat16 and named_dtype("float32") == torch.float32
    assert computing_dtype(torch.bfloat16) == best
    assert computing_dtype(torch.float16) == (torch.float16 if units else torch.float32)
    assert computing_dtype(torch.float64) == torch.float64 and computing_dtype(torch.float32) == torch.float32


@pytest.mark.parametrize("units", [True, False])
def test_gpu_reports_its_own_support(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: not units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: units)
    assert best_dtype("cuda") == (torch.bfloat16 if units else torch.float32)
