"""Learn the spans of a pretrained model to a budget of key/value memory; all other weights stay as they are.

1. Survey (survey.py): measure on a few texts what each key/value head loses with each of a dozen windows.
2. Start from the windows that lose least within the budget (model/budget.py).
3. Learn: windows w with a soft edge, and Adam on log w, minimise

       KL(full model ‖ model with windows) + λ · Σ_h w_h

   The full model's predictions are a much less noisy target than the next token. λ, the price of a token, is the
   one at which the heads' sum neither grows nor shrinks; after a step, one factor for all heads
   restores the budget. The soft edge narrows together with the step size. Features of linear states, if heads have
   any (far_learner.py), learn by the same backward pass.
4. Every few steps, evaluate whole windows, as a KV cache keeps them, on validation texts. Keep the best.

Shapes: L layers, Hkv key/value heads of a layer, T tokens, E width of the hidden states.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanformer.core.events import NoteEvent, ProgressEvent
from spanformer.hf.attach import CONFIG, base_of
from spanformer.hf.far_learner import FarLearner
from spanformer.hf.fit_events import OnFitEvent, Trial, WindowStep, ignore
from spanformer.hf.spans import HeadSpans, head_spans
from spanformer.hf.text import TextChunks, chunks, hidden_states, logits_of
from spanformer.hf.window_learner import WindowLearner
from spanformer.model.budget import Budget


@dataclass(frozen=True)
class FitConfig:
    steps: int = 48
    """most steps; each reads one window of text"""
    minutes: float = 0.0
    """stop learning after this many; 0: no limit"""
    lr: float = 0.08
    """learning rate of log w: 0.1 changes a window by about a tenth per step at first; falls to a tenth at the end"""
    ramp: float = 96.0
    """initial width of the soft edge in tokens"""
    last_ramp: float = 32.0
    """final width of the soft edge in tokens"""
    check: int = 12
    """steps between evaluations on validation texts"""
    far_lr: float = 0.01
    """learning rate of the features of linear states, if there are any; falls with lr"""
    patience: int = 2
    """stop after this many evaluations without a gain"""

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("check", 1), ("patience", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if not (self.lr > 0 and self.ramp >= self.last_ramp >= 1 and self.minutes >= 0):
            raise ValueError(
                f"lr is {self.lr:g}, ramp {self.ramp:g} to {self.last_ramp:g}, minutes {self.minutes:g}; expected a "
                "positive lr, a ramp that narrows down to 1 token or more, and 0 minutes or more"
            )


def window_table(model: nn.Module) -> Tensor:
    """[L, Hkv] how many tokens each key/value head keeps besides the sink_tokens."""
    return torch.tensor([layer.keeps() for layer in head_spans(model).values()])


def growth_table(model: nn.Module) -> Tensor:
    """[L, Hkv] by how much each head's window grows with each token of the text."""
    return torch.tensor([layer.growths() for layer in head_spans(model).values()])


@torch.no_grad()
def set_windows(
    model: nn.Module, windows: Tensor, ramp: float | None = None, growth: Tensor | None = None
) -> None:  # fmt: skip
    """Give every key/value head its window [L, Hkv], with a soft edge of `ramp` tokens centred on it; None: a hard
    edge, so that a head sees w tokens and keeps w. growth [L, Hkv]: tokens that a window gains with each token of
    the text beyond max_span (and loses below it); 1 is an unlimited head. None: windows do not grow."""
    layers = list(head_spans(model).values())
    growth = torch.zeros(windows.shape) if growth is None else growth
    for layer, row, more in zip(layers, windows.float(), growth.float(), strict=True):
        if bool(more.any()) and (layer.far is not None or layer.window is not None):
            raise ValueError(
                "growth is given for a layer with linear states or with its own sliding window; its windows do not grow"
            )
        layer.growth.copy_(
            more if layer.kv_heads == layer.groups else more.repeat_interleave(layer.kv_heads // layer.groups)
        )
        layer.ramp = 1.0 if ramp is None else ramp
        first = row - 1 if ramp is None else row - ramp / 2  # where the edge begins
        if layer.kv_heads != layer.groups:
            first = first.repeat_interleave(layer.kv_heads // layer.groups)
        if ramp is None and float(row.max()) > layer.max_span:
            raise ValueError(
                f"a window is {float(row.max()):g} tokens, and max_span {layer.max_span}; attach longer spans"
            )
        ratio = first / layer.max_span
        ratio = torch.where(ratio * layer.max_span > first, ratio.nextafter(torch.zeros(())), ratio)  # not a token more
        layer.ratio.copy_(ratio.clamp(0, 1))
    settings = getattr(base_of(model).config, CONFIG)
    settings["ramp"] = layers[0].ramp


def learn(
    model: PreTrainedModel,
    texts: TextChunks,
    trials: TextChunks,
    budget: Budget,
    start: tuple[Tensor, float],
    config: FitConfig,
    on_event: OnFitEvent = ignore,
    served: Budget | None = None,
) -> Tensor:
    """Whole windows [L, Hkv] within the budget; the model is left with them, hard-edged. start: windows and
    the price of a token at first, as `allocate` gives them. served: the budget of longer texts, to which windows grow
    (`growth_table`)."""
    begun = time.monotonic()
    windows, price = start
    layers = list(head_spans(model).values())
    check_layers(layers)
    budgets = [budget] if served is None else [budget, replace(budget, context=texts.start)]
    heads = WindowLearner(windows, price, budgets, lr=config.lr, shortest=config.last_ramp / 2)
    best = (budget.whole(windows), torch.zeros(windows.shape)) if served is None else heads.whole(served)
    on_event(ProgressEvent("trying the survey's windows", 0, config.steps))
    teacher: dict[int, Tensor] = {}  # by number of the text, as they are first read
    reference = [full_states(model, row, trials.start, budget.context) for row in trials.ids]
    lowest = trial(model, best[0], trials, reference, best[1])
    on_event(Trial(0, lowest))
    features, worse = FarLearner(layers, config.far_lr), 0
    for step in range(1, config.steps + 1):
        done = (step - 1) / config.steps
        ramp = config.ramp + (config.last_ramp - config.ramp) * done
        windows, growth = heads.soft(ramp)
        number = (step - 1) % len(texts)
        if number not in teacher:
            teacher[number] = full_states(model, texts.ids[number], texts.start, budget.context)
        set_windows(model, windows, ramp, growth)
        loss, *slopes = window_slopes(
            model, layers, texts.ids[number], teacher[number], texts.start, served is not None
        )
        weight, norm = heads.step(*slopes, scale=1 - 0.9 * done)
        features.step(1 - 0.9 * done)
        on_event(WindowStep(
            step, kl=loss, price=weight, ramp=ramp, lr=config.lr * (1 - 0.9 * done),
            grad_norm=norm, seconds=time.monotonic() - begun, windows=windows.tolist(),
        ))  # fmt: skip
        late = bool(config.minutes) and time.monotonic() - begun > 60 * config.minutes
        if step % config.check == 0 or step == config.steps or late:
            on_event(ProgressEvent(f"step {step}: trying windows", step, config.steps))
            whole = heads.whole(served)
            now = trial(model, whole[0], trials, reference, whole[1])
            on_event(Trial(step, now))
            worse = 0 if now < lowest else worse + 1
            if now < lowest:
                lowest, best = now, whole
                features.keep()
        if late or worse >= config.patience:
            on_event(NoteEvent(step, "out of time" if late else f"no gain in {worse} trials: stopped"))
            break
    features.restore()
    set_windows(model, best[0], growth=best[1])
    return best[0]


@torch.no_grad()
def full_states(model: PreTrainedModel, ids: Tensor, start: int, context: int) -> Tensor:
    """[T − start, E] of the teacher: the model with every head seeing the whole context. Leaves these windows set."""
    for layer in head_spans(model).values():
        layer.ramp = 1.0
        layer.ratio.fill_(1.0)
        layer.growth.zero_()
        if layer.max_span < min(context, layer.window or context):
            raise ValueError(f"max_span is {layer.max_span}, and texts have {context} tokens; attach longer spans")
    return hidden_states(model, ids[None], start)[0]


@torch.no_grad()
def trial(
    model: PreTrainedModel, windows: Tensor, texts: TextChunks, reference: list[Tensor], growth: Tensor | None = None
) -> float:
    """KL from the full model, in nats per token, with hard windows."""
    set_windows(model, windows, growth=growth)
    total = 0.0
    for row, wanted in zip(texts.ids, reference, strict=True):
        states = hidden_states(model, row[None], texts.start)[0]
        total += sum(float(_kl(model, states[part], wanted[part])) for part in chunks(len(states)))
    return total / (len(texts) * texts.targets)


def window_slopes(
    model: PreTrainedModel, layers: list[HeadSpans], ids: Tensor, wanted: Tensor, start: int, grow: bool = False
) -> tuple[float, Tensor, Tensor]:
    """(KL in nats per token, its derivatives by every window and by every growth, each [L, Hkv]) on one text. grow:
    whether windows grow; the derivatives by growths are zeros otherwise."""
    for layer in layers:
        layer.ratio.requires_grad_(True)
        layer.growth.requires_grad_(grow)
    states = hidden_states(model, ids[None], start)[0]
    loss = backward_kl(model, states, wanted)
    slopes, of_growth = [], []
    for layer in layers:
        assert layer.ratio.grad is not None
        slopes.append(layer.ratio.grad.float() / layer.max_span)
        of_growth.append(torch.zeros_like(slopes[-1]) if layer.growth.grad is None else layer.growth.grad)
        layer.ratio.grad = layer.growth.grad = None
        layer.ratio.requires_grad_(False)
        layer.growth.requires_grad_(False)
    return loss, torch.stack(slopes), torch.stack(of_growth)


def backward_kl(model: PreTrainedModel, states: Tensor, wanted: Tensor) -> float:
    """Backward from the mean KL, for a few tokens' logits at a time: all logits would be T × vocabulary numbers."""
    leaf = states.detach().requires_grad_(True)
    total = 0.0
    for part in chunks(len(states)):
        loss = _kl(model, leaf[part], wanted[part]) / len(states)
        loss.backward()
        total += float(loss.detach())
    states.backward(leaf.grad)
    return total


def _kl(model: PreTrainedModel, states: Tensor, wanted: Tensor) -> Tensor:
    """Σ over tokens of KL(full ‖ now)."""
    with torch.no_grad():
        goal = logits_of(model, wanted).log_softmax(-1)
    now = logits_of(model, states).log_softmax(-1)
    return (goal.exp() * (goal - now)).sum()


def budget_of(layers: list[HeadSpans], share: float, context: int, sink_tokens: int) -> Budget:
    """The budget as a share of what these layers keep in a full cache."""
    own = tuple(layer.window for layer in layers)
    return Budget(share, context, sink_tokens, own if any(own) else ())


def check_layers(layers: list[HeadSpans]) -> None:
    """Refuse models that fitting does not support."""
    if len({layer.groups for layer in layers}) != 1:
        raise ValueError(
            "this model's layers have different numbers of key/value heads; spans are fitted to models whose layers "
            "are alike"
        )
    if any(layer.kv_heads != layer.groups for layer in layers):
        raise ValueError('spans are attached per="head"; fitting learns one for each key/value head: per="kv_head"')
