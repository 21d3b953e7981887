"""What fits into memory: a budget of bytes as a share of the KV cache, and a table of both."""

from __future__ import annotations

from torch import nn

from spanformer.core.memory import parse_bytes, shown_bytes
from spanformer.hf.fit_plan import FitPlan
from spanformer.hf.spans import HeadSpans, head_spans, recent_bytes

LENGTHS = (2048, 8192, 32_768, 131_072)


def token_bytes(layers: list[HeadSpans], kv_bits: int) -> list[int]:
    """[layers] bytes of one token in the KV cache of a layer: all its KV heads' keys and values, with their scales."""
    return [s.groups * s.token_bytes(kv_bits) for s in layers]


def share_of_bytes(model: nn.Module, plan: FitPlan) -> float:
    """The share of the full KV cache at the plan's context that its bytes are."""
    layers, given = list(head_spans(model).values()), parse_bytes(plan.bytes)
    full = _full_bytes(layers, plan.cache_bits, plan.context)
    given -= recent_bytes(layers) if plan.cache_bits == 4 else 0
    # growing windows are rounded up: a token a head
    share = (given - (sum(token_bytes(layers, plan.cache_bits)) if plan.grows else 0)) / full
    if given >= full:
        raise ValueError(
            f"bytes is {plan.bytes}, and the whole KV cache of {plan.context:,} tokens takes {shown_bytes(full)}: "
            "nothing needs to be fitted; ask for less memory or a longer context"
        )
    least = (plan.kept_first + 1) / plan.length
    if share < least:
        raise ValueError(
            f"bytes is {plan.bytes}, and {plan.kept_first} sink tokens and the token itself, in proportion at "
            f"{plan.context:,} tokens, take {shown_bytes(least * full)}; ask for more memory, a shorter context or "
            "fewer sink tokens"
        )
    return share


def check_windows(model: nn.Module, plan: FitPlan) -> None:
    """Refuse a model whose own windows contradict the plan: those cannot all grow with the text, and a layer cannot
    have a second one."""
    windowed = any(spans.window is not None for spans in head_spans(model).values())
    if windowed and plan.per == "layer":
        raise ValueError(
            f"{type(model).__name__} has layers with a sliding window of their own, and per is 'layer': other engines "
            "hold one window for all; fit it with --per head"
        )
    if windowed and plan.grows:
        raise ValueError(
            f"{type(model).__name__} has layers with a sliding window of their own, which do not grow with the text; "
            "give --text as long as --context"
        )


def what_fits(model: nn.Module, plan: FitPlan, share: float) -> list[str]:
    """Lines of a table of lengths and bytes: all of the KV cache, and this share."""
    layers = list(head_spans(model).values())
    lengths = sorted({*(n for n in LENGTHS if n < plan.context), plan.length, plan.context})
    lines = [f"KV cache in {plan.cache_bits} bits, {sum(token_bytes(layers, plan.cache_bits)):,} bytes a token:"]
    lines.append(f"{'tokens':>10}{'all of it':>14}{f'{share:.3f} of it':>16}")
    for n in lengths:
        full = _full_bytes(layers, plan.cache_bits, n)
        lines.append(f"{n:>10,}{shown_bytes(full):>14}{shown_bytes(share * full):>16}")
    return lines


def _full_bytes(layers: list[HeadSpans], kv_bits: int, length: int) -> int:
    each = zip(layers, token_bytes(layers, kv_bits), strict=True)
    return sum(min(length, spans.window or length) * size for spans, size in each)
