"""What mechanisms cost: predicted against counted products and against the bytes that are really held."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from definitions import sees
from spanformer import Rule, attend
from spanformer.attention import ATTENTIONS, View
from spanformer.cost import pairs
from spanformer.cost.mechanisms import MECHANISMS, Sizes, attention_cost, find
from spanformer.cost.published import LENGTHS, flops_figures, memory_figures
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.model.kinds import KINDS
from spanformer.model.lm import LM

CLOSE = 0.05
ATTENTIONS_BY_CLASS = {made.__name__: made for made in ATTENTIONS.values()}


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def close(predicted: float, measured: float) -> bool:
    return abs(predicted / measured - 1) <= CLOSE


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "kind",
    ["full", "window:9", "sinks:5:2", "dilated:3:4", "strided:6", "fixed:6:2", "image_1d:8:5", "longformer:4:3:1"],
)
def test_operations_equal_counted_products(kind, causal):
    """Each query's own keys gathered from the definition, and its two products run as such."""
    n, heads, d = 37, 2, 5
    (name, *numbers) = kind.split(":")
    q, k, v = torch.randn(3, heads, n, d)

    def run() -> None:
        for i in range(n):
            seen = [j for j in range(n) if sees(name, causal)(n, i, j, *map(int, numbers))]
            weights = (q[:, i : i + 1] @ k[:, seen].transpose(1, 2)).softmax(-1)
            weights @ v[:, seen]

    assert attention_cost(kind, Sizes(n, heads, d, causal=causal)).flops == counted(run)


def test_operations_of_the_dense_oracle():
    q, k, v = torch.randn(3, 2, 4, 50, 8)
    sizes = Sizes(50, 4, 8, batch=2, causal=False)
    run = lambda: attend(q, k, v, Rule(4, reach=7, causal=False), backend="reference")  # noqa: E731
    assert counted(run) == attention_cost("full", sizes).flops  # it computes all, whatever is seen


def test_operations_of_the_blockwise_backend():
    """Chunks overhang the diagonal, the less the longer the text."""
    n, d = 8192, 8
    q, k, v = (torch.randn(1, 1, n, d, requires_grad=True) for _ in range(3))
    cost, made = attention_cost("full", Sizes(n, 1, d)), []
    assert close(cost.flops, counted(lambda: made.append(attend(q, k, v, Rule(1), backend="banded").out)))
    assert close(cost.flops_backward, counted(lambda: made[0].sum().backward()))


@pytest.mark.parametrize("kind, mechanism", [
    ("full", "Full(2, causal=False)"), ("image_1d:256:256", "ImageLocal1D(2, 256, 256, causal=False)"),
    ("image_2d:64:8:8:8:8", "ImageLocal2D(2, 64, (8, 8), (8, 8), causal=False)"),
    ("blockwise:4:512", "Blockwise(2, 4, size=512)"), ("big_bird:64:3:2:3", "BigBird(2, 64)"),
    ("window:1024", "Window(2, 1024, causal=False)"), ("general", "General(Full(2, causal=False), 16)"),
    ("cross:2048", "Cross(2)"),
])  # fmt: skip
def test_operations_of_blocks_in_both_directions(kind, mechanism):
    """What the blockwise backend really runs: where blocks have no edge to overhang, what is seen and no more."""
    n, d = 2048, 16
    q, k, v = (torch.randn(1, 2, n, d, requires_grad=True) for _ in range(3))
    made, found = eval(mechanism, dict(ATTENTIONS_BY_CLASS)), []
    made.backend, view = "banded", View() if kind.startswith("cross") else View(start=0, length=n)
    cost, rule = attention_cost(kind, Sizes(n, 2, d, causal=False)), made.rule(view)
    assert close(cost.flops, counted(lambda: found.append(made.mix(made.map_queries(q), k, v, rule, view).out)))
    assert close(cost.flops_backward, counted(lambda: found[0].sum().backward()))


def test_operations_of_linear_and_low_rank_attention():
    n, h, d, f = 40, 3, 8, 6
    q, k, v, phi = torch.randn(h, n, d), torch.randn(h, n, d), torch.randn(h, n, d), torch.randn(2, h, n, f)

    def low_rank() -> None:
        e = torch.randn(2, h, f, n)
        (q @ (e[0] @ k).transpose(1, 2)) @ (e[1] @ v)

    sizes = Sizes(n, h, d, causal=False)
    assert attention_cost(f"linear:{f}", sizes).flops == counted(lambda: phi[0] @ (phi[1].transpose(1, 2) @ v))
    assert attention_cost(f"low_rank:{f}", sizes).flops == counted(low_rank)


def held_bytes(run) -> int:
    """Bytes of all that autograd keeps of what is run."""
    held: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(held.values())


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_activations_are_what_the_kernel_and_a_dense_implementation_keep(kv_heads):
    pytest.importorskip("spanformer.ops.native")
    n, d = 200, 16
    q = torch.randn(2, 4, n, d, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, n, d, requires_grad=True) for _ in range(2))
    sizes, rule, made = Sizes(n, 4, d, kv_heads=kv_heads, batch=2), Rule(4, reach=30), []
    cost = attention_cost("window:30", sizes)
    ours = held_bytes(lambda: made.append(attend(q, k, v, rule, backend="native").out))
    assert close(cost.activation_bytes, ours)
    if kv_heads == 4:
        dense = held_bytes(lambda: made.append(torch.softmax(q / 4 @ k.transpose(2, 3), -1) @ v))
        assert close(cost.dense_activation_bytes, dense)
        assert sizes.dense_bytes == made[-1].numel() * 4 // d * n


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind, mechanism", [
    ("full", "Full(2, causal=c)"), ("window:30", "Window(2, 30, causal=c)"),
    ("adaptive_span:30:8", "AdaptiveSpan(2, 60, ramp=8, init=0.5, causal=c)"),
    ("sinks:30:0", "Sinks(Window(2, 30, causal=c))"), ("sinks:30:4", "Sinks(Window(2, 30, causal=c), kept=4)"),
    ("dilated:9:4", "DilatedWindow(2, 9, 4, causal=c)"), ("strided:16", "StridedSparse(2, 16, causal=c)"),
    ("strided_heads:16", "StridedSparse(2, 16, use='heads', causal=c)"),
    ("fixed:16:4", "FixedSparse(2, 16, 4, causal=c)"), ("image_1d:16:16", "ImageLocal1D(2, 16, 16, causal=c)"),
    ("image_2d:16:4:4:4:4", "ImageLocal2D(2, 16, (4, 4), (4, 4), causal=c)"),
    ("blockwise:4:50", "Blockwise(2, 4, size=50, causal=c)"),
    ("big_bird:16:3:1:2", "BigBird(2, 16, tokens=1, random=2, causal=c)"), ("dot", "Dot(Full(2, causal=c))"),
    ("general", "General(Full(2, causal=c), 64)"), ("bilinear", "Bilinear(Full(2, causal=c), 64)"),
])  # fmt: skip
def test_activations_of_every_mechanism_that_is_one_softmax_over_pairs(kind, mechanism, causal):
    pytest.importorskip("spanformer.ops.native")
    n, d = 800, 64
    q, k, v = (torch.randn(1, 2, n, d, requires_grad=True) for _ in range(3))
    made = eval(mechanism, ATTENTIONS_BY_CLASS | {"c": causal})
    made.backend, view, found = "native", View(start=0, length=n), []
    ours = held_bytes(lambda: found.append(made.mix(made.map_queries(q), k, v, made.rule(view), view).out))
    assert close(attention_cost(kind, Sizes(n, 2, d, causal=causal)).activation_bytes, ours)


CACHED = {
    "full": "full", "window:64": "window:64", "adaptive_span": "adaptive_span:150:16", "dot": "dot",
    "dynamic_span": "dynamic_span:150:16:500", "expire_span": "expire_span:150:16:500", "forgetting": "forgetting",
    "sink_window:64:4": "sink_window:64:4", "sink_span:4": "sink_span:4:150:16", "dilated:16:4": "dilated:16:4",
    "strided:16": "strided:16", "strided_heads:16": "strided_heads:16", "fixed:16:4": "fixed:16:4",
    "fixed_heads:16:4": "fixed_heads:16:4", "image_1d:32:32": "image_1d:32:32", "bilinear": "bilinear",
    "image_2d:32:4:4:4:4": "image_2d:32:4:4:4:4", "big_bird:16:3:1:2": "big_bird:16:3:1:2", "general": "general",
    "longformer:32": "longformer:32:0:1", "longformer:32:0:2": "longformer:32:0:2",
    "Blockwise([0, 1, 2, 3], 16)": "blockwise:4:16:0", "Blockwise([3, 0, 1, 2], 16)": "blockwise:4:16:1",
}  # fmt: skip
"""the kind of a run file, and the same with its numbers"""


def test_every_kind_that_has_a_cache_is_here():
    without = {"additive", "chunked", "etc", "etc_apart"}  # they mix values in ways that a cache does not know
    assert {kind.split(":")[0] for kind in CACHED.values()} == set(KINDS) - without


@pytest.mark.parametrize("kind", CACHED)
def test_caches_hold_what_was_predicted(kind):
    n, everything = 600, CACHED[kind].split(":")[0] in ("full", "forgetting", "strided", "strided_heads", "fixed",
        "fixed_heads", "big_bird", "dot", "general", "bilinear")  # fmt: skip
    attention = AttentionConfig(kind=kind, max_span=n if everything else 500, ramp=16.0, init=0.3)
    position = PositionConfig(kind="none")
    lm = LM(ModelConfig(vocab=9, dim=64, layers=2, heads=4, attention=attention, position=position))
    cache = lm.cache(3)
    lm.read(torch.zeros(3, n, dtype=torch.long), cache)
    cost = attention_cost(CACHED[kind], Sizes(n, 4, 16, batch=2 * 3))
    assert cost.cache_bytes is not None and close(cost.cache_bytes, cache.bytes())


def test_a_grouped_cache_holds_what_was_predicted():
    attention = AttentionConfig(kind="window", window=64)
    lm = LM(ModelConfig(vocab=9, dim=64, layers=2, heads=4, kv_heads=2, attention=attention))
    cache = lm.cache(3)
    lm.read(torch.zeros(3, 600, dtype=torch.long), cache)
    cost = attention_cost("window:64", Sizes(600, 4, 16, kv_heads=2, batch=2 * 3))
    assert cost.cache_bytes is not None and close(cost.cache_bytes, cache.bytes())


def test_a_cache_never_holds_more_than_there_is():
    for kind in MECHANISMS:
        few, many = (attention_cost(kind, Sizes(n, 2, 4)) for n in (10, 100_000))
        if few.cache_bytes is not None and kind not in ("linear", "cross"):
            a_key = 2 * 2 * 4 * 4 + 2 * 8 * MECHANISMS[kind].noted
            assert few.cache_bytes <= a_key * 10 and many.cache_bytes is not None
            assert few.cache_bytes <= many.cache_bytes <= a_key * 100_000


def test_the_published_figures():
    """Which of them are right, and that ours are those of the mechanisms."""
    memory = {(f.what, f.length): f for f in memory_figures()}
    wrong = {key for key, figure in memory.items() if not figure.agrees}
    assert wrong == {("sparse, √n", 512), *(("linear", n) for n in LENGTHS)}
    assert not any(figure.agrees for figure in flops_figures())
    for n in LENGTHS:
        sizes = Sizes(n, 12, 64, causal=False)
        for what, kind in (("full", "full"), ("linear", "linear:64"), ("low rank, r = 256", "low_rank:256")):
            assert memory[what, n].ours == attention_cost(kind, sizes).weight_bytes / 1e6
        # a window of 256, itself and the rest before it: all but the edge of the text
        seen = pairs.window(n, True, 256) + 256 * 255 // 2
        assert memory["local, w = 256", n].ours == 12 * 4 * seen / 1e6
    ours = {f.what: f.ours for f in flops_figures()}
    sizes = Sizes(8192, 12, 64, causal=False)
    for what, kind in (("full", "full"), ("linear", "linear:64"), ("low rank, r = 256", "low_rank:256")):
        assert ours[what] == attention_cost(kind, sizes).flops / 1e9
    assert all(len(figure.reason) > 10 for figure in [*memory.values(), *flops_figures()])


@pytest.mark.parametrize(
    "kind, said",
    [
        ("widnow:3", "there is no mechanism 'widnow'; did you mean window?"),
        ("qqq", "there is no mechanism 'qqq'; expected one of full, window"),
        ("window:3:4", "'window:3:4' cannot be read; expected window:w, with whole numbers"),
        ("dilated:3:-1", "'dilated:3:-1' cannot be read; expected dilated:w:s"),
        ("dilated:3:0", "s in 'dilated:3:0' is 0; expected at least 1"),
    ],
)
def test_kinds_that_cannot_be_are_refused(kind, said):
    with pytest.raises(ValueError, match=said):
        find(kind)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="length is 0; expected a whole number, 1 or more"):
        Sizes(0, 1, 1)
    with pytest.raises(ValueError, match="kv_heads is 3; expected a number that divides heads, 4"):
        Sizes(1, 4, 1, kv_heads=3)
