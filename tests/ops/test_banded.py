"""The banded backend against the float64 oracle, and its own promises: memory, causality, NaN only where it is seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spanformer import BlockIndex, Rule, attend
from spanformer.ops.backends import banded
from spanformer.ops.backends.banded_plan import block_visible, make_plan
from spanformer.ops.lower import flatten, make_call
from support.cases import Case, check, make, run

TERMS = (
    "span", "dynamic", "distance_bias", "distance_vec", "head_vec", "key_bias", "padding", "documents", "sink_logits",
    "blocks", "key_span", "head_key_span",
)  # fmt: skip
EVERY = ("distance_bias", "documents", "sink_logits")  # go with anything
SIZES = (1, 15, 16, 17, 63, 111, 129)
KINDS = ("implicit", "shuffled", "rows")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Many small tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def named(cases: list[Case]) -> list:
    return [pytest.param(case, id=case.name.replace(" ", ",")) for case in cases]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("term", ("plain", *TERMS))
def test_each_term_alone(term: str, size: int) -> None:
    terms = () if term == "plain" else (term,)
    check(Case(tq=size, tk=size, terms=terms), "banded")
    check(Case(tq=size, tk=size, terms=terms, causal=False, reach=(11, 70)), "banded")


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("term", ("plain", *TERMS))
def test_each_term_with_grouped_heads_fewer_queries_and_positions(term: str, positions: str) -> None:
    terms = () if term == "plain" else (term,)
    common = {"b": 2, "h": 4, "hkv": 2, "tq": 70, "tk": 131, "terms": terms, "positions": positions}
    check(Case(**common, reach=(7, 100, 1000, 0)), "banded")
    check(Case(**common, causal=False, dv=8), "banded")


@pytest.mark.parametrize(
    "case",
    named([
        Case(tq=500, tk=500, terms=("span", "distance_bias", "sink_logits")),
        Case(tq=500, tk=500, h=4, reach=(3, 64, 65, 200)),
        Case(tq=500, tk=500, h=4, hkv=1, reach=(300, 40, 40, 300), terms=("distance_vec", "padding")),
        Case(tq=500, tk=500, terms=("dynamic", "head_vec", "documents"), positions="rows", b=2),
        Case(tq=500, tk=500, terms=("blocks", "span"), causal=False),
        Case(b=2, tq=111, tk=129, h=4, terms=("span", *EVERY, "distance_vec", "key_bias", "blocks")),
        Case(b=2, tq=111, tk=129, terms=("dynamic", *EVERY, "head_vec", "padding"), reach=(40, 9)),
        Case(b=2, tq=63, tk=111, terms=("span", *EVERY, "head_vec", "key_bias"), causal=False, positions="shuffled"),
        Case(tq=500, tk=500, h=3, hkv=3, terms=("head_key_span", "sink_logits"), spans=(400.0,)),
        Case(b=2, tq=300, tk=500, terms=("key_span", "span", "blocks"), spans=(400.0,), positions="rows"),
        Case(b=2, tq=200, tk=300, terms=("key_span", "distance_vec"), spans=(90.0,), causal=False),
        Case(b=2, tq=200, tk=300, terms=("key_span", "sink_logits", "key_bias"), spans=(90.0,), sink_tokens=3,
        dropout=0.2), Case(tq=129, tk=129, terms=("span",), ramp=1.0),
        Case(tq=129, tk=129, terms=("span",), spans=(0.0, 20.0)),
        Case(tq=129, tk=129, terms=("span",), spans=(0.25, 63.5)),
        Case(tq=129, tk=129, terms=("span",), spans=(500.0, 1e7)),
        Case(tq=129, tk=129, terms=("dynamic",), ramp=1.0, causal=False),
        Case(tq=129, tk=129, reach=(0, 1)),
        Case(tq=129, tk=129, reach=(0, 1), causal=False, terms=("sink_logits", "span")),
        Case(tq=129, tk=129, reach=(0, 0), terms=("sink_logits", "distance_bias", "head_vec")),
        Case(tq=129, tk=129, logits=9.0),
        Case(tq=129, tk=129, logits=9.0, terms=("span", "distance_vec"), spans=(5.0, 31.5)),
        Case(b=3, tq=63, tk=63, terms=("padding", "span")),
        Case(b=3, tq=63, tk=63, terms=("padding", "distance_bias", "head_vec", "key_bias"), reach=(5, 9)),
        Case(tq=111, tk=129, paper_compat=True, terms=("span", "distance_vec", "distance_bias")),
        Case(b=2, tq=111, tk=129, paper_compat=True, terms=("dynamic", "head_vec"), reach=(40, 9), positions="rows"),
        Case(tq=111, tk=129, paper_compat=True, reach=(1, 70)),
        Case(tq=129, tk=63, causal=False, terms=("distance_bias", "head_vec"), reach=(20, 90)),
        Case(tq=1, tk=500, h=4, reach=(7, 100, 1000, 0), terms=("distance_vec", "key_bias")),
    ]),
)  # fmt: skip
def test_combinations(case: Case) -> None:
    check(case, "banded")


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("terms", [(), ("span", "distance_bias"), ("blocks", "sink_logits")])
def test_dropout_drops_the_same_weights(terms: tuple[str, ...], positions: str) -> None:
    check(Case(b=2, h=4, hkv=2, tq=129, tk=200, terms=terms, dropout=0.3, reach=(9, 80), positions=positions), "banded")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "case",
    named([
        Case(tq=63, tk=63),
        Case(b=2, h=4, hkv=2, tq=111, tk=129, terms=("span", "distance_bias", "distance_vec", "sink_logits"),
        layout="bthd"), Case(b=2, h=4, hkv=2, tq=111, tk=129, terms=("dynamic", "key_bias", "blocks"), reach=(50, 9),
        layout="bthd"), Case(b=2, tq=111, tk=129, terms=("span", "head_vec", "padding"), causal=False,
        positions="rows", dropout=0.2),
    ]),
)  # fmt: skip
def test_dtypes_and_layouts(case: Case, dtype: torch.dtype) -> None:
    check(case, "banded", dtype)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_key_bias_of_every_shape(heads: int, rows: int) -> None:
    case = Case(b=2, h=4, hkv=2, tq=90, tk=100, terms=("key_bias",), reach=(20, 70))
    made = make(case)
    made.inputs["key_bias"] = torch.randn(rows, heads, 100, dtype=torch.float64)
    made.inputs["key_bias"][:, :, 40:60] = -torch.inf
    truth, got = run(made, "reference", torch.float64), run(made, "banded", torch.float64)
    for name in truth:
        torch.testing.assert_close(got[name], truth[name], msg=name)


CASES = st.builds(
    Case,
    b=st.integers(1, 2),
    h=st.just(4),
    hkv=st.sampled_from([1, 2, 4]),
    tq=st.integers(1, 140),
    d=st.sampled_from([1, 8]),
    dv=st.sampled_from([None, 3]),
    terms=st.lists(st.sampled_from(TERMS), max_size=4, unique=True).filter(lambda t: not {"span", "dynamic"} <= set(t)),
    causal=st.booleans(),
    ramp=st.sampled_from([1.0, 8.0, 40.0]),
    spans=st.lists(st.sampled_from([0.0, 0.5, 7.0, 33.3, 90.0, 1e4]), min_size=1, max_size=4).map(tuple),
    reach=st.none() | st.lists(st.integers(0, 150), min_size=1, max_size=4).map(tuple),
    dropout=st.sampled_from([0.0, 0.0, 0.4]),
    positions=st.sampled_from(KINDS),
    layout=st.sampled_from(["bhtd", "bthd"]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=CASES, more=st.integers(0, 60), paper_compat=st.booleans())
def test_any_case(case: Case, more: int, paper_compat: bool) -> None:
    case.tk = case.tq + more
    case.paper_compat = paper_compat and case.causal
    check(case, "banded")


def test_consecutive_positions_are_planned_as_default() -> None:
    q, k = torch.randn(2, 2, 200, 8), torch.randn(2, 2, 300, 8)
    at = torch.arange(300) + torch.tensor([[1000], [-70]])
    rule = Rule(2, reach=[20, 50], distance_bias=torch.randn(2, 300))
    regular = make_plan(flatten(make_call(q, k, k, rule, q_positions=at[:, 100:], k_positions=at)))
    assert regular.offset == 100
    moved = make_plan(
        flatten(make_call(q, k, k, rule, q_positions=at[:, 100:] + torch.tensor([[0], [1]]), k_positions=at))
    )
    assert moved.offset is None
    out = attend(q, k, k, rule, backend="banded", q_positions=at[:, 100:], k_positions=at)
    torch.testing.assert_close(out, attend(q, k, k, rule, backend="reference"))


def test_any_integers_are_valid_positions() -> None:
    g = torch.Generator().manual_seed(0)
    made = make(Case(b=2, tq=90, tk=110, terms=("span",), reach=(30, 500)))
    made.fixed["q_positions"] = torch.randint(-400, 400, (2, 90), generator=g)
    for keys in (
        torch.randint(-400, 400, (2, 110), generator=g),
        torch.randint(-99, 99, (110,), generator=g).sort().values,
    ):
        made.fixed["k_positions"] = keys
        for causal in (True, False):
            made.fixed["causal"] = causal
            truth, got = run(made, "reference", torch.float64), run(made, "banded", torch.float64)
            for name in truth:
                torch.testing.assert_close(got[name], truth[name], msg=f"{name}, causal={causal}")


def test_no_queries_and_no_keys() -> None:
    q, k = torch.randn(2, 2, 5, 4, requires_grad=True), torch.randn(2, 2, 0, 4)
    sinks = torch.tensor([1.0, 2.0], requires_grad=True)
    out, lse = attend(q, k, k, Rule(2, causal=False, sink_logits=sinks), backend="banded")
    assert out.shape == q.shape and not out.any()
    torch.testing.assert_close(lse, sinks.detach()[:, None].expand(2, 2, 5))
    lse.sum().backward()
    torch.testing.assert_close(sinks.grad, torch.full((2,), 10.0))
    out, lse = attend(q, k, k, Rule(2, causal=False), backend="banded")
    assert not out.any() and bool((lse == -torch.inf).all())
    out, lse = attend(q[:, :, :0], q, q, Rule(2), backend="banded")
    assert out.shape == (2, 2, 0, 4) and lse.shape == (2, 2, 0)


@pytest.mark.parametrize("which", ["out", "lse"])
def test_gradients_of_one_output_alone(which: str) -> None:
    made = make(Case(tq=90, tk=90, terms=("span", "distance_bias", "head_vec", "key_bias", "sink_logits")))
    (made.g_lse if which == "out" else made.g_out).zero_()
    truth = run(made, "reference", torch.float64)
    leaves = {name: t.detach().clone().requires_grad_() for name, t in made.inputs.items()}
    rule = Rule(2, ramp=8.0, **{name: t for name, t in leaves.items() if name not in "qkv"})
    result = attend(leaves["q"], leaves["k"], leaves["v"], rule, backend="banded")
    part, g = (result.out, made.g_out) if which == "out" else (result.lse, made.g_lse)
    (part * g).sum().backward(retain_graph=True)
    for name, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, truth["d" + name], msg=name)
    (part * g).sum().backward()  # a second time, from the same graph
    torch.testing.assert_close(leaves["q"].grad, 2 * truth["dq"])


def test_only_the_gradients_asked_for() -> None:
    made = make(Case(tq=90, tk=90, terms=("span", "head_vec", "sink_logits", "key_bias", "distance_bias")))
    truth = run(made, "reference", torch.float64)
    for name in made.inputs:
        leaves = {n: t.detach().clone().requires_grad_(n == name) for n, t in made.inputs.items()}
        rule = Rule(2, ramp=8.0, **{n: t for n, t in leaves.items() if n not in "qkv"})
        out, lse = attend(leaves["q"], leaves["k"], leaves["v"], rule, backend="banded")
        ((out * made.g_out).sum() + (lse * made.g_lse).sum()).backward()
        torch.testing.assert_close(leaves[name].grad, truth["d" + name], msg=name)


def test_rows_that_see_nothing_give_zeros() -> None:
    made = make(Case(b=1, tq=70, tk=70, terms=("padding",)))
    made.inputs["key_bias"][:, :, :] = -torch.inf
    got = run(made, "banded", torch.float32)
    for name, t in got.items():
        assert not t.any() if name != "lse" else bool((t == -1).all()), name


def test_future_keys_have_no_effect() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 300, 16, generator=g) for _ in range(3))
    rule = Rule(4, span=torch.tensor([3.0, 50.5, 130.0, 400.0]), distance_bias=torch.randn(4, 300, generator=g))
    before = attend(q, k, v, rule, backend="banded")
    for cut in (1, 64, 127, 200):
        changed = [torch.cat([t[:, :, :cut], torch.randn(1, 4, 300 - cut, 16, generator=g) * 50], 2) for t in (q, k, v)]
        after = attend(*changed, rule, backend="banded")
        torch.testing.assert_close(after.out[:, :, :cut], before.out[:, :, :cut], rtol=0, atol=0)
        torch.testing.assert_close(after.lse[:, :, :cut], before.lse[:, :, :cut], rtol=0, atol=0)


def span_of(*ranges: tuple[int, int, int], heads: int, length: int = 150) -> torch.Tensor:
    """[1, heads, length], True for (head, first, last) ranges."""
    marked = torch.zeros(1, heads, length, dtype=torch.bool)
    for head, first, last in ranges:
        marked[0, head, first : last + 1] = True
    return marked


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v", "g_out", "g_lse"])
@pytest.mark.parametrize("terms", [(), ("distance_vec", "sink_logits"), ("blocks", "dynamic")])
def test_nan_spreads_only_where_it_is_seen(terms: tuple[str, ...], where: str, value: float) -> None:
    """Token 70 of the first head goes bad. Elsewhere, every number is what it was before."""
    made = make(Case(h=4, hkv=2, tq=150, tk=150, d=4, terms=terms, reach=(20, 9, 140, 20), spans=(9.0,)))
    if "blocks" in terms:
        made.fixed["blocks"] = BlockIndex.from_dense(torch.ones(1, 150, 150, dtype=torch.bool), 16)
        made.inputs["span"].fill_(500.0)
    before = run(made, "banded", torch.float64)
    target = (getattr(made, where) if where.startswith("g_") else made.inputs[where]).detach()
    target[0, 0, 70] = value
    after = run(made, "banded", torch.float64)
    queries = span_of((0, 70, 89), (1, 70, 78), heads=4) if where in "kv" else span_of((0, 70, 70), heads=4)
    keys = span_of((0, 51, 89), heads=2) if where in "kv" else span_of((0, 51, 70), heads=2)
    none_q, none_k = torch.zeros_like(queries), torch.zeros_like(keys)
    bad = {
        "out": queries if where in "qkv" else none_q,
        "lse": queries if where in "qk" else none_q,
        "dq": queries,
        "dk": keys,
        "dv": keys if where in ("q", "k", "g_out") else none_k,
        "dspan": none_q,  # no ramp is in sight
        "ddistance_vec": (torch.arange(150) < 20)[None],  # the distances that a bad row reads
        "dsink_logits": queries.any(-1)[0],
    }
    for name, got in after.items():
        found = ~(got.isfinite().all(-1) if got.ndim > 3 or name == "ddistance_vec" else got.isfinite())
        assert torch.equal(found, bad[name]), name
        torch.testing.assert_close(got[~found], before[name][~found], msg=name)


@pytest.mark.parametrize("positions", KINDS)
def test_nan_in_a_table_spreads_only_where_it_is_read(positions: str) -> None:
    made = make(
        Case(b=2, tq=150, tk=150, d=4, terms=("distance_vec", "distance_bias"), reach=(20, 9), positions=positions)
    )
    before = run(made, "banded", torch.float64)
    made.inputs["distance_vec"].detach()[:, 15] = torch.nan
    made.inputs["distance_bias"].detach()[:, 25] = torch.nan
    after = run(made, "banded", torch.float64)
    implicit = torch.arange(150)
    q_pos, k_pos = (
        (implicit if t is None else t).expand(2, 150) for t in (made.fixed["q_positions"], made.fixed["k_positions"])
    )
    reads = (q_pos[:, :, None] - k_pos[:, None] == 15).any(-1)  # and the first head reaches 20
    for name in ("out", "dq"):
        assert torch.equal(~after[name][:, 0].isfinite().all(-1), reads), name
        torch.testing.assert_close(after[name][:, 0][~reads], before[name][:, 0][~reads])
        torch.testing.assert_close(after[name][:, 1], before[name][:, 1])
    torch.testing.assert_close(after["dv"][:, 1], before["dv"][:, 1])


class Sizes(TorchDispatchMode):
    """The largest storage any operation returned, in elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


def big_bird(length: int, size: int, heads: int) -> BlockIndex:
    """Neighbours, the first block and two random ones: never a mask of length × length."""
    g = torch.Generator().manual_seed(0)
    rows, offsets, columns = length // size, [], []
    for _ in range(heads):
        starts = [len(columns)]
        for r in range(rows):
            seen = {0, max(0, r - 1), r, *torch.randint(0, rows, (2,), generator=g).tolist()}
            columns += sorted(range(rows) if r == 0 else seen)
            starts.append(len(columns))
        offsets.append(starts)
    none = torch.zeros(0, size, size, dtype=torch.bool)
    return BlockIndex(size, torch.tensor(offsets), torch.tensor(columns), torch.full((len(columns),), -1), none)


@pytest.mark.parametrize("kind", ["span", "reach", "dynamic", "unlimited", "positions", "shuffled", "blocks"])
def test_memory_never_holds_all_pairs(kind: str) -> None:
    length, heads = 1024 if kind == "shuffled" else 2048, 4
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 16, generator=g).requires_grad_() for _ in range(3))
    bias, vec = torch.randn(heads, length, generator=g), torch.randn(1, length, 16, generator=g)
    terms: dict = {"distance_bias": bias.requires_grad_(), "distance_vec": vec.requires_grad_()}
    positions: dict = {}
    bound = length * length // 3
    if kind == "span":
        terms |= {"span": torch.tensor([0.0, 20.5, 60.0, 200.0], requires_grad=True)}
    elif kind == "dynamic":
        terms |= {"span": (torch.rand(1, heads, length, generator=g) * 100).requires_grad_()}
    elif kind == "reach":
        terms |= {"reach": [1, 64, 100, 500]}
    elif kind == "blocks":
        terms = {"blocks": big_bird(length, 64, heads), "causal": False}
        bound = length * length // 16
    elif kind in ("positions", "shuffled"):
        at = torch.arange(length) * 2 if kind == "positions" else torch.randperm(length, generator=g)
        positions = {"q_positions": at, "k_positions": at}
        terms = {"reach": [3, 64, 100, 500]}
    with Sizes() as sizes:
        out, lse = attend(q, k, v, Rule(heads, **terms), backend="banded", **positions)
        (out.sum() + lse.sum()).backward()
    assert 0 < sizes.largest < bound
    assert q.grad is not None and bool(q.grad.isfinite().all())


def test_only_inputs_and_outputs_are_saved_for_backward() -> None:
    saved = []
    q, k, v = (torch.randn(1, 2, 1000, 8, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        attend(q, k, v, Rule(2, reach=[30, 1000]), backend="banded")
    assert sum(saved) == 3 * q.numel() + 2 * 1000


def test_short_heads_are_planned_short() -> None:
    q = torch.zeros(1, 4, 4096, 8)
    plan = make_plan(flatten(make_call(q, q, q, Rule(4, reach=[33, 40, 1, 5000]))))
    looked_at = dict.fromkeys(range(4), 0)
    for step in plan.steps:
        for head in step.heads:
            looked_at[head] += step.chunks * step.size * step.width
    assert looked_at[0] <= 4096 * (33 + 64) and looked_at[1] <= 4096 * (40 + 2 * 64) and looked_at[2] == 4096 * 64
    assert looked_at[3] <= 4096 * (4096 + 256) // 2
    assert sum(1 for s in plan.steps if s.heads == (0,)) < 6  # many chunks in one product


def test_block_visible_is_that_of_the_block_index() -> None:
    mask = torch.rand(2, 100, 90) < 0.2
    blocks = BlockIndex.from_dense(mask, 16)
    q_pos, k_pos = torch.randint(0, 100, (3, 40)), torch.randint(0, 120, (3, 50))
    for head in range(2):
        got = block_visible(blocks, head, q_pos, k_pos)
        assert torch.equal(got, blocks.visible(q_pos, k_pos)[:, head])


@pytest.mark.parametrize(
    "case",
    named([
        Case(b=2, h=4, hkv=2, tq=111, tk=129, terms=("span", "distance_bias", "distance_vec", "sink_logits")),
        Case(b=2, h=4, hkv=2, tq=111, tk=129, terms=("dynamic", "key_bias", "blocks"), reach=(50, 9), dropout=0.2),
        Case(b=2, tq=111, tk=129, terms=("span", "head_vec", "padding", "documents"), causal=False, positions="rows"),
    ]),
)  # fmt: skip
def test_path_without_reading_values(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the host never asks whether all is finite."""
    monkeypatch.setattr(banded, "_finite", lambda *_: False)
    check(case, "banded")


def test_autocast_does_not_change_the_result() -> None:
    q, k, v = (torch.randn(1, 2, 100, 16, requires_grad=True) for _ in range(3))
    plain = attend(q, k, v, Rule(2, reach=30), backend="banded")
    with torch.autocast("cpu", torch.bfloat16):
        cast = attend(q, k, v, Rule(2, reach=30), backend="banded")
    torch.testing.assert_close(cast.out, plain.out, rtol=0, atol=0)


def test_16_bit_inputs_return_a_float32_lse() -> None:
    q = torch.randn(1, 2, 40, 16, dtype=torch.bfloat16)
    out, lse = attend(q, q, q, Rule(2, span=torch.tensor([3.0, 9.0])), backend="banded")
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
