"""Learned spans: the equations, the bookkeeping, and that they learn to be as long as the task needs and no longer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spanformer import AdaptiveSpan, DynamicSpan, Rule
from spanformer.attention import Attention, View


def qkv(b: int = 2, h: int = 2, t: int = 12, d: int = 4, hkv: int | None = None, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, heads, t, d, generator=g) for heads in (h, hkv or h, hkv or h))


def on_reference(module: Attention) -> Attention:
    module.backend = "reference"
    return module


class TestAdaptiveSpan:
    def test_rule_holds_spans_in_tokens_and_the_originals_penalty(self):
        module = AdaptiveSpan(3, 200, ramp=16, penalty=0.01)
        with torch.no_grad():
            module.ratio.copy_(torch.tensor([0.0, 0.25, 1.0]))
        rule = module.rule()
        assert rule.heads == 3 and rule.ramp == 16 and rule.causal and not rule.paper_compat and rule.reach is None
        assert rule.span.tolist() == [0.0, 50.0, 200.0]
        assert module.penalty(rule).item() == pytest.approx(0.01 * 200 * (1.25 / 3))
        assert rule.limits() == [16, 66, 216]
        assert module.span_tensor().tolist() == [0.0, 50.0, 200.0] and not module.span_tensor().requires_grad

    def test_defaults(self):
        module = AdaptiveSpan(4, 1024)
        assert module.ratio.shape == (4,) and module.ratio.eq(0).all()
        assert module.rule(View()).ramp == 32 and module.penalty_weight == 2e-6

    def test_penalty_pulls_each_ratio_by_lambda_times_S_over_heads(self):
        module = AdaptiveSpan(4, 1000, penalty=2e-6, init=0.5)
        module.penalty().backward()
        assert torch.allclose(module.ratio.grad, torch.full((4,), 2e-6 * 1000 / 4))

    def test_original_is_capped_at_max_span_and_counts_from_the_previous_token(self):
        rule = AdaptiveSpan(2, 5, init=1.0, paper_compat=True).rule()
        assert rule.paper_compat and rule.reach.tolist() == [5, 5]
        module = on_reference(AdaptiveSpan(1, 5, init=1.0, paper_compat=True))
        q, k, _ = qkv(1, 1, 12, 12)
        weights = module(q, k, torch.eye(12)[None, None], module.rule(), View()).out[0, 0]
        for i in range(12):
            seen = [i - j for j in range(12) if weights[i, j] > 0]
            assert seen == [d for d in range(5, 0, -1) if d <= i]

    def test_gradients_reach_every_ratio_and_follow_the_finite_difference(self):
        module = on_reference(AdaptiveSpan(2, 20, ramp=6, init=0.23).double())
        q, k, v = (t.double() for t in qkv())

        def loss() -> torch.Tensor:
            out, lse = module(q, k, v, module.rule(), View())
            return (out**2).sum() + lse.sum()

        loss().backward()
        for h in range(2):
            step, values = 1e-6, []
            for sign in (1, -1):
                with torch.no_grad():
                    module.ratio[h] += sign * step
                values.append(loss().item())
                with torch.no_grad():
                    module.ratio[h] -= sign * step
            slope = (values[0] - values[1]) / (2 * step)
            assert abs(slope) > 1e-3 and module.ratio.grad[h].item() == pytest.approx(slope, rel=1e-5)

    def test_tied_heads_share_their_key_value_heads_span(self):
        module = on_reference(AdaptiveSpan(6, 100, kv_heads=2))
        assert module.ratio.shape == (2,)
        with torch.no_grad():
            module.ratio.copy_(torch.tensor([0.1, 0.02]))
        assert torch.allclose(module.span_tensor(), torch.tensor([10.0, 10.0, 10.0, 2.0, 2.0, 2.0]))
        assert module.penalty().item() == pytest.approx(2e-6 * 100 * 0.06)
        q, k, v = qkv(h=6, hkv=2, t=50)
        module(q, k, v, module.rule(), View()).out.square().sum().backward()
        assert module.ratio.grad.shape == (2,) and module.ratio.grad.ne(0).all()

    def test_after_step_clamps_in_place_without_reading_the_device(self):
        module = AdaptiveSpan(3, 10)
        with torch.no_grad():
            module.ratio.copy_(torch.tensor([-0.3, 0.4, 1.7]))
        kept = module.ratio.data_ptr()
        module.after_step()
        assert torch.equal(module.ratio, torch.tensor([0.0, 0.4, 1.0])) and module.ratio.data_ptr() == kept
        assert module.ratio.requires_grad and module.ratio.is_leaf
        elsewhere = AdaptiveSpan(3, 10).to("meta")  # a meta tensor has no values, so any read of one would raise
        elsewhere.after_step()
        assert elsewhere.span_tensor().shape == (3,) and elsewhere.rule().span.device.type == "meta"

    def test_negative_span_without_after_step_is_refused(self):
        module = AdaptiveSpan(2, 10)
        with torch.no_grad():
            module.ratio.sub_(0.1)
        with pytest.raises(ValueError, match=r"span of shape \[2\] holds -1"):
            module.rule()

    def test_state_dict_round_trip(self):
        module, other = AdaptiveSpan(4, 64, kv_heads=2, init=0.3), AdaptiveSpan(4, 64, kv_heads=2)
        assert list(module.state_dict()) == ["ratio"]
        other.load_state_dict(module.state_dict())
        assert torch.equal(module.span_tensor(), other.span_tensor())

    def test_bfloat16_parameters_still_give_spans_in_float32(self):
        module = AdaptiveSpan(2, 8192, init=0.3).bfloat16()
        assert module.rule().span.dtype == torch.float32
        assert module.span_tensor().tolist() == [module.ratio[0].item() * 8192] * 2

    def test_extra_repr(self):
        assert repr(AdaptiveSpan(4, 64)) == "AdaptiveSpan(heads=4, max_span=64, ramp=32, penalty=2e-06)"
        text = repr(AdaptiveSpan(4, 64, kv_heads=2, paper_compat=True))
        assert "kv_heads=2" in text and "paper_compat=True" in text

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"heads": 0}, "heads is 0; expected at least 1"),
            ({"max_span": math.nan}, "max_span is nan; expected 1 … 2,147,483,648 tokens"),
            ({"ramp": math.inf}, "ramp is inf; expected a positive, finite number"),
            ({"max_span": 0}, "max_span is 0; expected 1 … 2,147,483,648 tokens"),
            ({"init": -0.1}, "init is -0.1; expected a ratio of max_span, 0 … 1"),
            ({"init": 1.5}, "init is 1.5; expected a ratio"),
            ({"init": math.nan}, "init is nan; expected a ratio"),
            ({"penalty": -1.0}, "penalty is -1.0; expected at least 0"),
            ({"penalty": math.nan}, "penalty is nan; expected at least 0"),
            ({"ramp": 0}, "ramp is 0; expected a positive, finite number"),
            ({"kv_heads": 3}, "kv_heads is 3; expected a number that divides heads, 4"),
            ({"kv_heads": 0}, "kv_heads is 0; expected a number that divides heads, 4"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            AdaptiveSpan(**{"heads": 4, "max_span": 16, **options})


class TestDynamicSpan:
    def test_equation_by_hand(self):
        module = DynamicSpan(3, 2, 50, ramp=8, penalty=0.1).double()
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            module.weight.copy_(torch.randn(2, 3, generator=g))
            module.bias.copy_(torch.tensor([0.5, -1.0]))
        x = torch.randn(2, 4, 3, generator=g, dtype=torch.float64)
        rule = module.rule(View(x=x))
        assert rule.span.shape == (2, 2, 4) and rule.dynamic and rule.ramp == 8
        total = 0.0
        for b in range(2):
            for h in range(2):
                for t in range(4):
                    dot = sum(module.weight[h, c].item() * x[b, t, c].item() for c in range(3)) + module.bias[h].item()
                    z = 50 / (1 + math.exp(-dot))
                    assert rule.span[b, h, t].item() == pytest.approx(z, rel=1e-12)
                    total += z
        assert module.penalty(rule, View(x=x)).item() == pytest.approx(0.1 * total / 16, rel=1e-12)

    def test_initial_dynamic_spans_equal_the_bias(self):
        span = DynamicSpan(5, 3, 1000).rule(View(x=torch.randn(2, 7, 5))).span
        assert torch.allclose(span, torch.full((2, 3, 7), 1000 / (1 + math.exp(4))))

    def test_gradients_reach_weight_bias_and_hidden_states(self):
        module = on_reference(DynamicSpan(5, 2, 20, ramp=6, init=-1.0))
        x = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            module.weight.normal_(generator=torch.Generator().manual_seed(3))
        x.requires_grad_()
        view = View(x=x)
        module(*qkv(), module.rule(view), view).out.square().sum().backward()
        assert module.weight.grad.ne(0).all() and module.bias.grad.ne(0).all() and x.grad[:, 6:].ne(0).all()

    def test_tied_heads(self):
        module = DynamicSpan(5, 4, 20, kv_heads=2)
        assert module.weight.shape == (2, 5) and module.bias.shape == (2,)
        with torch.no_grad():
            module.bias.copy_(torch.tensor([0.0, 1.0]))
        span = module.rule(View(x=torch.zeros(1, 3, 5))).span
        assert torch.equal(span[:, 0], span[:, 1]) and torch.equal(span[:, 2], span[:, 3])
        assert span[0, 1, 0] == 10 and span[0, 2, 0] > 14

    def test_spans_stay_in_float32_under_autocast_and_half_precision(self):
        module, x = DynamicSpan(8, 1, 8192, init=0.0), torch.randn(1, 3, 8)
        with torch.no_grad():
            module.weight.normal_()
        exact = module.rule(View(x=x)).span
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under = module.rule(View(x=x)).span
        assert under.dtype == torch.float32 and torch.equal(under, exact)
        assert module.bfloat16().rule(View(x=x.bfloat16())).span.dtype == torch.float32

    def test_on_a_device_without_autocast(self):
        rule = DynamicSpan(8, 2, 64).to("meta").rule(View(x=torch.zeros(1, 3, 8, device="meta")))
        assert rule.span.shape == (1, 2, 3) and rule.span.device.type == "meta"

    def test_rules_can_be_compiled_whole(self):
        adaptive, dynamic = AdaptiveSpan(2, 16, init=0.5, paper_compat=True), DynamicSpan(3, 2, 16)
        whole = torch.compile(
            lambda x: (adaptive.rule().span, dynamic.rule(View(x=x)).span), backend="eager", fullgraph=True
        )
        spans, each = whole(torch.zeros(1, 4, 3))
        assert spans.tolist() == [8.0, 8.0] and each.shape == (1, 2, 4)

    def test_state_dict_round_trip_and_after_step(self):
        module, other = DynamicSpan(3, 2, 64), DynamicSpan(3, 2, 64)
        with torch.no_grad():
            module.weight.normal_()
        other.load_state_dict(module.state_dict())
        other.after_step()  # σ keeps spans in range by itself
        assert list(module.state_dict()) == ["weight", "bias"] and torch.equal(module.weight, other.weight)

    def test_bad_input(self):
        module = DynamicSpan(3, 2, 64)
        with pytest.raises(ValueError, match=r"view is of type Tensor; expected View\(x="):
            module.rule(torch.zeros(1, 5, 3))
        with pytest.raises(ValueError, match=r"view.x is missing; dynamic spans need the hidden states"):
            module.rule(View())
        with pytest.raises(ValueError, match=r"view.x has shape \[1, 5, 4\]; expected \[B, Tq, 3\]"):
            module.rule(View(x=torch.zeros(1, 5, 4)))
        with pytest.raises(ValueError, match=r"span has shape \[1, 2, 5\]; expected \[2, 2, 12\], one for each query"):
            on_reference(module)(*qkv(), module.rule(View(x=torch.zeros(1, 5, 3))), View())
        with pytest.raises(ValueError, match="dim is 0; expected at least 1"):
            DynamicSpan(0, 2, 64)
        with pytest.raises(ValueError, match="kv_heads is 3; expected a number that divides heads, 4"):
            DynamicSpan(3, 4, 64, kv_heads=3)

    def test_extra_repr(self):
        assert repr(DynamicSpan(3, 2, 64)) == "DynamicSpan(dim=3, heads=2, max_span=64, ramp=32, penalty=2e-06)"


class TestLearning:
    """Learned biases find where to look; the penalty should leave spans reaching that far and no further."""

    T, RAMP, SPAN = 40, 4.0, 32

    @pytest.fixture(autouse=True)
    def one_thread(self):
        """Tensors this small only lose by threads, and lose badly on a busy machine."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def copy_back(self, module: AdaptiveSpan, needed: tuple[int, int], steps: int) -> list[float]:
        """Train head h to output the value needed[h] tokens back; returns the error of every step."""
        on_reference(module)
        g = torch.Generator().manual_seed(0)
        bias = nn.Parameter(torch.zeros(2, self.T))
        optimizer = torch.optim.Adam([{"params": [bias], "lr": 0.2}, {"params": module.parameters(), "lr": 0.003}])
        q, errors = torch.zeros(8, 2, self.T, 4), []
        for _ in range(steps):
            x = torch.randn(8, self.T, 4, generator=g)
            v = x[:, None].expand(-1, 2, -1, -1)
            rule = module.rule() + Rule(2, distance_bias=bias)
            out = module(q, v, v, rule, View()).out
            error = sum((out[:, h, d:] - x[:, : self.T - d]).square().mean() for h, d in enumerate(needed))
            optimizer.zero_grad()
            (error + module.penalty()).backward()
            optimizer.step()
            module.after_step()
            errors.append(error.item())
        return errors

    def test_penalty_shrinks_each_span_to_what_its_head_needs(self):
        module = AdaptiveSpan(2, self.SPAN, ramp=self.RAMP, init=1.0, penalty=0.01)
        needed = (5, 14)
        errors = self.copy_back(module, needed, steps=600)
        assert errors[0] > 1.5 and errors[-1] < 0.01
        for z, d in zip(module.span_tensor().tolist(), needed, strict=True):
            assert d - self.RAMP < z < d, (d, z)  # the needed distance is left somewhere on the ramp …
        assert module.rule().limits() == [6, 15]  # … and costs what it must: distances 0 … 5 and 0 … 14

    def test_span_grows_when_the_task_pulls_it_along_the_ramp(self):
        module = AdaptiveSpan(2, self.SPAN, ramp=16.0, init=0.0, penalty=0.0)
        errors = self.copy_back(module, (2, 14), steps=200)
        assert errors[-1] < 0.1 and module.span_tensor()[1] > 1.0 + module.span_tensor()[0]

    def test_without_a_penalty_nothing_shortens_a_span_that_sees_everything(self):
        module = AdaptiveSpan(2, self.SPAN + 8, ramp=self.RAMP, init=1.0, penalty=0.0)
        self.copy_back(module, (2, 14), steps=30)
        assert module.span_tensor().tolist() == [self.SPAN + 8] * 2

    def test_dynamic_spans_follow_what_each_token_needs(self):
        """Half of the tokens, marked in their hidden state, must look 14 back, the others 2."""
        module = on_reference(DynamicSpan(2, 1, self.SPAN, ramp=self.RAMP, init=0.5, penalty=0.01))
        g = torch.Generator().manual_seed(0)
        table = nn.Parameter(torch.zeros(1, self.T, 2))
        optimizer = torch.optim.Adam([{"params": [table], "lr": 0.2}, {"params": module.parameters(), "lr": 0.01}])
        near, far = 2, 14
        for _ in range(600):
            marked = torch.rand(8, self.T, generator=g) < 0.5
            x = torch.stack([marked, ~marked], -1).float()
            v = torch.randn(8, 1, self.T, 4, generator=g)
            view = View(x=x)
            rule = module.rule(view) + Rule(1, distance_vec=table)
            out = module(x[:, None], torch.zeros(8, 1, self.T, 2), v, rule, view).out[:, 0, far:]
            values = v[:, 0]
            wanted = torch.where(marked[:, far:, None], values[:, :-far], values[:, far - near : -near])
            error = (out - wanted).square().mean()
            optimizer.zero_grad()
            (error + module.penalty(rule, view)).backward()
            optimizer.step()
        assert error < 0.01
        long, short = module.rule(View(x=torch.eye(2)[None])).span[0, 0].tolist()
        assert far - self.RAMP < long < far and short < near, (long, short)


class TestBase:
    def test_attention_base_class_has_no_rule(self):
        with pytest.raises(NotImplementedError, match="Attention has no rule"):
            Attention().rule(View())

    def test_view_is_frozen(self):
        with pytest.raises(AttributeError):
            View().x = torch.zeros(1)

    def test_view_positions_documents_and_padding_are_used(self):
        class Plain(Attention):
            def rule(self, view: View) -> Rule:
                return Rule(1)

        module = on_reference(Plain())
        q, k, _ = qkv(1, 1, 6, 6)
        v = torch.eye(6)[None, None]

        def seen(view: View, rule: Rule | None = None) -> list[list[int]]:
            out = module(q, k, v, rule or module.rule(view), view).out[0, 0]
            return [[j for j in range(6) if row[j] > 0] for row in out]

        assert seen(View())[3] == [0, 1, 2, 3]
        back = torch.arange(5, -1, -1)
        assert seen(View(q_positions=back, k_positions=back))[3] == [3, 4, 5]
        assert seen(View(documents=torch.tensor([0, 0, 1, 1, 1, 2])))[4] == [2, 3, 4]
        padding = torch.tensor([[True, True, False, False, False, False]])
        assert seen(View(padding=padding))[:4] == [[], [], [2], [2, 3]]
        twice = View(padding=padding, documents=torch.tensor([0, 0, 0, 1, 1, 1]))
        assert seen(twice, module.rule(twice) + twice.rule(1)) == seen(twice)  # adding it first changes nothing
        assert seen(View(), Rule(1, causal=False))[0] == [0, 1, 2, 3, 4, 5]

    def test_padding_must_be_boolean(self):
        with pytest.raises(ValueError, match=r"view.padding has shape \[2, 3\] and dtype torch.float32; expected \[B"):
            View(padding=torch.zeros(2, 3)).rule(1)

    def test_dropout_only_while_training(self):
        module = on_reference(AdaptiveSpan(2, 16))
        module.dropout = 0.5
        q, k, v = qkv()

        def mix() -> torch.Tensor:
            return module(q, k, v, module.rule(), View()).out

        assert not torch.equal(mix(), mix())
        module.eval()
        assert torch.equal(mix(), mix())
