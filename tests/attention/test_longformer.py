"""Longformer against its equation, written densely: windows, global tokens with their own projections, and both."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from spanformer import Rule
from spanformer.attention import View
from spanformer.attention import pattern as pattern_language
from spanformer.attention.longformer import Longformer, growing_windows
from spanformer.attention.patterned import Patterned
from spanformer.memory import HiddenStates
from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.model.encoder import Encoder
from spanformer.model.layer import SelfAttention
from spanformer.model.lm import LM
from spanformer.position import T5, Alibi, DATransformer, Position, Rotary, Shaw, Table, TransformerXL
from support.largest import largest_tensor

DIM, HEADS = 16, 2


def make(window: int, **options) -> Longformer:
    torch.manual_seed(0)
    return Longformer(DIM, HEADS, window, **options)


def inputs(b: int, t: int, kv_heads: int = HEADS, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    d = DIM // HEADS
    return {"q": rand(b, HEADS, t, d), "k": rand(b, kv_heads, t, d), "v": rand(b, kv_heads, t, d), "x": rand(b, t, DIM)}


def choose(b: int, t: int, most: int, seed: int = 3) -> Tensor:
    """[B, T]: each example its own global tokens, one of them none."""
    g = torch.Generator().manual_seed(seed)
    global_attention_mask = torch.zeros(b, t, dtype=torch.bool)
    for row in range(b - 1 if b > 1 else b):
        global_attention_mask[row, torch.randperm(t, generator=g)[:most]] = True
    return global_attention_mask


def seen(i: int, j: int, window: int, causal: bool, dilation: int) -> bool:
    """The paper's window, pair by pair: w/2 to either side, or the last w, in steps of the dilation."""
    if (i - j) % dilation:
        return False
    step = (i - j) // dilation
    return 0 <= step < window if causal else abs(step) <= window // 2


def oracle(
    made: dict[str, Tensor], weights: dict[str, Tensor], global_attention_mask: Tensor, module: Longformer, **options
):
    """out and lse by the definition, dense and pair by pair. padding and documents [B, T]; bias [H, T distances]."""
    b, h, t, d = made["q"].shape
    group = h // made["k"].shape[1]
    heads = lambda x: x.view(b, t, -1, d).transpose(1, 2)  # noqa: E731
    k, v = (made[n].repeat_interleave(group, 1) for n in ("k", "v"))
    own_q = heads(made["x"] @ weights["query.weight"].T)
    own_k, own_v = (heads(made["x"] @ weights[f"{n}.weight"].T).repeat_interleave(group, 1) for n in ("key", "value"))
    options = {"padding": None, "documents": None, "dilation": [1] * h, **options}

    def shown(n: int, head: int, i: int, j: int) -> bool:
        near = seen(i, j, module.window, module.causal, options["dilation"][head])
        return (
            (near or bool(global_attention_mask[n, i]) or bool(global_attention_mask[n, j]))
            and (not module.causal or j <= i)
            and (options["padding"] is None or not options["padding"][n, j])
            and (options["documents"] is None or bool(options["documents"][n, i] == options["documents"][n, j]))
        )

    pairs = [
        [[[shown(n, head, i, j) for j in range(t)] for i in range(t)] for head in range(h)] for n in range(b)
    ]  # fmt: skip
    is_global = global_attention_mask[:, None, :, None]
    score = torch.where(is_global, own_q @ own_k.mT, made["q"] @ k.mT) / math.sqrt(d)
    if (bias := options.get("bias")) is not None:
        score = score + bias.to(score.dtype)[:, (torch.arange(t)[:, None] - torch.arange(t)).abs()]
    score = torch.where(torch.tensor(pairs), score, -math.inf)
    weight = torch.where(torch.tensor(pairs), score.softmax(-1), 0)  # a row that sees nothing gives zeros
    return torch.where(is_global, weight @ own_v, weight @ v), score.logsumexp(-1)


def results(run, made: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse and every gradient, in float64."""
    out, lse = run(made, weights)
    g = torch.Generator().manual_seed(5)
    g_out, g_lse = (torch.randn(s.shape, generator=g, dtype=torch.float64).to(s.dtype) for s in (out, lse))
    shown = lse > -math.inf
    loss = (out * g_out).sum() + (torch.where(shown, lse, 0) * g_lse).sum()
    leaves = {**made, **weights}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"out": out, "lse": torch.where(shown, lse, 0)}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        found["d" + name] = torch.zeros_like(leaf) if grad is None else grad
    return {name: t.detach().double() for name, t in found.items()}


def check(
    module: Longformer,
    made: dict[str, Tensor],
    global_attention_mask: Tensor,
    view: View,
    backend: str,
    dtype,
    **options,
):
    """The module is as near to the float64 oracle as the same oracle is in the module's dtype, up to a small factor."""
    module = module.to(dtype)
    module.backend = backend
    names = ("query.weight", "key.weight", "value.weight")
    weights = {n: p.detach().to(dtype) for n, p in module.named_parameters() if n in names}
    assert len(weights) in (0, 3)
    made = {n: t.to(dtype) for n, t in made.items()}

    def leaves(tensors: dict[str, Tensor], to: torch.dtype) -> dict[str, Tensor]:
        return {n: t.to(to).requires_grad_() for n, t in tensors.items()}

    def run(made: dict[str, Tensor], weights: dict[str, Tensor]):
        rule = module.rule(view)
        if options.get("rule") is not None:
            rule = rule + options["rule"]
        arguments = (made["q"], made["k"], made["v"], rule, replace(view, x=made["x"]))
        return torch.func.functional_call(_Mix(module), {f"module.{n}": w for n, w in weights.items()}, arguments)

    def dense(made: dict[str, Tensor], weights: dict[str, Tensor]):
        weights = weights or {n: made["x"].new_zeros(DIM, DIM) for n in names}
        return oracle(made, weights, global_attention_mask, module, **{n: o for n, o in options.items() if n != "rule"})

    got = results(run, leaves(made, dtype), leaves(weights, dtype))
    truth = results(dense, leaves(made, torch.float64), leaves(weights, torch.float64))
    rough = results(dense, leaves(made, dtype), leaves(weights, dtype))
    eps = torch.finfo(dtype).eps
    for name, true in truth.items():
        allowed = 4 * (rough[name] - true).abs().max() + 16 * eps * max(float(true.abs().max()), 1e-3)
        error = (got[name] - true).abs().max()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


class _Mix(nn.Module):
    def __init__(self, module: Longformer) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments):
        return self.module(*arguments)


BACKENDS = [("native", torch.float32), ("banded", torch.float64)]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("b", "t", "window", "positions"), [(2, 23, 6, [0, 9, 22]), (1, 1, 2, [0]), (1, 33, 2, [4])])
def test_fixed_global_tokens_equal_the_equation(backend, dtype, causal, b, t, window, positions):
    module = make(window, positions=positions, causal=causal)
    global_attention_mask = torch.zeros(b, t, dtype=torch.bool)
    global_attention_mask[:, positions] = True
    check(module, inputs(b, t), global_attention_mask, View(), backend, dtype)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_chosen_by_each_example_with_padding(backend, dtype, causal):
    b, t, most = 3, 19, 4  # one example chooses none, one all it may, of which one is padding
    module = make(8, most=most, causal=causal)
    global_attention_mask = choose(b, t, most)
    global_attention_mask[0, t - 1] |= int(global_attention_mask[0].sum()) < most
    padding = torch.zeros(b, t, dtype=torch.bool)
    padding[0, 15:] = padding[1, :3] = True
    check(
        module,
        inputs(b, t),
        global_attention_mask,
        View(global_attention_mask=global_attention_mask, padding=padding),
        backend,
        dtype,
        padding=padding,
    )


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_shared_key_heads_documents_and_a_bias_over_distance(backend, dtype):
    b, t = 2, 21
    module = make(6, positions=[1, 2, 13], causal=False, kv_heads=1)
    global_attention_mask = torch.zeros(b, t, dtype=torch.bool)
    global_attention_mask[:, module.positions] = True
    documents = (torch.arange(t) >= 11).long().expand(b, t)
    alibi = Alibi(HEADS).to(dtype).rule(View(), t)
    options = {"documents": documents, "bias": alibi.distance_bias.double(), "rule": alibi}
    check(module, inputs(b, t, kv_heads=1), global_attention_mask, View(documents=documents), backend, dtype, **options)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_each_head_has_its_dilation(backend, dtype, causal):
    b, t, dilation = 2, 29, [1, 3]
    module = make(4, most=2, causal=causal, dilation=dilation)
    global_attention_mask = choose(b, t, 2)
    check(
        module,
        inputs(b, t),
        global_attention_mask,
        View(global_attention_mask=global_attention_mask),
        backend,
        dtype,
        dilation=dilation,
    )
    assert make(4, causal=causal, dilation=dilation).context_length() == ([3, 9] if causal else [2, 6])


def test_no_tensor_of_all_pairs():
    made, module = {n: s.float().requires_grad_() for n, s in inputs(1, 700).items()}, make(8, positions=[0, 50, 600])

    def work() -> None:
        module(made["q"], made["k"], made["v"], module.rule(), View(x=made["x"])).out.sum().backward()

    assert largest_tensor(work) < 700 * 700 / 4


def test_causal_text_projects_no_more_than_its_global_tokens_see(monkeypatch):
    made, module, seen = {n: s.float() for n, s in inputs(1, 50).items()}, make(8, positions=[0, 4, 7]), []
    project = module._project
    monkeypatch.setattr(
        module,
        "_project",
        lambda global_attention_mask, x: seen.append(x.shape[1]) or project(global_attention_mask, x),
    )
    module(made["q"], made["k"], made["v"], module.rule(), View(x=made["x"]))
    assert seen == [8]


def test_window_without_global_tokens_is_only_a_rule():
    for causal in (False, True):
        module = make(6, causal=causal)
        assert not list(module.parameters())
        check(module, inputs(2, 15), torch.zeros(2, 15, dtype=torch.bool), View(), "native", torch.float32)
    assert make(6).context_length() == [5, 5] and make(6, causal=False).context_length() == [3, 3]


def test_global_key_inside_the_window_counts_once():
    """With all scores equal every token that is seen has the same weight: counted twice, one would have two."""
    module = make(4, positions=[5], causal=False)
    q = torch.zeros(1, HEADS, 11, 8)
    v = torch.eye(11)[None, None].expand(1, HEADS, 11, 11)
    found = module(q, q, v[..., :8], module.rule(), View(x=torch.zeros(1, 11, DIM))).out
    assert torch.allclose(found[0, 0, 6, 4:8], torch.full((4,), 1 / 5))  # 4, 5, 6, 7 and 8
    assert torch.allclose(found[0, 0, 1, [0, 1, 2, 3, 5]], torch.full((5,), 1 / 5))


def test_learned_sink_counts_once():
    """Without scores and sinks of 0, four tokens seen and one sink: each has a fifth."""
    module = make(2, positions=[9], causal=False)
    q, v = torch.zeros(1, HEADS, 11, 8), torch.ones(1, HEADS, 11, 8)
    rule = module.rule() + Rule(HEADS, causal=False, sink_logits=torch.zeros(HEADS))
    found = module(q, q, v, rule, View(x=torch.zeros(1, 11, DIM))).out
    assert torch.allclose(found[:, :, 1:8], torch.tensor(4 / 5))


def test_causal_rows_do_not_change_with_the_future():
    module, t = make(6, positions=[0, 7], causal=True), 16
    made = {n: s.float() for n, s in inputs(1, t).items()}
    after = {n: s.clone() for n, s in made.items()}
    for name in ("q", "k", "v"):
        after[name][:, :, 10:] += 1
    after["x"][:, 10:] += 1
    a, c = (module(m["q"], m["k"], m["v"], module.rule(), View(x=m["x"])).out for m in (made, after))
    assert torch.equal(a[:, :, :10], c[:, :, :10]) and not torch.allclose(a[:, :, 10:], c[:, :, 10:])


ALL_POSITIONS = [
    pytest.param(make_position, id=name)
    for name, make_position in {
        "none": lambda causal: Position(),
        "alibi": lambda causal: Alibi(HEADS),
        "rotary": lambda causal: Rotary(DIM // HEADS),
        "table": lambda causal: Table(HEADS, DIM // HEADS, 30),
        "t5": lambda causal: T5(HEADS, causal=causal),
        "shaw": lambda causal: Shaw(HEADS, DIM // HEADS, 3, causal=causal),
        "transformer_xl": lambda causal: TransformerXL(DIM, HEADS, DIM // HEADS, causal=causal),
        "da_transformer": lambda causal: DATransformer(HEADS),
    }.items()
]


class TestInALayer:
    @pytest.mark.parametrize("position", [Alibi(HEADS), Rotary(DIM // HEADS)])
    def test_segments_with_memory_equal_one_pass(self, position):
        """Global tokens go on being seen from memory, as far back as `farthest`, and no farther."""
        torch.manual_seed(2)
        module = make(4, positions=[1, 6], farthest=11)
        layer = SelfAttention(DIM, HEADS, module, None)
        x = torch.randn(2, 24, DIM)
        whole, _ = layer(x, HiddenStates(x[:, :0]), View(), position)
        parts = []
        for start in range(0, 24, 6):
            memory = x[:, max(0, start - 13) : start]  # more than it looks back
            parts.append(layer(x[:, start : start + 6], HiddenStates(memory), View(start=start), position)[0])
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)
        changed = x.clone()
        changed[:, 6] += 1
        after, _ = layer(changed, HiddenStates(x[:, :0]), View(), position)
        moved = (after - whole).abs().amax((0, 2)) > 1e-6
        assert moved.nonzero().flatten().tolist() == list(range(6, 17))

    def test_global_projections_start_as_copies(self):
        layer = SelfAttention(DIM, 1, make(4, positions=[0], kv_heads=1), None)
        for name in ("query", "key", "value"):
            mine, theirs = getattr(layer.mechanism, name).weight, getattr(layer, name).weight
            assert torch.equal(mine, theirs) and mine is not theirs

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("make_position", ALL_POSITIONS)
    def test_untrained_layer_equals_attention_along_its_pattern(self, make_position, causal):
        """Copied projections, turned as the layer turns its own: then the pattern is all that is left."""
        torch.manual_seed(1)
        position, t = make_position(causal), 17
        layer = SelfAttention(DIM, HEADS, make(3 if causal else 4, positions=[1, 9], causal=causal), None)
        x = torch.randn(2, t, DIM)
        got, _ = layer(x, HiddenStates(x[:, :0]), View(), position)
        pattern = pattern_language.Window(3) | pattern_language.Global([1, 9])
        plain = SelfAttention(DIM, HEADS, Patterned(HEADS, pattern, causal=causal), None)
        plain.load_state_dict({n: w for n, w in layer.state_dict().items() if "mechanism" not in n})
        expected, _ = plain(x, HiddenStates(x[:, :0]), View(), position)
        assert torch.allclose(got, expected, atol=2e-6)

    def test_training_updates_the_global_projections(self):
        layer = SelfAttention(DIM, HEADS, make(4, positions=[0], causal=False), None)
        layer(torch.randn(1, 9, DIM), HiddenStates(torch.zeros(1, 0, DIM)), View(), Position())[
            0
        ].square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.mechanism.parameters())


def test_windows_grow_with_depth():
    sizes = growing_windows(12, 32, 512)
    assert sizes[0] == 32 and sizes[-1] == 512 and len(sizes) == 12
    assert sizes == sorted(sizes) and all(size % 2 == 0 for size in sizes)
    assert growing_windows(5, 32, 512) == [32, 64, 128, 256, 512] and growing_windows(1, 2, 8) == [8]
    with pytest.raises(ValueError, match="layers is 3, lowest 5 and highest 8; expected at least 1 layer and even"):
        growing_windows(3, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((16, 3, 4), {}, "dim is 16; expected a multiple of heads, 3"),
        ((16, 2, 0), {}, "window is 0; expected at least 1 token"),
        ((16, 2, 5), {"causal": False}, "window is 5; expected at least 1 token, an even number: half of it on"),
        ((16, 2, 4), {"positions": [1, 1]}, r"positions is \[1, 1\]; expected different positions of at least 0"),
        ((16, 2, 4), {"positions": [-1]}, r"positions is \[-1\]; expected different"),
        (
            (16, 2, 4),
            {"most": -1},
            "most is -1; expected the largest number of global tokens in an example, at least 0",
        ),
        ((16, 2, 4), {"farthest": 3}, "farthest is 3; expected more than the window's 3 tokens"),
        ((16, 2, 4), {"dilation": 0}, "dilation is 0; expected at least 1, for all heads or for each of 2"),
        ((16, 2, 4), {"dilation": [1]}, r"dilation is \[1\]; expected at least 1, for all heads or for each of 2"),
        ((16, 2, 4), {"kv_heads": 3}, "kv_heads is 3; expected a divisor of heads, 2"),
    ],
)
def test_bad_options_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        Longformer(*arguments, **options)


def test_bad_views_are_refused():
    made = inputs(2, 7)
    q, k, v, x = (made[n].float() for n in "qkvx")
    module = make(4, most=2, causal=False)
    with pytest.raises(
        ValueError, match=r"view.global_attention_mask has shape \[2, 6\] and dtype torch.bool; expected \[2, 7\]"
    ):
        module(q, k, v, module.rule(), View(x=x, global_attention_mask=torch.zeros(2, 6, dtype=torch.bool)))
    with pytest.raises(
        ValueError, match=r"view.global_attention_mask holds 7 global tokens; expected at most 2 in each example"
    ):
        module(q, k, v, module.rule(), View(x=x, global_attention_mask=torch.ones(2, 7, dtype=torch.bool)))
    module = make(4, positions=[0], causal=False)
    with pytest.raises(ValueError, match=r"view.keys is missing; expected the hidden states \[B, Tk, dim\]"):
        module(q, k, v, module.rule(), View())
    with pytest.raises(ValueError, match=r"view.keys has shape \[2, 6, 16\]; Longformer's global tokens have"):
        module(q, k, v, module.rule(), View(x=x[:, 1:]))


class TestInALanguageModel:
    def make(self, kind: str) -> LM:
        torch.manual_seed(4)
        attention = AttentionConfig(kind=kind, max_span=20)
        return LM(ModelConfig(vocab=11, dim=DIM, layers=2, heads=HEADS, attention=attention)).eval()

    @pytest.mark.parametrize("kind", ["longformer(6, 3)", "longformer(6)", "longformer(3, 2, 4)"])
    def test_segments_equal_one_pass(self, kind):
        lm, x = self.make(kind), torch.randint(11, (2, 90))
        whole, state, parts = lm(x).logits, None, []
        for piece in x.split(9, 1):
            out = lm(piece, state)
            state, _ = out.state, parts.append(out.logits)
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)

    def test_cache_works_without_global_tokens_only(self):
        x = torch.randint(11, (1, 40))
        for kind in ("longformer(6)", "longformer(3, 0, 2)"):
            lm = self.make(kind)
            cache = lm.cache(1)
            got = torch.cat([lm.decode(piece, cache) for piece in x.split(7, 1)], 1)
            assert torch.allclose(got, lm(x).logits, atol=1e-5)
        lm = self.make("longformer(6, 1)")
        with pytest.raises(ValueError, match="Longformer has no KV cache"):
            lm.decode(x, lm.cache(1))

    def test_mixture_accepts_only_a_window_without_global_tokens(self):
        self.make("1 longformer(6) + 1 adaptive_span")
        with pytest.raises(ValueError, match="Longformer cannot share a layer with other kinds"):
            self.make("1 longformer(6, 2) + 1 adaptive_span")


class TestInAnEncoder:
    def make(self, *stack: str) -> Encoder:
        torch.manual_seed(4)
        attention = AttentionConfig(stack=stack, max_span=64)
        layers = len(stack)
        return Encoder(ModelConfig(kind="encoder", vocab=11, dim=DIM, layers=layers, heads=HEADS, attention=attention))

    def test_windows_grow_from_layer_to_layer(self):
        encoder = self.make(*(f"longformer({size})" for size in growing_windows(3, 4, 16)))
        assert encoder.context_length() == [[2, 2], [4, 4], [8, 8]]

    def test_first_tokens_are_global_unless_a_mask_is_given(self):
        encoder, x = self.make("longformer(4, 2)").eval(), torch.randint(10, (2, 60))
        first = torch.arange(60).expand(2, 60) < 2
        said = encoder(x).logits
        assert torch.allclose(encoder(x, global_attention_mask=first).logits, said, atol=1e-6)
        changed = x.clone()
        changed[:, 40] = 10
        for global_attention_mask, heard in ((first, [0, 1]), (first.roll(30, 1), [30, 31])):  # and what stands near it
            moved = (
                encoder(changed, global_attention_mask=global_attention_mask).logits
                - encoder(x, global_attention_mask=global_attention_mask).logits
            )
            assert (moved.abs().amax((0, 2)) > 1e-6).nonzero().flatten().tolist() == [*heard, *range(38, 43)]

    def test_masked_token_training_updates_every_projection(self):
        encoder, x = self.make("longformer(4, 2)"), torch.randint(10, (2, 30))
        encoder(x, targets=x).nll.mean().backward()
        own = [p for mechanism in encoder.mechanisms() for p in mechanism.parameters()]
        assert len(own) == 3 and all(p.grad is not None and p.grad.abs().sum() > 0 for p in own)
