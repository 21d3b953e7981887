"""Chunked feed-forward and chunked loss: the same numbers as at once, and far less memory in training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from spanformer.core.recompute import recomputing
from spanformer.model.embedding import AdaptiveEmbedding, AdaptiveHead, Head
from spanformer.model.experts import Experts
from spanformer.model.feedforward import FeedForward
from spanformer.model.recompute import by_chunks
from support.small_models import CONFIGS, make

SIZES = [1, 7, 31, 32, 33, 66, 67]
"""tokens at a time, of 66"""


def values(module: nn.Module, run) -> list[Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    module.zero_grad(set_to_none=True)
    x = torch.randn(2, 33, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    y = run(x)
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)).sum().backward()
    grads = [p.grad for p in module.parameters()]
    assert x.grad is not None and all(g is not None for g in grads)
    return [y.detach(), x.grad, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("kind", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("size", SIZES)
def test_feedforward(kind, size: int) -> None:
    torch.manual_seed(0)
    at_once = FeedForward(24, 40, kind=kind, bias=True, dropout=0.0).double()
    chunked = FeedForward(24, 40, kind=kind, bias=True, dropout=0.0, chunk=size).double()
    chunked.load_state_dict(at_once.state_dict())
    both = zip(values(chunked, lambda x: chunked(x)[0]), values(at_once, lambda x: at_once(x)[0]), strict=True)
    for found, expected in both:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_feedforward_drops_the_same_in_both_passes() -> None:
    """∂y/∂x of a feed-forward with an identity inside is the mask that its forward pass drew."""
    layer = FeedForward(24, 24, kind="relu", bias=False, dropout=0.5, chunk=10).double().train()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.eye(24))
    x = (torch.rand(2, 33, 24, dtype=torch.float64) + 1).requires_grad_()
    y, _ = layer(x)
    y.sum().backward()
    assert x.grad is not None and 0.4 < (y == 0).double().mean() < 0.6
    torch.testing.assert_close(x.grad, (y / x).detach())


def test_experts() -> None:
    torch.manual_seed(0)
    make_one = lambda chunk: Experts(  # noqa: E731
        24, 16, experts=3, per_token=2, kind="gelu", bias=True, dropout=0.0, balance=0.01, chunk=chunk
    ).double()
    at_once, chunked = make_one(0), make_one(5)
    chunked.load_state_dict(at_once.state_dict())
    both = zip(values(chunked, lambda x: chunked(x)[0]), values(at_once, lambda x: at_once(x)[0]), strict=True)
    for found, expected in both:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("adaptive", [False, True])
def test_loss(size: int, adaptive: bool) -> None:
    torch.manual_seed(0)
    heads: list[Head | AdaptiveHead] = []
    for chunk in (size, 0):
        tied = AdaptiveEmbedding(41, 24, (10, 20), 2)
        heads.append(
            AdaptiveHead(41, 24, (10, 20), 2, tied_to=tied, chunk=chunk)
            if adaptive
            else Head(41, 24, True, chunk=chunk)
        )
    chunked, at_once = (head.double() for head in heads)
    chunked.load_state_dict(at_once.state_dict())
    targets = torch.randint(41, (2, 33))
    both = zip(*(values(head, lambda x, head=head: head.nll(x, targets)) for head in (chunked, at_once)), strict=True)
    for found, expected in both:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stack", ["residual", "reversible"])
def test_models_with_both(stack) -> None:
    config = replace(CONFIGS["rotary"], stack=stack)
    chunks = replace(
        config, feedforward=replace(config.feedforward, chunk=9), embedding=replace(config.embedding, loss_chunk=11)
    )
    x, found = torch.randint(37, (2, 33)), []
    for lm in (make(chunks), make(config)):
        loss = lm(x, targets=x).nll
        assert loss is not None
        loss.mean().backward()
        found.append([loss.detach(), *(p.grad for p in lm.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def saved(run) -> int:
    """Bytes of the tensors that autograd keeps of a call, parameters aside."""
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, nn.Parameter):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive = run()
    assert alive is not None
    return sum(kept.values())


def test_memory_of_the_inner_activations_is_saved() -> None:
    """Of 512 tokens only the input is kept, 64 numbers each, and not three times 256 inside."""
    x = torch.randn(2, 256, 64, requires_grad=True)
    at_once, chunked = (FeedForward(64, 256, kind="swiglu", bias=False, dropout=0.0, chunk=c) for c in (0, 32))
    assert saved(lambda: chunked(x)) <= 1.01 * x.nbytes
    assert saved(lambda: at_once(x)) >= 12 * x.nbytes


def test_memory_of_the_logits_is_saved() -> None:
    h, targets = torch.randn(2, 256, 16, requires_grad=True), torch.randint(1000, (2, 256))
    at_once, chunked = (Head(1000, 16, False, chunk=c) for c in (0, 32))
    assert saved(lambda: chunked.nll(h, targets)) <= h.nbytes + targets.nbytes
    assert saved(lambda: at_once.nll(h, targets)) >= 512 * 1000 * 4


def test_parts_run_once_without_gradients() -> None:
    calls = []

    def double(x: Tensor) -> Tensor:
        calls.append((len(x), recomputing()))
        return x * x

    x = torch.arange(5.0, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(by_chunks(double, 2, x), x * x)
    assert calls == [(2, False), (2, False), (1, False)]
    calls.clear()
    by_chunks(double, 2, x).sum().backward()
    assert sorted(calls) == sorted([(2, False), (2, False), (1, False), (2, True), (2, True), (1, True)])
