"""The fastest dtype for matrix products on a device. Muon, `fit-spans` and the benchmarks use it.

A processor without bfloat16 instructions (AVX512_BF16 or AMX; on ARM the bf16 extension) multiplies it one number at a
time: fifteen products of 192 × 192 matrices took 53 ms instead of 1.6 ms on two cores of a Zen 3. The environment
variables ONEDNN_MAX_CPU_ISA=AVX2 and ATEN_CPU_CAPABILITY=avx2 switch the instructions off.
"""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WITHOUT_UNITS = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""values of ONEDNN_MAX_CPU_ISA below AVX512_CORE_BF16, the first instruction set with bfloat16 products"""


def multiplies_bfloat16() -> bool:
    """Whether PyTorch computes bfloat16 products with bfloat16 instructions on this CPU."""
    import torch

    if platform.machine().lower() in ("aarch64", "arm64"):
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return supported is not None and bool(supported())
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):  # what ATEN_CPU_CAPABILITY leaves of it
        return False
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    if limit.upper() in WITHOUT_UNITS:
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def best_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 if the device has instructions for its products, else float32."""
    import torch

    kind = torch.device(device).type
    if kind == "cpu":
        units = multiplies_bfloat16()
    else:  # PyTorch does not report it for other accelerators; those it supports have it
        units = kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if units else torch.float32


def computing_dtype(stored: torch.dtype, device: torch.device | str = "cpu") -> torch.dtype:
    """The dtype to compute in, for weights stored in this dtype: float32 if a half-precision dtype is slow here."""
    import torch

    return torch.float32 if stored.itemsize == 2 and best_dtype(device) is torch.float32 else stored


def named_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """The dtype of an option; "auto" is the best of the device."""
    import torch

    return best_dtype(device) if name == "auto" else getattr(torch, name)
