"""The reversible stack against plain autograd of the same two streams, written from the equation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from spanformer.attention import Attention, View, Window
from spanformer.core.recompute import recomputing
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.reversible import Chain
from spanformer.model.seq2seq import Seq2Seq
from spanformer.model.stack import TransformerStack
from spanformer.ops import AnyRule, Attended
from spanformer.position import Position
from spanformer.train import memory_check
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.distributed import World
from support.small_models import CONFIGS, make

REVERSIBLE = {name: replace(c, stack="reversible") for name, c in CONFIGS.items() if c.order == "pre"}
Add = Callable[[Position, Tensor], Tensor]


def two_streams(self: TransformerStack, h: Tensor, memories: list, view: View, add_positions: Add, encoder_states=()):
    """As `TransformerStack.run_blocks`: y1 = x1 + Attn(norm x2), y2 = x2 + FF(norm y1)."""
    penalty = h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
    x1 = x2 = torch.zeros(())
    for n, (block, position) in enumerate(zip(self.layers()[-len(self.blocks) :], self.positions(), strict=True)):
        if not n:
            x1 = x2 = self.dropout(add_positions(position, h)).to(torch.promote_types(h.dtype, torch.float32))
        elif self.config.position.per_layer:
            x2 = add_positions(position, x2)
        states = block.norm1(x2.to(h.dtype))
        found, added = block.attention(states, memories[n], view, position)
        memories[n] = memories[n].keep(states)
        penalty = penalty if added is None else penalty + added
        x1 = x1 + found
        if block.feedforward is None:
            x1, x2 = x2, x1
            continue
        crossed = 0
        assert block.norm2 is not None
        if encoder_states:
            assert block.cross is not None and block.norm3 is not None
            crossed = block.cross(block.norm3(x1), block.cross.source(*encoder_states[n]))
        fed, added = block.feedforward(block.norm2((x1 + crossed).to(h.dtype)))
        penalty = penalty if added is None else penalty + added
        x2 = x2 + crossed + fed
    return ((x1 + x2) / 2).to(h.dtype), penalty


def gradients(model: TransformerStack, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    run().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def both(
    monkeypatch: pytest.MonkeyPatch, model: TransformerStack, run: Callable[[], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients by name: rebuilt, and of plain autograd."""
    found = gradients(model, run)
    with monkeypatch.context() as patched:
        patched.setattr(TransformerStack, "run_blocks", two_streams)
        expected = gradients(model, run)
    assert found.keys() == expected.keys()
    return found, expected


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of any parameter's gradient, by norms."""
    return max(
        float((found[name] - g).norm() / g.norm().clamp(min=1e-3 * max(e.norm() for e in expected.values())))
        for name, g in expected.items()
    )  # fmt: skip


def text(rows: int, length: int, vocab: int = 37, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(lm: LM, lengths: tuple[int, ...]) -> Callable[[], Tensor]:
    """The loss of the last of several segments, with the memory of the others."""

    def run() -> Tensor:
        state, loss = None, torch.zeros(())
        for n, length in enumerate(lengths):
            found = lm(text(2, length, seed=n), state, targets=text(2, length, seed=n + 9))
            assert found.nll is not None
            state, loss = found.state, found.nll.mean() + 10 * found.penalty
        return loss

    return run


@pytest.mark.parametrize("name", REVERSIBLE)
def test_language_models_of_every_kind(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lm = make(REVERSIBLE[name]).train()
    found, expected = both(monkeypatch, lm, loss_of(lm, (23, 17)))
    assert relative(found, expected) < 1e-9


@pytest.mark.parametrize("kind", ["routing(5, 4)", "lsh(5, 4, 2)", "linear", "gated_delta", "4 window(7)"])
def test_mechanisms_with_state(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Memories of their own and, of routing, centroids that learn from each token once."""
    lm = make(replace(REVERSIBLE["rotary"], attention=AttentionConfig(kind=kind), position=PositionConfig(kind="none")))
    run = loss_of(lm.train(), (23, 17))
    before = {name: t.clone() for name, t in lm.state_dict().items()}
    learned = []
    for grads in both(monkeypatch, lm, run):
        lm.load_state_dict(before)
        learned.append(grads)
    assert relative(*learned) < 1e-9
    if kind.startswith("routing"):
        lm.after_step()
        gradients(lm, run)
        assert all(float(m._found[..., -1].sum()) == 2 * 40 * m.heads for m in lm.mechanisms())  # pyright: ignore


@pytest.mark.parametrize("length", [1, 31, 33])
@pytest.mark.parametrize("chunk", [0, 7, 64])
def test_dropout_and_chunks(monkeypatch: pytest.MonkeyPatch, length: int, chunk: int) -> None:
    config = dropping(REVERSIBLE["rotary"], 0.3)
    lm = make(replace(config, feedforward=replace(config.feedforward, chunk=chunk))).train()
    found, expected = both(monkeypatch, lm, loss_of(lm, (length,)))
    assert relative(found, expected) < 1e-9


def dropping(config: ModelConfig, p: float) -> ModelConfig:
    return replace(
        config, attention=replace(config.attention, dropout=p), feedforward=replace(config.feedforward, dropout=p),
        embedding=replace(config.embedding, dropout=p),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["adaptive_span", "4 window(9) + 4 full"])
def test_twelve_layers_in_float32(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab=37, dim=128, layers=12, heads=8, stack="reversible", feedforward=FeedForwardConfig(kind="gelu"),
        attention=AttentionConfig(kind=kind, max_span=64, init=0.5),
    )  # fmt: skip
    lm = LM(dropping(config, 0.2)).train()
    found, expected = both(monkeypatch, lm, loss_of(lm, (101,)))
    assert relative(found, expected) < 1e-5


def test_twelve_layers_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bfloat16, whose rounding errors a rebuilt input moves by a unit: as far as two such runs are apart
    from one in float32."""
    torch.manual_seed(0)
    config = ModelConfig(vocab=37, dim=64, layers=12, heads=4, stack="reversible",
                         attention=AttentionConfig(max_span=64, init=0.5))  # fmt: skip
    lm = LM(dropping(config, 0.2)).train()
    run = loss_of(lm, (64,))

    def cast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = run()
            loss.backward()  # inside, as a training step has it: casts of weights are cached
        return loss.detach().requires_grad_()

    found, expected = both(monkeypatch, lm, cast)
    _, exact = both(monkeypatch, lm, run)
    assert relative(found, expected) < relative(expected, exact)
    chain = lm.embedding(text(1, 3))
    assert chain.dtype == torch.float32


def test_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocab=37, dim=32, layers=3, heads=4, kind="encoder", stack="reversible",
                         attention=AttentionConfig(kind="longformer(8, 2)"))  # fmt: skip
    model = Encoder(config).double()
    padding = torch.zeros(2, 33, dtype=torch.bool)
    padding[1, 20:] = True

    def run() -> Tensor:
        found = model(text(2, 33), targets=text(2, 33, seed=1), padding=padding)
        return found.nll[~padding].mean()

    assert relative(*both(monkeypatch, model, run)) < 1e-9


@pytest.mark.parametrize("feedforward", ["swiglu", "none"])
def test_encoder_decoder(monkeypatch: pytest.MonkeyPatch, feedforward) -> None:
    """Gradients reach the encoder through every layer of the decoder."""
    torch.manual_seed(0)
    config = ModelConfig(vocab=37, dim=32, layers=3, heads=4, kind="seq2seq", stack="reversible",
                         feedforward=FeedForwardConfig(kind=feedforward))  # fmt: skip
    model = Seq2Seq(config).double()
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 7:] = True

    def run() -> Tensor:
        found = model(text(2, 11), text(2, 9), targets=text(2, 9, seed=1), source_padding=padding)
        assert found.nll is not None
        return found.nll.mean() + found.penalty

    if feedforward == "none":  # the decoder's streams do not change places: cross-attention is the second half
        found = gradients(model, run)
        assert all(name in found for name, _ in model.named_parameters())
        return
    assert relative(*both(monkeypatch, model, run)) < 1e-9


@pytest.mark.parametrize("name", REVERSIBLE)
def test_decoding_and_segments_equal_one_pass(name: str) -> None:
    lm = make(REVERSIBLE[name])
    x = text(2, 43)
    whole = lm(x).logits
    with torch.no_grad():
        torch.testing.assert_close(lm(x).logits, whole)
    cache = lm.cache(2)
    parts = [lm.decode(piece, cache) for piece in x.split([20, 1, 22], 1)]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), whole)
    first = lm(x[:, :20])
    torch.testing.assert_close(torch.cat([first.logits, lm(x[:, 20:], first.state).logits], 1), whole)


def test_encoder_decoder_decodes_what_one_pass_gives() -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocab=37, dim=32, layers=3, heads=4, kind="seq2seq", stack="reversible")
    model = Seq2Seq(config).double().eval()
    source, x = text(2, 11), text(2, 9)
    cache = model.start(source)
    parts = [model.decode(piece, cache) for piece in x.split([4, 1, 4], 1)]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), model(source, x).logits)


class Counting(Attention):
    """Counts its calls as k-means would count its tokens: once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.inner = 4, Window(4, 5)
        self.calls, self.again = 0, 0

    def rule(self, view: View) -> AnyRule:
        return self.inner.rule(view)

    def context_length(self) -> list[int]:
        return self.inner.context_length()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        if recomputing():
            self.again += 1
        else:
            self.calls += 1
        return super().forward(q, k, v, rule, view)


@pytest.mark.parametrize("how", ["reversible", "checkpointing", "neither"])
def test_mechanisms_know_that_they_run_again(how: str) -> None:
    lm = make(REVERSIBLE["rotary"] if how == "reversible" else CONFIGS["rotary"])
    lm.checkpointing = how == "checkpointing"
    counting = [Counting() for _ in lm.layers()]
    for block, mechanism in zip(lm.layers(), counting, strict=True):
        block.attention.mechanism = mechanism
    loss_of(lm, (9,))().backward()
    assert [(c.calls, c.again) for c in counting] == [(1, 0 if how == "neither" else 1)] * 3
    assert not recomputing()


def test_random_state_is_left_where_it_was() -> None:
    lm = make(dropping(REVERSIBLE["rotary"], 0.3)).train()
    loss = loss_of(lm, (9,))()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def tensors() -> dict[int, int]:
    """Bytes by address of every tensor that Python knows."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def kept(layers: int, stack: Literal["residual", "reversible"], dropout: float, length: int) -> int:
    """Bytes of all tensors that are alive between forward and backward beside the parameters: what was saved, and what
    the chain of layers holds."""
    torch.manual_seed(0)
    config = ModelConfig(vocab=256, dim=64, layers=layers, heads=4, stack=stack, kind="encoder",
                         attention=AttentionConfig(kind="window(32)"))  # fmt: skip
    model, x = Encoder(dropping(config, dropout)).train(), text(2, length, 255)
    known, saved = tensors(), dict[int, int]()

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = model(x, targets=x)
    saved |= tensors()
    assert found.nll is not None
    return sum(size for at, size in saved.items() if at not in known)


@pytest.mark.parametrize("dropout, length", [(0, 128), (0.1, 1024)])  # random states are 10 KB a layer
def test_memory_does_not_grow_with_layers(dropout: float, length: int) -> None:
    six, many = (kept(layers, "reversible", dropout, length) for layers in (6, 24))
    assert many <= 1.1 * six
    assert kept(24, "residual", dropout, length) > 10 * many  # the measure sees what a residual stack keeps


def test_second_backward_is_refused() -> None:
    lm = make(REVERSIBLE["rotary"])
    loss = loss_of(lm, (5,))()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run the forward pass again before a second backward pass"):
        loss.backward()


def test_weights_changed_before_backward_are_noticed() -> None:
    lm = make(REVERSIBLE["rotary"])
    loss = loss_of(lm, (5,))()
    with torch.no_grad():
        lm.layers()[0].attention.query.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_graphs_are_freed_without_the_collector() -> None:
    lm = make(REVERSIBLE["rotary"])
    lm(text(1, 5))  # what is loaded at the first call may leave cycles of its own
    gc.collect()
    before = weakref.WeakSet(o for o in gc.get_objects() if type(o) is Chain)
    gc.disable()
    try:
        found = lm(text(1, 5))
        made = weakref.WeakSet(o for o in gc.get_objects() if type(o) is Chain and o not in before)
        assert len(made) == 1
        del found
        assert not len(made)
    finally:
        gc.enable()


def test_memory_check_counts_one_pair_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fits is not refused for activations and logits that it does not keep."""
    one = World(0, 1, torch.device("cpu"), "one")
    small = replace(REVERSIBLE["rotary"], layers=20, embedding=EmbeddingConfig(loss_chunk=64))
    config = RunConfig(model=small, train=TrainConfig(batch=8, block=4096))
    weights = 12 * sum(p.numel() for p in LM(small).parameters())
    monkeypatch.setattr(memory_check, "machine_bytes", lambda: weights + 4 * 8 * 4096 * 32 * 3)
    memory_check.check_memory(config, one)
    for plain in (replace(small, stack="residual"), replace(small, embedding=EmbeddingConfig())):
        with pytest.raises(ValueError, match=r"the run needs .* of memory on this machine"):
            memory_check.check_memory(replace(config, model=plain), one)


def test_bad_configurations() -> None:
    with pytest.raises(ValueError, match=r"model.stack is 'reversible', and a norm of a sum cannot be undone"):
        ModelConfig(vocab=5, stack="reversible", order="post")
    with pytest.raises(ValueError, match=r"train.checkpointing is set, and model.stack is 'reversible'"):
        RunConfig(model=ModelConfig(stack="reversible"), train=TrainConfig(checkpointing=True))
    with pytest.raises(ValueError, match=r"model.feedforward.chunk is -1; expected at least 0"):
        FeedForwardConfig(chunk=-1)
