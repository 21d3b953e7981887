"""The sections of a run file as plain data. No torch import here, so that command-line help is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from spanformer.data.config import DataConfig
from spanformer.model.config import ModelConfig
from spanformer.train.optim import OptimConfig

MOST_THREADS = 1024


@dataclass(frozen=True)
class TrainConfig:
    batch: int = 16
    """batch rows over all processes: lanes of text, or pairs for a seq2seq model"""
    block: int = 256
    """tokens per segment; earlier ones stay in the segment memory without gradient. For pairs: most tokens of a text"""
    masked: float = 0.15
    """encoder: share of the tokens to predict"""
    cpc_mask_ratio: float = 0.0
    """encoder of kind etc: share of the segments to mask as a whole; contrastive predictive coding then trains their
    global tokens to identify the segment; 0: none"""
    flop_price: float = 0.0
    """nats that a million operations of decoding a token cost: sets the penalty of learned spans, the ponder cost of
    adaptive computation time and the price of exits, instead of model.attention.penalty, model.depth.cost and
    model.depth.price; 0: those"""
    grad_accum_steps: int = 1
    """split each batch into this many pieces, to save memory"""
    steps: int = 1000
    """optimiser steps"""
    minutes: float = 0.0
    """stop after this many minutes of training steps; 0: no limit"""
    eval_every: int = 200
    """steps between evaluations on the validation split; 0: at the end only"""
    eval_tokens: int = 100_000
    """tokens of the validation split that each evaluation reads; 0: all"""
    patience: int = 0
    """stop after this many evaluations without improvement; 0: never"""
    save_every: int = 200
    """steps between checkpoints; 0: at the end only"""
    keep: int = 2
    """number of latest checkpoints to keep, besides the best"""
    log_every: int = 10
    """steps between rows of events.jsonl"""
    spike: float = 3.0
    """skip a step whose loss is this many times the recent average, like one that is not finite; 0: do not skip it"""
    max_skips: int = 20
    """stop after this many skipped steps"""
    start: str = ""
    """weights to begin with, spans included: a run's folder, a checkpoint or a model's folder, of a model of the same
    sizes on the same kind of tokens; empty: random ones"""
    seed: int = 1
    """random seed of the initial weights, data order and dropout"""
    device: str = "auto"
    """cpu, cuda, …; auto: a GPU if available"""
    threads: int = 0
    """CPU threads; 0: PyTorch's default"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: products in bfloat16 (autocast), weights in float32"""
    compile: bool = False
    """torch.compile the parts of a block with fixed shapes, norm and feed-forward; worth it on a GPU"""
    checkpointing: bool = False
    """recompute activations in the backward pass, to save memory"""
    engine: Literal["auto", "ddp", "fsdp"] = "auto"
    """with torchrun: ddp (auto) keeps the model whole in each process, fsdp shards it"""
    sharded: bool = False
    """each process writes its own shard of a checkpoint, instead of the first process gathering all of it; any number
    of processes can resume from either"""
    keep_memory: bool = True
    """on a CPU, have the C library keep freed memory for the next step instead of returning it to the system; ignored
    with checkpointing, which needs little memory"""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """write TensorBoard files beside events.jsonl; auto: if the package is installed (extra
    spanformer[tensorboard])"""
    measure: bool = True
    """at the end, measure the cost of a step with the model's attention and with full attention in its place"""

    def __post_init__(self) -> None:
        for name in ("batch", "block", "grad_accum_steps", "steps", "keep", "log_every", "max_skips"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} is {getattr(self, name)}; expected at least 1")
        for name in ("minutes", "eval_every", "eval_tokens", "patience", "save_every", "spike", "threads",
                     "flop_price"):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} is {getattr(self, name)}; expected a finite number, 0 or more")
        if self.threads > MOST_THREADS:
            raise ValueError(f"train.threads is {self.threads}; expected at most {MOST_THREADS:,}")
        if not 0 < self.masked <= 1:
            raise ValueError(f"train.masked is {self.masked}; expected a share of the tokens, above 0 and at most 1")
        if not 0 <= self.cpc_mask_ratio < 1:
            raise ValueError(
                f"train.cpc_mask_ratio is {self.cpc_mask_ratio}; expected a share of the segments, 0 … 1 without 1"
            )
        if not 0 <= self.seed < 1 << 31:  # every step derives its own seed from it
            raise ValueError(f"train.seed is {self.seed}; expected 0 … {(1 << 31) - 1}")
        if self.batch % self.grad_accum_steps:
            raise ValueError(
                f"train.grad_accum_steps is {self.grad_accum_steps}; expected a divisor of train.batch, {self.batch}"
            )


@dataclass(frozen=True)
class RetrieveConfig:
    """How the neighbours of a model with model.neighbours (SPALM) are found."""

    model: str = ""
    """a trained language model whose keys find them, which stays as it is: a run's folder or a checkpoint, on the same
    tokens"""
    store: str = ""
    """folder of its datastore of the training text, which is built if needed; empty: `datastore` in the run folder"""
    keys: Literal["int8", "float16", "float32"] = "int8"
    """how to store a key"""
    window: int = 32
    """entries on either side of a training token's own that it must not find"""
    copy: int = 8
    """a neighbour in the training text whose last tokens, this many, are those of the token itself is a copy, which it
    must not find either; 0: it may"""

    def __post_init__(self) -> None:
        for name in ("window", "copy"):
            if getattr(self, name) < 0:
                raise ValueError(f"retrieve.{name} is {getattr(self, name)}; expected 0 or more")


@dataclass(frozen=True)
class RunConfig:
    out: str = ""
    """run folder for events, checkpoints and report; empty: out/ and the name of the run file"""
    resume: bool = False
    """continue the run in that folder, if it holds one"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    retrieve: RetrieveConfig = field(default_factory=RetrieveConfig)

    @property
    def objective(self) -> str:
        """What the model learns: model.kind, or "task" or "image" for a language model on one of these."""
        from spanformer.data.tasks import parse_task

        if self.data.tokens == "pixel":
            return "image"
        return self.model.kind if parse_task(self.data.source) is None else "task"

    def __post_init__(self) -> None:
        if self.data.tokens == "pixel" and self.model.kind != "lm":
            raise ValueError(
                f"data.tokens is 'pixel' and model.kind is {self.model.kind!r}; expected 'lm', which predicts an image "
                "pixel by pixel"
            )
        if self.train.checkpointing and self.model.stack == "reversible":
            raise ValueError(
                "train.checkpointing is set, and model.stack is 'reversible', which keeps no activations of layers "
                "anyway; expected one of the two"
            )
        if bool(self.model.neighbours) != bool(self.retrieve.model):
            raise ValueError(
                f"model.neighbours is {self.model.neighbours} and retrieve.model is {self.retrieve.model!r}; expected "
                "both or none: how many neighbours to mix in, and the trained model whose keys find them"
            )
        if self.model.neighbours and self.objective != "lm":
            raise ValueError(
                f"model.neighbours is {self.model.neighbours} and data.source is {self.data.source!r}; "
                "expected a stream of text, or 0"
            )
        if self.train.cpc_mask_ratio and self.model.kind != "encoder":
            raise ValueError(
                f"train.cpc_mask_ratio is {self.train.cpc_mask_ratio} and model.kind is {self.model.kind!r}; expected "
                "0, since only encoders of kind etc mask segments"
            )
