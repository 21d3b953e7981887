"""Decode with a pretrained model whose tokens may leave after some of its layers.

Confident Adaptive Language Modeling (Schuster et al., 2022), §3. https://arxiv.org/abs/2207.07061

    x^n = layer_n(x^(n−1)) while the token runs, x^n = x^(n−1) once it has left        logits = W · norm(x^L)
    k_n, v_n = rotate(K_n g_n · x / rms(x)), V_n g_n · x / rms(x)                      of a layer n that it skips

A skipped layer stores its own keys and values of the state that the token left with; copies of another layer's ruin the
text. The gains g_n of the norms are part of the matrices, so all skipped layers are one product. Prompts run through
all layers.

Shapes: B rows, T tokens, E width, L layers, R skipped layers, Hkv key/value heads of size D.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from spanformer.hf.attach import attach, base_of
from spanformer.hf.attention import IMPLEMENTATION, make_mask
from spanformer.hf.cache import SpanCache, SpanLayer
from spanformer.hf.far import far_of
from spanformer.hf.spans import head_spans
from spanformer.hf.text import logits_of

Leaves = Callable[[int, Tensor, Tensor], Tensor | None]
"""(layers so far, states [B, E], states before the last layer [B, E]) → [B] bool, who leaves; None: nobody"""


class ExitLayers:
    """A model of Llama's form, with spans (full ones, unless it has some) so that its KV cache is ours."""

    def __init__(self, model: PreTrainedModel) -> None:
        base = base_of(model)
        _check_form(base)
        if base.config._attn_implementation != IMPLEMENTATION:
            attach(base)
        if any(far_of(spans) is not None for spans in head_spans(base).values()):
            raise ValueError(
                f"{type(base).__name__} has linear states beyond its spans (far_features), which skipped layers do not "
                "keep; fit spans without them to use exits"
            )
        self.model: Any = base
        self.trunk: Any = base.base_model
        self.layers: list[Any] = list(self.trunk.layers)
        self.matrix, self.bias = _stack(self.layers)
        self.eps = float(self.layers[0].input_layernorm.variance_epsilon)
        self.check()

    @property
    def count(self) -> int:
        """L"""
        return len(self.layers)

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    def cache(self, context: int = 0) -> SpanCache:
        return SpanCache(self.model, context=context)

    def logits(self, states: Tensor) -> Tensor:
        """States after any layer [..., E] → [..., V]."""
        return self.output(self.trunk.norm(states))

    def output(self, normed: Tensor) -> Tensor:
        """States after the last norm [..., E] → [..., V]."""
        return logits_of(self.model, normed)

    @torch.no_grad()
    def read(self, ids: Tensor, cache: SpanCache, each: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Run ids [B, T] through all layers: [B, T, E]. each(n, x): called with the states after n layers."""
        x, context = self._enter(ids, cache)
        for n, layer in enumerate(self.layers, 1):
            x = layer(x, **context)
            if each is not None:
                each(n, x)
        return x

    @torch.no_grad()
    def step(self, ids: Tensor, cache: SpanCache, leaves: Leaves) -> tuple[Tensor, Tensor]:
        """Run the next token of each row, ids [B]: the states it leaves with [B, E] and its layers [B]. A row does not
        depend on the others: it is frozen when it leaves, and the layers go on for the rest."""
        x, context = self._enter(ids[:, None], cache)
        rows = len(ids)
        taken = torch.full((rows,), self.count)
        gone: Tensor | None = None
        for n, layer in enumerate(self.layers, 1):
            after = layer(x, **context)
            before, x = x, after if gone is None else torch.where(gone[:, None, None], x, after)
            if n == self.count or (leaving := leaves(n, x[:, 0], before[:, 0])) is None:
                continue
            leaving = leaving if gone is None else leaving & ~gone
            taken[leaving.cpu()] = n
            gone = leaving if gone is None else gone | leaving
            if bool(gone.all()):
                self.store_from(n, x, context["position_embeddings"], cache)
                break
        return x[:, 0], taken

    def store_from(self, first: int, x: Tensor, positions: tuple[Tensor, Tensor], cache: SpanCache) -> None:
        """Store keys and values of the states x [B, T, E] in layers `first`, counted from 0, and later."""
        keys, values = self.project(first, x, positions)
        for n in range(first, self.count):
            held = cache.layers[n]
            assert isinstance(held, SpanLayer)
            held.store(keys[:, n - first], values[:, n - first])

    def project(self, first: int, x: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [B, T, E] → keys and values of layers `first` and later, [B, R, Hkv, T, D] each."""
        size = self.layers[0].self_attn.head_dim
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)
        bias = None if self.bias is None else self.bias[first:].flatten()
        found = F.linear(x * scale, self.matrix[first:].flatten(0, 1), bias)
        found = found.view(*x.shape[:2], self.count - first, 2, -1, size)  # [B, T, R, 2, Hkv, D]
        keys, values = found.permute(3, 0, 2, 4, 1, 5)
        cos, sin = (each[:, None, None] for each in positions)
        half = torch.cat([-keys[..., size // 2 :], keys[..., : size // 2]], -1)
        return keys * cos + half * sin, values

    def _enter(self, ids: Tensor, cache: SpanCache) -> tuple[Tensor, dict[str, Any]]:
        """Embedded tokens [B, T, E], and what every layer gets beside them."""
        past, new = cache.get_seq_length(), ids.shape[1]
        x = self.trunk.embed_tokens(ids)
        at = torch.arange(past, past + new, device=ids.device)[None]
        mask = make_mask(len(ids), new, past + new, past, device=ids.device)
        return x, {
            "attention_mask": mask, "position_ids": at, "position_embeddings": self.trunk.rotary_emb(x, at),
            "past_key_values": cache, "use_cache": True,
        }  # fmt: skip

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model that computes something else between its layers or before its keys."""
        ids, states = torch.arange(1, 5)[None] % self.model.config.vocab_size, []
        last = self.read(ids, self.cache(), lambda _, x: states.append(x))
        own = self.model(input_ids=ids, use_cache=True, past_key_values=DynamicCache())
        near = _near(self.logits(last), own.logits)
        positions = self.trunk.rotary_emb(last, torch.arange(ids.shape[1])[None])
        for n in range(1, self.count):
            k, v = self.project(n, states[n - 1], positions)
            held = own.past_key_values.layers[n]
            near = near and _near(k[:, 0], held.keys) and _near(v[:, 0], held.values)
        if not near:
            raise ValueError(
                f"{type(self.model).__name__} changes its states between layers, or its keys and values, in a way that "
                "exits do not know; expected a model of Llama's form (Llama, SmolLM2)"
            )


def _near(a: Tensor, b: Tensor) -> bool:
    return float((a.float() - b.float()).abs().max()) <= 1e-3 * float(b.float().abs().max()) + 1e-6


def _stack(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """[L, 2·Hkv·D, E] keys' and values' weights with their norm's gains, and their biases [L, 2·Hkv·D] if any."""
    matrices, biases = [], []
    for layer in layers:
        linears: Any = (layer.self_attn.k_proj, layer.self_attn.v_proj)  # type: ignore[union-attr]
        gain: Any = layer.input_layernorm.weight  # type: ignore[union-attr]
        matrices.append(torch.cat([linear.weight for linear in linears]).detach() * gain.detach())
        if linears[0].bias is not None:
            biases.append(torch.cat([linear.bias for linear in linears]).detach())
    return torch.stack(matrices), torch.stack(biases) if biases else None


def _check_form(model: PreTrainedModel) -> None:
    trunk: Any = model.base_model
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    lacks = next((name for name in parts if not hasattr(trunk, name)), None)
    if lacks is None:
        inner = ("input_layernorm.weight", "input_layernorm.variance_epsilon", "self_attn.k_proj", "self_attn.v_proj")
        lacks = next((name for name in inner if not _has(trunk.layers[0], name)), None)
    if lacks is not None:
        raise ValueError(
            f"{type(model).__name__} has no {lacks}, so exits cannot be made for it; expected a model of Llama's form "
            "(Llama, SmolLM2)"
        )
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if getattr(model.config, "sliding_window", None) is not None or kinds != {"full_attention"}:
        raise ValueError(
            f"{type(model).__name__} has sliding windows of its own, with which exits do not work; expected a model "
            "whose layers see the whole text, such as SmolLM2"
        )


def _has(part: object, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(part, name):
            return False
        part = getattr(part, name)
    return True
