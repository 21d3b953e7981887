"""Features that are made again in the backward pass (attention/recomputed.py): the same numbers and gradients as when
they are stored, for texts of several segments."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from spanformer.attention import View, recomputed
from spanformer.attention.performer import Performer
from spanformer.attention.recurrent import RecurrentAttention
from spanformer.attention.rfa import RFA, GatedRFA
from spanformer.memory import MemoryShape
from spanformer.ops import kernel
from support.cases import FACTOR, UNITS

pytestmark = pytest.mark.skipif(bool(kernel.problem()), reason="no kernel")
D, DIM = 8, 12
KINDS = {
    "rfa": lambda kv: RFA(4, D, 8, kv),
    "gated_rfa": lambda kv: GatedRFA(DIM, 4, D, 8, kv),
    "performer": lambda kv: Performer(4, D, 24, kv),
    "relu": lambda kv: Performer(4, D, 24, kv, relu=True),
}


def made(kind: str, kv_heads: int = 4) -> RecurrentAttention:
    torch.manual_seed(0)
    return KINDS[kind](kv_heads).double()


def drawn(tokens: int, kv_heads: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    heads = {"q": 4, "k": kv_heads, "v": kv_heads}
    found = {name: torch.randn(2, n, tokens, D, generator=g, dtype=torch.float64) for name, n in heads.items()}
    return found | {"x": torch.randn(2, tokens, DIM, generator=g, dtype=torch.float64)}


def run(m: RecurrentAttention, texts: dict[str, Tensor], dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Results and all gradients, for random directions in out, lse and the state after the text."""
    m = copy.deepcopy(m).to(dtype)
    m.backend = backend
    leaves = {name: t.to(dtype).requires_grad_() for name, t in texts.items()}
    g = torch.Generator().manual_seed(2)
    state = m.empty_state(MemoryShape(2, m.kv_heads, D, dtype=dtype))
    for name in "sz":
        state[name] = torch.rand(state[name].shape, generator=g, dtype=torch.float64).to(state[name].dtype)
    leaves |= {name: state[name].requires_grad_() for name in "sz"}
    if "peak" in state:
        state["peak"] = torch.zeros_like(state["peak"])
    inputs = m.token_inputs(leaves["k"], leaves["v"], View(x=leaves.pop("x")))
    gates = {name: t.detach().requires_grad_() for name, t in inputs.items() if name not in leaves}
    leaves |= gates  # how they come from x is PyTorch's
    found, after = m.run(leaves["q"], inputs | gates, state, None, None)
    results = {"out": found.out, "lse": found.lse} | {f"after {name}": t for name, t in after.items()}
    loss = sum(
        (t.double() * torch.randn(t.shape, generator=g, dtype=torch.float64)).sum()
        for name, t in results.items() if name != "after peak"
    )  # fmt: skip
    leaves |= {name: p for name, p in m.named_parameters() if name == "sigma"}
    grads = torch.autograd.grad(loss, list(leaves.values()))  # pyright: ignore
    results |= {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: t.detach().double() for name, t in results.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [65, 101, 128])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_stored_features_in_float64(
    kind: str, tokens: int, kv_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputed, "SEGMENT", 64)
    monkeypatch.setattr(recomputed, "LONG", 64)
    m, texts, calls = made(kind, kv_heads).to(dtype).double(), drawn(tokens, kv_heads), []
    texts = {name: t.to(dtype).double() for name, t in texts.items()}
    once = recomputed.attend_again
    monkeypatch.setattr("spanformer.attention.recurrent.attend_again", lambda *given: calls.append(1) or once(*given))
    found = run(m, texts, dtype, "native")
    assert calls == [1]
    true, plain = run(m, texts, torch.float64, "banded"), run(m, texts, dtype, "banded")
    assert calls == [1] and set(found) == set(true)
    for name, right in true.items():
        unit = torch.finfo(dtype).eps
        allowed = FACTOR * (plain[name] - right).abs().max() + UNITS * unit * right.abs().max()
        worst = (found[name] - right).abs().max()
        assert worst <= allowed, f"{name}: {worst:.3g} > {allowed:.3g}"


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_no_earlier_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed, "SEGMENT", 64)
    monkeypatch.setattr(recomputed, "LONG", 64)
    m, texts = made(kind).float(), {name: t.float().requires_grad_() for name, t in drawn(200).items()}

    def once(texts: dict[str, Tensor]) -> Tensor:
        inputs = m.token_inputs(texts["k"], texts["v"], View(x=texts["x"]))
        return m.run(texts["q"], inputs, m.empty_state(MemoryShape(2, 4, D)), None, None)[0].out

    whole = once(texts)
    for cut in (1, 64, 100):
        other = {name: t.detach().clone() for name, t in texts.items()}
        for name, t in other.items():
            (t if name == "x" else t.transpose(1, 2))[:, cut:] = torch.nan
        found = once({name: t.requires_grad_() for name, t in other.items()})
        assert torch.equal(found[:, :, :cut], whole[:, :, :cut])
        assert bool(found[:, :, cut:].isnan().all())


def test_parameters_of_the_call_are_those_of_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func.functional_call puts other parameters into a module for the forward pass alone."""
    monkeypatch.setattr(recomputed, "SEGMENT", 64)
    monkeypatch.setattr(recomputed, "LONG", 64)
    m, texts = made("rfa").float(), {name: t.float() for name, t in drawn(101).items()}
    sigma = (1 + torch.rand_like(m.sigma)).requires_grad_()  # pyright: ignore

    def out(sigma: Tensor) -> Tensor:
        given = (texts["q"], texts["k"], texts["v"], m.rule(View()), View())
        return torch.func.functional_call(m, {"sigma": sigma}, given).out

    (found,) = torch.autograd.grad(out(sigma).square().sum(), sigma)
    with torch.no_grad():
        m.sigma.copy_(sigma)  # pyright: ignore
    (right,) = torch.autograd.grad(m(*[texts[n] for n in "qkv"], m.rule(View()), View()).out.square().sum(), m.sigma)  # pyright: ignore
    torch.testing.assert_close(found, right)
