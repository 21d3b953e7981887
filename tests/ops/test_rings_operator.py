"""Decoding from rings as an operator: exported and compiled, a step gives eager's logits and caches bit for bit."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

from spanformer import HeadCache, Rings, Rule, attend_rings
from spanformer.ops import kernel
from spanformer.ops.decode.operator import arguments

BACKENDS = ["banded"] if kernel.problem() else ["native", "banded"]
B, H, HKV, D, VOCAB, KEPT = 2, 4, 2, 16, 11, 2
REACH = [12, 5]  # of the key/value heads


def new_cache(bits=0) -> HeadCache:
    return HeadCache(B, REACH, D, sink_tokens=KEPT, bits=bits)


def a_rule(span: Tensor) -> Rule:
    return Rule(H, span=span, ramp=4.0, reach=[12, 12, 5, 5], sink_tokens=KEPT)


class Step(nn.Module):
    """One layer and a head over rings that are its buffers: token ids [B, 1] → logits."""

    def __init__(self, cache: HeadCache) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, H * D), nn.Linear(H * D, VOCAB)
        self.projections = nn.ModuleList(nn.Linear(H * D, heads * D) for heads in (H, HKV, HKV))
        self.span = nn.Parameter(torch.tensor([3.0, 9.0, 2.0, 1.0]))
        rings = cache.rings()
        self.capacity, self.bits = rings.capacities, cache.bits
        scales = rings.scales or (None, None)
        tensors = {"keys": rings.keys, "values": rings.values, "newest": rings.newest, "ks": scales[0], "vs": scales[1]}
        for name, t in tensors.items():
            self.register_buffer(name, t)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.embed(x)
        return h, *(project(h).view(B, 1, -1, D).transpose(1, 2) for project in self.projections)

    def logits(self, h: Tensor, out: Tensor) -> Tensor:
        return self.head(h + out.transpose(1, 2).reshape(B, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        h, q, k, v = self.project(x)
        scales = (self.ks, self.vs) if self.bits else None
        rings = Rings(self.keys, self.values, self.capacity, self.newest, KEPT, None, scales, (D, D))  # pyright: ignore
        out = attend_rings(q, rings, a_rule(self.span), new=(k, v)).out
        self.newest.add_(1)  # pyright: ignore
        return self.logits(h, out)


def exported(step: Step) -> torch.export.ExportedProgram:
    return torch.export.export(step, (torch.zeros(B, 1, dtype=torch.int64),))


@torch.no_grad()
def check_steps(run: nn.Module, step: Step, cache: HeadCache, bits=0) -> None:
    """25 tokens, so that both rings wrap: logits, keys, values, scales and positions, all bit for bit."""
    eager = new_cache(bits)
    for token in torch.randint(0, VOCAB, (25, B, 1), generator=torch.Generator().manual_seed(1)):
        got = run(token)
        h, q, k, v = step.project(token)
        expected = step.logits(h, eager.attend(q, k, v, a_rule(step.span)).out)
        assert torch.equal(got, expected)
        assert torch.equal(cache.store.memory, eager.store.memory)
        assert torch.equal(cache.place, eager.place)


@pytest.mark.parametrize("functional", [False, True], ids=["as traced", "functional"])
@pytest.mark.parametrize("bits", [0, 8])
def test_exported_step_repeats_eager_logits_and_caches(bits, functional: bool) -> None:
    """An exported program's buffers are the module's own, so it writes to the cache's memory."""
    cache = new_cache(bits)
    step = Step(cache)
    program = exported(step)
    assert any(
        "spanformer.decode" in str(node.target) for m in program.graph_module.modules() for node in m.graph.nodes
    )
    program = program.run_decompositions({}) if functional else program
    check_steps(program.module(), step, cache, bits)


def test_exported_step_is_saved_and_loaded() -> None:
    step, file = Step(new_cache()), io.BytesIO()
    for name, t in list(step.named_buffers()):
        step.register_buffer(name, t.clone())  # out of the cache's one allocation: a file holds each by itself
    torch.export.save(exported(step), file)
    file.seek(0)
    loaded, token = torch.export.load(file).module(), torch.ones(B, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(15):
            assert torch.equal(loaded(token), step(token))
    assert torch.equal(loaded.keys, step.keys) and torch.equal(loaded.newest, step.newest)


def test_exported_step_checks_spans_when_it_runs() -> None:
    cache = new_cache()
    step = Step(cache)
    program = exported(step).module()
    with torch.no_grad():
        program.span.fill_(1.0)
        program(torch.zeros(B, 1, dtype=torch.int64))
        program.span[0] = -100.0
        with pytest.raises(ValueError, match=r"span of shape .* holds -100"):
            program(torch.zeros(B, 1, dtype=torch.int64))


def test_compiled_cache_decodes_in_one_graph() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    cache, eager, rule = new_cache(), new_cache(), a_rule(torch.tensor([3.0, 9.0, 2.0, 1.0]))
    step = torch.compile(lambda q, k, v: cache.attend(q, k, v, rule), fullgraph=True, backend=counter)
    for _ in range(15):
        q, k, v = (torch.randn(B, heads, 1, D) for heads in (H, HKV, HKV))
        got, expected = step(q, k, v), eager.attend(q, k, v, rule)
        assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)
        assert torch.equal(cache.store.memory, eager.store.memory) and torch.equal(cache.place, eager.place)
    assert counter.frame_count == 1


TERMS = {
    "span": {"span": torch.tensor([3.0, 9.0, 2.0, 1.0]), "ramp": 2.0},
    "tables": {
        "distance_bias": torch.randn(H, 20),
        "distance_vec": torch.randn(1, 20, D),
        "sink_logits": torch.zeros(H),
    },
    "banded": {"distance_scale": torch.rand(H, 20), "distance_value": torch.randn(1, 3, D)},
}


@pytest.mark.parametrize("write", [False, True], ids=["attend_rings", "decode"])
@pytest.mark.parametrize("terms", TERMS)
def test_opcheck(terms: str, write: bool) -> None:
    keys, values = torch.randn(B, 17, D), torch.randn(B, 17, D)
    rings = Rings(keys, values, REACH, torch.tensor([20, 3]))
    rule = Rule(H, reach=[12, 12, 5, 5], **TERMS[terms])
    q, k, v = (torch.randn(B, heads, 1, D) for heads in (H, HKV, HKV))
    operator = torch.ops.spanformer.decode if write else torch.ops.spanformer.attend_rings
    torch.library.opcheck(operator.default, (q, *((k, v) if write else ()), *arguments(rings, rule), "auto", 0.25))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_new_keys_and_values_are_written_at_the_newest_position(backend: str, bits) -> None:
    """Rows at different positions: in a ring that has wrapped, among the kept ones, and nowhere."""
    newest = torch.tensor([17, 1, -1])
    cache = HeadCache(3, REACH, D, sink_tokens=KEPT, bits=bits)
    cache.append(*torch.randn(2, 3, HKV, 17, D))
    before, rings = cache.store.memory.clone(), cache.store.rings(newest, KEPT, None)
    expected = HeadCache(3, REACH, D, sink_tokens=KEPT, bits=bits)
    expected.store.memory.copy_(before)
    q, (k, v) = torch.randn(3, H, 1, D), torch.randn(2, 3, HKV, 1, D)
    expected.place.copy_(newest.clamp(min=0))
    expected.append(k, v, lengths=(newest >= 0).long())
    rule = Rule(H, reach=[12, 12, 5, 5], sink_tokens=KEPT)
    got = attend_rings(q, rings, rule, new=(k, v), backend=backend)
    assert torch.equal(cache.store.memory, expected.store.memory)
    assert not torch.equal(cache.store.memory, before)
    assert torch.equal(got.out, attend_rings(q, rings, rule, backend=backend).out)
    assert (got.out[2] == 0).all()


def test_new_keys_of_another_shape_are_named() -> None:
    rings = Rings(torch.zeros(B, 17, D), torch.zeros(B, 17, D), REACH, torch.tensor([2, 3]))
    q, new = torch.randn(B, H, 1, D), torch.randn(B, HKV, 1, D)
    rule = Rule(H, reach=[12, 12, 5, 5])
    with pytest.raises(ValueError, match=r"new values have shape \[2, 2, 1, 8\].*; expected \[2, 2, 1, 16\]"):
        attend_rings(q, rings, rule, new=(new, new[..., :8]))
    columns = Rings(torch.zeros(B, D, 17).mT, torch.zeros(B, 17, D), REACH, torch.tensor([2, 3]))
    with pytest.raises(
        ValueError,
        match=r"keys has strides \[272, 1, 17\]; expected contiguous rows, because new ones are written to it",
    ):
        attend_rings(q, columns, rule, new=(new, new))
