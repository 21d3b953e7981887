"""The whole model of the adaptive-span paper's code, dense: the oracle for parity and imports.

Adaptive Attention Span in Transformers, https://arxiv.org/abs/1905.07799
Augmenting Self-attention with Persistent Memory, https://arxiv.org/abs/1907.01470
Adaptive Input Representations for Neural Language Modeling, https://arxiv.org/abs/1809.10853

    s_d = (q·k_d + q·r_d) / √D                      d = 1 … S tokens back, r_d = key_pe[:, S − d]
    p   = softmax over all d, and over the persistent keys √D·m_key jointly
    a   = m·p / (Σ m·p + 1e-8)                      m_d = clip((R + z − (d − 1)) / R, 0, 1), 1 for persistent keys
    x   = LayerNorm(x + W_o Σ a·v)                  then x = LayerNorm(x + FF(x)), unless there is persistent memory

Parameters go by the names that the paper's code gives them. Shapes: B batch, T tokens, H heads, D head size, S the
longest span, N persistent vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

CURRENT = "attn.attn.adaptive_span._mask.current_val"
TEMPLATE = "attn.attn.adaptive_span._mask.mask_template"
TWIN = "persistent_memory.adaptive_span"


@dataclass(frozen=True)
class Shape:
    vocab: int = 29
    dim: int = 24
    layers: int = 2
    heads: int = 3
    inner: int = 20
    span: int = 96
    ratios: tuple[float, ...] | None = (0.0,)
    """of all heads, layer by layer, repeated; None: no spans are learned, every head sees S"""
    ramp: float = 32.0
    penalty: float = 1e-3
    persistent: int = 0
    """N; they stand in for the feed-forward"""
    cutoffs: tuple[int, ...] = ()
    divisor: int = 2
    tied: bool = False


def random_state(shape: Shape) -> dict[str, Tensor]:
    """A state dict as the paper's code has it, in float64, with numbers that make every part matter."""
    g = torch.Generator().manual_seed(11)

    def draw(*size: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(*size, generator=g, dtype=torch.float64)

    dim, heads, head_dim = shape.dim, shape.heads, shape.dim // shape.heads
    state = {"key_pe": draw(1, head_dim, shape.span), **_embeddings(shape, draw)}
    for n in range(shape.layers):
        layer = {f"attn.proj_{name}.weight": draw(dim, dim, scale=dim**-0.5) for name in ("query", "key", "val", "out")}
        if shape.ratios is not None:
            every = [shape.ratios[(n * heads + h) % len(shape.ratios)] for h in range(heads)]
            layer[CURRENT] = torch.tensor(every, dtype=torch.float64).view(heads, 1, 1)
            layer[TEMPLATE] = torch.arange(1.0 - shape.span, 1.0, dtype=torch.float64)
        norms = ["norm1"]
        if shape.persistent:
            layer["attn.attn.persistent_memory.key"] = draw(heads, head_dim, shape.persistent, scale=head_dim**-0.5)
            layer["attn.attn.persistent_memory.val"] = draw(
                heads, shape.persistent, head_dim, scale=shape.persistent**-0.5
            )
            if shape.ratios is not None:  # there the same module has two names
                layer |= {name.replace("adaptive_span", TWIN): layer[name] for name in (CURRENT, TEMPLATE)}
        else:
            norms.append("norm2")
            layer |= {"ff.fc1.weight": draw(shape.inner, dim, scale=dim**-0.5), "ff.fc1.bias": draw(shape.inner)}
            layer |= {"ff.fc2.weight": draw(dim, shape.inner, scale=dim**-0.5), "ff.fc2.bias": draw(dim, scale=0.3)}
        for norm in norms:
            layer |= {f"{norm}.weight": draw(dim, scale=0.2, mean=1.0), f"{norm}.bias": draw(dim, scale=0.2)}
        state |= {f"layers.{n}.{name}": t for name, t in layer.items()}
    return state


def _embeddings(shape: Shape, draw) -> dict[str, Tensor]:
    vocab, dim = shape.vocab, shape.dim
    if not shape.cutoffs:
        weight = draw(vocab, dim, scale=dim**-0.5)
        return {"in_emb.weight": draw(vocab, dim), "out_emb.weight": weight, "out_emb.bias": draw(vocab, scale=0.2)}
    state = {}
    bounds = [0, *shape.cutoffs, vocab]
    for i, (low, high) in enumerate(pairwise(bounds)):
        size = dim // shape.divisor**i
        # in use multiplied by √dim; larger ones would make scores so large that the 1e-8 above shows
        state[f"in_emb.emb_layers.{i}.weight"] = draw(high - low, size, scale=dim**-0.5)
        state[f"in_emb.emb_projs.{i}"] = draw(dim, size, scale=size**-0.5)
        made = (draw(high - low, size), draw(dim, size, scale=dim**-0.5))
        if shape.tied:
            made = (state[f"in_emb.emb_layers.{i}.weight"], state[f"in_emb.emb_projs.{i}"])
        state[f"out_emb.out_layers.{i}.weight"], state[f"out_emb.out_projs.{i}"] = made
        state[f"out_emb.out_layers.{i}.bias"] = draw(high - low, scale=0.2)
    state["out_emb.cluster_proj.weight"] = draw(len(shape.cutoffs), dim, scale=dim**-0.5)
    state["out_emb.cluster_proj.bias"] = draw(len(shape.cutoffs), scale=0.2)
    return state


class Dense:
    """Reads one segment after another."""

    def __init__(self, shape: Shape, state: dict[str, Tensor]) -> None:
        self.shape, self.w = shape, state
        self.caches: list[Tensor] | None = None

    def read(self, x: Tensor, targets: Tensor) -> Tensor:
        """[B, T] ids → [B, T] −log p of each target."""
        s = self.shape
        h = self._embed(x)
        if self.caches is None:  # zeros, which are attended to like tokens
            self.caches = [h.new_zeros(len(x), s.span, s.dim) for _ in range(s.layers)]
        for n in range(s.layers):
            seen = torch.cat([self.caches[n], h], 1)
            self.caches[n] = seen[:, -s.span :].detach()
            h = self._layer(f"layers.{n}.", h, seen)
        return self._nll(h, targets)

    def penalty(self) -> Tensor:
        spans = [t for key, t in self.w.items() if key.endswith(CURRENT)]
        return sum((self.shape.penalty * self.shape.span * t.mean() for t in spans), torch.zeros(()))

    def _layer(self, at: str, h: Tensor, seen: Tensor) -> Tensor:
        h = self._norm(at + "norm1", h + self._attention(at, h, seen))
        if self.shape.persistent:
            return h
        inner = torch.relu(F.linear(h, self.w[at + "ff.fc1.weight"], self.w[at + "ff.fc1.bias"]))
        return self._norm(at + "norm2", h + F.linear(inner, self.w[at + "ff.fc2.weight"], self.w[at + "ff.fc2.bias"]))

    def _attention(self, at: str, h: Tensor, seen: Tensor) -> Tensor:
        """h [B, T, dim] the new states, seen [B, S + T, dim] these and the S before them."""
        s, w = self.shape, self.w
        q, k, v = (
            F.linear(t, w[f"{at}attn.proj_{name}.weight"]).unflatten(-1, (s.heads, -1)).transpose(1, 2)
            for name, t in (("query", h), ("key", seen), ("val", seen))
        )  # [B, H, T or S + T, D]
        head_dim = q.shape[-1]
        weight = self._mask(at).to(q.dtype)  # [H, S]
        keys, values = torch.zeros_like(q[0, :, :0]), torch.zeros_like(q[0, :, :0])
        if s.persistent:
            keys = w[at + "attn.attn.persistent_memory.key"].transpose(1, 2) * math.sqrt(head_dim)
            values = w[at + "attn.attn.persistent_memory.val"] * math.sqrt(s.persistent)
            weight = torch.cat([weight, weight.new_ones(s.heads, s.persistent)], 1)
        # for each query the S states before it, the farthest first, which is key_pe's order too: [B, H, T, D, S]
        near_k, near_v = (t.unfold(2, s.span, 1)[:, :, : h.shape[1]] for t in (k, v))
        score = torch.einsum("bhtd,bhtds->bhts", q, near_k) + q @ w["key_pe"][0]
        score = torch.cat([score, torch.einsum("bhtd,hnd->bhtn", q, keys)], -1) / math.sqrt(head_dim)
        a = score.softmax(-1) * weight[:, None]
        if s.ratios is not None:
            a = a / (a.sum(-1, keepdim=True) + 1e-8)
        out = torch.einsum("bhts,bhtds->bhtd", a[..., : s.span], near_v)
        out = out + torch.einsum("bhtn,hnd->bhtd", a[..., s.span :], values)
        return F.linear(out.transpose(1, 2).flatten(2), w[at + "attn.proj_out.weight"])

    def _mask(self, at: str) -> Tensor:
        """[H, S], the farthest first."""
        s = self.shape
        if s.ratios is None:
            return torch.ones(s.heads, s.span)
        z = self.w[at + CURRENT][:, 0] * s.span
        d = torch.arange(s.span, 0, -1)
        m = (s.ramp + z - (d - 1)) / s.ramp
        return m.clamp(0, 1)  # which has a gradient at exactly 0 and 1 too: of spans of a whole number of tokens

    def _norm(self, name: str, h: Tensor) -> Tensor:
        return F.layer_norm(h, h.shape[-1:], self.w[name + ".weight"], self.w[name + ".bias"])

    def _embed(self, x: Tensor) -> Tensor:
        s, w = self.shape, self.w
        if not s.cutoffs:
            return w["in_emb.weight"][x]
        clusters = range(len(s.cutoffs) + 1)
        every = [w[f"in_emb.emb_layers.{i}.weight"] @ w[f"in_emb.emb_projs.{i}"].T for i in clusters]
        return torch.cat(every)[x] * math.sqrt(s.dim)

    def _nll(self, h: Tensor, targets: Tensor) -> Tensor:
        """From the log-probabilities of every word, [B, T, V]."""
        s, w = self.shape, self.w
        if not s.cutoffs:
            logp = F.linear(h, w["out_emb.weight"], w["out_emb.bias"]).log_softmax(-1)
            return -logp.gather(-1, targets[..., None])[..., 0]
        scores = [
            F.linear(
                h @ w[f"out_emb.out_projs.{i}"], w[f"out_emb.out_layers.{i}.weight"], w[f"out_emb.out_layers.{i}.bias"]
            )
            for i in range(len(s.cutoffs) + 1)
        ]
        of_tails = F.linear(
            h @ w["out_emb.out_projs.0"], w["out_emb.cluster_proj.weight"], w["out_emb.cluster_proj.bias"]
        )
        head = torch.cat([scores[0], of_tails], -1).log_softmax(-1)
        parts = [head[..., : s.cutoffs[0]]]  # the shortlist; tail i goes by the head's i-th column from the end
        parts += [head[..., -i, None] + tail.log_softmax(-1) for i, tail in enumerate(scores[1:], 1)]
        return -torch.cat(parts, -1).gather(-1, targets[..., None])[..., 0]
