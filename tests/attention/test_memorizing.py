"""Heads that retrieve (memorizing, retrieval): against full attention, over segments, after eviction; certificates.

The product test compares them with the dense oracle of tests/support/memory_oracle.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import LM
from spanformer.attention import Memorizing, Retrieval, View
from spanformer.inspect.attention_maps import attention_maps
from spanformer.inspect.certificates import certificates
from spanformer.memory import Cache, LayerCall, MemoryShape, State
from spanformer.memory.retrieved import Retrieved
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.model.retrofit import retrofit
from spanformer.ops.retrieve import attend_rows, find_rows
from spanformer.ops.search import Codes
from spanformer.position import Position

KINDS = {
    "gate": "memorizing(16, 3, 4, 4)",
    "joint": "memorizing(12, 2, 8, 4, joint)",
    "no_unit": "memorizing(16, 3, 4, 4, gate, false)",
    "retrieval": "retrieval(4, 3, 16, 4)",
    "mixed": "2 window(5) + 4 memorizing(16, 3, 4, 4)",
}


def made(row: str, position: str = "rotary", **more) -> LM:
    torch.manual_seed(0)
    attention = AttentionConfig(kind=row, max_span=60, ramp=4)
    config = ModelConfig(vocab=31, dim=48, layers=2, heads=6, kv_heads=3, position=PositionConfig(kind=position),
                         attention=attention, **more)  # fmt: skip
    model = LM(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


@pytest.fixture(params=KINDS)
def lm(request: pytest.FixtureRequest) -> LM:
    return made(KINDS[request.param])


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_segments(lm: LM, x: Tensor, sizes: list[int], **more) -> Tensor:
    parts, state = [], None
    for n, piece in enumerate(x.split(sizes, 1)):
        found = lm(piece, state, **{name: t.split(sizes, 1)[n] for name, t in more.items()})
        parts.append(found.logits)
        state = found.state
    return torch.cat(parts, 1)


# ---- the operation


def store(n: int, d: int = 8, batch: int = 2) -> tuple[Codes, Tensor, Tensor]:
    random = torch.Generator().manual_seed(n)
    keys, values = torch.randn(2, batch, n, d, generator=random, dtype=torch.float64)
    codes = Codes(batch, d)
    codes.append(keys)
    return codes, keys, values


@pytest.mark.parametrize("n, k", [(1, 1), (31, 4), (33, 32), (101, 7), (500, 64), (40, 99)])
def test_rows_that_are_found_are_the_best(n: int, k: int) -> None:
    codes, keys, _ = store(n)
    q = torch.randn(2, 13, 8, dtype=torch.float64)
    ids = find_rows(codes, keys, q, k).sort(2).values
    assert torch.equal(ids, (q @ keys.mT).topk(min(n, k), dim=2).indices.sort(2).values)


def test_equal_keys_are_searched_again_and_none_is_found_twice() -> None:
    """8-bit codes cannot tell these keys apart, so the bound asks for another search."""
    base = torch.randn(1, 1, 8, dtype=torch.float64)
    keys = base + 1e-5 * torch.randn(1, 300, 8, dtype=torch.float64)
    codes = Codes(1, 8)
    codes.append(keys)
    q = torch.randn(1, 5, 8, dtype=torch.float64)
    ids = find_rows(codes, keys, q, 10)
    assert torch.equal(ids.sort(2).values, (q @ keys.mT).topk(10, dim=2).indices.sort(2).values)


@pytest.mark.parametrize("n, k", [(1, 1), (33, 5), (40, 99)])
def test_attention_over_rows_equals_softmax_with_its_gradient(n: int, k: int) -> None:
    codes, keys, values = store(n)
    keys.requires_grad_()
    values.requires_grad_()
    q = torch.randn(2, 13, 8, dtype=torch.float64, requires_grad=True)
    ids = find_rows(codes, keys, q, k)
    found = attend_rows(q, keys, values, ids, 0.3)
    picked = (torch.stack([t[m, ids[m]] for m in range(2)]).detach() for t in (keys, values))
    rows_k, rows_v = picked
    s = 0.3 * (rows_k @ q[..., None])[..., 0]
    out, lse = (s.softmax(2)[:, :, None] @ rows_v)[:, :, 0], s.logsumexp(2)
    weights = torch.randn_like(out), torch.randn_like(lse)
    mine, true = (
        torch.autograd.grad((a * weights[0]).sum() + (b * weights[1]).sum(), [q, keys, values], allow_unused=True)
        for a, b in ((found.out, found.lse), (out, lse))
    )
    torch.testing.assert_close(found.out, out)
    torch.testing.assert_close(mine[0], true[0])
    assert mine[1] is None and mine[2] is None
    torch.testing.assert_close(found.lowest, s.amin(2))


def test_rows_that_are_not_there_have_no_weight() -> None:
    _, keys, values = store(5)
    q = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    found = attend_rows(q, keys, values, torch.full((2, 3, 4), -1), 0.3)
    assert not found.out.any() and bool((found.lse == -math.inf).all())
    found.out.sum().backward()
    assert q.grad is not None and not q.grad.any()


# ---- one function, whatever the segments


@pytest.mark.parametrize("sizes", [[4] * 11 + [3], [1] * 47, [13, 1, 33]])
def test_segments_equal_one_pass(lm: LM, sizes: list[int]) -> None:
    x = text(2, 47)
    torch.testing.assert_close(by_segments(lm, x, sizes), lm(x).logits)


@pytest.mark.parametrize("sizes", [[47], [1] * 47, [20, 1, 1, 17, 8]])
def test_decoding_equals_one_pass(lm: LM, sizes: list[int]) -> None:
    x, cache = text(2, 47), lm.cache(2)
    parts = [lm.decode(piece, cache) for piece in x.split(sizes, 1)]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), lm(x).logits)


def test_rows_of_different_lengths_decode_as_each_alone(lm: LM) -> None:
    x, cache = text(3, 40), lm.cache(3)
    lengths = torch.tensor([26, 3, 17])
    lm.decode(x[:, :26], cache, lengths=lengths)
    after = lm.decode(x[:, 26:], cache)
    for row, n in enumerate(lengths.tolist()):
        whole = lm(torch.cat([x[row : row + 1, :n], x[row : row + 1, 26:]], 1)).logits
        torch.testing.assert_close(after[row], whole[0, n:])


def test_future_changes_nothing(lm: LM) -> None:
    x, other = text(2, 33), text(2, 12, seed=5)
    torch.testing.assert_close(lm(torch.cat([x, other], 1)).logits[:, :33], lm(x).logits, rtol=0, atol=1e-12)


def test_cache_is_cropped_reordered_forked_and_saved(lm: LM, tmp_path: Path) -> None:
    x, cache = text(3, 45), lm.cache(3, slack=6)
    lm.decode(x[:, :33], cache)
    cache.crop(torch.tensor([33, 29, 27]))
    cache.reorder(torch.tensor([2, 1]))
    cache.save(tmp_path / "cache")
    fork = Cache.load(tmp_path / "cache", lm).fork(2)
    for one, rows in ((cache, [2, 1]), (fork, [2, 2, 1, 1])):
        after = lm.decode(x[rows, 33:], one)
        for n, row in enumerate(rows):
            kept = x[row : row + 1, : {2: 27, 1: 29}[row]]
            whole = lm(torch.cat([kept, x[row : row + 1, 33:]], 1)).logits
            torch.testing.assert_close(after[n], whole[0, kept.shape[1] :])


def test_nothing_is_retrieved_from_another_document(lm: LM) -> None:
    x, documents = text(1, 47), torch.tensor([[0] * 13 + [1] * 5 + [2] * 29])
    found = by_segments(lm, x, [7] * 6 + [5], documents=documents)
    other = torch.cat([text(1, 18, seed=9), x[:, 18:]], 1)
    torch.testing.assert_close(by_segments(lm, other, [11] * 4 + [3], documents=documents)[:, 18:], found[:, 18:])
    alone = lm(x[:, 18:])  # rotary positions and a multiple of no block: only the sets must be alike
    assert alone.logits is not None


def test_padding_is_not_retrieved(lm: LM) -> None:
    x, padding = text(2, 47), torch.zeros(2, 47, dtype=torch.bool)
    padding[0, 3:9] = padding[1, 14] = padding[1, 20:29] = True
    other = torch.where(padding, text(2, 47, seed=3), x)
    found, again = (by_segments(lm, t, [16, 16, 15], padding=padding) for t in (x, other))
    torch.testing.assert_close(again[~padding], found[~padding], rtol=0, atol=1e-12)


def test_state_is_saved_and_resumed_bit_identically(lm: LM) -> None:
    x, more = text(2, 30), text(2, 17, seed=1)
    state = lm(x).state
    saved = {name: t.clone() for name, t in state.tensors().items()}
    resumed = lm.start(2).with_tensors(saved, state.seen)
    assert torch.equal(lm(more, resumed).logits, lm(more, state).logits)
    for name, t in state.tensors().items():  # a segment can run twice
        assert torch.equal(t.nan_to_num(7.0), saved[name].nan_to_num(7.0))
    halves = [lm(more[some], state.rows(some)) for some in (slice(0, 1), slice(1, 2))]
    torch.testing.assert_close(torch.cat([h.logits for h in halves]), lm(more, state).logits)
    joined = State.stack([h.state for h in halves]).tensors()
    assert all(torch.equal(joined[n].isnan(), t.isnan()) for n, t in lm(more, state).state.tensors().items())


# ---- k = N


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", ["memorizing(64, 64, 4, 4, joint, false)", "retrieval(4, 64, 64, 4)"])
def test_retrieving_everything_is_full_attention(row: str, dtype: torch.dtype) -> None:
    """And the same gradients, if full attention takes keys and values outside the ring as constants."""
    lm = made(row, "none" if row.startswith("m") else "rotary").to(dtype)
    full = LM(replace(lm.config, attention=AttentionConfig(kind="full", max_span=60))).to(dtype).eval()
    missing = full.load_state_dict(lm.state_dict(), strict=False).unexpected_keys
    assert all("mechanism" in name for name in missing)
    x = text(2, 47)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(lm(x).logits, full(x).logits, **close)
    # the last block of a segment: everything before it comes from memory in both models
    state, other = lm(x[:, :40]).state, full(x[:, :40]).state
    grads = []
    for model, before in ((lm, state), (full, other)):
        found = model(x[:, 40:44], before, targets=x[:, 40:44])
        found.nll.mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name in ("query", "out"):
        for layer in range(2):
            name_ = f"blocks.{layer}.attention.{name}.weight"
            torch.testing.assert_close(grads[0][name_], grads[1][name_], **close)


@pytest.mark.parametrize("row", ["memorizing(64, 64, 4, 4, joint, false)", "retrieval(4, 64, 64, 4)"])
def test_retrieving_everything_has_the_gradients_of_full_attention(row: str) -> None:
    """Of a block's queries, keys and values: float32, against attention to all tokens in float64 with the older ones as
    constants, ≤ 1e-5."""
    kind = "none" if row.startswith("m") else "rotary"  # what `memorizing` retrieves has no position
    lm, x, at = _one_layer(row, kind).float().train(), text(2, 44), torch.arange(44)
    layer, held = lm.layers()[0].attention, {}
    before = lm(x[:, :40]).state

    def keep(name: str, states: Tensor, t: Tensor) -> None:
        if name == "query":
            held["states"] = states
        if torch.equal(states, held["states"]):  # and not when older tokens are projected again
            t.retain_grad()
            held[name] = t

    for name in ("query", "key", "value"):
        getattr(layer, name).register_forward_hook(lambda module, args, out, name=name: keep(name, args[0], out))
    layer.out.register_forward_pre_hook(lambda module, args: keep("out", held["states"], args[0]))
    lm(x[:, 40:], before, targets=x[:, 40:]).nll.mean().backward()
    with torch.no_grad():
        h = lm.blocks[0].norm1(lm.embedding(x[:, :40])).double()
    leaves = {name: held[name].detach().double().requires_grad_() for name in ("query", "key", "value")}
    q, k, v = (t.view(2, 4, -1, 8).transpose(1, 2) for t in leaves.values())
    older = ((h @ w.weight.detach().double().T).view(2, 40, 3, 8).transpose(1, 2) for w in (layer.key, layer.value))
    k, v = (torch.cat([old, new], 2).repeat_interleave(2, 1) for old, new in zip(older, (k, v), strict=True))
    if kind == "rotary":
        rotary = lm.double().positions()[0]
        q, k = rotary.rotate(q, at[40:]), rotary.rotate(k, at)
    s = q @ k.mT / math.sqrt(8)
    out = (s.masked_fill(at > at[40:, None], -math.inf).softmax(3) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(held["out"].double(), out, rtol=1e-5, atol=1e-5)
    out.backward(held["out"].grad.double())
    for name, leaf in leaves.items():
        found, true = held[name].grad.double(), leaf.grad
        assert true is not None and float((found - true).abs().max()) <= 1e-5 * float(true.abs().max()), name


def test_no_gradient_reaches_the_memory() -> None:
    lm = made(KINDS["joint"]).train()
    state = lm(text(2, 30)).state
    assert not any(t.requires_grad for t in state.tensors().values())
    part = state.layers[0]
    assert isinstance(part, Retrieved)
    held = part.tensors()
    for name in ("store_keys", "store_values"):
        held[name] = held[name].clone().requires_grad_()
    lm(text(2, 9, seed=2), replace(state, layers=(part.with_tensors(held), *state.layers[1:]))).logits.sum().backward()
    assert held["store_keys"].grad is None and held["store_values"].grad is None


def test_gates_scales_and_projections_are_trained() -> None:
    lm = made(KINDS["gate"]).train()
    state = lm(text(2, 30)).state
    x = text(2, 9, seed=2)
    lm(x, state, targets=x).nll.mean().backward()
    for name, p in lm.named_parameters():
        assert p.grad is not None and bool(p.grad.any()), name


def test_gate_is_off_where_nothing_is_stored() -> None:
    lm, x = made(KINDS["gate"]), text(2, 8)
    before = lm(x).logits
    with torch.no_grad():
        for m in lm.mechanisms():
            assert isinstance(m, Memorizing) and m.gate is not None
            m.gate.fill_(9.0)
    assert torch.equal(lm(x).logits, before)


def test_memory_is_enlarged_after_training() -> None:
    lm, x = made(KINDS["gate"]), text(1, 60)
    before = lm(x).logits
    for m in lm.mechanisms():
        assert isinstance(m, Retrieval)
        m.resize(40)
    after = lm(x).logits
    assert torch.equal(after[:, :20], before[:, :20]) and not torch.equal(after[:, 40:], before[:, 40:])
    with pytest.raises(ValueError, match="memory is 42; expected a multiple of block, 4"):
        m.resize(42)


# ---- eviction


def test_every_retrieved_value_is_right_after_eviction() -> None:
    """A stream much longer than the memory; the peer's values are wrong rows from its first overflow on."""
    lm = made("memorizing(16, 16, 4, 4)").float()
    cache, x = lm.cache(1), text(1, 203)
    layer, values = lm.layers()[0].attention, []
    layer.value.register_forward_hook(lambda module, args, out: values.append(out.detach()))
    for n, piece in enumerate(x.split(7, 1)):
        lm.decode(piece, cache)
        part = cache.parts()[0]
        assert isinstance(part, Retrieved)
        at = part.tensors()["store_at"][0]
        newest = (min(203, 7 * (n + 1)) // 4 - 1) * 4  # those before the ring
        assert sorted(at[at >= 0].tolist()) == list(range(max(0, newest - 16), max(0, newest)))
        every = torch.cat(values, 1)[0].view(-1, 3, 8)
        for p in at[at >= 0].tolist():
            torch.testing.assert_close(part.values_at(torch.tensor([p]))[:, 0], every[p])
    assert cache.bytes() == lm.cache(1).bytes()


# ---- certificates


@pytest.mark.parametrize("sizes", [[60], [1] * 60])
def test_certificate_bounds_the_weight_that_was_left_out(sizes: list[int]) -> None:
    """Against full attention's weights of the keys that a layer did not read."""
    lm = _one_layer()
    x, cache = text(2, 60), lm.cache(2)
    layer = lm.layers()[0].attention
    states: list[Tensor] = []
    layer.query.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with certificates(lm) as found:
        for piece in x.split(sizes, 1):
            lm.decode(piece, cache)
    h, share = torch.cat(states, 1).detach(), found()[0]
    assert share.shape == (2, 6, 60)
    q, k = (w(h).detach().view(2, 60, -1, 8).transpose(1, 2) for w in (layer.query, layer.key))
    at = torch.arange(60)
    rotary = lm.positions()[0]
    q, k = rotary.rotate(q, at), rotary.rotate(k, at).repeat_interleave(2, 1)
    s = (q @ k.mT / math.sqrt(8)).masked_fill(at > at[:, None], -math.inf)
    first = (at // 4 * 4 - 4).clamp(min=0)
    older = at[None] < first[:, None]
    best = s.masked_fill(~older, -math.inf).topk(3, dim=3)
    read = ~older | torch.zeros_like(s, dtype=torch.bool).scatter(3, best.indices, best.values > -math.inf)
    omitted = s.softmax(3).masked_fill(read, 0).sum(3)
    assert bool((omitted <= share + 1e-12).all()) and float(omitted.max()) > 0.1
    assert float(share.max()) < 1 and bool((share[..., :8] == 0).all())


def _one_layer(row: str = "retrieval(4, 3, 64, 4)", position: str = "rotary") -> LM:
    lm = made(row, position)
    return LM(replace(lm.config, layers=1)).double().eval()


@pytest.mark.parametrize("row", [KINDS[name] for name in ("gate", "joint", "no_unit", "retrieval")])
def test_attention_maps_have_the_weights_of_the_layer(row: str) -> None:
    """Weights times the layer's values are its output, what is retrieved included."""
    lm, x, states, outs = _one_layer(row), text(1, 37), [], []
    layer = lm.layers()[0].attention
    layer.query.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    layer.out.register_forward_pre_hook(lambda module, args: outs.append(args[0]))
    (weights,) = attention_maps(lm, x[0])
    v = layer.value(states[0]).view(37, 3, 8).transpose(0, 1).repeat_interleave(2, 0)
    torch.testing.assert_close((weights @ v).transpose(0, 1).flatten(1), outs[0][0])


# ---- a trained model gets a memory


def test_retrofit_changes_nothing_at_first_but_by_the_gate() -> None:
    torch.manual_seed(1)
    attention = AttentionConfig(kind="window(8)", max_span=60)
    config = ModelConfig(vocab=31, dim=48, layers=3, heads=6, attention=attention, position=PositionConfig(kind="none"))
    trained = LM(config).eval()
    lm = retrofit(trained, 1, "memorizing(16, 4, 4, 4)")
    m = lm.mechanisms()[1]
    assert isinstance(m, Memorizing) and m.log_scale is None and m.gate is not None
    assert float(m.gate.detach().sigmoid().max()) < 0.02
    own = trained.state_dict()
    assert all(torch.equal(t, own[name]) for name, t in lm.state_dict().items() if name in own)
    assert set(lm.state_dict()) - set(own) == {"blocks.1.attention.mechanism.gate"}


def test_retrofit_refuses_what_is_no_memory() -> None:
    trained = made("window(5)")
    with pytest.raises(ValueError, match=r"kind is 'window\(5\)'; expected memorizing"):
        retrofit(trained, 1, "window(5)")
    with pytest.raises(ValueError, match="layer is 2; expected 0 … 1"):
        retrofit(trained, 2, "memorizing")


@pytest.mark.parametrize(
    "row, said",
    [
        ("memorizing(10, 2, 4, 4)", "memory is 10; expected a multiple of block, 4"),
        ("memorizing(8, 2, 3, 4)", "ring is 3; expected a multiple of block, 4"),
        ("retrieval(4, 3, 9, 4)", "memory is 9; expected a multiple of block, 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(row: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(row)


def test_keys_that_are_not_finite_are_never_found() -> None:
    codes, keys, _ = store(20)
    keys[0, 3] = math.nan
    codes = Codes(2, 8)
    codes.append(keys)
    ids = find_rows(codes, keys, torch.randn(2, 6, 8, dtype=torch.float64), 20)
    assert not bool((ids[0] == 3).any()) and bool((ids[1] == 3).any())


def test_token_that_is_not_finite_is_forgotten_with_the_ring() -> None:
    m = Retrieval(2, 16, ring=4, memory=16, k=3, block=4).eval()
    memory, random = m.new_memory(MemoryShape(1, 2, 8, in_place=True)), torch.Generator().manual_seed(0)
    for start in range(0, 24, 4):
        q, k, v = torch.randn(3, 1, 2, 4, 8, generator=random)
        if not start:
            k[:, :, 1], v[:, :, 1] = math.nan, math.inf
        at = torch.arange(start, start + 4)
        view = View(x=torch.zeros(1, 4, 16), q_positions=at, k_positions=at)
        found, _ = memory.attend(LayerCall(m, Position(), view, q, k.clone, v, _none, _none))
        memory = memory.keep(torch.zeros(1, 4, 16))
        assert bool(found.out.isfinite().all()) == (start > 4)
    assert bool(memory.tensors()["bounds"].isfinite().all())


def _none(_states: Tensor, _heads: list[int] | None) -> tuple[Tensor, Tensor]:
    raise AssertionError("decoding projects no earlier states")
