"""The dense oracle, compared with things written without it: scalar loops over the equations, torch's own attention,
the paper's literal form, finite differences, and the original's conventions."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer import Attended, BlockIndex, Rule, attend, merge
from support.cases import KEYS, LEARNED, TABLE_TERMS, TERMS, Case, Made, make

F64 = torch.float64


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def qkv(b: int = 1, h: int = 2, t: int = 12, d: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return rand(b, h, t, d, seed=seed), rand(b, h, t, d, seed=seed + 1), rand(b, h, t, d, seed=seed + 2)


def reference(q: Tensor, k: Tensor, v: Tensor, rule: Rule, **options) -> Attended:
    return attend(q, k, v, rule, backend="reference", **options)


# --- scalar loops ---------------------------------------------------------------------------------------------------


def mix32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def kept(seed: int, p: float, row: int, i: int, j: int) -> bool:
    base = mix32(seed % 2**32 ^ mix32(seed >> 32 ^ mix32(row)))
    draw = mix32(mix32((base + i) % 2**32) ^ mix32(((base ^ 0x9E3779B9) + j) % 2**32))
    return draw // 256 >= round(p * 2**24)


def in_blocks(blocks: BlockIndex, h: int, i: int, j: int) -> bool:
    head = h if len(blocks.offsets) > 1 else 0
    row, column = i // blocks.size, j // blocks.size
    for n in range(int(blocks.offsets[head, row]), int(blocks.offsets[head, row + 1])):
        if int(blocks.columns[n]) == column:
            mask = int(blocks.mask_ids[n])
            return mask == -1 or bool(blocks.masks[mask, i % blocks.size, j % blocks.size])
    return False


def place(ids, b: int, n: int) -> int:
    return ids[b][n] if isinstance(ids[0], list) else ids[n]


def by_loops(made: Made, seed: int | None = None) -> tuple[list, list]:
    """out and lse as nested lists: Python floats, one pair at a time."""
    c, t, fixed = made.case, {name: x.tolist() for name, x in made.inputs.items()}, made.fixed
    shift = 1 if c.paper_compat else 0
    q_pos = range(c.tk - c.tq, c.tk) if fixed["q_positions"] is None else fixed["q_positions"].tolist()
    k_pos = range(c.tk) if fixed["k_positions"] is None else fixed["k_positions"].tolist()
    outs, lses = [], []
    for b, h, i in itertools.product(range(c.b), range(c.h), range(c.tq)):
        group = h // (c.h // c.hkv)
        numerators, values = [], []
        for j in range(c.tk):
            p_i, p_j = place(q_pos, b, i), place(k_pos, b, j)
            d = p_i - p_j - shift
            if c.causal and d < 0:
                continue
            entry = d + fixed["max_future"] if fixed.get("max_future") else abs(d)
            d = abs(d)
            if "reach" in fixed and d >= fixed["reach"][h]:
                continue
            m = 1.0
            if "span" in t:
                z = t["span"][b][h][i] if made.inputs["span"].ndim == 3 else t["span"][h]
                m = min(max((c.ramp + z - d) / c.ramp, 0.0), 1.0)
            if "key_span" in t:
                e = t["key_span"][b][h % len(t["key_span"][b])][j]
                m *= min(max((c.ramp + e - d) / c.ramp, 0.0), 1.0)
            if "documents" in fixed:
                ids = fixed["documents"]
                if int(ids[b, i + c.tk - c.tq]) != int(ids[b, j]):
                    continue
            if "blocks" in fixed and not in_blocks(fixed["blocks"], h, p_i, p_j):
                continue
            query = t["q"][b][h][i]
            s = sum(x * y for x, y in zip(query, t["k"][b][group][j], strict=True))
            if "distance_vec" in t:
                table = t["distance_vec"][h if len(t["distance_vec"]) > 1 else 0]
                s += sum(x * y for x, y in zip(query, table[entry], strict=True))
            s /= math.sqrt(c.d)
            if "distance_scale" in t:
                s = max(s, 0.0) * t["distance_scale"][h][entry]
            if "distance_bias" in t:
                s += t["distance_bias"][h][entry]
            if "key_bias" in t:
                per_head = len(t["key_bias"][0])
                s += t["key_bias"][b][h // (c.h // per_head)][j]
            if "forget" in t:
                gates = t["forget"][b][h % len(t["forget"][b])]
                s += gates[c.tk - c.tq + i] - gates[j]
            weight = m * math.exp(s)
            if weight > 0:
                stays = 1.0 if not c.dropout else kept(seed, c.dropout, b * c.h + h, i, j) / (1 - c.dropout)
                numerators.append(weight)
                value = t["v"][b][group][j]
                if "distance_value" in t:
                    table = t["distance_value"][h if len(t["distance_value"]) > 1 else 0]
                    at = p_i - p_j - shift + len(table) // 2 if fixed.get("max_future") else d
                    added = table[min(max(at, 0), len(table) - 1)]
                    value = [x + y for x, y in zip(value, added, strict=True)]
                values.append((weight * stays, value))
        total = sum(numerators) + (math.exp(t["sink_logits"][h]) if "sink_logits" in t else 0.0)
        width = c.dv or c.d
        outs.append([sum(w * value[n] for w, value in values) / total if total else 0.0 for n in range(width)])
        lses.append(math.log(total) if total else -math.inf)
    return outs, lses


def check_by_loops(case: Case) -> None:
    made = make(case)
    options = {key: value for key, value in made.fixed.items() if not key.endswith("_positions")}
    rule = Rule(case.h, **options, **{name: made.inputs[name] for name in LEARNED if name in made.inputs})
    places = {key: made.fixed[key] for key in ("q_positions", "k_positions")}
    seed = int(torch.randint(0, 1 << 62, (1,), generator=torch.Generator().manual_seed(7)))
    got = reference(
        *(made.inputs[name] for name in "qkv"),
        rule,
        dropout=case.dropout,
        generator=torch.Generator().manual_seed(7),
        **places,
    )
    out, lse = by_loops(made, seed)
    assert torch.allclose(got.out, torch.tensor(out, dtype=F64).view_as(got.out), rtol=1e-10, atol=1e-12), case.name
    assert torch.allclose(got.lse, torch.tensor(lse, dtype=F64).view_as(got.lse), rtol=1e-10, atol=1e-12), case.name


SMALL = {"b": 2, "h": 4, "hkv": 2, "tq": 7, "tk": 11, "d": 3, "dv": 2, "ramp": 2.5, "spans": (1.3, 4.0, 0.0, 30.0)}
KINDS = ({}, {"causal": False}, {"paper_compat": True})
SIGNED = {"causal": False, "max_future": True}
TABLES = ("distance_bias", "distance_vec", "head_vec", *TABLE_TERMS)


@pytest.mark.parametrize("positions", ["implicit", "shuffled", "rows"])
@pytest.mark.parametrize("term", (*TABLES, "clipped_value"))
def test_signed_tables_equal_scalar_loops(term, positions):
    kind = {"causal": False} if term == "clipped_value" else SIGNED
    check_by_loops(Case(**SMALL, terms=(term,), positions=positions, **kind))
    check_by_loops(Case(**SMALL, terms=(term, "span", "sink_logits"), positions=positions, reach=(3, 0, 20, 1), **kind))


@pytest.mark.parametrize("kind", KINDS, ids=["causal", "both ways", "paper_compat"])
@pytest.mark.parametrize("term", (None, *TERMS, *TABLE_TERMS, *KEYS))
def test_every_term_equals_scalar_loops(term, kind):
    for positions, reach in itertools.product(("implicit", "shuffled", "rows"), (None, (3, 0, 20, 1))):
        terms = () if term is None else (term,)
        check_by_loops(Case(**SMALL, terms=terms, positions=positions, reach=reach, **kind))


def test_combinations_of_terms_equal_scalar_loops():
    draw = random.Random(0)

    def choose(*options):
        return draw.choice(options)

    for seed in range(40):
        terms = (
            choose("span", "dynamic", ""),
            choose("distance_vec", "head_vec", ""),
            choose("key_bias", "padding", ""),
        )
        terms += tuple(
            term
            for term in ("distance_bias", "documents", "sink_logits", "blocks", "key_span", "forget")
            if draw.random() < 0.5
        )
        check_by_loops(
            Case(
                **SMALL,
                terms=tuple(term for term in terms if term),
                positions=choose("implicit", "shuffled", "rows"),
                reach=choose(None, (5,), (3, 0, 20, 1)),
                dropout=choose(0.0, 0.4),
                seed=seed,
                **draw.choice(KINDS),
            )
        )


@pytest.mark.parametrize("sizes", [(1, 1), (1, 9), (5, 5), (3, 0), (0, 4), (9, 5)])
def test_awkward_sizes(sizes):
    tq, tk = sizes
    case = Case(**{**SMALL, "tq": tq, "tk": tk}, terms=("span", "sink_logits", "distance_bias"), causal=tq <= tk)
    check_by_loops(case)


# --- other people's attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hkv", "tq", "tk", "causal"), [(4, 9, 9, True), (4, 5, 9, False), (2, 9, 9, True), (1, 6, 3, False)]
)
def test_empty_rule_equals_torch_attention(hkv, tq, tk, causal):
    q, k, v = rand(2, 4, tq, 8), rand(2, hkv, tk, 8, seed=1), rand(2, hkv, tk, 8, seed=2)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    out, lse = reference(q, k, v, Rule(4, causal=causal))
    assert torch.allclose(out, theirs, atol=1e-12)
    scores = q @ k.repeat_interleave(4 // hkv, 1).transpose(-1, -2) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(tq, tk).triu(1).bool(), -math.inf) if causal else scores
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-12)


def test_scale():
    q, k, v = qkv()
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert torch.allclose(reference(q, k, v, Rule(2), scale=0.3).out, theirs, atol=1e-12)


def test_papers_literal_form():
    """Softmax over the whole context, multiply by the mask, renormalise: same values, same gradients."""
    q, k, v = (t.requires_grad_() for t in qkv(b=2, t=30))
    z = torch.tensor([3.7, 11.2], dtype=F64, requires_grad=True)
    g = rand(2, 2, 30, 4, seed=9)
    ours = reference(q, k, v, Rule(2, span=z, ramp=6.0)).out
    d = torch.arange(30)[:, None] - torch.arange(30)
    a = (q @ k.transpose(-1, -2) / 2).masked_fill(d < 0, -math.inf).softmax(-1)
    a = a * ((6 + z[:, None, None] - d) / 6).clamp(0, 1)
    theirs = (a / a.sum(-1, keepdim=True)) @ v
    assert torch.allclose(ours, theirs, atol=1e-12)
    for mine, other in zip(
        torch.autograd.grad((ours * g).sum(), (q, k, v, z)),
        torch.autograd.grad((theirs * g).sum(), (q, k, v, z)),
        strict=True,
    ):
        assert torch.allclose(mine, other, atol=1e-11)


@pytest.mark.parametrize("spans", [(0.0, 0.0), (2.5, 8.0), (8.0, 1.25)])
def test_originals_conventions(spans):
    """Keys at d = 1 … S, each weighted by clip((R + z − (d − 1))/R, 0, 1); its position table's entry 0 is d = 1."""
    s, r, t = 8, 4.0, 20
    q, k, v = qkv(t=t)
    table, z = rand(s, 4, seed=5), torch.tensor(spans, dtype=F64)
    rule = Rule(2, span=z, ramp=r, reach=[s, s], distance_vec=table[None], paper_compat=True)
    out, lse = reference(q, k, v, rule)
    assert out[:, :, 0].eq(0).all() and lse[:, :, 0].eq(-math.inf).all()  # the first token has nothing before it
    for h, i in itertools.product(range(2), range(1, t)):
        steps = [d for d in range(1, s + 1) if i - d >= 0]
        keys, values = torch.stack([k[0, h, i - d] for d in steps]), torch.stack([v[0, h, i - d] for d in steps])
        positions = torch.stack([table[d - 1] for d in steps])
        a = ((keys @ q[0, h, i] + positions @ q[0, h, i]) / 2).softmax(0)
        a = a * torch.tensor([min(max((r + spans[h] - (d - 1)) / r, 0.0), 1.0) for d in steps], dtype=F64)
        assert torch.allclose(out[0, h, i], (a / a.sum()) @ values, atol=1e-12)


# --- gradients ------------------------------------------------------------------------------------------------------

TINY = {"b": 2, "h": 2, "hkv": 1, "tq": 4, "tk": 5, "d": 2, "ramp": 2.5, "spans": (0.7, 1.9)}


def function_of(made: Made, names: list[str], dropout: float = 0.0):
    options = {key: value for key, value in made.fixed.items() if not key.endswith("_positions")}
    places = {key: made.fixed[key] for key in ("q_positions", "k_positions")}

    def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        t = {**made.inputs, **dict(zip(names, leaves, strict=True))}
        rule = Rule(made.case.h, **options, **{name: t[name] for name in LEARNED if name in t})
        generator = torch.Generator().manual_seed(3)
        out, lse = reference(t["q"], t["k"], t["v"], rule, dropout=dropout, generator=generator, **places)
        return out, torch.where(lse == -math.inf, 0, lse)

    return run


@pytest.mark.parametrize("kind", KINDS, ids=["causal", "both ways", "paper_compat"])
@pytest.mark.parametrize(
    "terms",
    [
        (),
        ("span",),
        ("dynamic", "sink_logits"),
        ("distance_bias", "padding"),
        ("head_vec", "documents"),
        ("span", "distance_bias", "distance_vec", "key_bias", "sink_logits"),
        ("dynamic", "key_bias", "blocks"),
        ("span", "distance_bias", "distance_vec", "distance_scale", "distance_value"),
    ],
    ids="+".join,
)
def test_gradcheck(terms, kind):
    made = make(Case(**TINY, terms=terms, **kind))
    names = [name for name in made.inputs if not (name == "key_bias" and "padding" in terms)]  # −inf has no difference
    leaves = [made.inputs[name].requires_grad_() for name in names]
    assert torch.autograd.gradcheck(function_of(made, names), leaves)


def test_gradcheck_with_dropout():
    made = make(Case(**TINY, terms=("span", "sink_logits")))
    leaves = [t.requires_grad_() for t in made.inputs.values()]
    assert torch.autograd.gradcheck(function_of(made, list(made.inputs), dropout=0.4), leaves)


def test_gradgradcheck():
    terms = ("span", "distance_bias", "distance_vec", "key_bias", "sink_logits")
    made = make(Case(**{**TINY, "b": 1, "tq": 3, "tk": 3}, terms=terms))
    leaves = [t.requires_grad_() for t in made.inputs.values()]
    assert torch.autograd.gradgradcheck(function_of(made, list(made.inputs)), leaves)


def test_whole_number_span_has_its_gradient_strictly_inside_the_ramp():
    """At d = z (m just reached 1) and d = z + R (m just reached 0) the mask has an edge; neither side counts."""
    q, k, v = qkv(h=1, t=12)
    g = rand(1, 1, 12, 4, seed=9)
    z = torch.tensor([3.0], dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad((reference(q, k, v, Rule(1, span=z, ramp=4.0)).out * g).sum(), z)
    d = torch.arange(12)[:, None] - torch.arange(12)
    m = ((4 + 3.0 - d) / 4).clamp(0, 1) * (d >= 0)
    a = m * (q @ k.transpose(-1, -2) / 2).exp()[0, 0]
    a = a / a.sum(-1, keepdim=True)
    ds = a * (g[0, 0] @ v[0, 0].T - (g[0, 0] * (a @ v[0, 0])).sum(-1, keepdim=True))  # softmax's own gradient
    on_ramp = (d > 3) & (d < 7)
    by_hand = (ds / m.clamp(min=1e-9) / 4)[on_ramp].sum()  # d log m / dz = 1 / (m·R)
    assert torch.allclose(grad[0], by_hand, atol=1e-12)
    (none,) = torch.autograd.grad((reference(q, k, v, Rule(1, span=z, ramp=1.0)).out * g).sum(), z)
    assert none.item() == 0  # a ramp of one token has no whole distance strictly inside


def test_infinite_and_zero_spans():
    q, k, v = qkv()
    z = torch.tensor([math.inf, 0.0], dtype=F64, requires_grad=True)
    out, _ = reference(q, k, v, Rule(2, span=z, ramp=1.0))
    plain, _ = reference(q, k, v, Rule(2))
    assert torch.allclose(out[:, 0], plain[:, 0], atol=1e-12) and torch.allclose(out[:, 1], v[:, 1], atol=1e-12)
    out.sum().backward()
    assert z.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_does_not_change_the_reach(dtype):
    """Distances and spans are geometry, not data: half a float's digits must not move the edge of a span."""
    rule = Rule(1, span=torch.tensor([2301.0]), ramp=8.0)
    q, k = torch.zeros(1, 1, 1, 2, dtype=dtype), torch.zeros(1, 1, 2500, 2, dtype=dtype)
    v = torch.zeros(1, 1, 2500, 2)
    v[..., 0] = torch.arange(2500, 0, -1) >= 2310  # distances 2309 and beyond: none of them seen
    v[..., 1] = torch.arange(2500, 0, -1) == 2309  # distance 2308, at m = 1/8
    out = attend(q, k, v.to(dtype), rule, backend="reference").out[0, 0, 0]
    assert out.dtype == dtype and out[0] == 0 and out[1] > 0


# --- what must not be seen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize(
    "terms", [(), ("span", "distance_bias", "key_bias", "sink_logits"), ("dynamic", "distance_vec")]
)
def test_future_keys_have_no_effect(terms, original):
    made = make(Case(b=2, tq=12, tk=12, d=4, ramp=3.0, terms=terms, paper_compat=original))
    run = function_of(made, ["k", "v"])
    out, lse = run(made.inputs["k"], made.inputs["v"])
    for t in range(12):
        k, v = made.inputs["k"].clone(), made.inputs["v"].clone()
        k[:, :, t:] += 3.0
        v[:, :, t:] -= 5.0
        again, lse_again = run(k, v)
        first = t + 1 if original else t  # the original's token does not even see itself
        assert torch.equal(out[:, :, :first], again[:, :, :first]) and torch.equal(
            lse[:, :, :first], lse_again[:, :, :first]
        )
        if first < 12:
            assert not torch.equal(out[:, :, first], again[:, :, first])


def hidden_by(how: str, t: int, j: int) -> tuple[dict, Tensor]:
    """Rule options, and which rows [t] still see key j."""
    i = torch.arange(t)
    if how == "reach":
        return {"reach": 3}, (i >= j) & (i < j + 3)
    if how == "span":
        return {"span": torch.tensor([1.5, 1.5], dtype=F64), "ramp": 2.0}, (i >= j) & (i < j + 3.5)
    if how == "documents":
        return {"documents": (i >= 7).long()}, (i >= j) & (i < 7)
    if how == "padding":
        bias = torch.zeros(1, 1, t, dtype=F64)
        bias[..., j] = -math.inf
        return {"key_bias": bias}, i < 0
    mask = torch.ones(t, t, dtype=torch.bool)
    mask[::2, j] = mask[5::2, :3] = False  # rows that see key j see none of the first three
    return {"blocks": BlockIndex.from_dense(mask, 8)}, (i >= j) & (i % 2 == 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("how", ["reach", "span", "documents", "padding", "blocks"])
def test_nan_in_a_key_reaches_only_rows_that_see_it(how, which, bad):
    """Gradients too: those of clean rows' queries, and of keys and values that no spoilt row sees."""
    t, j = 12, 4
    options, sees = hidden_by(how, t, j)
    clean = dict(zip("qkv", qkv(t=t), strict=True))
    table = rand(1, t, 4, seed=5)
    weights = reference(clean["q"], clean["k"], torch.eye(t, dtype=F64).expand(1, 2, t, t), Rule(2, **options)).out
    assert torch.equal(weights[0, 0, :, j] > 0, sees)
    untouched = {"q": ~sees, "k": ~(weights[0, 0][sees] > 0).any(0)}
    untouched["v"] = untouched["k"]
    spoilt = {name: x.clone() for name, x in clean.items()}
    spoilt[which][:, :, j] = bad
    results = []
    for tensors in (clean, spoilt):
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        rule = Rule(2, distance_vec=table, **options)
        out, lse = reference(*leaves.values(), rule, dropout=0.2, generator=torch.Generator())
        loss = (out[:, :, ~sees] ** 2).sum() + lse[:, :, ~sees].sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        results.append({"out": out, "lse": lse, **dict(zip(leaves, grads, strict=True))})
    wanted, got = results
    for name in wanted:
        rows = untouched.get(name, ~sees)
        assert torch.allclose(wanted[name][:, :, rows], got[name][:, :, rows], atol=1e-11), name
        assert wanted[name][:, :, rows].isfinite().all() and rows.any()
    if math.isnan(bad) and which == "k":
        assert got["lse"][:, :, sees].isnan().all()  # and it is not hidden from those that do see it


@pytest.mark.parametrize("sinks", [False, True])
def test_row_that_sees_nothing_gives_zeros_and_no_gradient(sinks):
    t = 8
    q, k, v = (x.requires_grad_() for x in qkv(t=t))
    learned = {
        "span": torch.tensor([1.5, 3.5], dtype=F64, requires_grad=True),
        "distance_bias": rand(2, t, seed=4).requires_grad_(),
        "distance_vec": rand(1, t, 4, seed=5).requires_grad_(),
        "key_bias": torch.full((1, 1, t), -math.inf, dtype=F64, requires_grad=True),
    }
    if sinks:
        learned["sink_logits"] = rand(2, seed=6).requires_grad_()
    out, lse = reference(q, k, v, Rule(2, ramp=2.0, **learned))
    assert out.eq(0).all()
    if sinks:
        assert torch.allclose(lse, learned["sink_logits"][None, :, None].expand_as(lse))
    else:
        assert lse.eq(-math.inf).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v, *learned.values()), allow_unused=True):
        assert grad is None or grad.eq(0).all()


def test_reach_zero_hides_everything_from_a_head():
    out, lse = reference(*qkv(), Rule(2, reach=[0, 1]))
    assert out[:, 0].eq(0).all() and lse[:, 0].eq(-math.inf).all()
    assert torch.allclose(out[:, 1], qkv()[2][:, 1], atol=1e-12)  # reach 1 is the token itself


# --- merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(5,), (1, 11), (4, 4, 9)])
def test_merging_split_keys_equals_the_whole_with_gradients(cuts):
    t = 12
    leaves = [x.requires_grad_() for x in qkv(b=2, t=t)]
    q, k, v = leaves
    z = torch.tensor([2.6, 6.3], dtype=F64, requires_grad=True)
    sinks = rand(2, seed=6).requires_grad_()
    g, g_lse = rand(2, 2, t, 4, seed=7), rand(2, 2, t, seed=8)
    at = torch.arange(t)
    rule = Rule(2, span=z, ramp=3.0)
    whole = reference(q, k, v, rule + Rule(2, sink_logits=sinks))
    edges, parts = [0, *cuts, t], []
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        part = rule + Rule(2, sink_logits=sinks) if n == 0 else rule  # the sink is one more key: in one part only
        parts.append(reference(q, k[:, :, a:b], v[:, :, a:b], part, q_positions=at, k_positions=at[a:b]))
    joined = merge(parts)
    assert torch.allclose(joined.out, whole.out, atol=1e-12) and torch.allclose(joined.lse, whole.lse, atol=1e-12)
    losses = [(x.out * g).sum() + (x.lse * g_lse).sum() for x in (joined, whole)]
    for a, b in zip(*(torch.autograd.grad(loss, (*leaves, z, sinks)) for loss in losses), strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def test_merging_rows_that_saw_nothing():
    q, k, v = (x.requires_grad_() for x in qkv())
    nothing, plain = reference(q, k, v, Rule(2, reach=0)), reference(q, k, v, Rule(2))
    for parts in ([nothing, plain], [plain, nothing], [plain]):
        joined = merge(parts)
        assert torch.allclose(joined.out, plain.out) and torch.allclose(joined.lse, plain.lse)
    both = merge([nothing, nothing])
    assert both.out.eq(0).all() and both.lse.eq(-math.inf).all()
    joined = merge([nothing, plain])
    for grad in torch.autograd.grad(joined.out.sum() + joined.lse.sum() + both.out.sum(), (q, k, v)):
        assert grad.isfinite().all()


def test_merge_of_no_parts():
    with pytest.raises(ValueError, match="merge was given no parts; expected at least one Attended"):
        merge([])


def test_merge_of_parts_that_do_not_fit():
    whole, shorter = reference(*qkv(), Rule(2)), reference(*qkv(t=5), Rule(2))
    with pytest.raises(
        ValueError, match=r"parts\[1\] has out \[1, 2, 5, 4\] and lse \[1, 2, 5\]; expected \[1, 2, 12, 4\]"
    ):
        merge([whole, shorter])
    with pytest.raises(ValueError, match=r"parts\[0\] has out .* and lse \[1, 2, 12, 4\]; .* and \[1, 2, 12\]"):
        merge([Attended(whole.out, whole.out)])


def test_merge_gradcheck():
    out, lse = [rand(1, 1, 3, 2, seed=n).requires_grad_() for n in range(2)], [rand(1, 1, 3, seed=n) for n in (5, 6)]
    lse = [x.requires_grad_() for x in lse]

    def run(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        return tuple(merge([Attended(a, c), Attended(b, d)]))

    assert torch.autograd.gradcheck(run, (*out, *lse)) and torch.autograd.gradgradcheck(run, (*out, *lse))
