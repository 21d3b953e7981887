"""The one attention operation: checks a call, picks a backend by name, and never falls back silently."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import Backend
from spanformer.ops.dropout import draw_seed
from spanformer.ops.head_groups import AnyRule, HeadGroups
from spanformer.ops.lower import Lowered, dense, first_lowered, flatten, lower, make_call, split_heads
from spanformer.ops.rule import Rule

log = logging.getLogger("spanformer")

NAMES = ("native", "triton", "flex", "banded", "reference")
AUTO = {
    "cpu": ("native", "banded"),
    "cuda": ("triton", "flex", "banded"),
}  # the first that can serve the call runs it; other devices use banded
_loaded: dict[str, Backend] = {}
_logged: set[str] = set()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AnyRule,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    scale: float | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> Attended:
    """Attention of queries over keys. The rule says which keys each head sees, and a head costs only what it sees.

    q [B, H, Tq, D]; k [B, Hkv, Tk, D]; v [B, Hkv, Tk, Dv]; H a multiple of Hkv. By default queries are the last Tq
    of the keys' positions; to change that, pass q_positions [Tq] or [B, Tq] and k_positions [Tk] or [B, Tk].
    scale multiplies q·k; default 1/√D. dropout drops weights after the softmax; every backend draws the same ones from
    `generator` (default: torch's).
    backend: "auto" (see `choose_backend`) or one of `backends()`.

    Returns out [B, H, Tq, Dv] and lse [B, H, Tq]; a row that sees no key gives zeros and −inf.
    """
    if isinstance(rule, HeadGroups):
        each = [
            attend(
                *some, backend=backend, dropout=dropout, generator=generator, scale=scale, q_positions=q_positions,
                k_positions=k_positions,
            )
            for some in split_heads(q, k, v, rule)
        ]  # fmt: skip
        return Attended(torch.cat([found.out for found in each], 1), torch.cat([found.lse for found in each], 1))
    seed = draw_seed(generator, q.device) if dropout else None
    call = make_call(
        q, k, v, rule, scale=scale, dropout=dropout, seed=seed, q_positions=q_positions, k_positions=k_positions
    )
    if backend == "reference":
        return _pick(whole := dense(call), backend).run(whole)
    return lower(call, lambda part: _pick(part, backend).run(part))


def part_gradients(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, g_out: Tensor, lse: Tensor, spread: Tensor, *, backend: str,
    dropout: float, generator: torch.Generator | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:  # fmt: skip
    """Gradients of q, k, v and the rule's span, for keys that are a part of those in a softmax. lse [B, H, Tq]: of all
    its keys; spread: g_lse − g_out·out. None if the backend computes them only together with `attend`."""
    seed = draw_seed(generator, q.device) if dropout else None
    call = flatten(make_call(q, k, v, rule, scale=scale, dropout=dropout, seed=seed))
    run = _pick(call, backend).part_gradients
    return None if run is None else run(call, g_out, lse, spread)


def backends() -> dict[str, list[str]]:
    """Every backend's name, with the reasons why it cannot run on this machine ([] if it can)."""
    return {name: _backend(name).unusable() for name in NAMES}


def choose_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AnyRule,
    *,
    dropout: float = 0.0,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
) -> str:
    """The backend that backend="auto" chooses for this call; with HeadGroups, the one for the first group."""
    if isinstance(rule, HeadGroups):
        q, k, v, rule = split_heads(q, k, v, rule)[0]
    call = make_call(q, k, v, rule, dropout=dropout, q_positions=q_positions, k_positions=k_positions)
    return _pick(first_lowered(call), "auto").name


def _pick(call: Lowered, name: str) -> Backend:
    if name != "auto":
        if name not in NAMES:
            raise ValueError(f"backend is {name!r}; expected 'auto' or one of {', '.join(NAMES)}")
        chosen = _backend(name)
        reasons = chosen.unusable() or chosen.refuses(call)
        if reasons:
            raise ValueError(f"backend {name!r} cannot serve this call: {'; '.join(reasons)}")
        return chosen
    refused = []
    for candidate in AUTO.get(call.q.device.type, ("banded",)):
        chosen = _backend(candidate)
        reasons = chosen.unusable() or chosen.refuses(call)
        if not reasons:
            if not torch.compiler.is_compiling():
                _log_once(candidate, refused)
            return chosen
        refused.append(f"{candidate}: {'; '.join(reasons)}")
    raise ValueError(
        f"no backend can serve this call ({' | '.join(refused)}); backend='reference' takes any call, at dense cost"
    )


def _backend(name: str) -> Backend:
    if name not in _loaded:  # imported lazily: loading the kernel, triton and FlexAttention takes time
        _loaded[name] = _import(name)
    return _loaded[name]


def _import(name: str) -> Backend:
    """Import statements, because torch.compile can trace those but not importlib."""
    if name == "native":
        from spanformer.ops.backends.native import BACKEND
    elif name == "triton":
        from spanformer.ops.backends.triton import BACKEND
    elif name == "flex":
        from spanformer.ops.backends.flex import BACKEND
    elif name == "banded":
        from spanformer.ops.backends.banded import BACKEND
    else:
        from spanformer.ops.backends.reference import BACKEND
    return BACKEND


def _log_once(name: str, refused: list[str]) -> None:
    line = f"attention runs on {name!r}" + (f" ({' | '.join(refused)})" if refused else "")
    if line not in _logged:
        _logged.add(line)
        log.info(line)
