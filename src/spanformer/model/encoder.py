"""A bidirectional model, and its objective: predict masked tokens.

BERT (Devlin et al., 2018), https://arxiv.org/abs/1810.04805

    h = norm(blocks(embedding(x)))        p(token at i) = softmax(head(h_i))        loss = mean over masked i of −log p

Shapes: B batch, T tokens, N predicted positions per row, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.model.config import ModelConfig
from spanformer.model.cpc import SHARE, nce
from spanformer.model.etc import make_summaries
from spanformer.model.stack import Output, TransformerStack
from spanformer.position import Position


class Encoded(NamedTuple):
    states: Tensor
    """[B, T, dim], the last hidden states; undefined for padding"""
    summaries: Tensor
    """[B, m, dim], the states of ETC's global tokens; m is 0 for other mechanisms"""
    penalty: Tensor
    """a scalar to add to the loss"""


class Encoder(TransformerStack):
    """Its mechanisms run in both directions. `encoder(x)` returns the logits of every token, `encoder.encode(…)` only
    the hidden states."""

    def __init__(self, config: ModelConfig, *, tokens: bool = True) -> None:
        """tokens: False for an encoder that receives embedded tokens, as in an encoder–decoder."""
        super().__init__(config, "encoder", tokens=tokens)
        self.summaries = make_summaries(config.dim, self.mechanisms())
        """the global tokens of ETC layers; None for other kinds"""

    @property
    def mask(self) -> int:
        """The mask token: the last of the vocabulary."""
        return self.config.vocab - 1

    def forward(
        self,
        x: Tensor,
        *,
        at: Tensor | None = None,
        targets: Tensor | None = None,
        padding: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
        picked: Tensor | None = None,
        alone: Tensor | None = None,
        alone_padding: Tensor | None = None,
    ) -> Output:
        """x [B, T] ids; padding [B, T] bool: True for padding, which no token sees. at [B, N]: only these positions of
        each row are predicted. targets [B, N], or [B, T] without at: if given, only their losses are computed.
        global_attention_mask [B, T] bool: each text's global tokens, for Longformer layers. segments
        [B, T] integers: the global token of each token (ETC), −1 for none; by default of equal length.

        picked [B, P]: segments that are completely masked in x; alone [B, P, S] their tokens, alone_padding [B, P, S]
        True after the end of each: the penalty then includes the contrastive loss of model/cpc.py."""
        check_ids("x", x)
        asked = x if at is None else at
        if asked.ndim != 2 or len(asked) != len(x) or asked.is_floating_point():
            raise ValueError(
                f"at has shape {list(asked.shape)} and dtype {asked.dtype}; expected positions [{len(x)}, N] of "
                "torch.int64"
            )
        if targets is not None and targets.shape != asked.shape:
            raise ValueError(f"targets has shape {list(targets.shape)}; expected {list(asked.shape)}")
        h, summaries, penalty = self.encode(self.embedding(x), padding, global_attention_mask, segments)
        if any(given is not None for given in (picked, alone, alone_padding)):
            penalty = penalty + SHARE * self._contrast(summaries, picked, alone, alone_padding)
        if at is not None:
            h = h.gather(1, at[..., None].expand(-1, -1, h.shape[2]))
        h = self.dropout(h)
        if targets is None:
            return Output(self.head.logits(h), None, penalty)
        return Output(None, self.head.nll(h, targets), penalty)

    def encode(
        self,
        embedded: Tensor,
        padding: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Encoded:
        """embedded: tokens [B, T, dim]; padding, global_attention_mask and segments: as in `forward`."""
        check_padding("padding", padding, embedded)
        h, view, m = embedded, View(padding=padding, global_attention_mask=global_attention_mask), 0
        if self.summaries is not None:
            m = self.summaries.count(h.shape[1])
            h, view = self.summaries(h, padding, segments)
        elif segments is not None:
            raise ValueError("segments is given, and no layer has global tokens for them; expected attention kind etc")
        if global_attention_mask is not None and not any(getattr(m, "most", 0) for m in self.mechanisms()):
            raise ValueError(
                "global_attention_mask is given, and no layer has global tokens; expected attention kind "
                "longformer(globals=N)"
            )
        nothing, at = self.empty_memories(h), self.positions_from(0, h[:, m:], self.draw_offsets(len(h), h.device))

        def add_positions(position: Position, h: Tensor) -> Tensor:
            return torch.cat([h[:, :m], position.embed(h[:, m:], at)], 1) if m else position.embed(h, at)

        h, penalty = self.run_blocks(h, nothing, view, add_positions)
        h = self.norm(h)
        return Encoded(h[:, m:], h[:, :m], penalty)

    def _contrast(
        self, summaries: Tensor, picked: Tensor | None, alone: Tensor | None, alone_padding: Tensor | None
    ) -> Tensor:  # fmt: skip
        if self.summaries is None or picked is None or alone is None or alone_padding is None:
            raise ValueError(
                "some of picked, alone and alone_padding are missing, or no layer has global tokens for them; expected "
                "all three (spanformer.data.mask_segments), and attention kind etc"
            )
        if picked.dtype != torch.int64 or picked.shape != alone.shape[:2] or alone.shape != alone_padding.shape:
            raise ValueError(
                f"picked has shape {list(picked.shape)} and dtype {picked.dtype}, alone {list(alone.shape)} and "
                f"alone_padding {list(alone_padding.shape)}; expected [B, P] of torch.int64, [B, P, S] and [B, P, S]"
            )
        if picked.device.type == "cpu" and picked.numel() and not torch.compiler.is_compiling():
            lowest, highest = (int(n) for n in picked.aminmax())
            if lowest < 0 or highest >= summaries.shape[1]:
                raise ValueError(f"picked holds {lowest} … {highest}; expected segments 0 … {summaries.shape[1] - 1}")
        rows, hidden = alone.flatten(0, 1), alone_padding.flatten(0, 1)
        codes = self.encode(self.embedding(rows), hidden, segments=torch.zeros_like(rows)).summaries[:, 0]
        guessed = summaries.gather(1, picked[..., None].expand(-1, -1, summaries.shape[2]))
        return nce(guessed.flatten(0, 1), codes)


def check_ids(name: str, x: Tensor) -> None:
    if x.ndim != 2 or x.is_floating_point() or not x.numel():
        raise ValueError(
            f"{name} has shape {list(x.shape)} and dtype {x.dtype}; expected token ids [B, T], B and T at least 1"
        )


def check_padding(name: str, padding: Tensor | None, tokens: Tensor) -> None:
    """padding for tokens [B, T, …]"""
    if padding is not None and (padding.shape != tokens.shape[:2] or padding.dtype != torch.bool):
        raise ValueError(
            f"{name} has shape {list(padding.shape)} and dtype {padding.dtype}; expected {list(tokens.shape[:2])} of "
            "torch.bool, True for padding"
        )
