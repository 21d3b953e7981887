"""The operator around the kernels: torch's own checks, torch.compile, how much a call launches, and what a model does
with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spanformer import Rule, attend
from spanformer.ops.backends.triton import operator
from spanformer.ops.backends.triton.launch import Fixed, Terms
from spanformer.ops.lower import flatten, make_call
from support.triton_cases import DEVICE

AUTO = sys.modules["spanformer.ops.attend"].AUTO  # spanformer.ops.attend is the function of this name
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU, launches are not the interpreter's")


def inputs(grad: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 20, 16, device=DEVICE) for h in (4, 2, 2))
    span = torch.tensor([3.0, 9.5, 0.0, 30.0], device=DEVICE)
    key_bias, sinks = torch.randn(1, 1, 20, device=DEVICE), torch.randn(4, device=DEVICE)
    return tuple(t.requires_grad_(grad) for t in (q, k, v, span, key_bias, sinks))


def a_rule(span: Tensor, key_bias: Tensor | None, sinks: Tensor | None, **more) -> Rule:
    return Rule(4, span=span, ramp=6.0, reach=[20, 7, 9, 40], key_bias=key_bias, sink_logits=sinks, **more)


def test_opcheck() -> None:
    q, k, v, span, key_bias, sinks = inputs()
    call = flatten(make_call(q, k, v, a_rule(span, key_bias, sinks)))
    given = (q, k, v, *operator.terms_of(call), *operator.fixed_of(call))
    torch.library.opcheck(torch.ops.spanformer.attend_triton.default, given)


def test_opcheck_of_the_backward_pass() -> None:
    q, k, v, span, key_bias, sinks = inputs(False)
    bias = torch.randn(4, 20, device=DEVICE)
    terms, fixed = Terms(span, bias, key_bias, sinks), Fixed(0.25, 6.0, True, 0, 0, *[None] * 5)
    out, lse = torch.ops.spanformer.attend_triton(q, k, v, *terms, *fixed)
    given = (torch.randn_like(out), torch.randn_like(lse), out, lse, q, k, v, *terms, *fixed, [True] * 7)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.spanformer.attend_triton_backward.default, given, test_utils=tests)


def test_compiled_whole_with_gradients() -> None:
    def run(q, k, v, span, key_bias, sinks):
        out, lse = attend(q, k, v, a_rule(span, key_bias, sinks), backend="triton")
        return out.square().sum() + lse.sum()

    given = inputs()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    eager, traced = (torch.autograd.grad(f(*given), given) for f in (run, compiled))
    for mine, theirs in zip(traced, eager, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_no_second_derivative() -> None:
    q, k, v, span, *_ = inputs()
    out, _ = attend(q, k, v, a_rule(span, None, None), backend="triton")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="backend 'triton' has no second derivative"):
        dq.sum().backward()


# --- launches

FREE = (
    "view", "expand", "slice", "select", "transpose", "detach", "unsqueeze", "alias", "empty", "as_strided", "unbind",
    "fill_",
)  # fmt: skip
"""what launches nothing on a GPU, and what fills uninitialised memory in these tests"""


class Counted(TorchDispatchMode):
    """Operations of torch that would launch a kernel on a GPU, and reads of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if not any(word in name for word in FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def counted(self, *args, **kwargs):
        mode.names.append(f"triton {self.__name__}")
        with torch.utils._python_dispatch._disable_current_modes():  # the interpreter copies its arguments
            return run(self, *args, **kwargs)

    with monkeypatch.context() as patched, Counted() as mode:
        patched.setattr(InterpretedFunction, "run", counted)
        yield mode.names


@interpreted
@pytest.mark.parametrize("dynamic", [False, True])
def test_launches_are_few_and_the_host_reads_nothing(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, span, key_bias, sinks = inputs(False)
    span = span[None, :, None].expand(2, 4, 20).contiguous() if dynamic else span
    bias = torch.randn(4, 20)
    rule = a_rule(span, key_bias, sinks, distance_bias=bias)
    call = flatten(make_call(q, k, v, rule))
    given = (q, k, v, *operator.terms_of(call), *operator.fixed_of(call))
    read, tolist = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda t: read.append(t) or tolist(t))
    with counting(monkeypatch) as forward:
        out, lse = operator.forward(*given)
    with counting(monkeypatch) as backward:
        wanted = [True] * 7
        found = operator.backward(torch.ones_like(out), torch.ones_like(lse), out, lse, *given, wanted)
        operator._of_inputs(found, (q, k, v, *operator.terms_of(call)), wanted)
    assert 1 <= len(forward) <= 3, forward
    backward = [name for name in backward if name != "ones_like"]
    assert 3 <= len(backward) <= 5, backward
    assert not any("item" in name or "local_scalar" in name for name in (*forward, *backward))
    assert all(t is rule.reach for t in read)


@interpreted
def test_decoding_launches_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from spanformer import HeadCache

    cache = HeadCache(2, [12, 7], 16)
    rule = Rule(4, span=torch.full((4,), 3.0), ramp=3.0)
    tokens = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16)
    for _ in range(3):
        cache.attend(*tokens, rule, backend="triton")
    with counting(monkeypatch) as names:
        cache.read(*tokens, rule, backend="triton")
    assert names == ["triton decode", "triton merge"]


# --- models


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that ran; "auto" takes triton here, as on a GPU."""
    from triton.runtime.interpreter import InterpretedFunction

    names, run = [], InterpretedFunction.run
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda self, *a, **o: names.append(self.__name__) or run(self, *a, **o)
    )
    monkeypatch.setitem(AUTO, "cpu", ("triton", "banded"))
    return names


def a_model(backend: str):
    from dataclasses import replace

    from support.small_models import SMALL, make, with_attention

    config = replace(SMALL, kv_heads=2, layers=2)
    return make(with_attention(config, backend=backend)).float()


@interpreted
def test_training_by_segments_runs_all_heads_at_once(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from spanformer.memory import groups, hidden_states
    from support.small_models import text

    def as_on_cuda(context, past, _device):
        return groups.group_heads(context, past, torch.device("cuda"))

    x, grads = text(2, 40), []
    for backend in ("triton", "banded"):
        with monkeypatch.context() as patched:
            patched.setattr(hidden_states, "group_heads", as_on_cuda)
            lm, state, total = a_model(backend).train(), None, torch.zeros(())
            for piece in x.split(20, 1):
                found = lm(piece, state)
                state, total = found.state, total + found.logits.square().mean()
            total.backward()
            grads.append({name: p.grad for name, p in lm.named_parameters() if p.grad is not None})
    assert launched.count("forward") == launched.count("backward_q") == 4, "one launch per layer and segment"
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, atol=2e-6, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@interpreted
def test_generation_decodes_with_the_kernel(launched: list[str]) -> None:
    from support.reading import from_cache
    from support.small_models import text

    lm, x = a_model("triton").eval(), text(2, 30)
    with torch.no_grad():
        got = from_cache(lm, x, [20, 1, 1, 8])
        expected = a_model("banded").eval()(x).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert launched.count("decode") == 4, "two tokens, two layers"


@interpreted
def test_attached_models_run_on_it(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from spanformer import hf
    from support.hf_models import tiny, tokens

    ids, found = tokens(2, 31), []
    for order in (("triton",), ("banded",)):
        model = tiny("llama")
        hf.attach(model, max_span=30, init=0.3, ramp=4, sink_tokens=3)
        monkeypatch.setitem(AUTO, "cpu", order)
        launched.clear()
        with torch.no_grad():
            found.append(model(ids).logits)
        assert ("forward" in launched) == ("triton" in order)
    assert (found[0] - found[1]).abs().max() < 2e-5
