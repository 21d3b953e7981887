"""Every mechanism with a recurrent state against dense weights in float64: values, gradients, splits, causality."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spanformer.attention import RecurrentAttention, View
from spanformer.kinds import KINDS, HeadSpec
from spanformer.kinds.notation import parse_layer
from spanformer.memory import MemoryShape
from spanformer.ops import Attended, Rule
from support.cases import FACTOR, UNITS
from support.linear_oracle import WEIGHTS, log_sum, output
from support.recurrent_heads import check_advance, run_pieces, with_another_future

ROWS = ("linear", "performer(24)", "performer(24, relu=true)", "rfa(64)", "gated_rfa(64)", "retention(learned=true)")
BOTH = ROWS[:4]
HEADS, KV, D, CHUNK = 4, 2, 8, 64


def spec_of(row: str, causal: bool = True) -> HeadSpec:
    (spec,) = parse_layer(row, HEADS)
    return replace(spec, dim=HEADS * D, head_dim=D, kv_heads=KV, causal=causal)


def made(row: str, causal: bool = True) -> RecurrentAttention:
    torch.manual_seed(1)
    mechanism = KINDS[spec_of(row).kind].make()(spec_of(row, causal))
    with torch.no_grad():
        for p in mechanism.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return mechanism.double()


def drawn(tokens: int, batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = {"q": (HEADS, tokens, D), "k": (KV, tokens, D), "v": (KV, tokens, D), "x": (tokens, HEADS * D)}
    return {name: torch.randn(batch, *size, generator=random, dtype=torch.float64) for name, size in sizes.items()}


def run(m: RecurrentAttention, t: dict[str, Tensor], **view: Tensor | None) -> Attended:
    return m(t["q"], t["k"], t["v"], m.rule(), View(x=t["x"], **view))  # pyright: ignore[reportArgumentType]


def pairs(m: RecurrentAttention, row: str, t: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """[B, H, T, T]; hidden [B or 1, 1, T, T]. Every tensor of a KV head is repeated for each of its query heads."""
    shared = HEADS // KV
    own = {name: p.repeat_interleave(shared, 0) for name, p in m.named_parameters()}
    each = SimpleNamespace(**dict(m.named_buffers()), **own, relu=getattr(m, "relu", False))
    k = t["k"].repeat_interleave(shared, 1)
    return WEIGHTS[spec_of(row).kind](each, t["x"])(t["q"], k).masked_fill(hidden, 0)


def dense(m: RecurrentAttention, row: str, t: dict[str, Tensor], hidden: Tensor) -> Attended:
    kind, weights = spec_of(row).kind, pairs(m, row, t, hidden)
    lse = torch.zeros_like(weights[..., 0]) if kind == "retention" else log_sum(kind, weights)
    return Attended(output(kind, weights, t["v"].repeat_interleave(HEADS // KV, 1)), lse)


def later(tokens: int) -> Tensor:
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)


def gradients(found: Attended, t: dict[str, Tensor], m: RecurrentAttention, *, lse: bool) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(9)
    parts = [found.out, found.lse] if lse else [found.out]
    loss = sum((p * torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype)).sum() for p in parts)
    named = {**t, **dict(m.named_parameters())}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)  # pyright: ignore
    return {f"d{name}": g for name, g in zip(named, grads, strict=True) if g is not None}


def everything(found: Attended, t: dict[str, Tensor], m: RecurrentAttention, row: str) -> dict[str, Tensor]:
    lse = not row.startswith("retention")
    values = {"out": found.out.detach()} | ({"lse": found.lse.detach()} if lse else {})
    return values | gradients(found, t, m, lse=lse)


def needing_gradients(t: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {name: x.detach().to(dtype).requires_grad_() for name, x in t.items()}


@pytest.mark.parametrize("tokens", [1, 31, CHUNK - 1, CHUNK, CHUNK + 1, 101])
@pytest.mark.parametrize("row", ROWS)
def test_equals_dense_weights_with_every_gradient(row: str, tokens: int) -> None:
    m, t = made(row), needing_gradients(drawn(tokens))
    wanted = everything(dense(m, row, t, later(tokens)), t, m, row)
    found = everything(run(m, t), t, m, row)
    assert set(found) == set(wanted)
    for name, right in wanted.items():
        torch.testing.assert_close(found[name], right, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("row", BOTH)
def test_both_directions_equal_dense_weights(row: str) -> None:
    m, t = made(row, causal=False), needing_gradients(drawn(33))
    padding = torch.zeros(2, 33, dtype=torch.bool)
    padding[1, 20:] = True
    wanted = dense(m, row, t, padding[:, None, None])
    found = run(m, t, padding=padding)
    torch.testing.assert_close(found.out[0], wanted.out[0])
    torch.testing.assert_close(found.out[1, :, :20], wanted.out[1, :, :20])
    torch.testing.assert_close(found.lse[1, :, :20], wanted.lse[1, :, :20])


@pytest.mark.parametrize("row", ROWS)
def test_documents_and_padding_equal_dense_weights(row: str) -> None:
    """Padding lies at the beginning, within and at the end; a document ends where a chunk does not."""
    tokens = 101
    m, t = made(row), needing_gradients(drawn(tokens))
    documents = torch.tensor([[0] * 40 + [3] * 61, [5] * 70 + [6] * 31])
    padding = torch.zeros(2, tokens, dtype=torch.bool)
    padding[0, :3] = padding[0, 50:55] = padding[1, 90:] = True
    hidden = later(tokens) | (documents[:, None, :, None] != documents[:, None, None]) | padding[:, None, None]
    real = (~padding)[:, None].expand(-1, HEADS, -1)
    found = run(m, t, documents=documents, padding=padding)
    shared = found.out[real], found.lse[real]
    if spec_of(row).kind in ("gated_rfa", "retention"):  # padding does not decay, and the dense form counts places
        without = [row_of(t, n, ~padding[n]) for n in range(2)]
        ids = [documents[n][~padding[n]] for n in range(2)]
        unseen = [later(len(i)) | (i[:, None] != i) for i in ids]
        each = [dense(m, row, u, p) for u, p in zip(without, unseen, strict=True)]
        wanted = torch.cat([e.out[0].transpose(0, 1) for e in each]).flatten()
        torch.testing.assert_close(found.out.transpose(1, 2)[~padding].flatten(), wanted)
        return
    wanted = dense(m, row, t, hidden)
    torch.testing.assert_close(shared, (wanted.out[real], wanted.lse[real]))


def row_of(t: dict[str, Tensor], row: int, real: Tensor) -> dict[str, Tensor]:
    return {name: x[row : row + 1, real] if name == "x" else x[row : row + 1, :, real] for name, x in t.items()}


@pytest.mark.parametrize("row", ROWS)
def test_float32_is_as_close_as_dense_weights_in_float32(row: str) -> None:
    """Weights that may be negative cancel in their sum, and dividing by it enlarges what was rounded. Gradients of
    gates are sums over all later tokens of differences, each rounded by its own size."""
    tokens, exact, single = 197, made(row), made(row).float()
    t = needing_gradients(drawn(tokens))
    small = needing_gradients(t, torch.float32)
    truth = everything(dense(exact, row, t, later(tokens)), t, exact, row)
    plain = everything(dense(single, row, small, later(tokens)), small, single, row)
    found = everything(run(single, small), small, single, row)
    weights = pairs(exact, row, t, later(tokens)).detach()
    enlarged = float((weights.abs().sum(3) / weights.sum(3).clamp(min=1e-3)).max()) if "rfa" in row else 1.0
    for name, right in truth.items():
        unit = torch.finfo(torch.float32).eps * float(right.abs().max())
        error, allowed = (float((x[name].double() - right).abs().max()) for x in (found, plain))
        summed = tokens**0.5 if row.startswith("gated") and name in ("dx", "dweight", "dbias") else 1.0
        most = FACTOR * allowed + UNITS * enlarged * summed * unit
        assert error <= most, f"{name} is off by {error:.1e}, dense by {allowed:.1e}"


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("row", ROWS)
def test_states_carry_a_text_over_any_split(row: str, tokens: int) -> None:
    m, t = made(row), drawn(tokens)
    whole = run(m, t)
    for cuts in ([*range(1, tokens)], [tokens // 3, tokens // 2], [tokens - 1]):
        parts = run_pieces(m, t, m.empty_state(MemoryShape(2, KV, D, dtype=torch.float64)), cuts)
        torch.testing.assert_close(torch.cat([p.out for p in parts], 2), whole.out)
        torch.testing.assert_close(torch.cat([p.lse for p in parts], 2), whole.lse)


@pytest.mark.parametrize("row", ROWS)
def test_advance_equals_the_state_after_run(row: str) -> None:
    m = made(row)
    check_advance(m, m.empty_state(MemoryShape(2, KV, D, dtype=torch.float64)), [drawn(37), drawn(37, seed=1)])


@pytest.mark.parametrize("instead", ["random", "nan"])
@pytest.mark.parametrize("cut", [1, 40, CHUNK, 100])
@pytest.mark.parametrize("row", ROWS)
def test_later_tokens_change_no_earlier_bit(row: str, cut: int, instead: str) -> None:
    m, t = made(row).float(), {name: x.float() for name, x in drawn(130).items()}
    whole = run(m, t)
    found = run(m, with_another_future(t, cut, drawn(130, seed=5) if instead == "random" else None))
    assert torch.equal(found.out[:, :, :cut], whole.out[:, :, :cut])
    assert torch.equal(found.lse[:, :, :cut], whole.lse[:, :, :cut])


@pytest.mark.parametrize("row", ROWS)
def test_large_queries_and_keys_give_no_nan(row: str) -> None:
    m = made(row).float()
    t = needing_gradients({name: x if name == "v" else 100 * x for name, x in drawn(130).items()}, torch.float32)
    found = run(m, t)
    found.out.sum().backward()
    assert bool(found.out.isfinite().all()) and not bool(found.lse.isnan().any())
    assert all(bool(x.grad.isfinite().all()) for x in t.values() if x.grad is not None)


@pytest.mark.parametrize("row", ["linear", "retention"])
def test_bfloat16_inputs_have_a_float32_state(row: str) -> None:
    m, t = made(row).bfloat16(), {name: x.bfloat16() for name, x in drawn(70).items()}
    state = m.empty_state(MemoryShape(2, KV, D, dtype=torch.bfloat16))
    found, state = m.run(t["q"], m.token_inputs(t["k"], t["v"], View(x=t["x"])), state, None, None)
    assert found.out.dtype == torch.bfloat16 and state["s"].dtype == state["z"].dtype == torch.float32


def test_rows_are_all_kinds_with_an_oracle() -> None:
    assert {spec_of(row).kind for row in ROWS} == set(WEIGHTS) - {"span_linear"}  # test_span_linear.py


@pytest.mark.parametrize("rule", [Rule(HEADS, reach=4), Rule(HEADS, distance_bias=torch.zeros(HEADS, 9))])
def test_rule_with_other_terms_is_refused(rule: Rule) -> None:
    m, t = made("linear"), drawn(9)
    with pytest.raises(ValueError, match=r"(reach|distance_bias) was given; LinearAttention has no scores to apply it"):
        m(t["q"], t["k"], t["v"], rule, View())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("performer(7)", "features is 7; expected at least the head size, 8: fewer cannot tell keys apart"),
        ("rfa(3)", "frequencies is 3, which gives 6 features; expected at least the head size, 8"),
        ("gated_rfa(3)", "frequencies is 3, which gives 6 features; expected at least the head size, 8"),
    ],
)
def test_too_few_features_are_refused(row: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(row)


def test_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="heads is 4, features 8 and kv_heads 3; expected at least 1 each"):
        KINDS["linear"].make()(replace(spec_of("linear"), kv_heads=3))
