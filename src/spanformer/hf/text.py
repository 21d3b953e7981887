"""Text for fitting and measuring a pretrained model: windows of tokens, and bits per byte on the end of each.

A window's first part is context only. Loss is counted on the targets at positions `start` … T − 1, where a head that
looks far back has enough context. Loss is per byte of the text of those tokens, so that tokenizers can be compared.

Shapes: N windows, T tokens of one, E width of the hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from spanformer.core.progress import OnCount
from spanformer.hf.pretrained import check_tokenizer, load_causal_lm, load_tokenizer


@dataclass(frozen=True, eq=False)
class TextChunks:
    """ids [N, T]; bytes [N]: the bytes of each chunk's targets, at positions `start` … T − 1."""

    ids: Tensor
    bytes: Tensor
    start: int

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, which: slice) -> TextChunks:
        return TextChunks(self.ids[which], self.bytes[which], self.start)

    @property
    def context(self) -> int:
        """T"""
        return self.ids.shape[1]

    @property
    def targets(self) -> int:
        """how many targets of a window count"""
        return self.context - self.start


def load_model(name: str, dtype: torch.dtype | str = torch.float32) -> tuple[PreTrainedModel, Any]:
    """(model, tokenizer) of a folder in Hugging Face's format, a .gguf file or a folder with one, or a name on the
    hub."""
    path = Path(name)
    where, gguf = name, ""
    if path.suffix == ".gguf" or (path.is_dir() and not (path / "config.json").exists()):
        packed = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
        if len(packed) != 1 or not packed[0].is_file():
            found = f"{len(packed)} .gguf files and no config.json" if path.is_dir() else "no such file"
            raise ValueError(
                f"{name} holds no model ({found}); give a folder in Hugging Face's format, or one .gguf file"
            )
        where, gguf = str(packed[0].parent), packed[0].name
    elif not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"there is no folder {name}; give a model's folder, a .gguf file, or a name on the hub")
    tokenizer = load_tokenizer(where, gguf=gguf)
    model = load_causal_lm(where, dtype=dtype, gguf=gguf)
    if gguf:
        _forget_packing(model, name)
    check_tokenizer(tokenizer, model, name)
    model.eval()
    return model.requires_grad_(False), tokenizer


def _forget_packing(model: PreTrainedModel, name: str) -> None:
    """The weights of a GGUF file are unpacked by now, but transformers still marks the model as quantised and would not
    save it."""
    quantizer = getattr(model, "hf_quantizer", None)
    if getattr(quantizer, "packed_modules", None):
        raise ValueError(f"{name} was loaded with its weights packed, which give no gradients; unpack it first")
    model.hf_quantizer = None  # pyright: ignore[reportArgumentType]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before every text (a beginning-of-text token), if any: a model that was
    trained with them predicts worse without."""
    whole, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    return whole[: next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)]


def make_chunks(text: str, tokenizer: Any, *, context: int, start: int, limit: int = 0) -> TextChunks:
    """Chunks of `context` tokens one after another, each with these first tokens; limit: at most this many, spread
    over the text (0: all)."""
    first = beginning(tokenizer)
    if not max(1, len(first)) <= start < context:
        least = max(1, len(first))
        raise ValueError(f"start is {start}; expected a position from {least} to {context - 1}, inside the context")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    size = context - len(first)
    count = len(ids) // size
    if count == 0:
        raise ValueError(
            f"the text has {len(ids):,} tokens, and one window takes {size:,}; give more text or a shorter context"
        )
    windows = ids[: count * size].view(count, size)
    if limit and limit < count:
        windows = windows[torch.linspace(0, count - 1, limit).round().long()]
    windows = torch.cat([torch.tensor(first, dtype=torch.long).expand(len(windows), -1), windows], 1)
    return spelt_chunks(windows, tokenizer, start)


def spelt_chunks(windows: Tensor, tokenizer: Any, start: int) -> TextChunks:
    """Windows of tokens [N, T] with the bytes of their targets."""
    spelt = [tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in windows[:, start:].tolist()]
    return TextChunks(windows, torch.tensor([len(each.encode()) for each in spelt]), start)


def hidden_states(model: PreTrainedModel, ids: Tensor, start: int) -> Tensor:
    """[N, T − start, E]: the last hidden states that predict the targets from `start` on."""
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states[:, start - 1 : -1]


def logits_of(model: PreTrainedModel, states: Tensor) -> Tensor:
    """[…, E] → […, vocabulary] in float32."""
    head = model.get_output_embeddings()
    assert head is not None
    logits = head(states).float()
    if (divisor := getattr(model.config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (factor := getattr(model.config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * factor
    if (cap := getattr(model.config, "final_logit_softcapping", None)) is not None:  # Gemma
        logits = (logits / cap).tanh() * cap
    return logits


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Refuse a model whose logits `logits_of` cannot compute from hidden states."""
    ids = torch.arange(1, 5)[None] % model.config.vocab_size
    own = model(input_ids=ids, use_cache=False).logits.float()
    ours = logits_of(model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if float((ours - own).abs().max()) > 0.05 * float(own.abs().max()):
        raise ValueError(
            f"{type(model).__name__} changes its logits after the output layer in a way that is not supported here, so "
            "its loss cannot be measured in parts; spans can be attached and learned with spanformer.hf.attach"
        )


def chunks(length: int, size: int = 256) -> Iterator[slice]:
    """Slices over this many targets: all logits of a text at once would be T × vocabulary numbers."""
    for begin in range(0, length, size):
        yield slice(begin, min(begin + size, length))


@torch.no_grad()
def chunk_bits(model: PreTrainedModel, texts: TextChunks, on_progress: OnCount | None = None) -> list[float]:
    """[N] the bits of the counted targets of each chunk. Divide their sum by the sum of bytes."""
    found = []
    for number, row in enumerate(texts.ids):
        states = hidden_states(model, row[None], texts.start)[0]
        targets = row[texts.start :]
        nats = sum(
            float(functional.cross_entropy(logits_of(model, states[part]), targets[part], reduction="sum"))
            for part in chunks(len(targets))
        )
        found.append(nats / math.log(2))
        if on_progress:
            on_progress(number + 1, len(texts))
    return found


def bits_per_byte(model: PreTrainedModel, texts: TextChunks, on_progress: OnCount | None = None) -> float:
    return sum(chunk_bits(model, texts, on_progress)) / float(texts.bytes.sum())
