"""The adaptive-span paper's recipe: its code, imported from a clone, and the same model in spanformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from spanformer.bench.peers import import_from
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig

CLIP = 0.03


def check_clone(original: Path | None) -> None:
    if original is not None and not (original / "models.py").is_file():
        raise ValueError(f"original is {original}; expected a clone of adaptive-span, with models.py in it")


def our_model(*, vocab: int, dim: int, layers: int, heads: int, span: int) -> ModelConfig:
    return ModelConfig(
        vocab=vocab, dim=dim, layers=layers, heads=heads, norm="layer", order="post", paper_compat=True,
        attention=AttentionConfig(max_span=span), position=PositionConfig(kind="table"),
        feedforward=FeedForwardConfig(kind="relu", dim=4 * dim, bias=True), embedding=EmbeddingConfig(bias=True),
    )  # fmt: skip


class PaperCode:
    """The paper's model, optimiser and training step."""

    def __init__(self, clone: Path, *, vocab: int, dim: int, layers: int, heads: int, span: int, lr: float) -> None:
        made: Any = import_from(clone, "models").TransformerSeq(
            vocab_size=vocab, hidden_size=dim, nb_heads=heads, nb_layers=layers, attn_span=span, emb_dropout=0.0,
            adapt_io_params={"adapt_io_enabled": False}, inner_hidden_size=4 * dim, dropout=0.0,
            adapt_span_params={"adapt_span_enabled": True, "adapt_span_loss": 2e-6, "adapt_span_ramp": 32,
                               "adapt_span_init": 0.0, "adapt_span_cache": True},
            pers_mem_params={"pers_mem_size": 0},
        )  # fmt: skip
        self.model, self.vocab, self.dim = made, vocab, dim
        self.spans = [layer.attn.attn.adaptive_span for layer in made.layers]
        adagrad = import_from(clone, "adagrad_with_grad_clip").AdagradWithGradClip
        self.optimizer: Optimizer = adagrad(made.parameters(), lr=lr, grad_clip=CLIP)

    def start(self, rows: int) -> list[Tensor]:
        """An empty memory for each layer."""
        weight = next(self.model.parameters())
        return [weight.new_zeros(rows, s.get_cache_size(), self.dim) for s in self.spans]

    def loss(self, x: Tensor, y: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Mean nats, and the memory after x."""
        out, memory, _ = self.model(x, memory, target=y)
        return nn.functional.nll_loss(out.view(-1, self.vocab), y.reshape(-1)), memory

    def step(self, x: Tensor, y: Tensor, memory: list[Tensor], before_update=lambda: None) -> list[Tensor]:
        """Forward, backward, clipping and Adagrad."""
        self.optimizer.zero_grad()
        loss, memory = self.loss(x, y, memory)
        (loss + sum(s.get_loss() for s in self.spans)).backward()
        before_update()
        self.optimizer.step()
        for s in self.spans:
            s.clamp_param()
        return memory
