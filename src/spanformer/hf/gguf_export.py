"""Rewrites a GGUF file so that llama.cpp runs it with learned windows, without touching a quantised number.

The form is `granite_swa`: with neutral multipliers it is `llama` with a sliding window in some layers and a sink logit
for each query head. So a Llama changes its header and gets one small tensor a layer. Qwen2 rotates other pairs of
numbers (i, i + D/2 in place of 2i, 2i + 1): the rows of its query and key matrices are put in another order, which is
exact in every quantisation, because blocks lie within a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from spanformer.core.progress import OnProgress, silent
from spanformer.hf.export import How, Windows, choose_windows
from spanformer.hf.gguf_file import (
    FLOAT32,
    UINT32,
    Gguf,
    TensorInfo,
    Value,
    bools,
    new_tensor,
    number,
    read_gguf,
    text,
    write_gguf,
)
from spanformer.hf.granite import sinks_of
from spanformer.hf.span_file import PER_MATRIX, check_likeness, read_layers, sampled
from spanformer.hf.spans import HeadSpans

KINDS = ("llama", "qwen2")
ARCH = "granite_swa"
COMPARED = 8
"""layers whose weights are compared with the fingerprint"""


@dataclass(frozen=True)
class Exported:
    windows: Windows
    full_token: int
    """bytes of a token in the KV cache of a layer, keys and values in 16 bits"""
    lost: tuple[str, ...] = ()
    """what the file cannot hold of the spans, in words"""

    def kv_bytes(self, context: int, ubatch: int = 512) -> tuple[int, int]:
        """(bytes of llama.cpp's KV cache for one sequence, those of the model without windows). A layer with a window
        has window + ubatch cells; cells come in multiples of 256."""
        whole = -(-context // 256) * 256
        cells = -(-min(whole, self.windows.sliding_window + ubatch) // 256) * 256
        local = self.windows.layer_types.count("sliding_attention")
        layers = len(self.windows.layer_types)
        return (local * cells + (layers - local) * whole) * self.full_token, layers * whole * self.full_token


def export_gguf(
    source: Path, fit: str | Path, out: Path, *, how: How = "longest", context: int = 0,
    on_progress: OnProgress = silent,
) -> Exported:  # fmt: skip
    """Write `out`: the model of `source` with the spans of the folder or preset `fit`. how, context: as in
    `to_windows`; 0: the length that the spans were learned at."""
    if out.exists():
        raise ValueError(f"{out} already exists; choose another file")
    file = read_gguf(source)
    arch = file.get("general.architecture")
    if arch not in KINDS or file.get(f"{arch}.expert_count", 0):
        what = f"a {arch!r} with experts" if arch in KINDS else f"{arch!r}"
        raise ValueError(
            f"{source} is of architecture {what}; windows can be written into {' and '.join(KINDS)} without experts: "
            "fit and export another model"
        )
    heads, kv_heads = _heads(file, arch)
    layers, held = read_layers(fit, heads, kv_heads)
    _check_fits(file, arch, layers, fit)
    _check_weights(file, held, len(layers), fit)
    windows = choose_windows(layers, how=how, context=context or layers[0].max_span)
    size = _head_size(file, arch, heads)
    tensors = file.tensors if arch == "llama" else [_reordered(t, size) for t in file.tensors]
    sinks = [new_tensor(f"blk.{n}.attn_sinks.weight", sinks_of(spans).tolist()) for n, spans in enumerate(layers)]
    write_gguf(out, Gguf(source, _header(file, arch, windows), [*tensors, *sinks]), on_progress)
    return Exported(windows, 2 * 2 * kv_heads * size, tuple(_lost(layers, windows)))


def _lost(layers: list[HeadSpans], windows: Windows) -> Iterator[str]:
    if any(spans.sink_tokens for spans in layers):
        yield f"{layers[0].sink_tokens} sink tokens, without sink logits in their place"
    if any(len(set(spans.keeps(windows.context))) > 1 for spans in layers):
        yield "windows of heads that differ in a layer"
    if any(0 < b < 1 for spans in layers for b in spans.growths()):
        yield "windows that grow with the text"


def _heads(file: Gguf, arch: str) -> tuple[int, int]:
    heads = file.get(f"{arch}.attention.head_count")
    kv_heads = file.get(f"{arch}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or not 0 < kv_heads <= heads:
        raise ValueError(
            f"{file.path} names {heads} heads over {kv_heads} KV heads; expected one number for all layers: export "
            "another model"
        )
    return heads, kv_heads


def _head_size(file: Gguf, arch: str, heads: int) -> int:
    return file.get(f"{arch}.attention.key_length", file.get(f"{arch}.embedding_length", 0) // heads)


def _check_fits(file: Gguf, arch: str, layers: list[HeadSpans], fit: str | Path) -> None:
    count = file.get(f"{arch}.block_count")
    if count != len(layers):
        raise ValueError(
            f"{fit} holds spans of {len(layers)} layers, and {file.path} has {count}; export the model that was fitted"
        )


def _check_weights(file: Gguf, held: torch.Tensor, layers: int, fit: str | Path) -> None:
    """Compare value and output matrices with the fingerprint; a GGUF file has the rows of queries and keys in another
    order."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    by_name = {t.name: t for t in file.tensors}
    if held.numel() != layers * 4 * PER_MATRIX:
        raise ValueError(f"the fingerprint in {fit} is not that of a Llama or Qwen2; export the model that was fitted")
    wanted, own = held.view(layers, 4, PER_MATRIX), []
    some = sorted({round(n) for n in torch.linspace(0, layers - 1, COMPARED).tolist()})
    with open(file.path, "rb") as opened:
        for n in some:
            for name in (f"blk.{n}.attn_v.weight", f"blk.{n}.attn_output.weight"):
                if name not in by_name:
                    raise ValueError(f"{file.path} has no {name}; expected a Llama or Qwen2 with separate matrices")
                t = by_name[name]
                opened.seek(t.begin)
                raw = np.frombuffer(opened.read(t.size), np.uint8).reshape(t.shape[1], -1)
                plain = raw.view({0: np.float32, 1: np.float16}[t.kind]) if t.kind in (0, 1) else raw
                own.append(sampled(torch.from_numpy(np.array(dequantize(plain, GGMLQuantizationType(t.kind))))))
    check_likeness(wanted[some, 2:].flatten(), torch.cat(own), fit)


def _header(file: Gguf, arch: str, windows: Windows) -> dict[str, Value]:
    values = {
        f"{ARCH}.{name.removeprefix(f'{arch}.')}" if name.startswith(f"{arch}.") else name: value
        for name, value in file.values.items()
    }
    values["general.architecture"] = text(ARCH)
    values[f"{ARCH}.logit_scale"] = number(1.0, FLOAT32)
    values[f"{ARCH}.attention.sliding_window"] = number(windows.sliding_window, UINT32)
    local = [kind == "sliding_attention" for kind in windows.layer_types]
    values[f"{ARCH}.attention.sliding_window_pattern"] = bools(local)
    return values


def _reordered(t: TensorInfo, size: int) -> TensorInfo:
    """Rows of query and key matrices and biases, i and i + D/2 of each head next to each other."""
    if not t.name.endswith(("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")):
        return t
    if size < 2 or size % 2 or t.shape[-1] % size:
        raise ValueError(f"{t.name} has {t.shape[-1]} rows; expected whole heads of {size}: the file is damaged")
    rows = torch.arange(t.shape[-1]).view(-1, 2, size // 2).transpose(1, 2).flatten()
    return replace(t, rows=tuple(rows.tolist()))
