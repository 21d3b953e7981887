"""Why the kernels cannot run here, or cannot serve a call. Each reason is one sentence, said before any launch."""

from __future__ import annotations

import functools
import os
from dataclasses import fields

import torch

from spanformer.ops.backends.base import unserved_derivatives, unserved_terms
from spanformer.ops.backends.triton.tiles import LARGEST_HEAD
from spanformer.ops.lower import Lowered
from spanformer.ops.lower.call import Inputs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OLDEST = 8, 0
"""the least compute capability of an NVIDIA GPU: Ampere, which copies to shared memory in the background"""
_SERVED = (
    *(f.name for f in fields(Inputs)), "causal", "shift", "max_future", "ramp", "reach", "span", "distance_bias",
    "key_bias", "sink_logits",
)  # fmt: skip
_unserved = unserved_terms(Lowered, "triton", _SERVED)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@torch.compiler.assume_constant_result
def unusable() -> list[str]:
    if (missing := _missing()) is not None:
        return [missing]
    if interpreted() or torch.cuda.is_available():
        return []
    return ["torch finds no GPU (torch.cuda.is_available() is False)"]


@functools.cache
def _missing() -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported ({error}); install it with pip install 'spanformer[gpu]'"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    least = ".".join(map(str, LEAST))
    return None if version >= LEAST else f"triton {triton.__version__} is too old; install {least} or newer"


LEAST = 3, 7
"""the oldest version of triton that the tests have seen"""


def refuses(call: Lowered) -> list[str]:
    reasons = [*_unserved(call), *unserved_derivatives("triton", call)]
    if call.dropout:
        reasons.append("triton has no dropout of attention weights; use dropout=0, or backend='banded'")
    if call.scale < 0:
        reasons.append(f"scale is {call.scale}; triton takes scales of at least 0")
    if call.q.dtype not in DTYPES:
        reasons.append(f"q has dtype {call.q.dtype}; triton takes float32, float16 and bfloat16")
    for names, size in (("q and k", call.q.shape[3]), ("v", call.v.shape[3])):
        if size > LARGEST_HEAD:
            reasons.append(f"the head size of {names} is {size}; triton takes up to {LARGEST_HEAD}")
    if call.distance_bias is not None and call.distance_bias.requires_grad and call.q_positions is not None:
        reasons.append("distance_bias has a gradient at explicit positions, whose diagonals triton cannot follow")
    return reasons + refuses_device(call.q.device)


def refuses_device(device: torch.device) -> list[str]:
    if device.type == "cpu" and interpreted():
        return []
    if device.type != "cuda":
        return [f"q is on {device}; triton runs on GPUs (and with TRITON_INTERPRET=1 on the CPU, for tests)"]
    found = _capability(device.index)
    if found is None or found >= OLDEST:
        return []
    name = ".".join(map(str, found))
    return [f"the GPU {device} has compute capability {name}; triton's kernels need {'.'.join(map(str, OLDEST))}"]


@torch.compiler.assume_constant_result
def _capability(index: int | None) -> tuple[int, int] | None:
    """None: AMD, or nothing to ask (a fake device)."""
    if torch.version.hip or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(index)
