"""Part kv:… of `spanformer bench fit-spans`: KV caches in 8 and 4 bits, alone and with learned spans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from spanformer.hf.fits import token_bytes
from spanformer.hf.plan import FitRun
from spanformer.hf.rounded import rounded_kv
from spanformer.model.budget import Budget


def kv_bits(
    run: FitRun, sets: dict[str, Tensor], budget: Budget, show: Callable[[object], None]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Bits per byte of held-out text with all tokens and each set of windows in 16, 8 and 4 bits, its rise over all
    tokens in 16 bits, and the share of the bytes of those; and all of it as text."""
    of_token = {bits: sum(token_bytes(run.layers, bits)) for bits in (16, 8, 4)}
    rows: dict[str, dict[str, Any]] = {}
    full = run.measure(None, "full", show)
    for name, windows in {"all tokens": None, **sets}.items():
        share = 1.0 if windows is None else budget.share_of(windows)
        for bits in (16, 8, 4):
            title = f"{name}, {bits} bits"
            if bits == 16:
                found = full if windows is None else run.measure(windows, title, show)
            else:
                with rounded_kv(bits):
                    found = run.measure(windows, title, show)
            rows[title] = {"share": share * of_token[bits] / of_token[16], "bits": found, "rise": found / full - 1}
    lines = [f"{name:<24}{x['share']:.4f} {x['bits']:.4f} {100 * x['rise']:+.2f} %" for name, x in rows.items()]
    return rows, "\n".join(lines)
