"""What mechanisms cost: predicted against counted products and against the bytes that are really held."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from definitions import sees
from spanformer import Rule, attend
from spanformer.cost import pairs
from spanformer.cost.mechanisms import MECHANISMS, Sizes, attention_cost, find
from spanformer.cost.published import LENGTHS, flops_figures, memory_figures
from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.model.lm import LM

CLOSE = 0.05


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


@pytest.mark.parametrize("kind, numbers", [("window", {"window": 64}), ("full", {"max_span": 512})])
def test_caches_hold_what_was_predicted(kind, numbers):
    attention = AttentionConfig(kind=kind, **numbers)
    lm = LM(ModelConfig(vocab=9, dim=64, layers=2, heads=4, kv_heads=2, attention=attention))
    cache = lm.cache(3)
    lm.read(torch.zeros(3, 600, dtype=torch.long), cache)
    (width,) = numbers.values()
    cost = attention_cost(f"window:{width}", Sizes(600, 4, 16, kv_heads=2, batch=2 * 3))
    assert cost.cache_bytes is not None and close(cost.cache_bytes, cache.bytes())


def test_a_cache_never_holds_more_than_there_is():
    for kind in MECHANISMS:
        few, many = (attention_cost(kind, Sizes(n, 2, 4)) for n in (10, 100_000))
        if few.cache_bytes is not None and kind not in ("linear", "cross"):
            assert few.cache_bytes <= 2 * 2 * 4 * 4 * 10 and many.cache_bytes is not None
            assert few.cache_bytes <= many.cache_bytes <= 2 * 2 * 4 * 4 * 100_000


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
