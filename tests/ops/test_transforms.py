"""Derivatives that the kernel and banded do not have are refused, never dropped."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from spanformer import Rings, Rule, attend, attend_rings

Q, K, V = torch.randn(3, 1, 2, 12, 8, generator=torch.Generator().manual_seed(0)).unbind()
BACKENDS = ("native", "banded")


def out(q: torch.Tensor, backend: str, **terms) -> torch.Tensor:
    return attend(q, K, V, Rule(2, **terms), backend=backend).out


@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_of_a_query_is_refused(backend: str, learning: bool) -> None:
    with forward_ad.dual_level():
        q = forward_ad.make_dual(Q.clone().requires_grad_(learning), torch.ones_like(Q))
        with pytest.raises(ValueError, match=r"no forward-mode derivatives; backend='reference' has"):
            out(q, backend)
        assert forward_ad.unpack_dual(out(q, "reference")).tangent.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_mode_of_a_term_is_refused(backend: str) -> None:
    with forward_ad.dual_level():
        sinks = forward_ad.make_dual(torch.zeros(2), torch.ones(2))
        with pytest.raises(ValueError, match="no forward-mode derivatives"):
            out(Q, backend, sink_logits=sinks)
        assert out(Q, backend).isfinite().all()  # nothing here has a tangent


TRANSFORMS = {
    "jvp": lambda f: torch.func.jvp(f, (Q,), (torch.ones_like(Q),)),
    "jacfwd": lambda f: torch.func.jacfwd(f)(Q),
    "grad": lambda f: torch.func.grad(lambda q: f(q).sum())(Q),
    "vjp": lambda f: torch.func.vjp(f, Q),
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([Q, Q])),
    "functionalize": lambda f: torch.func.functionalize(f)(Q),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_transforms_are_refused(backend: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"does not support torch\.func .*; use torch\.autograd"):
        TRANSFORMS[name](lambda q: out(q, backend))


def test_functional_transforms_of_rings_are_refused() -> None:
    rings = Rings(K[:, 0], V[:, 0], torch.tensor([12]), torch.tensor([11]))
    with pytest.raises(ValueError, match=r"does not support torch\.func"):
        torch.func.functionalize(lambda q: attend_rings(q, rings, Rule(1), backend="native").out)(Q[:, :1, :1])


def test_auto_names_the_backend_that_has_them() -> None:
    with pytest.raises(
        ValueError, match=r"no backend can serve this call .*backend='reference' takes any call, at dense cost"
    ):
        TRANSFORMS["jvp"](lambda q: out(q, "auto"))


def test_second_derivative_of_the_operator_is_refused() -> None:
    """torch would warn and go on, with a gradient that passes for a constant."""
    from spanformer.ops.backends.native import _fixed, _learned
    from spanformer.ops.lower import flatten, make_call

    q = Q.clone().requires_grad_()
    call = flatten(make_call(q, K, V, Rule(2)))
    found, _ = torch.ops.spanformer.attend(q, K, V, *_learned(call), *_fixed(call))
    (grad,) = torch.autograd.grad(found.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        grad.square().sum().backward()
