"""Gated blocks (GTrXL): each gate against its equation, memory against one long pass, decoding against both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.model.gates import FIRST_BIAS, make_gate
from spanformer.model.lm import LM

KINDS = tuple(FIRST_BIAS)
CONFIG = ModelConfig(
    vocab=31, dim=32, layers=3, heads=4, block="gated", attention=AttentionConfig(max_span=20, ramp=4, init=0.3)
)


def equation(kind: str, w: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Written from the paper, one matrix at a time."""
    b, d = w.get("bias"), x.shape[-1]
    if kind == "gru":
        w_r, w_z, w_g = (w["from_y.weight"][n * d : (n + 1) * d] for n in range(3))
        u_r, u_z = (w["from_x.weight"][n * d : (n + 1) * d] for n in range(2))
        r = torch.sigmoid(y @ w_r.T + x @ u_r.T)
        z = torch.sigmoid(y @ w_z.T + x @ u_z.T - b)  # type: ignore[operator]
        return (1 - z) * x + z * torch.tanh(y @ w_g.T + (r * x) @ w["reset.weight"].T)
    if kind == "input":
        return torch.sigmoid(x @ w["weight.weight"].T) * x + y
    if kind == "output":
        return x + torch.sigmoid(x @ w["weight.weight"].T - b) * y  # type: ignore[operator]
    if kind == "highway":
        g = torch.sigmoid(x @ w["weight.weight"].T + b)  # type: ignore[operator]
        return g * x + (1 - g) * y
    return x + torch.sigmoid(y @ w["weight.weight"][:d].T - b) * torch.tanh(y @ w["weight.weight"][d:].T)  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_gate_equals_its_equation_with_gradients(kind: str) -> None:
    torch.manual_seed(0)
    gate = make_gate(kind, 7).double()
    x, y = (torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    mine, want = gate(x, y), equation(kind, dict(gate.named_parameters()), x, y)
    torch.testing.assert_close(mine, want, atol=1e-12, rtol=1e-12)
    wrt = [x, y, *gate.parameters()]
    weight = torch.randn_like(mine)
    mine_g, want_g = (torch.autograd.grad((out * weight).sum(), wrt) for out in (mine, want))
    for a, b in zip(mine_g, want_g, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_new_gru_block_nearly_passes_the_stream_on() -> None:
    torch.manual_seed(0)
    gate = make_gate("gru", 64)
    x = torch.randn(100, 64)
    changed = (gate(x, torch.zeros_like(x)) - x).norm() / x.norm()
    assert 0.05 < changed < 0.3  # z is about 0.12


@pytest.mark.parametrize("kind", KINDS)
def test_memory_equals_one_long_pass_and_decoding(kind: str) -> None:
    torch.manual_seed(1)
    lm = LM(replace(CONFIG, gate=kind)).double().eval()  # type: ignore[arg-type]
    x = torch.randint(31, (2, 40))
    with torch.no_grad():
        whole, state, segments = lm(x).logits, None, []
        for piece in x.split(13, 1):
            out = lm(piece, state)
            state = out.state
            segments.append(out.logits)
        cache = lm.cache(2)
        decoded = torch.cat([lm.decode(piece, cache) for piece in x.split(1, 1)], 1)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(segments, 1), whole, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(decoded, whole, atol=1e-9, rtol=1e-9)


def test_block_applies_relu_before_the_gate() -> None:
    torch.manual_seed(2)
    lm = LM(CONFIG).double().eval()
    block, seen = lm.ordered_blocks()[0], []
    for gate in block.gates.values():
        gate.register_forward_hook(lambda _, args, out: seen.append((*args, out)))
    lm(torch.randint(31, (1, 9)))
    assert len(seen) == 2
    for x, y, out in seen:
        assert (y >= 0).all() and (y == 0).any()
        assert not torch.equal(out, x + y)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"order": "post"}, "model.block is 'gated' with order 'post'"),
        ({"stack": "reversible"}, "a reversible stack; expected order 'pre'"),
        ({"gate": "door"}, "model.gate is 'door'; expected one of gru"),
        ({"block": "open"}, "model.block is 'open'; expected 'plain' or 'gated'"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(CONFIG, **changes)  # type: ignore[arg-type]
