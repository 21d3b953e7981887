"""An encoder–decoder: the encoder sees the source in both directions, the decoder generates the answer token by token.

Attention Is All You Need (Vaswani et al., 2017), https://arxiv.org/abs/1706.03762

    states = encoder(source)        p(y_t | y_<t, source) = softmax(head(decoder(y_<t, states)))

A decoder layer has self-attention (any mechanism), attention to all of the encoder's states, and a feed-forward part.
Shapes: B batch, S tokens of the source, T tokens of the answer, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.memory import Cache
from spanformer.model.block import Block
from spanformer.model.config import ModelConfig
from spanformer.model.decoder import Decoder
from spanformer.model.decoding import make_cache
from spanformer.model.encoder import Encoder, check_ids, check_padding
from spanformer.model.stack import Output
from spanformer.ops.decode.codes import Bits


class Seq2Seq(Decoder):
    """One vocabulary and one embedding for both texts; the last two tokens are `begin` and `end`.

    `model(source, x)` returns the logits after every token of x, which begins with `begin`. `start` encodes a source,
    and `decode` then continues token by token.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, "seq2seq")
        self.encoder = Encoder(config.reading_half(), tokens=False)

    @property
    def begin(self) -> int:
        """The token before the first token of an answer."""
        return self.config.vocab - 2

    @property
    def end(self) -> int:
        """The last token of a source and of an answer."""
        return self.config.vocab - 1

    def layers(self) -> list[Block]:
        return [*self.encoder.layers(), *self.ordered_blocks()]

    def forward(
        self,
        source: Tensor,
        x: Tensor,
        *,
        targets: Tensor | None = None,
        source_padding: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Output:
        """source [B, S] and x [B, T] ids; targets [B, T] ids: if given, only their losses are computed.

        source_padding [B, S] and padding [B, T] bool: True for padding, which no token sees.
        """
        check_ids("x", x)
        if len(source) != len(x):
            raise ValueError(f"source has {len(source)} rows and x {len(x)}; expected one answer for each source")
        if targets is not None and targets.shape != x.shape:
            raise ValueError(f"targets has shape {list(targets.shape)}; expected {list(x.shape)}, as x has")
        check_padding("padding", padding, x)
        states, penalty = self.encode(source, source_padding)
        h, heard = self.embedding(x), (states, source_padding)
        nothing, at = self.empty_memories(h), self.positions_from(0, h, self.draw_offsets(len(h), h.device))
        h, added = self.run_blocks(
            h, nothing, View(padding=padding), lambda position, h: position.embed(h, at), [heard] * len(nothing)
        )
        penalty = penalty + added
        h = self.dropout(self.norm(h))
        if targets is None:
            return Output(self.head.logits(h), None, penalty)
        return Output(None, self.head.nll(h, targets), penalty)

    def encode(self, source: Tensor, source_padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """source [B, S] → the encoder's states [B, S, dim], and a term of the loss."""
        check_ids("source", source)
        check_padding("source_padding", source_padding, source)
        self.encoder.checkpointing = self.checkpointing
        found = self.encoder.encode(self.embedding(source), source_padding)
        return found.states, found.penalty

    def start(self, source: Tensor, source_padding: Tensor | None = None, *, slack: int = 0, bits: Bits = 0) -> Cache:
        """Encode source [B, S], without gradients and dropout, into a KV cache with each layer's keys and values, for
        texts that `decode` continues, starting with `begin`. slack, bits: see `LM.cache`."""
        training, blocks = self.training, self.ordered_blocks()
        self.eval()
        try:
            with torch.inference_mode():
                states, _ = self.encode(source, source_padding)
                heard = [block.cross.source(states, source_padding) for block in blocks if block.cross is not None]
        finally:
            self.train(training)
        return make_cache(self, len(source), slack, bits, heard)
