"""The Triton backend: the interpreter's tests in a process of their own, and what needs no kernel to run: refusals,
laziness, tracing on fake CUDA tensors, and compilation keys that spans and lengths do not change."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import BlockIndex, Rule, attend
from spanformer.ops.backends.triton import BACKEND, checks
from spanformer.ops.lower import Lowered, flatten, make_call

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_kernels_equal_the_oracle_in_the_interpreter() -> None:
    env = os.environ | {"SPANFORMER_TRITON_TESTS": "1", "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(HERE / "interpreted"),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 50, done.stdout[-500:]


# --- what it refuses, before any launch


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with triton and a GPU of compute capability 8.0, as far as the checks can tell."""
    monkeypatch.setattr(checks, "_missing", lambda: None)
    monkeypatch.setattr(checks, "_capability", lambda _index: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def a_call(rule: Rule | None = None, size: int = 64, dtype: torch.dtype = torch.float32, **options) -> Lowered:
    q, k, v = torch.zeros(3, 1, 2, 5, size, dtype=dtype)
    return flatten(make_call(q, k, v, Rule(2) if rule is None else rule, **options))


def on_cuda(reasons: list[str]) -> list[str]:
    """Without the reason that the tensors here are on the CPU."""
    return [reason for reason in reasons if not reason.startswith("q is on cpu")]


def test_a_plain_call_is_served(a_gpu: None) -> None:
    assert BACKEND.unusable() == []
    assert on_cuda(BACKEND.refuses(a_call())) == []
    for dtype in (torch.float16, torch.bfloat16):
        assert on_cuda(BACKEND.refuses(a_call(dtype=dtype))) == []


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    checks._missing.cache_clear()
    (reason,) = BACKEND.unusable()
    assert reason.startswith("triton cannot be imported (") and reason.endswith("pip install 'spanformer[gpu]'")
    with pytest.raises(ValueError, match="backend 'triton' cannot serve this call: triton cannot be imported"):
        q = torch.zeros(1, 2, 5, 64)
        attend(q, q, q, Rule(2), backend="triton")
    checks._missing.cache_clear()


def test_with_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.1.0"))
    checks._missing.cache_clear()
    assert BACKEND.unusable() == ["triton 3.1.0 is too old; install 3.7 or newer"]
    checks._missing.cache_clear()


def test_without_a_gpu(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BACKEND.unusable() == ["torch finds no GPU (torch.cuda.is_available() is False)"]


def test_a_gpu_that_is_too_old(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_capability", lambda _index: (7, 5))
    assert checks.refuses_device(torch.device("cuda", 1)) == [
        "the GPU cuda:1 has compute capability 7.5; triton's kernels need 8.0"
    ]


def test_tensors_on_another_device(a_gpu: None) -> None:
    assert BACKEND.refuses(a_call()) == [
        "q is on cpu; triton runs on GPUs (and with TRITON_INTERPRET=1 on the CPU, for tests)"
    ]
    q = torch.zeros(1, 2, 5, 64, device="meta")
    with pytest.raises(ValueError, match="span is on cpu; expected meta, where q is"):
        attend(q, q, q, Rule(2, span=torch.ones(2)), backend="triton")


REFUSED: dict[str, tuple[Callable[[], Lowered], str]] = {
    "dtype": (lambda: a_call(dtype=torch.float64), "q has dtype torch.float64; triton takes float32, float16 and"),
    "head size": (lambda: a_call(size=320), "the head size of q and k is 320; triton takes up to 256"),
    "dropout": (lambda: a_call(dropout=0.5, seed=torch.zeros(1, dtype=torch.int64)), "triton has no dropout of"),
    "scale": (lambda: a_call(scale=-0.5), "scale is -0.5; triton takes scales of at least 0"),
    "vectors": (lambda: a_call(Rule(2, distance_vec=torch.zeros(1, 5, 64))), "triton does not support distance_vec"),
    "blocks": (
        lambda: a_call(Rule(2, blocks=BlockIndex.from_dense(torch.ones(5, 5, dtype=torch.bool), 16))),
        "triton does not support blocks",
    ),
    "key spans": (lambda: a_call(Rule(2, key_span=torch.ones(1, 1, 5))), "triton does not support key_span"),
    "bias": (
        lambda: a_call(
            Rule(2, distance_bias=torch.zeros(2, 5, requires_grad=True)),
            q_positions=torch.arange(5), k_positions=torch.arange(5),
        ),
        "distance_bias has a gradient at explicit positions, whose diagonals triton cannot follow",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str, a_gpu: None) -> None:
    make, text = REFUSED[what]
    reasons = on_cuda(BACKEND.refuses(make()))
    assert reasons and reasons[0].startswith(text)
    assert all(". " not in reason for reason in reasons)


def test_transforms_are_refused(a_gpu: None) -> None:
    def run(q: Tensor) -> Tensor:
        assert any("torch.func" in reason for reason in BACKEND.refuses(flatten(make_call(q, q, q, Rule(2)))))
        return q.sum()

    torch.func.grad(run)(torch.zeros(1, 2, 5, 64))


# --- lazy, and traced without a GPU


def python(code: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_asking_for_backends_launches_nothing() -> None:
    code = """
import sys, spanformer
assert "triton" not in sys.modules
print(spanformer.backends()["triton"])
assert "spanformer.ops.backends.triton.forward" not in sys.modules
"""
    assert python(code).strip().startswith("[")


COLD = """
import sys, torch, spanformer
from torch._subclasses.fake_tensor import FakeTensorMode
from spanformer.ops.backends.triton import checks
torch.cuda.is_available = lambda: sys._getframe(1).f_code.co_name == "unusable"  # torch itself must not believe it
checks._capability = lambda index: (8, 0)
checks._missing = lambda: None
seen = []

def keep(graph, inputs):
    seen.extend(str(node.target) for node in graph.graph.nodes)
    return graph

def run(q, k, span):
    rule = spanformer.Rule(4, span=span, reach=[7, 9, 40, 40])
    return spanformer.attend(q, k, k, rule).out

with FakeTensorMode(allow_non_fake_inputs=True):
    q, k = (torch.empty(1, h, 20, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2))
    span = torch.empty(4, device="cuda")
    out = torch.compile(run, fullgraph=True, backend=keep)(q, k, span)
assert out.shape == (1, 4, 20, 64) and out.device.type == "cuda"
assert sum("attend_triton" in name for name in seen) == 1, seen
"""


@pytest.mark.slow
@needs_triton
def test_first_call_of_a_process_compiles_whole_on_cuda() -> None:
    python(COLD)


KEYS = """
import collections, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

compiled, binders = collections.defaultdict(set), {}

def run(self, *args, grid, warmup, **kwargs):
    "What the launcher does up to the point where it looks for a compiled kernel."
    backend = make_backend(GPUTarget("cuda", 80, 32))
    if self not in binders:
        binders[self] = jit.create_function_from_signature(self.signature, self.params, backend)
    _, specialization, options = binders[self](*args, **kwargs)
    compiled[self.__name__].add(str((specialization, options)))

jit.JITFunction.run = run

from spanformer import HeadCache, Rule
from spanformer.ops.backends.triton import checks, operator
from spanformer.ops.lower import flatten, make_call

checks.refuses_device = lambda device: []
from spanformer.ops.backends.triton import rings
rings.unusable, rings.refuses_device = lambda: [], lambda device: []

for step, (tq, tk) in enumerate([(130, 130), (256, 256), (257, 257), (129, 1000), (128, 144), (1000, 1001)]):
    span = torch.rand(8) * 10 ** step
    rule = Rule(8, span=span, reach=[7 + step, 10000] * 4, key_bias=torch.zeros(1, 1, tk))
    q, k, v = (torch.randn(2, h, t, 64, dtype=torch.bfloat16) for h, t in ((8, tq), (2, tk), (2, tk)))
    call = flatten(make_call(q, k, v, rule))
    given = q, k, v, *operator.terms_of(call), *operator.fixed_of(call)
    out, lse = operator.forward(*given)
    operator.backward(out, lse, out, lse, *given, [True] * 4 + [False, True, False])
    cache = HeadCache(2, [10 + step, 300 * step + 9], 64, dtype=torch.bfloat16)
    for _ in range(2):
        cache.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], Rule(8, span=span.clamp(max=2), ramp=7.0), backend="triton")
print({name: len(keys) for name, keys in sorted(compiled.items())})
"""


@needs_triton
def test_new_spans_and_lengths_compile_nothing() -> None:
    """Ask the launcher which program it would compile, without a GPU."""
    assert python(KEYS, TRITON_INTERPRET="0").strip() == str(
        {"backward_kv": 1, "backward_q": 1, "decode": 1, "forward": 1, "merge": 1}
    )
