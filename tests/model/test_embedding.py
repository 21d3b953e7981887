"""Embeddings and output layers against probabilities built word by word in float64."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import Tensor, nn

from spanformer.model.embedding import AdaptiveEmbedding, AdaptiveHead, Embedding, Head

# vocab, dim, cutoffs, divisor
SIZES = [(111, 17, (7, 30, 61), 2), (2, 4, (1,), 4), (63, 9, (62,), 3), (5, 16, (1, 2, 3, 4), 2), (129, 8, (1, 128), 2)]


def make(vocab: int, dim: int, cutoffs, divisor: int, tied: bool) -> tuple[AdaptiveEmbedding, AdaptiveHead]:
    torch.manual_seed(0)
    embedding = AdaptiveEmbedding(vocab, dim, cutoffs, divisor).double()
    head = AdaptiveHead(vocab, dim, cutoffs, divisor, tied_to=embedding if tied else None).double()
    with torch.no_grad():
        for bias in head.biases:
            bias.normal_()
    return embedding, head


def cluster_of(word: int, cutoffs) -> tuple[int, int]:
    """(cluster, id within it)"""
    i = sum(word >= c for c in cutoffs)
    return i, word - ([0, *cutoffs])[i]


def embed_by_hand(embedding: AdaptiveEmbedding, ids: Tensor, dim: int, cutoffs) -> Tensor:
    rows = []
    for word in ids.flatten().tolist():
        i, at = cluster_of(word, cutoffs)
        rows.append(math.sqrt(dim) * (embedding.clusters.projections[i] @ embedding.clusters.weights[i][at]))
    return torch.stack(rows).view(*ids.shape, dim)


def probabilities_by_hand(head: AdaptiveHead, h: Tensor, vocab: int, cutoffs) -> Tensor:
    """h [dim] → [V], each word's probability as the product of its cluster's and its own."""
    tails = len(cutoffs)

    def softmax(scores: list[Tensor]) -> list[Tensor]:
        powers = [s.exp() for s in scores]
        return [p / sum(powers) for p in powers]

    def scores(i: int, weight: Tensor, bias: Tensor) -> list[Tensor]:
        short = head.clusters.projections[i].T @ h
        return [row @ short + b for row, b in zip(weight, bias, strict=True)]

    first = scores(0, head.clusters.weights[0], head.biases[0]) + scores(0, head.tails.weight, head.tails.bias)
    first = softmax(first)
    inner = [softmax(scores(i, head.clusters.weights[i], head.biases[i])) for i in range(1, tails + 1)]
    result = []
    for word in range(vocab):
        i, at = cluster_of(word, cutoffs)
        result.append(first[at] if i == 0 else first[cutoffs[0] + tails - i] * inner[i - 1][at])
    return torch.stack(result)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_nll_and_every_gradient_equal_those_of_all_probabilities(sizes, tied):
    vocab, dim, cutoffs, _ = sizes
    embedding, head = make(*sizes, tied)
    ids, targets = torch.randint(vocab, (2, 4)), torch.randint(vocab, (2, 4))
    turn = torch.randn(dim, dim, dtype=torch.float64) / dim

    x = embedding(ids)
    expected_x = embed_by_hand(embedding, ids, dim, cutoffs)
    torch.testing.assert_close(x, expected_x)
    nll = head.nll(x @ turn, targets)
    rows = [probabilities_by_hand(head, h, vocab, cutoffs) for h in (expected_x @ turn).view(-1, dim)]
    assert all(abs(row.sum().item() - 1) < 1e-12 for row in rows)
    expected = torch.stack([-row[t].log() for row, t in zip(rows, targets.flatten(), strict=True)]).view(2, 4)
    assert nll.dtype == torch.float64
    torch.testing.assert_close(nll, expected)

    weight = torch.rand(2, 4, dtype=torch.float64)
    parameters = dict(nn.ModuleDict({"embedding": embedding, "head": head}).named_parameters())
    clusters = len(cutoffs) + 1
    assert len(parameters) == (2 if tied else 4) * clusters + clusters + 2
    got = torch.autograd.grad((nll * weight).sum(), list(parameters.values()))  # every one takes part, used or not
    want = torch.autograd.grad((expected * weight).sum(), list(parameters.values()), allow_unused=True)
    for name, a, b in zip(parameters, got, want, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("sizes", SIZES)
def test_logits_are_the_log_probabilities_of_nll(sizes):
    vocab, dim, _, _ = sizes
    _, head = make(*sizes, tied=False)
    h = torch.randn(1, 3, dim, dtype=torch.float64)
    logits = head.logits(h)
    assert logits.shape == (1, 3, vocab)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(1, 3, dtype=torch.float64))
    for word in range(vocab):
        torch.testing.assert_close(head.nll(h, torch.full((1, 3), word)), -logits[..., word])


@pytest.mark.parametrize("only", [range(7), range(30, 61), range(61, 111)])
def test_clusters_without_a_target(only):
    embedding, head = make(*SIZES[0], tied=True)
    ids = torch.tensor(list(only))[torch.randint(len(only), (2, 5))]
    h = torch.randn(2, 5, 17, dtype=torch.float64)
    nll = head.nll(h, ids)
    torch.testing.assert_close(nll, -head.logits(h).gather(-1, ids[..., None])[..., 0])
    (nll.sum() + embedding(ids).sum()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in [*embedding.parameters(), *head.parameters()])
    used = [w.grad.any().item() for w in head.clusters.weights]
    assert used == [True, *(start in only for start in (7, 30, 61))]  # the shortlist is scored for every token


def test_no_targets_to_score():
    embedding, head = make(*SIZES[0], tied=True)
    ids = torch.zeros(2, 0, dtype=torch.int64)
    assert head.nll(embedding(ids), ids).shape == (2, 0)


def test_no_tensor_of_all_words_for_all_tokens():
    vocab, tokens = 4000, 300
    torch.manual_seed(0)
    head = AdaptiveHead(vocab, 16, (100, 1000), 4)
    largest = 0

    def note(t: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        head.nll(torch.randn(1, tokens, 16), torch.randint(200, (1, tokens)))
    assert largest <= tokens * 900  # the shortlist, and the first tail for half of the tokens


@pytest.mark.parametrize("adaptive", [True, False])
def test_half_precision_scores_are_summed_in_float32(adaptive):
    head = AdaptiveHead(30, 8, (10, 20), 2) if adaptive else Head(30, 8, bias=True)
    h, targets = torch.randn(2, 3, 8), torch.randint(30, (2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = head.nll(h, targets)
    assert under_autocast.dtype == torch.float32
    assert head.bfloat16().nll(h.bfloat16(), targets).dtype == torch.float32
    torch.testing.assert_close(under_autocast, head.float().nll(h, targets), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("bias", [True, False])
def test_plain_head_is_the_softmax_over_all_words(bias):
    torch.manual_seed(0)
    head = Head(11, 5, bias=bias).double()
    h, targets = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.randint(11, (2, 3))
    scores = h @ head.weight.T + (head.bias if bias else 0)
    expected = scores.exp().sum(-1).log() - scores.gather(-1, targets[..., None])[..., 0]
    nll = head.nll(h, targets)
    assert nll.dtype == torch.float64
    torch.testing.assert_close(head.logits(h), scores)
    torch.testing.assert_close(nll, expected)
    inputs, weight = [h, *head.parameters()], torch.rand(2, 3, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(nll, inputs, weight), torch.autograd.grad(expected, inputs, weight))


def test_tied_layers_share_their_parameters_also_after_a_copy():
    plain = Embedding(11, 5)
    adaptive = AdaptiveEmbedding(11, 5, (4,), 2)
    both = nn.ModuleDict(
        {
            "plain": plain,
            "head": Head(11, 5, bias=True, tied_to=plain),
            "adaptive": adaptive,
            "adaptive_head": AdaptiveHead(11, 5, (4,), 2, tied_to=adaptive),
        }
    )
    for copied in (both, copy.deepcopy(both), copy.deepcopy(both).double()):
        assert copied["head"].weight is copied["plain"].weight
        assert copied["adaptive_head"].clusters is copied["adaptive"].clusters
        assert len(list(copied.parameters())) == 2 + 4 + 2 + 2


def refused(make_it, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_it()


@pytest.mark.parametrize("cutoffs", [(), (0,), (3, 3), (5, 4), (10,), (4, 12)])
def test_cutoffs_rise_within_the_vocabulary(cutoffs):
    refused(
        lambda: AdaptiveEmbedding(10, 8, cutoffs, 2),
        f"cutoffs is {list(cutoffs)}; expected one or more increasing numbers between 0 and the vocabulary, 10",
    )


@pytest.mark.parametrize("divisor", [0, 1, 3])
def test_divisors_leave_every_cluster_a_vector(divisor):
    refused(
        lambda: AdaptiveHead(10, 8, (2, 4), divisor),
        f"divisor is {divisor}; expected at least 2, and so small that a dim of 8 divided by it "
        "2 times leaves the last cluster a vector",
    )


def test_tied_layers_must_fit():
    refused(
        lambda: Head(11, 5, bias=False, tied_to=Embedding(11, 6)),
        "tied_to has shape [11, 6]; expected [11, 5] as the output layer",
    )
    refused(
        lambda: AdaptiveHead(11, 5, (4,), 2, tied_to=AdaptiveEmbedding(11, 5, (3,), 2)),
        "tied_to has (vocab, dim, cutoffs, divisor) (11, 5, (3,), 2); expected (11, 5, (4,), 2) as the output layer",
    )


@pytest.mark.parametrize(("bad", "named"), [([0, 300, 1], 300), ([0, 256], 256), ([5, -1], -1), ([-100, 300], -100)])
def test_unknown_tokens_are_named(bad, named):
    ids, h = torch.tensor([bad]), torch.zeros(1, len(bad), 8)
    message = f"token {named} is outside the vocabulary; expected 0 … 255"
    refused(lambda: Embedding(256, 8)(ids), message)
    refused(lambda: AdaptiveEmbedding(256, 8, (9,), 2)(ids), message)
    refused(lambda: Head(256, 8, bias=False).nll(h, ids), message)
    refused(lambda: AdaptiveHead(256, 8, (9,), 2).nll(h, ids), message)


def test_plain_embedding_is_torchs():
    embedding, ids = Embedding(7, 3), torch.tensor([[0, 6, 6]])
    assert torch.equal(embedding(ids), embedding.weight[ids])
    assert list(embedding.state_dict()) == ["weight"]
