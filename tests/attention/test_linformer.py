"""Linformer against full attention, its equation, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import Encoder, ModelConfig
from spanformer.attention import Linformer, View
from spanformer.core.fields import as_dict
from spanformer.cost.sizes import Sizes
from spanformer.kinds import KINDS
from spanformer.kinds.costs import layer_cost
from spanformer.model.config import AttentionConfig, PositionConfig
from spanformer.model.folder import write_folder
from spanformer.model.lm import LM
from spanformer.model.load import load_any
from support.low_rank_oracle import pooled
from support.memory_use import Largest

PROJECT = KINDS["linformer"].choices["project"]


def inputs(length: int, kv_heads: int = 4, seed: int = 0) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = (4, kv_heads, kv_heads)
    return [torch.randn(2, h, length, 8, dtype=torch.float64, generator=made).requires_grad_() for h in shapes]


def hide(length: int) -> Tensor:
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[0, : length // 3] = padding[1, length - length // 2 :] = True
    return padding


def values(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The output, and the gradient of every leaf."""
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


def run(m: Linformer, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
    view = View(padding=padding)
    return m(q, k, v, m.rule(view), view).out


@pytest.mark.parametrize("length", [1, 31, 32, 33, 101])
def test_identity_is_full_attention(length: int) -> None:
    m = Linformer(4, length, length, share="key_value").double()
    with torch.no_grad():
        m.e.copy_(torch.eye(length))
    q, k, v = inputs(length)
    expected = (q @ k.transpose(2, 3) / math.sqrt(8)).softmax(-1) @ v
    for found, right in zip(values(run(m, q, k, v), [q, k, v]), values(expected, [q, k, v]), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 101])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("project", PROJECT)
def test_equation(length: int, padded: bool, project: str) -> None:
    torch.manual_seed(0)
    m = Linformer(4, 5, 101, project=project).double()
    q, k, v = inputs(length)
    padding = hide(length) if padded else None
    leaves = [q, k, v, *m.parameters()]
    both = values(run(m, q, k, v, padding), leaves), values(pooled(m, "linformer", q, k, v, padding), leaves)
    for found, right in zip(*both, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("project", PROJECT)
def test_padding_may_hold_anything(project: str) -> None:
    torch.manual_seed(0)
    m, padding = Linformer(4, 5, 40, project=project).double(), hide(33)
    q, k, v = (t.detach() for t in inputs(33))
    expected = run(m, q, k, v, padding)
    for t in (k, v):
        t.masked_fill_(padding[:, None, :, None], math.nan)
    torch.testing.assert_close(run(m, q, k, v, padding), expected, rtol=0, atol=0)


def test_shared_keys_of_grouped_heads() -> None:
    torch.manual_seed(0)
    m = Linformer(4, 5, 33, kv_heads=2).double()
    q, k, v = inputs(33, kv_heads=2)
    wide = Linformer(4, 5, 33).double()
    with torch.no_grad():
        for name in ("e", "f"):
            getattr(wide, name).copy_(getattr(m, name).repeat_interleave(2, 0))
    repeated = (t.repeat_interleave(2, 1) for t in (k, v))
    torch.testing.assert_close(run(m, q, k, v), run(wide, q, *repeated))


@pytest.mark.parametrize("length, rank, tokens", [(64, 16, 64), (1024, 16, 1024), (1024, 16, 50), (1024, 256, 333)])
def test_variance_does_not_depend_on_length_or_rank(length: int, rank: int, tokens: int) -> None:
    torch.manual_seed(0)
    m = Linformer(4, rank, length)
    k = torch.randn(8, 4, tokens, 64)
    padding = torch.zeros(8, tokens, dtype=torch.bool)
    for hidden in (None, padding.index_fill(1, torch.arange(tokens // 2), True)):
        e, f = (t.detach() for t in m.project(k, k, hidden))
        assert 0.85 < float(e.var()) < 1.15 and 0.85 < float(f.var()) < 1.15


@pytest.mark.parametrize("share, count", [("none", 2 * 4 * 3), ("headwise", 6), ("key_value", 3), ("layerwise", 1)])
def test_shares_as_many_matrices_as_the_paper_counts(share: str, count: int) -> None:
    lm = encoder(f"linformer(5, 37, {share})")
    numbers = sum(p.numel() for name, p in lm.named_parameters() if "mechanism" in name)
    assert numbers == count * 5 * 37


def encoder(*stack: str) -> Encoder:
    torch.manual_seed(0)
    config = ModelConfig(vocab=11, dim=32, layers=3, heads=4, kind="encoder", attention=AttentionConfig(stack=stack))
    return Encoder(config)


def test_layers_share_a_matrix_through_saving(tmp_path: Path) -> None:
    model = encoder("linformer(5, 37, layerwise)", "linformer(4, 37, layerwise)").double()
    first, second, third = model.mechanisms()
    assert first.e is third.e and first.e is not second.e and second.rank == 4
    write_folder(tmp_path / "model", {"model": dict(model.state_dict())}, {"model": as_dict(model.config)})
    copy = load_any(tmp_path / "model").double()
    assert isinstance(copy, Encoder) and copy.mechanisms()[0].e is copy.mechanisms()[2].e
    x = torch.randint(11, (2, 33))
    torch.testing.assert_close(copy(x).logits, model(x).logits)


def test_two_models_share_nothing() -> None:
    a, b = (encoder("linformer(5, 37, layerwise)").mechanisms()[0] for _ in range(2))
    assert a.e is not b.e


def test_rank_of_each_layer() -> None:
    model = encoder("linformer(9, 37)", "linformer(6, 37)", "linformer(3, 37)")
    assert [m.rank for m in model.mechanisms()] == [9, 6, 3]
    assert model(torch.randint(11, (2, 37))).logits is not None


def test_pooling_takes_texts_of_any_length() -> None:
    assert encoder("linformer(5, 20, project=mean)")(torch.randint(11, (1, 101))).logits is not None


def test_refusals() -> None:
    model = encoder("linformer(5, 37)")
    with pytest.raises(ValueError, match=r"the text has 38 tokens, and E and F are made for 37; .* length of 38"):
        model(torch.randint(11, (1, 38)))
    with pytest.raises(ValueError, match=r"linformer sums keys over the whole text, so a token would see the future"):
        LM(ModelConfig(vocab=11, dim=32, heads=4, attention=AttentionConfig(kind="linformer(5, 37)")))
    with pytest.raises(ValueError, match=r"share in .* is 'all'; expected one of none, headwise, key_value, layerwise"):
        ModelConfig(vocab=11, attention=AttentionConfig(kind="linformer(5, 37, all)"))
    with pytest.raises(ValueError, match=r"rank 38 and length 37; expected .* a rank up to length"):
        encoder("linformer(38, 37)")
    with pytest.raises(ValueError, match=r"share is 'headwise', and mean has no E and F to share"):
        encoder("linformer(5, 37, headwise, mean)")
    with pytest.raises(ValueError, match=r"Alibi depends on distances, and a projected key has no position"):
        config = ModelConfig(vocab=11, dim=32, heads=4, kind="encoder", position=PositionConfig(kind="alibi"),
                             attention=AttentionConfig(kind="linformer(5, 37)"))  # fmt: skip
        Encoder(config)(torch.randint(11, (1, 9)))
    m, view = Linformer(4, 5, 37), View(documents=torch.zeros(2, 9, dtype=torch.int64))
    q, k, v = inputs(9)
    with pytest.raises(ValueError, match="documents was given; Linformer's keys are sums over the whole text"):
        m(q, k, v, m.rule(view), view)


@pytest.mark.parametrize("project", PROJECT)
def test_cost_counts_products_and_what_is_kept(project: str) -> None:
    """By autograd's own saved tensors, in float32 on the reference backend, and by the products of the equation."""
    n, rank, size = 96, 12, 8
    cost = layer_cost(f"linformer({rank}, {n}, project={project})", Sizes(n, 4, 8, causal=False))
    extra = {"learned": 2 * rank, "convolution": 2}.get(project, 0) * 2 * 4 * n * size
    assert cost.flops == 4 * 4 * size * n * rank + extra
    assert cost.cache_bytes is None
    pooled_bytes = 4 * 2 * 4 * rank * size
    own = 0 if project == "mean" else 4 * 2 * 4 * n * size
    assert cost.activation_bytes == 4 * 2 * 4 * n * size + own + pooled_bytes + 4 * 4 * n


def test_no_tensor_of_pairs_of_tokens() -> None:
    m = Linformer(4, 16, 2048, share="key_value")
    q, k, v = (t.detach().float() for t in inputs(2048))
    with Largest() as largest:
        run(m, q, k, v)
    assert largest.most <= 2 * 4 * 2048 * 16
