"""Configurations, tokenizers and models in Hugging Face's format: the only place that loads them with transformers.

A folder from elsewhere is untrusted. Code in it (`auto_map`) is never run: `trust_remote_code=False`;
otherwise transformers asks on standard input. A configuration that describes far more than its files hold is refused
before memory is allocated. Anything that transformers cannot read ends in an error of one sentence.
"""

from __future__ import annotations

import logging
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from spanformer.core.memory import machine_bytes
from spanformer.model.meta import TooLarge, build_on_meta

PER_BYTE = 16  # most parameters per byte of a file: 8 of one bit, and tied ones count twice
SPARE = 1 << 20  # parameters that no file holds, as a new output layer
SPARE_TENSORS = 1000
LEAST_ENTRY = 8  # bytes that a tensor or a value takes at least in the header of a GGUF file
TOKENIZERS = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken")
WEIGHTS = ("*.safetensors", "*.bin")


def load_config(where: str | Path) -> PreTrainedConfig:
    return _load(AutoConfig, where, "configuration", {})


def load_tokenizer(where: str | Path, *, gguf: str = "") -> Any:
    """gguf: the name of a file in the folder that holds it."""
    try:
        return _load(AutoTokenizer, where, "tokenizer", {"gguf_file": gguf} if gguf else {})
    except ValueError:
        if gguf or not Path(where).is_dir() or any(file for name in TOKENIZERS for file in Path(where).glob(name)):
            raise
        raise ValueError(
            f"{where} has no tokenizer; expected tokenizer.json or the like beside its weights: copy the model's own "
            "into the folder"
        ) from None


def load_causal_lm(
    where: str | Path, *, dtype: torch.dtype | str = "auto", gguf: str = "", config: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """gguf: the name of a file in the folder that holds the model. config: instead of the folder's own."""
    options: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    logging.getLogger("transformers.quantizers.quantizer_gguf").addFilter(_of_unpacked)
    chosen: PreTrainedConfig = _load(AutoConfig, where, "configuration", options) if config is None else config
    _check_size(chosen, where, gguf)
    options |= {"config": chosen, "dtype": dtype, "output_loading_info": True}
    model, found = _load(AutoModelForCausalLM, where, "causal language model", options)
    if missing := sorted(found["missing_keys"]):  # transformers would initialise them at random and continue
        raise ValueError(
            f"{where} could not be loaded as a causal language model: its weights lack {missing[0]} "
            f"({len(missing)} in all); they do not fit its configuration"
        )
    return model


def _of_unpacked(record: logging.LogRecord) -> bool:
    """transformers warns of the speed of packed weights also where it unpacks them, as here."""
    return "weights packed" not in record.getMessage()


def check_tokenizer(tokenizer: Any, model: PreTrainedModel, where: str | Path) -> None:
    """Refuse a tokenizer whose vocabulary is larger than the model's. (Tokens added to it may be unused.)"""
    tokens, rows = tokenizer.vocab_size, model.get_input_embeddings().num_embeddings  # pyright: ignore
    if tokens > rows:
        raise ValueError(
            f"the tokenizer in {where} has {tokens:,} tokens, and its model {rows:,}; they do not belong "
            "together: copy the model's own tokenizer into the folder"
        )


def make_causal_lm(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model with random weights. Its configuration is untrusted, too."""
    return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def _load(kind: Any, where: str | Path, what: str, options: dict[str, Any]) -> Any:
    if "gguf_file" in options:
        _check_gguf(Path(where) / options["gguf_file"])
    try:
        return kind.from_pretrained(where, trust_remote_code=False, **options)
    except ImportError:
        raise  # which says what to install
    except Exception as error:  # transformers, tokenizers, torch and gguf raise all kinds of errors for a damaged file
        raise ValueError(f"{where} could not be loaded as a {what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    said = str(error).strip()
    if "trust_remote_code" in said:
        return "it comes with its own code, which is never run; give a model that transformers supports"
    if isinstance(error, pickle.UnpicklingError):
        return "its weights are a pickle of more than tensors, which is never run; convert them to safetensors"
    first, rest = (part.strip() for part in said.partition("\n")[::2])
    return f"{first} {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else first or type(error).__name__


def _check_size(config: PreTrainedConfig, where: str | Path, gguf: str) -> None:
    """Refuse a configuration of more parameters than the files or the memory can hold."""
    folder, numbers, tensors = Path(where), machine_bytes(), None  # a parameter takes a byte at least
    held = "this machine's memory"
    try:
        if folder.is_dir():
            files = [folder / gguf] if gguf else [file for pattern in WEIGHTS for file in folder.glob(pattern)]
            stored, tensors = sum(file.stat().st_size for file in files), _count_tensors(files)
            numbers, held = min(numbers, PER_BYTE * stored + SPARE), f"the {stored:,} bytes of its weights"
        build_on_meta(lambda: make_causal_lm(config), numbers=numbers, tensors=tensors)
    except TooLarge:
        raise ValueError(
            f"{where} could not be loaded as a causal language model: its configuration describes more parameters than "
            f"{held} can hold; one of the two is damaged"
        ) from None
    except Exception as error:
        reason = _reason(error)
        raise ValueError(f"{where} could not be loaded as a causal language model: {reason}") from error


def _count_tensors(files: list[Path]) -> int | None:
    """The number of tensors in these files; None if unknown."""
    count = 0
    for file in files:
        if file.suffix == ".gguf":
            count += _check_gguf(file)
        elif file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                count += len(opened.keys())
        else:
            return None
    return 2 * count + SPARE_TENSORS


def _check_gguf(file: Path) -> int:
    """The number of tensors. A header that counts more than the file can hold is refused: a reader would loop
    too long."""
    try:
        with open(file, "rb") as stream:
            magic, _version, tensors, values = struct.unpack("<4sIQQ", stream.read(24))
        size = file.stat().st_size
    except (OSError, struct.error) as error:
        raise ValueError(f"{file} is not a GGUF file ({error}); give another one") from None
    if magic != b"GGUF":
        raise ValueError(f"{file} is not a GGUF file; give another one")
    if (tensors + values) * LEAST_ENTRY > size:
        raise ValueError(
            f"{file} counts {tensors:,} tensors and {values:,} values in {size:,} bytes; the file is damaged"
        )
    return tensors
