"""The memory of recurrent states: segments, decoding, cropping, documents, and mixtures with windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import LM, Encoder
from spanformer.attention import MixedMemory, View
from spanformer.infer import Sampling, generate
from spanformer.inspect.attention_maps import attention_maps
from spanformer.inspect.clocks import AttentionClock
from spanformer.memory import ByHead, Cache, LayerCall, MemoryShape, Recurrent
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.position import Position
from support.reading import (
    by_segments,
    check_continued,
    check_rows_and_stack_of_states,
    check_rows_of_different_lengths,
    from_cache,
    text,
)

KINDS = (
    "linear",
    "performer(16)",
    "gated_rfa(8)",
    "retention(learned=true)",
    "2 adaptive_span + 2 linear",
    "2 performer(16) + 2 retention",
)


def make(kind: str, position: str = "none", **more) -> LM:
    torch.manual_seed(0)
    config = ModelConfig(vocab=31, dim=32, layers=2, heads=4, kv_heads=2, position=PositionConfig(kind=position),
                         attention=AttentionConfig(kind=kind, max_span=64, init=0.2, **more))  # fmt: skip
    return LM(config).double().eval()


@pytest.fixture(params=KINDS)
def lm(request: pytest.FixtureRequest) -> LM:
    return make(request.param, "none" if " linear" in request.param or request.param == "linear" else "rotary")


@pytest.mark.parametrize("cuts", [[1, 2, 3], [4, 64, 70], [99]])
def test_segments_equal_one_pass(lm: LM, cuts: list[int]) -> None:
    x = text(2, 100)
    torch.testing.assert_close(by_segments(lm, x, cuts), lm(x).logits)


@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("sizes", [[1] * 20, [3, 1, 8, 8]])
def test_cache_equals_one_pass_with_and_without_slack(lm: LM, sizes: list[int], slack: int) -> None:
    x = text(2, 20)
    torch.testing.assert_close(from_cache(lm, x, sizes, slack), lm(x).logits)


def test_rows_of_different_lengths(lm: LM) -> None:
    check_rows_of_different_lengths(lm, [9, 4, 0], 5, slack=3)


def test_cache_is_cropped_reordered_forked_and_saved(lm: LM, tmp_path: Path) -> None:
    """Twice, so that what is taken back is the second time what was read after the first."""
    x, cache = text(3, 40), lm.cache(3, slack=4)
    lm.decode(x[:, :20], cache)
    cache.crop(torch.tensor([20, 17, 16]))
    for row, n in enumerate((20, 17, 16)):
        assert cache.seen[row] == n
    kept = [torch.cat([x[row, :n], x[row, 30:33]]) for row, n in enumerate((20, 17, 16))]
    lm.decode(x[:, 30:33], cache)
    cache.crop(cache.seen - torch.tensor([3, 0, 1]))
    kept = [ids[: len(ids) - back] for ids, back in zip(kept, (3, 0, 1), strict=True)]
    cache.reorder(torch.tensor([2, 1]))
    cache.save(tmp_path / "cache")
    fork = Cache.load(tmp_path / "cache", lm).fork(2)
    for one, rows in ((cache, [2, 1]), (fork, [2, 2, 1, 1])):
        check_continued(lm, one, [kept[row] for row in rows], x[rows, 34:])


def test_crop_of_some_rows_leaves_the_others_bit_identical(lm: LM) -> None:
    x, cache = text(2, 12), lm.cache(2, slack=4)
    lm.decode(x, cache)
    before = [part.state["s"] for part in cache.parts() if isinstance(part, Recurrent)]
    cache.crop(torch.tensor([12, 10]))
    after = [part.state["s"] for part in cache.parts() if isinstance(part, Recurrent)]
    assert all(torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("slack", "said"), [(2, "row 0 cannot be cropped"), (0, "cannot take tokens back|row 0 cannot")]
)
def test_crop_beyond_slack_changes_nothing(lm: LM, slack: int, said: str) -> None:
    x, cache = text(1, 80), lm.cache(1, slack=slack)
    lm.decode(x, cache)
    with pytest.raises(ValueError, match=said):
        cache.crop(torch.tensor([74]))
    assert cache.seen.tolist() == [80]
    torch.testing.assert_close(lm.decode(x[:, :1], cache), lm(torch.cat([x, x[:, :1]], 1)).logits[:, -1:])


def test_bytes_are_a_state_and_slack_tokens() -> None:
    """float64: s and z of 2 KV heads, a document id, and for slack one state more and keys and values of n tokens, and
    two ids of each, of the state and of the last token."""
    lm, state = make("linear"), 2 * 8 * (8 + 1) * 8
    assert lm.cache(3).bytes() == 2 * 3 * (state + 8)
    assert lm.cache(3, slack=7).bytes() == 2 * 3 * (2 * state + 8 + 7 * (2 * 2 * 8 * 8 + 1) + 9 * 2 * 8)
    cache = lm.cache(3, slack=7)
    lm.decode(text(3, 50), cache)
    assert cache.bytes() == lm.cache(3, slack=7).bytes()
    held = {t.untyped_storage().nbytes() for part in cache.parts() for t in part.tensors().values()}  # pyright: ignore
    assert held == {t.numel() * t.element_size() for part in cache.parts() for t in part.tensors().values()}  # pyright: ignore


def test_documents_begin_with_an_empty_state(lm: LM) -> None:
    """Over segments, of which one begins with a document and another within one."""
    x = text(2, 30)
    documents = torch.tensor([[0] * 10 + [1] * 20, [4] * 3 + [5] * 14 + [6] * 13])
    logits = by_segments(lm, x, [10, 19], documents)
    if lm.config.position.kind == "none":
        for row in range(2):
            for document in documents[row].unique():
                mine = documents[row] == document
                torch.testing.assert_close(logits[row, mine], lm(x[row : row + 1, mine]).logits[0])
    torch.testing.assert_close(logits, lm(x, documents=documents).logits)


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 5, [3] * 12 + [4] * 2])
PADDING = torch.tensor([[False] * 4 + [True] * 2 + [False] * 8, [False] * 11 + [True] + [False] * 2])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pieces", [[14], [7, 7], [1] * 14, [9, 2, 3]])
@pytest.mark.parametrize(
    "kind", ["linear", "performer(16)", "gated_rfa(8)", "gated_delta", "gated_linear", "span_linear"]
)
def test_crop_goes_back_over_the_beginning_of_a_document(kind: str, pieces: list[int], padded: bool) -> None:
    """As if the tokens that are taken back had never been read."""
    mechanism = make(kind).mechanisms()[0]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 14, 8, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    x = torch.randn(2, 14, 32, generator=g, dtype=torch.float64)
    padding = PADDING if padded else torch.zeros_like(PADDING)

    def read(sizes: list[int], tokens: int, row: slice, real: Tensor) -> Recurrent:
        memory = mechanism.new_memory(MemoryShape(len(x[row]), 2, 8, slack=9, dtype=torch.float64))
        assert isinstance(memory, Recurrent)
        for at in torch.arange(tokens).split(sizes):
            view = View(x=x[row][:, at], documents=DOCUMENTS[row][:, at], padding=real[row][:, at])
            queries, keys, values = (t[row][:, :, at] for t in (q, k, v))
            memory.attend(LayerCall(mechanism, Position(), view, queries, keys.clone, values, never, never))
            memory = memory.keep(x)
        return memory

    def after(memory: Recurrent, row: int | None = None) -> Tensor:
        """The output of one token more, of the document that was read last."""
        some = slice(0, 2) if row is None else slice(row, row + 1)
        view = View(x=x[some, :1], documents=memory.document[:, None])
        queries, keys, values = (t[some, :, :1] for t in (q, k, v))
        call = LayerCall(mechanism, Position(), view, queries, keys.clone, values, never, never)
        return memory.attend(call)[0].out

    whole = read(pieces, 14, slice(0, 2), padding)
    for back in ([0, 0], [2, 1], [6, 2], [8, 4], [3, 0]):
        cropped = whole.crop(torch.tensor(back))
        for row, n in enumerate(back):
            last = [t for t in range(14) if not padding[row, t]][-n - 1] if n else 13
            right = read([last + 1], last + 1, slice(row, row + 1), padding)
            assert int(cropped.document[row]) == int(right.document[0])
            torch.testing.assert_close(after(cropped)[row], after(right, row)[0])


def never(*_given):
    raise AssertionError("a recurrent state projects no earlier hidden states")


def test_padding_changes_no_state(lm: LM) -> None:
    if lm.config.position.kind != "none":
        pytest.skip("positions count padding")
    x, padding = text(1, 20), torch.zeros(1, 20, dtype=torch.bool)
    padding[0, :4] = padding[0, 9:12] = True
    if isinstance(lm.mechanisms()[0], MixedMemory):
        padding[0, 9:12] = False  # distances of windows count padding
    found = lm(x[:, 10:], lm(x[:, :10], padding=padding[:, :10]).state, padding=padding[:, 10:]).logits
    real = ~padding[0, 10:]
    torch.testing.assert_close(found[:, real], lm(x[:, ~padding[0]]).logits[:, -int(real.sum()) :])


def test_states_are_detached_and_gradients_reach_every_parameter(lm: LM) -> None:
    state = lm(text(2, 6, seed=1)).state
    assert not any(t.requires_grad for t in state.tensors().values())
    x = text(2, 9)
    found = lm(x, state, targets=x)
    assert found.nll is not None
    (found.nll.mean() + found.penalty).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in lm.parameters())


def test_checkpointing_gives_the_same_gradients_and_state(lm: LM) -> None:
    x, found = text(2, 20), []
    for checkpointing in (False, True):
        lm.checkpointing = checkpointing
        lm.zero_grad()
        output = lm(x[:, 10:], lm(x[:, :10]).state, targets=x[:, 10:])
        assert output.nll is not None
        output.nll.mean().backward()
        grads = [p.grad.clone() for p in lm.parameters() if p.grad is not None]
        found.append((grads, list(output.state.tensors().values())))
    torch.testing.assert_close(found[0], found[1])


def test_rows_and_stack_of_states(lm: LM) -> None:
    check_rows_and_stack_of_states(lm, 9, 5)


def test_segment_runs_twice_from_one_state(lm: LM) -> None:
    state = lm(text(2, 9)).state
    first, second = (lm(text(2, 5, seed=1), state) for _ in range(2))
    assert torch.equal(first.logits, second.logits)


def test_mixture_has_rings_for_some_heads_and_a_state_for_others() -> None:
    lm = make("2 adaptive_span + 2 linear")
    (rings, state), layer = lm.cache(1).parts()[:2], lm.start(1).layers[0]
    assert isinstance(layer, ByHead) and isinstance(state, Recurrent) and not isinstance(rings, Recurrent)


def test_whole_prompt_matters(lm: LM) -> None:
    """More of it than the spans of any layer reach."""
    assert lm.receptive_field() > 10**12 and make("window(5)").receptive_field() == 9
    x, read = text(1, 300)[0], []
    (piece,) = generate(lm, x, max_tokens=1, sampling=Sampling(temperature=0), on_read=lambda n, *_: read.append(n))
    assert piece.id == int(lm(x[None]).logits[0, -1].argmax()) and read[-1] == 300


@pytest.mark.parametrize("position", ["none", "rotary"])
@pytest.mark.parametrize(
    "kind", ["linear", "performer(16)", "rfa(16)", "gated_rfa(16)", "2 window(5) + 2 performer(16)"]
)
def test_attention_maps_give_the_outputs(kind: str, position: str) -> None:
    """Weights times values, by hooks on the layer's projections."""
    if kind == "linear" and position == "rotary":
        return
    lm, x, found = make(kind, position), text(1, 30), {}
    attention = lm.layers()[0].attention
    attention.out.register_forward_pre_hook(lambda module, args: found.update(out=args[0]))
    attention.value.register_forward_hook(lambda module, args, out: found.update(v=out))
    weights = attention_maps(lm, x[0])[0]
    v = found["v"].view(30, 2, 8).transpose(0, 1).repeat_interleave(2, 0)
    torch.testing.assert_close((weights @ v).transpose(0, 1).flatten(1), found["out"][0])
    assert "run" not in vars(attention.mechanism) and not bool(weights.triu(1).any())


def test_clock_times_every_part_and_leaves_no_trace(lm: LM) -> None:
    parts = [p for m in lm.mechanisms() for p in (m.each() if isinstance(m, MixedMemory) else [m])]
    with AttentionClock(lm) as clock:
        lm(text(2, 20)).logits.sum().backward()
        assert len(clock.mechanisms) == len(parts) and not clock.running
    assert clock.seconds > 0 and not any("run" in vars(part) for part in parts)
    seconds = clock.seconds
    lm(text(2, 20))
    assert clock.seconds == seconds


@pytest.mark.parametrize("kind", ["linear", "performer(16)", "2 rfa(8) + 2 window(5)"])
def test_encoder_sees_both_directions(kind: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocab=31, dim=32, layers=2, heads=4, kind="encoder", attention=AttentionConfig(kind=kind),
                         position=PositionConfig(kind="none"),
                         feedforward=FeedForwardConfig(kind="none"))  # fmt: skip
    model = Encoder(config).double().eval()
    x = text(2, 20)
    changed = x.clone()
    changed[:, -1] = (x[:, -1] + 1) % 31
    assert not torch.equal(model(x).logits[:, 0], model(changed).logits[:, 0])
    padding = torch.arange(20) >= torch.tensor([20, 12])[:, None]
    torch.testing.assert_close(model(x, padding=padding).logits[1, :12], model(x[1:, :12]).logits[0])


@pytest.mark.parametrize(
    ("kind", "position", "said"),
    [
        ("linear", "rotary", "LinearAttention does not support this position encoding: .* use none, sinusoidal, sinus"),
        ("2 window(3) + 2 linear", "alibi", "LinearAttention does not support this position encoding"),
        ("performer(16)", "alibi", "Performer does not support this position encoding: .* learned_per_layer or rotary"),
        ("retention", "t5", "Retention does not support this position encoding"),
    ],
)
def test_positions_that_cannot_act_are_refused(kind: str, position: str, said: str) -> None:
    for use in (lambda lm: lm(text(1, 4)), lambda lm: lm.cache(1)):
        with pytest.raises(ValueError, match=said):
            use(make(kind, position))


def test_dropout_of_weights_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model\.attention\.dropout is 0\.1, and LinearAttention has no attention weig"
    ):
        make("2 window(3) + 2 linear", dropout=0.1)


def test_state_of_another_batch_or_dtype_is_refused() -> None:
    lm = make("linear")
    state, cache = lm(text(2, 5)).state, lm.cache(1)
    with pytest.raises(ValueError, match=r"s has 2 rows of torch\.float64 on cpu, and the new tokens need 3 rows"):
        lm(text(3, 4), state)
    with pytest.raises(ValueError, match=r"need 1 rows of torch\.float32 on cpu; begin with this model's start\(\)"):
        lm.float().decode(text(1, 3), cache)


@pytest.mark.parametrize("kind", ["gated_delta", "gated_rfa(8)", "retention(learned=true)"])
def test_parameters_that_are_not_finite_are_named(kind: str) -> None:
    lm = make(kind)
    name, p = next(iter(lm.mechanisms()[0].named_parameters()))
    with torch.no_grad():
        p.view(-1)[0] = torch.nan
    with pytest.raises(ValueError, match=rf"\.{name} holds numbers that are not finite"):
        lm.cache(1)
    assert "not finite" in (lm.mechanisms()[0].advice() or "")
