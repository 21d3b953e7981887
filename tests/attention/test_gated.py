"""Gated linear attention and gated delta networks against their equations in float64: values, gradients, splits,
documents, padding, causality."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import LM
from spanformer.attention import GatedDelta, GatedLinear, View
from spanformer.attention.matrix_state import MatrixStateAttention
from spanformer.attention.short_convolution import ShortConvolution
from spanformer.kinds import KINDS, HeadSpec
from spanformer.kinds.notation import parse_layer
from spanformer.memory import MemoryShape
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.ops import Rule
from support.reading import by_segments, check_crop_reorder_fork_and_save, from_cache, text
from support.recurrent_heads import check_advance, run_pieces, with_another_future
from support.state_oracle import STATES, outputs

ROWS = ("gated_linear", "gated_linear(rank=3)", "gated_delta", "gated_delta(conv=0)", "gated_delta(conv=1)")
HEADS, D, CHUNK = 4, 8, 64


def made(row: str, kv_heads: int = HEADS) -> MatrixStateAttention:
    torch.manual_seed(1)
    (spec,) = parse_layer(row, HEADS)
    spec: HeadSpec = replace(spec, dim=HEADS * D, head_dim=D, kv_heads=kv_heads, causal=True)
    mechanism = KINDS[spec.kind].make()(spec)
    with torch.no_grad():
        for p in mechanism.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return mechanism.double()


def drawn(tokens: int, kv_heads: int = HEADS, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = {"q": (HEADS, tokens, D), "k": (kv_heads, tokens, D), "v": (kv_heads, tokens, D), "x": (tokens, HEADS * D)}
    return {name: torch.randn(2, *size, generator=random, dtype=torch.float64) for name, size in sizes.items()}


def run(m: MatrixStateAttention, t: dict[str, Tensor], **view: Tensor | None) -> Tensor:
    return m(t["q"], t["k"], t["v"], m.rule(), View(x=t["x"], **view)).out  # pyright: ignore[reportArgumentType]


def oracle(row: str, m: MatrixStateAttention, t: dict[str, Tensor], padding: Tensor | None = None) -> Tensor:
    return outputs(row.split("(")[0], m, t["x"], t["q"], t["k"], t["v"], padding)


def gradients(out: Tensor, t: dict[str, Tensor], m: MatrixStateAttention) -> dict[str, Tensor]:
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    named = {**t, **dict(m.named_parameters())}
    return dict(zip(named, torch.autograd.grad((out * direction).sum(), list(named.values())), strict=True))


@pytest.mark.parametrize("tokens", [1, 31, CHUNK - 1, CHUNK, CHUNK + 1, 101])
@pytest.mark.parametrize("row", ROWS)
def test_equals_the_equations_with_every_gradient(row: str, tokens: int) -> None:
    m, t = made(row), {name: x.requires_grad_() for name, x in drawn(tokens).items()}
    wanted, found = oracle(row, m, t), run(m, t)
    torch.testing.assert_close(found, wanted)
    mine, theirs = gradients(found, t, m), gradients(wanted, t, m)
    for name, right in theirs.items():
        torch.testing.assert_close(mine[name], right, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("row", ROWS)
def test_grouped_heads_share_keys_values_and_gates(row: str) -> None:
    """As with as many key/value heads, each a copy."""
    m, whole, t = made(row, kv_heads=2), made(row), drawn(40, kv_heads=2)
    own = dict(m.named_parameters())
    with torch.no_grad():
        for name, p in whole.named_parameters():
            given = own[name]
            if given.shape != p.shape:  # [Hkv …] or [Hkv · D …]
                heads = given.unflatten(0, (2, len(given) // 2)).repeat_interleave(2, 0)
                given = heads.flatten(0, 1)
            p.copy_(given)
    copied = t | {name: t[name].repeat_interleave(2, 1) for name in ("k", "v")}
    torch.testing.assert_close(run(m, t), run(whole, copied))


@pytest.mark.parametrize("row", ROWS)
def test_documents_and_padding_equal_separate_texts(row: str) -> None:
    tokens, m = 101, made(row)
    t = drawn(tokens)
    documents = torch.tensor([[0] * 40 + [3] * 61, [5] * 70 + [6] * 31])
    padding = torch.zeros(2, tokens, dtype=torch.bool)
    padding[0, :3] = padding[0, 50:55] = padding[1, 90:] = True
    spoilt = {name: x.clone() for name, x in t.items()}  # nothing of a padded token may be read
    for name, x in spoilt.items():
        (x if name == "x" else x.transpose(1, 2))[padding] = 1e6
    found = run(m, spoilt, documents=documents, padding=padding)
    for b, cut in ((0, 40), (1, 70)):
        for some in (slice(0, cut), slice(cut, tokens)):
            piece = {name: x[b : b + 1, some] if name == "x" else x[b : b + 1, :, some] for name, x in t.items()}
            real = ~padding[b, some]
            wanted = oracle(row, m, piece, padding[b : b + 1, some])
            torch.testing.assert_close(found[b, :, some][:, real], wanted[0, :, real])


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("row", ROWS)
def test_states_carry_a_text_over_any_split(row: str, tokens: int) -> None:
    m, t = made(row), drawn(tokens)
    whole = run(m, t)
    for cuts in ([*range(1, tokens)], [tokens // 3, tokens // 2], [tokens - 1]):
        parts = run_pieces(m, t, m.empty_state(MemoryShape(2, HEADS, D, dtype=torch.float64)), cuts)
        torch.testing.assert_close(torch.cat([p.out for p in parts], 2), whole)


@pytest.mark.parametrize("row", ROWS)
def test_advance_equals_the_state_after_run(row: str) -> None:
    m = made(row)
    check_advance(m, m.empty_state(MemoryShape(2, HEADS, D, dtype=torch.float64)), [drawn(37), drawn(37, seed=1)])


@pytest.mark.parametrize("instead", ["random", "nan"])
@pytest.mark.parametrize("cut", [1, 40, CHUNK, 100])
@pytest.mark.parametrize("row", ROWS)
def test_later_tokens_change_no_earlier_bit(row: str, cut: int, instead: str) -> None:
    m, t = made(row).float(), {name: x.float() for name, x in drawn(130).items()}
    changed = with_another_future(t, cut, drawn(130, seed=5) if instead == "random" else None)
    assert torch.equal(run(m, changed)[:, :, :cut], run(m, t)[:, :, :cut])


@pytest.mark.parametrize("row", ROWS)
def test_strong_gates_and_large_inputs_give_no_nan(row: str) -> None:
    m = made(row).float()
    t = {name: (100 * x).float().requires_grad_() for name, x in drawn(130).items()}
    with torch.no_grad():
        if isinstance(m, GatedDelta):
            m.bias.fill_(50.0)
        elif isinstance(m, GatedLinear):
            m.bias.fill_(-800.0)  # −50 after the root
    out = run(m, t)
    grads = torch.autograd.grad(out.sum(), [*t.values(), *m.parameters()])
    assert bool(out.isfinite().all()) and all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("row", ROWS)
def test_bfloat16_has_a_float32_state(row: str) -> None:
    m, t = made(row).bfloat16(), {name: x.bfloat16() for name, x in drawn(70).items()}
    state = m.empty_state(MemoryShape(2, HEADS, D, dtype=torch.bfloat16))
    found, state = m.run(t["q"], m.token_inputs(t["k"], t["v"], View(x=t["x"])), state, None, None)
    assert found.out.dtype == torch.bfloat16 and {s.dtype for s in state.values()} == {torch.float32}
    exact = run(made(row).bfloat16().double(), {name: x.double() for name, x in t.items()})
    torch.testing.assert_close(found.out.double(), exact, rtol=0.1, atol=0.1)


def test_short_convolution_carries_its_last_inputs() -> None:
    """Documents and padding too: a document begins without what came before it, over a split as well."""
    torch.manual_seed(0)
    conv, x = ShortConvolution(2, 3, 4).double(), torch.randn(1, 2, 9, 3, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    empty = x.new_zeros(1, 2, 3, 3)
    whole, _ = conv(x, empty, None, documents)
    for cut in range(5, 9):
        first, tail = conv(x[:, :, :cut], empty, None, documents[:, :cut])
        second, _ = conv(x[:, :, cut:], tail, None, None)
        torch.testing.assert_close(torch.cat([first, second], 2), whole)
    second, _ = conv(x[:, :, 4:], empty, None, None)
    torch.testing.assert_close(second, whole[:, :, 4:])


def model(kind: str, **options) -> LM:
    torch.manual_seed(0)
    position = PositionConfig(kind=options.pop("position", "none"), length=64)
    return LM(ModelConfig(vocab=31, dim=32, layers=2, heads=4, position=position,
                          attention=AttentionConfig(kind=kind), **options)).double().eval()  # fmt: skip


@pytest.mark.parametrize("kind", [*ROWS, "2 gated_delta + 2 window(5)"])
def test_segments_and_cache_equal_one_pass(kind: str) -> None:
    lm = model(kind, kv_heads=2)
    x = text(2, 19)
    whole = lm(x).logits
    torch.testing.assert_close(by_segments(lm, x, [4, 5, 14]), whole)
    torch.testing.assert_close(from_cache(lm, x, [7, 1, 1, 10]), whole)


@pytest.mark.parametrize("kind", ROWS)
def test_cache_is_cropped_reordered_forked_and_saved(kind: str, tmp_path: Path) -> None:
    check_crop_reorder_fork_and_save(model(kind, kv_heads=2), tmp_path, [12], 3)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: GatedDelta(8, 2, 4, conv=-1), "conv is -1; expected at least 1, or 0 for no convolution"),
        (lambda: GatedLinear(8, 2, 4, rank=0), "rank is 0; expected at least 1"),
        (lambda: GatedLinear(0, 2, 4), "dim is 0; expected the size of hidden states"),
        (lambda: GatedDelta(8, 3, 4, kv_heads=2), "heads a multiple of kv_heads"),
        (lambda: GatedDelta(8, 2, 4)(*[torch.zeros(1, 2, 3, 4)] * 3, Rule(2), View()), "view.keys is missing"),  # pyright: ignore
        (lambda: model("gated_delta", persistent=2), "model.persistent is set, and GatedDelta has no sum of weights"),
        (lambda: model("gated_linear", position="rotary")(torch.zeros(1, 3).long()), "GatedLinear does not support"),
        (lambda: model("gated_delta", position="alibi")(torch.zeros(1, 3).long()), "GatedDelta does not support"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(build, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


def test_rows_are_all_kinds_with_an_oracle() -> None:
    assert {row.split("(")[0] for row in ROWS} == set(STATES)
