"""`spanformer export-windows FITTED --data TEXT`: convert learned spans to one window per layer, and
measure what the conversion costs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.core.text import printable


@dataclass(frozen=True)
class ExportOptions:
    model: tyro.conf.Positional[str]
    """a folder with spans, written by fit-spans or save_pretrained"""
    data: str
    """text to measure on: a file, a folder or a glob"""
    out: str = "out/windows"
    """folder for the model with plain windows (layer_types and one sliding_window), which runs without spanformer"""
    form: Literal["windows", "granite"] = "windows"
    """windows: the model's own kind with layer_types (Llama and Mistral: a Ministral). granite: a GraniteSWA, which
    also holds learned sink logits (fit-spans --per layer)"""
    how: Literal["longest", "mean", "shortest"] = "longest"
    """which of a layer's head spans becomes the layer's window"""
    context: int = 0
    """tokens per text at which the windows should need the least memory; 0: the length the spans were attached for"""
    texts: int = 4
    """number of texts to measure"""


def run(options: ExportOptions) -> None:
    from spanformer.core.processor import computing_dtype
    from spanformer.core.text import read_text
    from spanformer.hf.attach import CONFIG
    from spanformer.hf.export import to_windows
    from spanformer.hf.granite import to_granite
    from spanformer.hf.saved import load_fitted
    from spanformer.hf.spans import cache_bytes
    from spanformer.hf.text import bits_per_byte, check_logits, make_chunks

    out = Path(options.out)
    if out.exists():
        raise ValueError(f"{out} already exists; choose another folder with --out")
    if options.texts < 1 or options.context < 0:
        raise ValueError(f"texts is {options.texts} and context {options.context}; expected texts ≥ 1 and context ≥ 0")
    text = read_text(options.data)
    with Progress() as report:
        report(f"loading {options.model}", 0, 0)
        model, tokenizer, fitted = load_fitted(options.model)
        if not fitted:
            raise ValueError(f"{options.model} has no spans; give a folder that fit-spans wrote")
        stored = model.dtype
        model.to(computing_dtype(stored))  # pyright: ignore[reportArgumentType]
        context = options.context or getattr(model.config, CONFIG)["max_span"]
        check_logits(model)
        texts = make_chunks(text, tokenizer, context=context, start=max(1, context // 2), limit=options.texts)
        other, windows = {"windows": to_windows, "granite": to_granite}[options.form](
            model, how=options.how, context=context
        )
        kept, full = cache_bytes(model, context)
        shares = {"spans": kept / full, "windows": windows.tokens / (len(windows.wanted) * context)}
        bits = {
            name: bits_per_byte(each, texts, functools.partial(report, f"measuring: {name}"))
            for name, each in (("spans", model), ("windows", other))
        }
        report(f"writing {out}", 0, 0)
        other.to(stored).save_pretrained(out)  # pyright: ignore[reportArgumentType]
        tokenizer.save_pretrained(out)
    local = windows.layer_types.count("sliding_attention")
    print(
        f"{local} of {len(windows.wanted)} layers have a window of {windows.sliding_window} tokens, the others see all"
    )
    for name, share in shares.items():
        rise = 100 * (bits[name] / bits["spans"] - 1)
        print(f"  {name:<10}{share:.3f} of the KV cache  {bits[name]:.4f} bits per byte  {rise:+.2f} %")
    print(f"model: {printable(out)}")


EXPORT = Command(ExportOptions, run)
