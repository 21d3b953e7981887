"""What a run is, as plain data: the sections of a run file. No torch here, so that the command line's help is quick."""

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
    """lanes: streams of text read side by side, or pairs of a seq2seq model, over all processes together"""
    block: int = 256
    """tokens of a segment; what came before is remembered, not learned through. Of pairs: the most tokens of a text"""
    masked: float = 0.15
    """of an encoder: share of the tokens that it has to guess"""
    sentences: float = 0.0
    """of an encoder of kind etc: share of the segments that are masked as a whole, for their global tokens to be told
    apart by what they hold (contrastive predictive coding); 0: none"""
    micro: int = 1
    """in how many pieces a batch goes through the model, to save memory"""
    steps: int = 1000
    """optimiser steps"""
    minutes: float = 0.0
    """stop after so many minutes of training steps; 0: no limit"""
    eval_every: int = 200
    """steps between evaluations on the validation split; 0: at the end only"""
    eval_tokens: int = 100_000
    """how much of the validation split is read then; 0: all"""
    patience: int = 0
    """stop after so many evaluations without improvement; 0: never"""
    save_every: int = 200
    """steps between checkpoints; 0: at the end only"""
    keep: int = 2
    """how many of the last checkpoints stay, beside the best"""
    log_every: int = 10
    """steps between rows of events.jsonl"""
    spike: float = 3.0
    """skip a step whose loss is so many times the recent average, as one that is not finite; 0: take them"""
    max_skips: int = 20
    """stop after so many skipped steps"""
    seed: int = 1
    """of the first weights and of all that is drawn afterwards"""
    device: str = "auto"
    """cpu, cuda, …; auto: a GPU if there is one"""
    threads: int = 0
    """of the CPU; 0: as many as PyTorch takes"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: products in bfloat16 (autocast), weights in float32"""
    compile: bool = False
    """torch.compile what has fixed shapes in a block, norm and feed-forward; worth it on a GPU"""
    checkpointing: bool = False
    """recompute activations in the backward pass, to save memory"""
    engine: Literal["auto", "ddp", "fsdp"] = "auto"
    """with torchrun: ddp (auto) keeps the model whole in each process, fsdp shards it"""
    sharded: bool = False
    """each process writes its own shard of a checkpoint, instead of the first gathering all of it; any number of
    processes can go on from either"""
    keep_memory: bool = True
    """on a CPU, have the C library keep freed memory for the next step instead of giving it back to the system; not
    with checkpointing, which asks for little memory"""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """write TensorBoard files beside events.jsonl; auto: if the package is installed, which the extra
    spanformer[tensorboard] brings"""
    measure: bool = True
    """at the end, measure what a step costs with the model's attention and with full attention in its place"""

    def __post_init__(self) -> None:
        for name in ("batch", "block", "micro", "steps", "keep", "log_every", "max_skips"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} is {getattr(self, name)}; expected at least 1")
        for name in ("minutes", "eval_every", "eval_tokens", "patience", "save_every", "spike", "threads"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"train.{name} is {getattr(self, name)}; expected a finite number, 0 or more")
        if self.threads > MOST_THREADS:
            raise ValueError(f"train.threads is {self.threads}; expected at most {MOST_THREADS:,}")
        if not 0 < self.masked <= 1:
            raise ValueError(f"train.masked is {self.masked}; expected a share of the tokens, above 0 and at most 1")
        if not 0 <= self.sentences < 1:
            raise ValueError(f"train.sentences is {self.sentences}; expected a share of the segments, 0 … 1 without 1")
        if not 0 <= self.seed < 1 << 31:  # every step draws a seed of its own from it
            raise ValueError(f"train.seed is {self.seed}; expected 0 … {(1 << 31) - 1}")
        if self.batch % self.micro:
            raise ValueError(f"train.micro is {self.micro}; expected a divisor of train.batch, {self.batch}")


@dataclass(frozen=True)
class RunConfig:
    out: str = ""
    """folder of the run: events, checkpoints, report; empty: out/ and the name of the run file"""
    resume: bool = False
    """continue the run in that folder, if there is one"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if self.train.sentences and self.model.kind != "encoder":
            raise ValueError(
                f"train.sentences is {self.train.sentences}, and model.kind is {self.model.kind!r}; segments are "
                "masked for encoders of kind etc alone, expected 0"
            )
