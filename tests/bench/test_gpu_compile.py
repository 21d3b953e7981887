"""The compile gate: what it reads in a binary, and that each bar can be missed."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spanformer.bench.gpu_binary import Loop, pairs, read_amdgcn, read_sass
from spanformer.bench.gpu_compile import ARCHS, GATED, compile_kernels, faults

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
TOYS = "support.gpu_kernels"
SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/               @P1 LDL R3, [R1] ;
        /*0040*/                   FADD R5, R5, R6 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/              @!P0 BRA `(.L_x_3) ;
        /*0070*/                   RED.E.ADD.F32 [R2], R5 ;
        /*0080*/              @!P2 BRA `(.L_x_0) ;
.L_x_3:
        /*0090*/                   FADD R5, R5, R6 ;
        /*00a0*/               @P0 BRA `(.L_x_3) ;
        /*00b0*/                   EXIT ;
"""


def test_innermost_loops_with_products_are_counted() -> None:
    operations, loops = read_sass(SASS)
    assert [loop.instructions for loop in loops] == [4]
    assert loops[0].operations == Counter(HMMA=1, LDL=1, FADD=1, BRA=1)
    assert operations["RED"] == 1 and operations["BRA"] == 4 and operations.total() == 12


def test_unrolled_loops_count_for_all_their_tiles() -> None:
    # A tile of 64 × 64 with heads of 64 and 4 warps has 32 of m16n8k16 a warp and product.
    assert pairs(Loop(390, Counter(HMMA=64)), (64, 64), 2, 64, 4) == 4096
    assert pairs(Loop(780, Counter(HMMA=128)), (64, 64), 2, 64, 4) == 8192
    assert pairs(Loop(400, Counter(HMMA=96)), (64, 64), 3, 64, 4) == 4096


def test_amd_assembly() -> None:
    text = """
	v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
	global_atomic_add_f32 v0, v1, s[2:3]
    .sgpr_spill_count: 3
    .vgpr_count:     96
    .vgpr_spill_count: 2
"""
    found = read_amdgcn(text)
    assert (found.registers, found.spilled) == (96, 2)
    assert found.operations["v_mfma_f32_32x32x8_bf16"] == 1 and found.operations["global_atomic_add_f32"] == 1


GOOD: dict[str, Any] = {
    "triton": "3.9.0", "arch": "sm_80", "kernel": GATED, "head_size": 64, "products": 2, "spilled": 0, "shared": 40960,
    "tensor_core": 128, "async_copies": 48, "atomics": 0, "per_pair": {"full": 11.6, "edge": 26.8},
}  # fmt: skip


@pytest.mark.parametrize(
    "change, said",
    [
        ({"atomics": 1}, "1 atomic operations; expected none"),
        ({"spilled": 8}, "8 bytes of spilled registers; expected none"),
        ({"shared": 102_400}, "102400 bytes of shared memory; expected at most 101376"),
        ({"tensor_core": 0}, "no HMMA instruction"),
        ({"async_copies": 0}, "no asynchronous copy"),
        ({"per_pair": {"full": 14.1, "edge": 26.8}}, "14.1 instructions a pair in the full loop; expected at most 14"),
        ({"per_pair": {"full": 11.6, "edge": 30.1}}, "30.1 instructions a pair in the edge loop; expected at most 30"),
        ({"per_pair": {"full": None, "edge": None}}, "None instructions a pair in the full loop"),
    ],
)
def test_each_bar_can_be_missed(change: dict, said: str) -> None:
    assert faults(GOOD) == []
    found = faults(GOOD | change)
    assert found and said in found[0] and found[0].startswith(f"triton 3.9.0, sm_80, {GATED}: ")


def test_copies_are_not_asked_of_a_kernel_that_skips_tiles() -> None:
    assert faults(GOOD | {"kernel": "backward_kv_all_terms_64", "async_copies": 0}) == []


@needs_triton
def test_gate_tells_a_good_kernel_from_one_with_atomics(tmp_path: Path) -> None:
    good, atomic = compile_kernels("sm_80", (64,), variants=TOYS, only=("good", "atomic"), cache=tmp_path)
    assert faults(good) == [] and good["tensor_core"] and good["async_copies"] and len(good["loops"]) == 2
    assert 1 < good["per_pair"]["full"] < good["per_pair"]["edge"] < 20
    assert "atomic operations" in faults(atomic)[0] and len(faults(atomic)) == 1


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_gate_finds_spills_and_missing_copies(arch: str, tmp_path: Path) -> None:
    rows = compile_kernels(arch, (64,), variants=TOYS, only=("spilling", "unaligned"), cache=tmp_path)
    said = [" ".join(faults(row)) for row in rows]
    if arch == "gfx942":
        assert said == ["", ""] and rows[0]["spilled"] and rows[0]["tensor_core"]
    else:
        assert "spilled registers" in said[0] and "no asynchronous copy" in said[1]


@needs_triton
def test_failing_compilation_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^compiling for sm_80 failed: .*no_such_module"):
        compile_kernels("sm_80", (64,), variants="no_such_module")


# --- the kernels of the backend ---------------------------------------------------------------------------------------


@needs_triton
def test_forward_kernel_passes_the_gate_on_sm_80(tmp_path: Path) -> None:
    (row,) = compile_kernels("sm_80", (64,), only=(GATED,), cache=tmp_path)
    assert faults(row) == []


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_passes_the_gate(arch: str, tmp_path: Path) -> None:
    rows = compile_kernels(arch, (64, 128), cache=tmp_path)
    assert len(rows) >= 10 and [fault for row in rows for fault in faults(row)] == []
