"""ETC's attention against its equation, written as one dense matrix over long and global tokens together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.attention.etc import GlobalLocal, Projected, Structure
from spanformer.ops import Rule
from support.etc_oracle import PARTS, oracle
from support.largest import largest_tensor

H, D = 2, 4
TABLES = PARTS


def made(b: int, n: int, m: int, clip: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(n)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    sizes = {"l2l": n, "l2g": m, "g2g": m, "g2l": n}
    tensors = {"q_long": rand(b, H, n, D), "q_global": rand(b, H, m, D)}
    for part in PARTS:
        tensors[f"k_{part}"], tensors[f"v_{part}"] = rand(b, H, sizes[part], D), rand(b, H, sizes[part], D)
        tensors[part] = rand(H, 2 * clip + 1 if part in ("l2l", "g2g") else 2, D)
    return tensors


class TwoStreams(torch.nn.Module):
    """`functional_call` calls forward, and this is what it is to run."""

    def __init__(self, of: GlobalLocal) -> None:
        super().__init__()
        self.of = of

    def forward(self, given: Projected, structure: Structure):
        return self.of.two_streams(given, structure)


def module_run(t: dict[str, Tensor], structure: Structure, module: GlobalLocal) -> list[Tensor]:
    given = Projected(t["q_long"], t["q_global"], *((t[f"k_{part}"], t[f"v_{part}"]) for part in PARTS))
    long, top = torch.func.functional_call(
        TwoStreams(module), {f"of.{name}": t[name] for name in TABLES}, (given, structure)
    )
    return [*long, *top]


def with_gradients(run, t: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = {name: s.to(dtype).requires_grad_() for name, s in t.items()}
    found = run(leaves)
    g, loss = torch.Generator().manual_seed(1), 0.0
    results = {}
    for n, s in enumerate(found):
        shown = s > -math.inf
        results[f"result {n}"] = torch.where(shown, s, 0)
        g_s = torch.randn(s.shape, generator=g, dtype=torch.float64).to(s.dtype)
        loss = loss + (results[f"result {n}"] * g_s).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        results["d" + name] = torch.zeros_like(leaf) if grad is None else grad
    return {name: s.detach().double() for name, s in results.items()}


def check(b, n, m, radius, clip, hard, backend, dtype, structure: Structure) -> None:
    t = {name: s.to(dtype).double() for name, s in made(b, n, m, clip).items()}
    module = GlobalLocal(H, D, radius, clip=clip, hard_g2l=hard)
    module.backend = backend
    dense = lambda leaves: oracle(leaves, structure, radius, clip, hard)  # noqa: E731
    truth, rough = with_gradients(dense, t, torch.float64), with_gradients(dense, t, dtype)
    got = with_gradients(lambda leaves: module_run(leaves, structure, module), t, dtype)
    for name, true in truth.items():
        assert torch.isfinite(got[name]).all(), name
        allowed = 4 * (rough[name] - true).abs().max() + 16 * torch.finfo(dtype).eps * max(true.abs().max(), 1e-3)
        assert (got[name] - true).abs().max() <= allowed, name


def segments_of(b: int, n: int, m: int) -> Tensor:
    """Segments of uneven lengths, and some tokens of none."""
    ids = (torch.arange(n) * m // max(n, 1)).expand(b, n).clone()
    ids[:, 2::5] = -1
    ids[b - 1] = ids[b - 1].flip(0)
    return ids


BACKENDS = [("native", torch.float32), ("banded", torch.float64)]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(
    ("b", "n", "m", "radius", "clip"), [(2, 13, 3, 4, 2), (1, 1, 1, 0, 0), (1, 7, 2, 9, 12), (1, 17, 5, 1, 3)]
)
def test_four_parts_equal_the_equation(b, n, m, radius, clip, hard, backend, dtype):
    check(b, n, m, radius, clip, hard, backend, dtype, Structure(segments_of(b, n, m)))


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("hard", [False, True])
def test_padding_of_both_inputs(hard, backend, dtype):
    b, n, m = 3, 12, 4
    long, top = torch.zeros(b, n, dtype=torch.bool), torch.zeros(b, m, dtype=torch.bool)
    long[0, 8:] = True
    top[0, 2:] = top[1, 0] = True
    long[2], top[2] = True, True  # nothing at all is there: zeros, and no NaN in any gradient
    check(b, n, m, 3, 2, hard, backend, dtype, Structure(segments_of(b, n, m), long, top))


def test_no_tensor_of_all_pairs_or_long_by_global_pairs():
    n, m, radius = 600, 40, 3
    t = {name: s.float().requires_grad_() for name, s in made(1, n, m, 2).items()}
    module, structure = GlobalLocal(H, D, radius, clip=2), Structure(segments_of(1, n, m))

    def work() -> None:
        long, _, top, _ = module_run(t, structure, module)
        (long.sum() + top.sum()).backward()

    assert largest_tensor(work) < H * n * m / 2


def test_projections_shared_by_two_parts_are_given_once():
    t = made(1, 6, 2, 1)
    long, top = (t["k_l2l"], t["v_l2l"]), (t["k_g2g"], t["v_g2g"])
    given = Projected(t["q_long"], t["q_global"], l2l=long, l2g=top, g2g=top, g2l=long)
    module = GlobalLocal(H, D, 2, clip=1).double()
    module.backend = "banded"
    a, c = module.two_streams(given, Structure(segments_of(1, 6, 2)))
    assert a.out.shape == (1, H, 6, D) and c.out.shape == (1, H, 2, D)
    assert torch.isfinite(a.out).all() and torch.isfinite(c.lse).all()


def test_dropout_drops_weights_of_all_parts_while_training():
    torch.manual_seed(0)
    t = made(1, 40, 4, 1)
    ones = {name: torch.ones_like(s) if name[0] == "v" else torch.zeros_like(s) for name, s in t.items()}
    module = GlobalLocal(H, D, 8, clip=1).double()
    module.backend, module.dropout = "banded", 0.5
    structure = Structure(segments_of(1, 40, 4))
    results = module_run(ones, structure, module)
    assert results[0].std() > 0.05 and results[2].std() > 0.05  # each row's sum of weights is no longer 1
    assert abs(float(results[0].mean()) - 1) < 0.1
    module.eval()
    assert torch.allclose(module_run(ones, structure, module)[0], torch.ones(1, H, 40, D, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 4, 2), {}, "heads is 0 and head_dim 4; expected at least 1 each"),
        ((2, 4, -1), {}, "radius is -1 and clip 12; expected numbers of tokens, 0 …"),
        ((2, 4, 2), {"segment": 0}, "segment is 0; expected at least 1 token per global token"),
    ],
)
def test_bad_options_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        GlobalLocal(*arguments, **options)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure(torch.zeros(1, 5).long()), r"segments has shape \[1, 5\] and dtype torch.int64; expected \[1, 6\]"),
        (Structure(torch.full((1, 6), 2)), r"segments holds 2; expected −1 … 1, as there are 2 global tokens"),
        (Structure(torch.full((1, 6), -2)), r"segments holds -2; expected −1 … 1"),
        (
            Structure(torch.zeros(1, 6).long(), global_padding=torch.zeros(1, 3, dtype=torch.bool)),
            r"global_padding has shape \[1, 3\] and dtype torch.bool; expected \[1, 2\] of torch.bool, True for",
        ),
        (
            Structure(torch.zeros(1, 6).long(), long_padding=torch.zeros(1, 6)),
            r"long_padding has shape \[1, 6\] and dtype torch.float32; expected \[1, 6\] of torch.bool",
        ),
    ],
)
def test_bad_structures_are_refused(structure, message):
    with pytest.raises(ValueError, match=message):
        module_run(made(1, 6, 2, 1), structure, GlobalLocal(H, D, 2, clip=1))


def test_etc_bad_layers():
    module, q = GlobalLocal(H, D, 2), torch.randn(1, H, 6, D)
    with pytest.raises(ValueError, match=r"view.segments is missing; expected the number \[B, n\]"):
        module(q, q, q, module.rule(), View())
    slopes = module.rule() + Rule(H, causal=False, distance_bias=torch.zeros(H, 3))
    view = View(segments=torch.zeros(1, 4, dtype=torch.long))
    sinks, documents = (
        module.rule() + Rule(H, causal=False, sink_logits=torch.zeros(H)),
        torch.zeros(1, 6, dtype=torch.long),
    )
    for rule, given, name in (
        (slopes, view, "distance_bias"),
        (sinks, view, "sink_logits"),
        (module.rule(), replace(view, documents=documents), "documents"),
    ):
        with pytest.raises(
            ValueError, match=f"{name} was given; ETC encodes distances by its labels and hides only padding"
        ):
            module(q, q, q, rule, given)
    with pytest.raises(
        ValueError, match="k has 1 heads; expected 2, because ETC adds labels to the keys of every head"
    ):
        module(q, q[:, :1], q[:, :1], module.rule(), view)
