"""The model card beside a file of spans: what it is, how to load it, what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from spanformer.core.memory import shown_bytes
from spanformer.hf.spans import HeadSpans, cache_bytes

CARD = "README.md"
_HEAD = """---
library_name: spanformer
tags:
- kv-cache
- adaptive-span
{base}---

# Learned spans for {name}

{what}
learned by `spanformer fit-spans`. The weights of the model are not here and stay as they are: a head's KV cache keeps
only the tokens within its span.

```py
import transformers
from spanformer import hf

model = transformers.AutoModelForCausalLM.from_pretrained("{name}")
hf.load_spans(model, "PATH")  # the folder of this file
model.generate(ids, past_key_values=hf.SpanCache(model))
```

Spans of another model are refused: the file holds a fingerprint of the weights.

## Memory

"""


def write_card(model: PreTrainedModel, layers: dict[str, HeadSpans], figures: dict[str, Any]) -> str:
    """Markdown. figures: those of spans.json, or none."""
    where = model.config._name_or_path
    name = Path(where).name or type(model).__name__
    on_hub = where.count("/") == 1 and not Path(where).exists()
    shown = where if on_hub else name
    what = f"One attention span for each KV head of {shown},"
    if any(spans.sink_logits is not None for spans in layers.values()):
        what = f"One window or full attention for each layer of {shown}, and a sink logit for each head,"
    head = _HEAD.format(name=shown, base=f"base_model: {where}\n" if on_hub else "", what=what)
    return head + _memory(model, layers) + _windows(layers) + _retrieval(figures) + _measured(figures)


def _memory(model: PreTrainedModel, layers: dict[str, HeadSpans]) -> str:
    first = next(iter(layers.values()))
    lines = ["| tokens of text | KV cache | all of it | share |", "| --- | --- | --- | --- |"]
    for length in (first.max_span // 2, first.max_span, 4 * first.max_span, 16 * first.max_span):
        kept, full = cache_bytes(model, length)
        lines.append(f"| {length:,} | {shown_bytes(kept)} | {shown_bytes(full)} | {kept / full:.3f} |")
    return (
        "\n".join(lines) + f"\n\nIn {str(model.dtype).removeprefix('torch.')}, with "
        f"{max(s.sink_tokens for s in layers.values())} sink tokens a head.\n\n"
    )


def _windows(layers: dict[str, HeadSpans]) -> str:
    lines = ["## Tokens of each KV head", "", "| layer | tokens |", "| --- | --- |"]
    lines += [f"| {n} | {', '.join(map(str, spans.keeps()))} |" for n, spans in enumerate(layers.values())]
    return "\n".join(lines) + "\n"


def _retrieval(figures: dict[str, Any]) -> str:
    found = figures.get("retrieve")
    if not found:
        return ""
    return f"""
## Retrieval heads

{found["heads"]} heads, those with the longest windows above, were measured with rings of {found["ring"]} tokens and a \
search of all older ones. The cache then takes {shown_bytes(found["ram_bytes"])} in RAM after \
{figures["context"]:,} tokens.

```py
hf.retrieve(model, share={found["share"]:.6g}, ring={found["ring"]}, k={found["k"]})
cache = hf.RetrievalCache(model, bits=8, folder="FOLDER", codes="{found["codes"]}")
model.generate(ids, attention_mask=mask, past_key_values=cache)
```
"""


def _measured(figures: dict[str, Any]) -> str:
    bits = figures.get("bits_per_byte")
    if not bits:
        return "\nWhat they cost in quality was not measured here.\n"
    full = bits["full"]
    lines = ["", "## Measured", "", f"Bits per byte of held-out text, context {figures['context']:,}.", "",
             "| | bits per byte | over the full model |", "| --- | --- | --- |"]  # fmt: skip
    lines += [f"| {name} | {value:.4f} | {100 * (value / full - 1):+.2f} % |" for name, value in bits.items()]
    return "\n".join(lines) + "\n"
