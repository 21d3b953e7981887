"""Random rings of keys and values, against dense attention over the same keys in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer import Rings, Rule, attend
from spanformer.ops.decode.codes import CODES, SCALES, Bits, code_bytes, encode, scales_shape, slot_first
from spanformer.ops.decode.rings import Decoder
from support.cases import differences
from support.rounded import rounded

POSITIONS = 310


@dataclass
class RingCase:
    """Some steps of decoding."""

    b: int = 1
    hkv: int = 1
    group: int = 1
    d: int = 16
    dv: int = 16
    reach: tuple[int, ...] = (7,)  # by key/value head
    spare: int = 0  # slots beyond what the reach needs
    sink_tokens: int = 0
    newest: tuple[int, ...] = (40,)  # by row, before the first step
    terms: tuple[str, ...] = ()
    bits: Bits = 0  # 8 or 4: keys and values have scales
    paper_compat: bool = False
    ramp: float = 8.0
    steps: int = 1
    seed: int = 0


def check_rings(case: RingCase, backend: str, dtype: torch.dtype) -> None:
    """Raise if a step of decoding is further from the truth than a dense run in its own dtype allows."""
    c, g = case, torch.Generator().manual_seed(case.seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double()  # noqa: E731
    h, rows = c.hkv * c.group, (rand(c.b, c.hkv, POSITIONS, c.d), rand(c.b, c.hkv, POSITIONS, c.dv))
    learned = _terms(c, rand)
    rings = _rings(c, dtype)
    for position in range(max(rings.newest.tolist()) + 1):
        _write(rings, rows, position)
    fixed = {"reach": [r for r in c.reach for _ in range(c.group)], "sink_tokens": c.sink_tokens}
    fixed |= {"paper_compat": c.paper_compat, "ramp": c.ramp}
    decoder = None
    for _ in range(c.steps):
        q = rand(c.b, h, 1, c.d)
        rings.newest.add_(1)
        if decoder is None:
            decoder = Decoder(q.to(dtype), rings, _rule(h, fixed, learned, dtype), backend=backend)
        at = rings.newest[:, None, None, None]
        new = [t.gather(2, at.expand(-1, c.hkv, 1, t.shape[3])).to(dtype) for t in rows]
        with torch.no_grad():
            got = decoder.attend(q.to(dtype), (new[0], new[1]))
        truth, dense = (_dense(c, q, rows, rings, fixed, learned, kind) for kind in (torch.float64, dtype))
        # a row may see one key, and lse is its score: a sum of d products of about 1 / √d each, rounded as such even
        # where they cancel
        wrong = differences(truth, dense, _result(got), dtype, floors={"lse": c.d**0.5})
        assert not wrong, f"{backend} {dtype}: " + "; ".join(wrong)


def _terms(c: RingCase, rand) -> dict[str, Tensor]:
    h, most, found = c.hkv * c.group, max(c.reach), {}
    if "span" in c.terms:
        found["span"] = rand(h).abs() * 20
    if "dynamic" in c.terms:
        found["span"] = rand(c.b, h, 1).abs() * 20
    if "bias" in c.terms:
        found["distance_bias"] = rand(h, most)
    if "vec" in c.terms or "head_vec" in c.terms:
        found["distance_vec"] = rand(1 if "vec" in c.terms else h, most, c.d)
    if "sink_logits" in c.terms:
        found["sink_logits"] = rand(h)
    return found


def _rule(h: int, fixed: dict, learned: dict[str, Tensor], dtype: torch.dtype) -> Rule:
    return Rule(h, **fixed, **{name: t.to(dtype) for name, t in learned.items()})


def _rings(c: RingCase, dtype: torch.dtype) -> Rings:
    """Full of NaN, or of the largest code: what was never written must not be read."""
    capacity = torch.tensor([r + c.paper_compat + c.spare for r in c.reach])
    slots = int(capacity.sum()) + c.sink_tokens * c.hkv
    newest = torch.tensor([c.newest[row % len(c.newest)] for row in range(c.b)])
    sizes = (c.d, c.dv)
    if not c.bits:
        keys, values = (torch.full((c.b, slots, size), torch.nan, dtype=dtype) for size in sizes)
        return Rings(keys, values, capacity, newest, c.sink_tokens)
    keys, values = (torch.full((c.b, slots, code_bytes(size, c.bits)), 127, dtype=CODES[c.bits]) for size in sizes)
    scales = [torch.full(scales_shape(c.b, slots, size, c.bits), torch.nan, dtype=SCALES[c.bits]) for size in sizes]
    return Rings(keys, values, capacity, newest, c.sink_tokens, scales=(scales[0], scales[1]), sizes=sizes)


def _write(rings: Rings, rows: tuple[Tensor, Tensor], p: int) -> None:
    """Keys and values of position p into the rows that have come that far."""
    for b, newest in enumerate(rings.newest.tolist()):
        if p > newest:
            continue
        for g, capacity in enumerate(rings.capacities):
            slot = int(rings.first[g]) + (p - rings.sink_tokens if p < rings.sink_tokens else p % capacity)
            for kind, (held, given) in enumerate(zip((rings.keys, rings.values), rows, strict=True)):
                if rings.scales is None or not rings.bits:
                    held[b, slot] = given[b, g, p]
                else:
                    codes, scales = encode(given[b, g, p], rings.bits, kind)
                    held[b, slot], slot_first(rings.scales[kind])[b, slot] = codes, scales


def _dense(
    c: RingCase, q: Tensor, rows: tuple[Tensor, Tensor], rings: Rings, fixed: dict, learned: dict, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Row by row, over all positions up to the newest."""
    if c.bits:
        rows = tuple(rounded(x, c.bits, kind) for kind, x in enumerate(rows))  # pyright: ignore
    found = []
    for b, newest in enumerate(rings.newest.tolist()):
        own = {name: t[b : b + 1] if name == "span" and t.ndim == 3 else t for name, t in learned.items()}
        k, v = (t[b : b + 1, :, : newest + 1].to(dtype) for t in rows)
        rule = _rule(q.shape[1], fixed, own, dtype)
        positions = {"q_positions": torch.tensor([newest]), "k_positions": torch.arange(newest + 1)}
        found.append(_result(attend(q[b : b + 1].to(dtype), k, v, rule, backend="reference", **positions)))
    return {name: torch.cat([row[name] for row in found]) for name in found[0]}


def _result(found) -> dict[str, Tensor]:
    lse = found.lse.double()
    return {"out": found.out.double(), "lse": torch.where(lse == -torch.inf, -1.0, lse)}
