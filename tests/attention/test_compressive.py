"""The Compressive Transformer: who gets which gradient, and that segments, one pass and decoding agree.

The product test compares every compression with the dense oracle of tests/support/memory_oracle.py.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import LM
from spanformer.attention import Compressive, View
from spanformer.cost.sizes import Sizes
from spanformer.kinds.costs import layer_cost
from spanformer.memory import Cache, State
from spanformer.memory.compressed import Compressed
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.train.optim import clip_model
from support.memory_oracle import compress

KINDS = {
    "mean": "compressive(4, 8, 4, 2, mean)",
    "max": "compressive(6, 6, 4, 3, max)",
    "conv": "compressive(4, 8, 6, 2, conv)",
    "autoencode": "compressive(4, 4, 6, 2, conv, autoencode)",
    "dilated": "compressive(8, 8, 4, 2, dilated)",
    "most_used": "compressive(4, 8, 4, 2, most_used)",
    "learned": "compressive(4, 4, 6, 2, conv, learned=true)",
    "mixed": "2 window(5) + 4 compressive(4, 4, 6, 2)",
}


def made(row: str, position: str = "rotary", **more) -> LM:
    torch.manual_seed(0)
    attention = AttentionConfig(kind=row, max_span=60, ramp=4, init=0.1, penalty=1e-3)
    config = ModelConfig(vocab=31, dim=48, layers=2, heads=6, kv_heads=3, position=PositionConfig(kind=position),
                         attention=attention, **more)  # fmt: skip
    model = LM(config).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
            if name.endswith("span.ratio"):  # some heads see the ring only
                p.copy_(torch.tensor([0.0, 0.01, 0.0, 0.9, 0.5, 0.2]))
    return model


@pytest.fixture(params=KINDS)
def lm(request: pytest.FixtureRequest) -> LM:
    return made(KINDS[request.param])


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_segments(lm: LM, x: Tensor, sizes: list[int], **more) -> tuple[Tensor, State]:
    parts, state = [], None
    for n, piece in enumerate(x.split(sizes, 1)):
        found = lm(piece, state, **{name: t.split(sizes, 1)[n] for name, t in more.items()})
        parts.append(found.logits)
        state = found.state
    assert state is not None
    return torch.cat(parts, 1), state


def mechanism(lm: LM) -> Compressive:
    return next(m for m in lm.mechanisms()[0].modules() if isinstance(m, Compressive))


# ---- one function, whatever the segments


@pytest.mark.parametrize("sizes", [[4] * 11 + [3], [1] * 47, [13, 1, 33], [31, 16]])
def test_segments_equal_one_pass(lm: LM, sizes: list[int]) -> None:
    x = text(2, 47)
    torch.testing.assert_close(by_segments(lm, x, sizes)[0], lm(x).logits)


@pytest.mark.parametrize("sizes", [[47], [1] * 47, [20, 1, 1, 17, 8]])
def test_decoding_equals_one_pass(lm: LM, sizes: list[int]) -> None:
    x, cache = text(2, 47), lm.cache(2)
    parts = [lm.decode(piece, cache) for piece in x.split(sizes, 1)]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), lm(x).logits)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 101])
def test_future_changes_nothing(lm: LM, length: int) -> None:
    x, other = text(2, length), text(2, 12, seed=5)
    before = lm(x).logits
    torch.testing.assert_close(lm(torch.cat([x, other], 1)).logits[:, :length], before, rtol=0, atol=1e-12)


def test_rows_of_different_lengths_decode_as_each_alone(lm: LM) -> None:
    x, cache = text(3, 40), lm.cache(3)
    lengths = torch.tensor([26, 3, 17])
    lm.decode(x[:, :26], cache, lengths=lengths)
    after = lm.decode(x[:, 26:], cache)
    for row, n in enumerate(lengths.tolist()):
        whole = lm(torch.cat([x[row : row + 1, :n], x[row : row + 1, 26:]], 1)).logits
        torch.testing.assert_close(after[row], whole[0, n:])


@pytest.mark.parametrize("row", [name for name in KINDS if name != "most_used"])
def test_cache_is_cropped_reordered_forked_and_saved(row: str, tmp_path: Path) -> None:
    lm, x = made(KINDS[row]), text(3, 45)
    cache = lm.cache(3, slack=6)
    lm.decode(x[:, :33], cache)
    cache.crop(torch.tensor([33, 29, 27]))
    cache.reorder(torch.tensor([2, 1]))
    cache.save(tmp_path / "cache")
    fork = Cache.load(tmp_path / "cache", lm).fork(2)
    for one, rows in ((cache, [2, 1]), (fork, [2, 2, 1, 1])):
        after = lm.decode(x[rows, 33:], one)
        for n, row_ in enumerate(rows):
            kept = x[row_ : row_ + 1, : {2: 27, 1: 29}[row_]]
            whole = lm(torch.cat([kept, x[row_ : row_ + 1, 33:]], 1)).logits
            torch.testing.assert_close(after[n], whole[0, kept.shape[1] :])


def test_crop_beyond_slack_is_refused() -> None:
    lm = made(KINDS["mean"])
    cache = lm.cache(1, slack=2)
    lm.decode(text(1, 12), cache)
    cache.crop(torch.tensor([11]))
    with pytest.raises(ValueError, match=r"row 0 cannot be cropped by 2 tokens: at most 2 .* and 1 are left"):
        cache.crop(torch.tensor([9]))


def test_most_used_takes_nothing_back() -> None:
    with pytest.raises(ValueError, match=r"slack is 3; compress='most_used' .* use slack 0"):
        made(KINDS["most_used"]).cache(1, slack=3)


def test_documents_do_not_see_each_other(lm: LM) -> None:
    """Documents that end inside a block or a slot, in segments of other lengths."""
    x = text(1, 47)
    lengths = [13, 5, 29]
    documents = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1)
    found, _ = by_segments(lm, x, [7] * 6 + [5], documents=documents)
    other = torch.cat([text(1, 18, seed=9), x[:, 18:]], 1)
    torch.testing.assert_close(by_segments(lm, other, [11] * 4 + [3], documents=documents)[0][:, 18:], found[:, 18:])
    with pytest.raises(AssertionError):  # and without documents they do
        torch.testing.assert_close(lm(other).logits[:, 18:], lm(x).logits[:, 18:])


def test_padding_is_not_seen(lm: LM) -> None:
    x = text(2, 47)
    padding = torch.zeros(2, 47, dtype=torch.bool)
    padding[0, 3:9] = padding[1, 14] = padding[1, 20:29] = True
    other = torch.where(padding, text(2, 47, seed=3), x)
    found, _ = by_segments(lm, x, [16, 16, 15], padding=padding)
    again, _ = by_segments(lm, other, [16, 16, 15], padding=padding)
    torch.testing.assert_close(again[~padding], found[~padding], rtol=0, atol=1e-12)


def test_state_is_saved_and_resumed_bit_identically(lm: LM) -> None:
    x, more = text(2, 30), text(2, 17, seed=1)
    state = lm(x).state
    saved = {name: t.clone() for name, t in state.tensors().items()}
    resumed = lm.start(2).with_tensors(saved, state.seen)
    assert torch.equal(lm(more, resumed).logits, lm(more, state).logits)
    assert all(torch.equal(t, saved[name]) for name, t in state.tensors().items())  # a segment can run twice


def test_a_row_of_the_state_continues_alone(lm: LM) -> None:
    x, more = text(3, 30), text(3, 17, seed=1)
    state = lm(x).state
    whole = lm(more, state)
    halves = [lm(more[some], state.rows(some)) for some in (slice(0, 1), slice(1, 3))]
    torch.testing.assert_close(torch.cat([h.logits for h in halves]), whole.logits)
    joined = State.stack([h.state for h in halves])
    for name, t in whole.state.tensors().items():
        torch.testing.assert_close(joined.tensors()[name], t)


# ---- gradients


@pytest.mark.parametrize("row", ["conv", "autoencode", "dilated", "mixed"])
def test_each_loss_reaches_its_own_parameters_only(row: str) -> None:
    lm = made(KINDS[row]).train()
    own = {id(p) for p in lm.auxiliary_parameters()}
    assert own
    state = None
    for n in range(6):
        x = text(2, 4, seed=n)
        for which in ("nll", "penalty"):
            lm.zero_grad(set_to_none=True)
            found = lm(x, state, targets=x)
            if which == "penalty":
                if not found.penalty.requires_grad:
                    assert n < 2  # nothing has left the memory
                    continue
                found.penalty.backward()
                reached = {id(p) for p in lm.parameters() if p.grad is not None and bool(p.grad.any())}
                assert reached <= own and (reached == own or row in ("dilated",) or n < 2)
            else:
                found.nll.mean().backward()
                grads = dict(lm.named_parameters())
                assert all(p.grad is None for p in grads.values() if id(p) in own)
                for name in ("key", "value", "query"):  # a peer's were never trained again after its second segment
                    grad = grads[f"blocks.1.attention.{name}.weight"].grad
                    assert grad is not None and bool(grad.any())
        state = found.state


def test_penalty_is_of_training_only() -> None:
    lm, x = made(KINDS["conv"]), text(2, 24)
    assert not bool(lm(x).penalty) and bool(lm.train()(x).penalty)


def test_attention_loss_equals_its_equation() -> None:
    """Algorithm 2 of the paper: no positions, no mask; old, h and the projections are constants."""
    lm = made(KINDS["conv"]).train()
    layer, m = lm.layers()[0].attention, mechanism(lm)
    states: list[Tensor] = []
    layer.query.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    x = text(2, 12)
    lm.layers()[1].attention.mechanism.compressor.learns = False
    penalty = lm(x).penalty
    h, old = states[0][:, 8:12].detach(), states[0][:, :4].detach()  # block 2 pushes block 0 out

    def attn(memory: Tensor) -> Tensor:
        q = (h @ layer.query.weight.T.detach()).view(2, 4, 6, 8).transpose(1, 2)
        k, v = ((memory @ w.weight.T.detach()).view(2, -1, 3, 8).transpose(1, 2) for w in (layer.key, layer.value))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return (q @ k.transpose(2, 3) / math.sqrt(8)).softmax(-1) @ v

    # the third of three blocks in this call has a block to push out
    expected = (attn(compress(m.compressor, old)) - attn(old)).square().mean() / 3
    torch.testing.assert_close(penalty, expected, rtol=1e-9, atol=0)
    parameters = list(m.compressor.parameters())
    grads = (torch.autograd.grad(each, parameters) for each in (penalty, expected))
    for mine, true in zip(*grads, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-15)


def test_autoencoding_loss_equals_its_equation() -> None:
    lm = made("compressive(4, 4, 6, 2, conv, autoencode)").train()
    states: list[Tensor] = []
    lm.layers()[0].attention.query.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    lm.layers()[1].attention.mechanism.compressor.learns = False
    penalty, c = lm(text(2, 8)).penalty, mechanism(lm).compressor
    old = states[0][:, :4].detach()
    new = compress(c, old)
    back = torch.stack([new[:, t // 2] @ c.back[48 * (t % 2) : 48 * (t % 2 + 1)].T for t in range(4)], 1)
    torch.testing.assert_close(penalty, (old - back).square().mean() / 2, rtol=1e-9, atol=0)


def test_compressor_is_clipped_apart() -> None:
    lm = made(KINDS["conv"]).train()
    own = {id(p) for p in lm.auxiliary_parameters()}
    for p in lm.parameters():
        p.grad = torch.full_like(p, 1e3 if id(p) in own else 1.0)
    wanted = sum(p.numel() for p in lm.parameters() if id(p) not in own) ** 0.5
    assert float(clip_model(lm, 1.0)) == pytest.approx(wanted)
    for apart in (True, False):
        some = [p.grad for p in lm.parameters() if (id(p) in own) == apart]
        assert float(torch.cat([g.flatten() for g in some]).norm()) == pytest.approx(1, rel=1e-4)


# ---- what is stored


def test_bytes_are_those_of_all_tensors_and_do_not_grow() -> None:
    lm = made(KINDS["conv"])
    cache = lm.cache(2)
    lm.decode(text(2, 5), cache)
    few = cache.bytes()
    lm.decode(text(2, 70), cache)
    held = [t for part in cache.parts() for t in part.tensors().values()]
    assert cache.bytes() == few == sum(t.numel() * t.element_size() for t in held)


def test_heads_with_short_spans_store_no_slots() -> None:
    lm = made(KINDS["learned"])
    assert mechanism(lm).far_heads(3) == (1, 2)
    part = lm.cache(1).parts()[0]
    assert isinstance(part, Compressed)
    assert [part.tensors()[f"keys{n}"].shape[1:3] for n in range(2)] == [(1, 8), (2, 8 + 6)]


def test_slots_have_the_positions_of_their_tokens() -> None:
    lm = made(KINDS["mean"])
    part = lm(text(1, 20)).state.layers[0]
    assert isinstance(part, Compressed)
    at = part.tensors()["at"][0]
    assert sorted(at[:4].tolist()) == [4, 6, 8, 10]  # of blocks 1 and 2, two tokens each
    assert sorted(at[4:].tolist()) == list(range(8, 20))


@pytest.mark.parametrize(
    "row, said",
    [
        ("compressive(4096, 4096, 2, 2048)", "ratio is 2048; expected 1 … 1,024 tokens of a slot"),
        ("compressive(6, 6, 4, 4)", "ratio is 4 and block 6; expected a ratio that divides block"),
        ("compressive(8, 4, 4, 4)", "memory is 4 and block 8; expected a multiple of block"),
        ("compressive(8, 8, 3, 4)", "slots is 3; expected a multiple of block/ratio, 2"),
        ("compressive(8, 8, 4, 4, median)", "compress"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(row: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(row)


def test_text_beyond_the_memory_needs_a_layer() -> None:
    m = Compressive(2, 8, block=4, memory=4, slots=2, ratio=2)
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match="k has 9 tokens and no memory; expected at most 8"):
        m(q, q, q, m.rule(), View())


@pytest.mark.parametrize("n", [1, 4, 11, 12, 13, 47, 100])
@pytest.mark.parametrize("row", ["compressive(4, 8, 4, 2)", "compressive(6, 6, 4, 3)", "compressive(4, 4, 8, 1)"])
def test_pairs_are_those_of_the_definition(row: str, n: int) -> None:
    block, memory, slots, ratio = map(int, re.findall(r"\d+", row))
    seen = 0
    for i in range(n):
        first = max(0, i // block * block - memory)  # exact from here on; the block before it is compressed
        seen += i + 1 - first + min(first // ratio, slots)
    assert layer_cost(row, Sizes(n, 2, 4)).pairs == seen
