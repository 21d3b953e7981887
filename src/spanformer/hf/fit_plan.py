"""The settings of one fit. The command line takes its help from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spanformer.core.memory import parse_bytes
from spanformer.model.budget import Budget


@dataclass(frozen=True)
class FitPlan:
    budget: float = 0.25
    """share of the full KV cache to keep, sink tokens included"""
    bytes: str = ""
    """use instead of a budget: largest size of the KV cache at the context, such as 2GiB or 500MB"""
    kv_bits: Literal[16, 8, 4] = 16
    """of a number in that KV cache; 8 and 4 have a scale of 4 bytes for each key and value. Always 8 with --retrieve"""
    tolerance: float = 0.0
    """use instead of a budget: largest rise of the loss (0.01 is 1 %), on validation texts taken from the
    data; the budget is the smallest memory at which the survey's windows reach it, and learning improves on it"""
    context: int = 2048
    """longest text to serve; KV memory is computed for this length"""
    text: int = 0
    """tokens per text to learn from; 0: the context, at most 2,048. Where the context is longer, windows grow with the
    text, so that all lengths have the same share of memory"""
    start: int = 0
    """first position whose loss counts; 0: half of a text"""
    sink_tokens: int = 4
    """number of first tokens that stay visible to every head"""
    survey: int = 8
    """texts used to choose the initial windows"""
    steps: int = 48
    """maximum number of training steps, one text each"""
    minutes: float = 0.0
    """stop training after this many minutes; 0: no limit"""
    lr: float = 0.08
    """learning rate of the logarithm of a window"""
    sink_lr: float = 0.2
    """learning rate of the sink logits, with --per layer"""
    per: Literal["head", "layer"] = "head"
    """head: one window for each KV head. layer: the form that other engines hold; each layer sees everything or has the
    one window of all others, and each query head has a learned sink logit in place of sink tokens. What that costs
    against windows by head is measured, too"""
    far: Literal["none", "linear"] = "none"
    """linear: heads also keep a linear state of what lies beyond their span, where it pays; its bytes are part of the
    budget"""
    far_features: int = 16
    """features of a linear state"""
    lora: int = 0
    """rank of LoRA updates, trained after the spans; 0: no LoRA, the weights stay unchanged"""
    lora_steps: int = 60
    lora_lr: float = 1e-3
    retrieve: float = 0.0
    """largest share of the KV heads that may retrieve: keep a short ring and 8-bit codes of all older keys, from which
    each query reads the best. The survey chooses heads, ring and the windows of all others at least cost; the
    budget is then what all of them hold in RAM, as a share of an 8-bit KV cache; 0: none"""
    retrieve_k: int = 64
    """keys that a query of such a head reads beside its ring"""
    retrieve_codes: Literal["ram", "file"] = "ram"
    """where the 8-bit codes lie: in RAM, as part of the budget, or in files beside the keys and values"""
    measure: int = 4
    """held-out texts on which to measure bits per byte"""
    baselines: bool = True
    """also measure uniform windows, and windows chosen by attention mass, at the same memory"""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context < 8:
            raise ValueError(f"context is {self.context}; expected at least 8 tokens")
        for name, least in (
            ("survey", 1),
            ("steps", 0),
            ("measure", 1),
            ("lora", 0),
            ("lora_steps", 1),
            ("start", 0),
            ("retrieve_k", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if not (self.text == 0 or 8 <= self.text <= self.context):
            raise ValueError(
                f"text is {self.text}; expected 8 tokens or more, at most the context of {self.context:,}, or 0"
            )
        if self.start >= self.length:
            raise ValueError(f"start is {self.start}; expected a position inside a text of {self.length:,} tokens")
        if self.kv_bits not in (16, 8, 4):
            raise ValueError(f"kv_bits is {self.kv_bits}; expected 16, 8 or 4")
        if self.bytes:
            parse_bytes(self.bytes)
            if self.tolerance:
                raise ValueError(
                    f"bytes is {self.bytes} beside a tolerance of {self.tolerance:g}; leave one of them out"
                )
        self._check_growth()
        for name in ("lr", "sink_lr", "lora_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name):g}; expected a positive number")
        if not self.minutes >= 0:
            raise ValueError(f"minutes is {self.minutes:g}; expected 0 (no limit) or more")
        if self.far not in ("none", "linear"):
            raise ValueError(f"far is {self.far!r}; expected 'none' or 'linear'")
        if self.far_features < 1:
            raise ValueError(f"far_features is {self.far_features}; expected at least 1")
        for name in ("lora", "tolerance", "retrieve"):
            if self.far == "linear" and getattr(self, name):
                raise ValueError(
                    f"{name} is {getattr(self, name):g} beside far 'linear'; linear states are fitted to a budget, "
                    f"without {name}: leave one of them out"
                )
        if not 0 <= self.retrieve <= 1:
            raise ValueError(f"retrieve is {self.retrieve:g}; expected a share of the KV heads, such as 0.15")
        if self.retrieve_codes not in ("ram", "file"):
            raise ValueError(f"retrieve_codes is {self.retrieve_codes!r}; expected 'ram' or 'file'")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance is {self.tolerance:g}; expected a share of the loss, such as 0.01")
        if self.per not in ("head", "layer"):
            raise ValueError(f"per is {self.per!r}; expected 'head' or 'layer'")
        if self.per == "layer":
            self._check_layers()
        if not self.bytes:
            Budget(self.budget, self.length, self.kept_first)

    def _check_growth(self) -> None:
        fixed = [name for name in ("lora", "tolerance", "retrieve") if getattr(self, name)]
        fixed += ["far"] if self.far == "linear" else []
        if self.grows and fixed:
            raise ValueError(
                f"{fixed[0]} is {getattr(self, fixed[0])}, and the context of {self.context:,} is longer than the "
                f"texts of {self.length:,}, so that windows grow; leave out {fixed[0]}, or give --text {self.context}"
            )

    def _check_layers(self) -> None:
        given = [name for name in ("lora", "tolerance", "retrieve") if getattr(self, name)]
        given += ["far"] if self.far != "none" else []
        if given:
            raise ValueError(
                f"{given[0]} is {getattr(self, given[0])} beside per 'layer'; other engines hold only windows and sink "
                f"logits: leave {given[0]} out"
            )
        if self.grows:
            raise ValueError(
                f"context is {self.context:,} beside per 'layer' and texts of {self.length:,} tokens; other engines "
                f"hold no windows that grow with the text: give --text {self.context}, or leave --context out"
            )
        if not self.bytes and self.budget >= 1:
            raise ValueError(
                f"budget is {self.budget:g} beside per 'layer'; expected less than 1, so that layers have windows"
            )

    @property
    def length(self) -> int:
        """tokens of a text to learn from"""
        return self.text or min(self.context, 2048)

    @property
    def cache_bits(self) -> int:
        """of a number in the KV cache that the budget is a share of"""
        return 8 if self.retrieve else self.kv_bits

    @property
    def kept_first(self) -> int:
        """sink tokens that the fitted model keeps; windows by layer have sink logits instead"""
        return self.sink_tokens if self.per == "head" else 0

    @property
    def grows(self) -> bool:
        """whether windows grow with the text"""
        return self.context > self.length

    @property
    def first(self) -> int:
        return self.start or self.length // 2

    @property
    def features(self) -> int:
        """of linear states; 0: none"""
        return self.far_features if self.far == "linear" else 0
