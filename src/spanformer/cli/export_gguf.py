"""`spanformer export-gguf MODEL.gguf FIT OUT.gguf`: write a quantised model with learned windows, for llama.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.core.memory import shown_bytes
from spanformer.core.text import printable


@dataclass(frozen=True)
class GgufOptions:
    model: tyro.conf.Positional[Path]
    """a .gguf file of a Llama or Qwen2, in any quantisation"""
    fit: tyro.conf.Positional[str]
    """the folder that fit-spans wrote for this model, its folder `spans`, or preset:NAME"""
    out: tyro.conf.Positional[Path]
    """the .gguf file to write"""
    how: Literal["longest", "mean", "shortest"] = "longest"
    """which of a layer's head spans becomes the layer's window"""
    context: int = 0
    """tokens at which the windows should need the least memory; 0: the length that the spans were learned at"""
    ubatch: int = 512
    """the --ubatch-size that llama.cpp will run with, for the memory that is printed: a layer with a window has a cell
    for each of its tokens, too"""


def run(options: GgufOptions) -> None:
    from spanformer.hf.gguf_export import export_gguf

    if options.context < 0 or options.ubatch < 1:
        raise ValueError(
            f"context is {options.context} and ubatch {options.ubatch}; expected context ≥ 0 and ubatch ≥ 1"
        )
    with Progress() as report:
        found = export_gguf(
            options.model, options.fit, options.out, how=options.how, context=options.context, on_progress=report
        )
    windows = found.windows
    local = windows.layer_types.count("sliding_attention")
    print(
        f"{local} of {len(windows.layer_types)} layers have a window of {windows.sliding_window} tokens, "
        "the others see all"
    )
    if found.lost:
        print(f"not in the file: {'; '.join(found.lost)}. fit-spans --per layer learns what the file holds")
    for context in sorted({windows.context, 8192, 32_768}):
        kept, full = found.kv_bytes(context, options.ubatch)
        print(f"  {context:>7,} tokens: a KV cache of {shown_bytes(kept)} of {shown_bytes(full)}, in 16 bits")
    print(f"model: {printable(options.out)}")
    print(f"to serve it: llama-server -m {printable(options.out)} --ubatch-size {options.ubatch}")


EXPORT_GGUF = Command(GgufOptions, run)
