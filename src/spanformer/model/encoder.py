"""A model whose tokens see what comes before and after them, and its objective: guess the tokens that were masked.

BERT (Devlin et al., 2018), https://arxiv.org/abs/1810.04805

    h = norm(blocks(embedding(x)))        p(token at i) = softmax(head(h_i))        loss = mean over masked i of −log p

Shapes: B batch, T tokens, N places asked for in a row, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.model.config import ModelConfig
from spanformer.model.layered import Layered, Output


class Encoder(Layered):
    """Its mechanisms run in both directions. `encoder(x)` gives the logits of every token, `encoder.states(…)` the
    hidden states alone."""

    def __init__(self, config: ModelConfig, *, tokens: bool = True) -> None:
        """tokens: False for one that is given embedded tokens, as in an encoder–decoder."""
        super().__init__(config, "encoder", tokens=tokens)

    @property
    def mask(self) -> int:
        """The token that stands for one to be guessed: the last of the vocabulary."""
        return self.config.vocab - 1

    def forward(
        self,
        x: Tensor,
        *,
        at: Tensor | None = None,
        targets: Tensor | None = None,
        padding: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Output:
        """x [B, T] ids; padding [B, T] bool: True where x is no token, nothing sees it. at [B, N]: only these places of
        each row are predicted. targets [B, N], or [B, T] without at: then only their losses are computed. chosen [B, T]
        bool: each text's global tokens, for layers that have such (Longformer)."""
        check_ids("x", x)
        asked = x if at is None else at
        if asked.ndim != 2 or len(asked) != len(x) or asked.is_floating_point():
            raise ValueError(f"at has shape {list(asked.shape)} and dtype {asked.dtype}; expected places [{len(x)}, N]")
        if targets is not None and targets.shape != asked.shape:
            raise ValueError(f"targets has shape {list(targets.shape)}; expected {list(asked.shape)}")
        h, penalty = self.states(self.embedding(x), padding, chosen)
        if at is not None:
            h = h.gather(1, at[..., None].expand(-1, -1, h.shape[2]))
        h = self.dropout(h)
        if targets is None:
            return Output(self.head.logits(h), None, penalty)
        return Output(None, self.head.nll(h, targets), penalty)

    def states(
        self, embedded: Tensor, padding: Tensor | None, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """embedded [B, T, dim] tokens, padding and chosen [B, T] → hidden states [B, T, dim] (of padding, they mean
        nothing), and what to add to the loss."""
        check_padding("padding", padding, embedded)
        h = self.dropout(self.place(0, embedded, 0))
        penalty = h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
        for n, (block, position) in enumerate(zip(self.blocks, self.positions(), strict=True)):
            h = self.place(n, h, 0) if n else h
            h, _, added = self.through(block, h, h[:, :0], View(padding=padding, chosen=chosen), position)
            penalty = penalty if added is None else penalty + added
        return self.norm(h), penalty


def check_ids(name: str, x: Tensor) -> None:
    if x.ndim != 2 or x.is_floating_point():
        raise ValueError(f"{name} has shape {list(x.shape)} and dtype {x.dtype}; expected token ids [B, T]")


def check_padding(name: str, padding: Tensor | None, tokens: Tensor) -> None:
    """padding for tokens [B, T, …]"""
    if padding is not None and (padding.shape != tokens.shape[:2] or padding.dtype != torch.bool):
        raise ValueError(
            f"{name} has shape {list(padding.shape)} and dtype {padding.dtype}; expected {list(tokens.shape[:2])} of "
            "torch.bool, True where there is no token"
        )
