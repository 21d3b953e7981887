"""EleutherAI's evaluation harness with our models. It makes models by a registered name, and finds none by entry point:
importing this file registers `spanformer`."""

from __future__ import annotations

import contextlib
import io
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from spanformer.cli.retrieval import with_neighbours
from spanformer.cli.text_input import model_vocabulary
from spanformer.core.processor import computing_dtype
from spanformer.core.progress import OnProgress
from spanformer.data import Pixels, Vocab, Words
from spanformer.hf.lm_eval import HarnessLM
from spanformer.model.folder import META
from spanformer.model.lm import LM
from spanformer.model.load import CHECKPOINTS, load_any, load_meta

try:
    from lm_eval._cli import HarnessCLI  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import LM as AnyLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.config.evaluate_config import EvaluatorConfig  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import setup_logging  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        f'spanformer lm-eval needs lm-eval 0.4.12 or newer ({error}): pip install -U "spanformer[eval]"'
    ) from error

MODEL_ARGS = (
    "dtype", "max_length", "truncation", "logits_cache", "softmax_dtype", "mixed_precision_dtype", "add_bos_token",
    "prefix_token_id", "think_end_token", "enable_thinking", "chat_template_args",
)  # fmt: skip
"""of --model_args: those of `HFLM` that do not say how it would load a model itself"""
Bits = Literal[0, 4, 8]
_maker: ContextVar[Callable[..., AnyLM]] = ContextVar("what makes the model that the harness asks for by name")


@register_model("spanformer")
class Registered(AnyLM):  # pyright: ignore[reportGeneralTypeIssues]
    """The name in the harness's registry; the models are those that `make` returns."""

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> AnyLM:
        return _maker.get()(**arg_dict, **(additional_config or {}))


def evaluate(model: str, arguments: list[str], bits: Bits, report: OnProgress) -> str:
    """Run the harness's command line with these arguments, and return what it prints: its tables come last, and would
    end up in the progress bar."""
    setup_logging()
    parser = HarnessCLI()
    given = _parse(parser, arguments)
    given.model = "spanformer"
    given.model_args = {"pretrained": model} | ({"bits": bits} if bits else {}) | (given.model_args or {})
    printed = io.StringIO()
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(printed):
        token = _maker.set(partial(make, report=report, stack=stack))
        stack.callback(_maker.reset, token)
        report("loading tasks", 0, 0)
        parser.execute(given)
    return printed.getvalue()


def _parse(parser: HarnessCLI, arguments: list[str]) -> Namespace:
    """The harness's arguments, without those that say which model it would load."""
    complaint, before = io.StringIO(), sys.argv
    sys.argv = ["lm-eval", "run", *arguments]
    try:
        with contextlib.redirect_stderr(complaint):
            given = parser.parse_args()
    except SystemExit:
        said = complaint.getvalue().strip().rpartition("error: ")[2]
        raise ValueError(f"the harness does not take these options: {said} (see lm-eval run --help)") from None
    finally:
        sys.argv = before
    told = EvaluatorConfig.load_yaml_config(given.config) if given.config else {}
    if given.tasks is None and not told.get("tasks"):
        raise ValueError(f"{given.config} names no tasks; add them to it, or give --tasks")
    if given.model is not None:
        raise ValueError(f"--model is {given.model!r}; leave it out, the model is the argument before all options")
    if named := {"model", "model_args"} & set(told):
        raise ValueError(f"{given.config} sets {min(named)}; leave it out, and give --model_args instead")
    if getattr(given, "trust_remote_code", False) or told.get("trust_remote_code"):
        raise ValueError("trust_remote_code is given; code that comes with a model is never run, so leave it out")
    if odd := sorted(set(given.model_args or {}) - set(MODEL_ARGS)):
        raise ValueError(f"--model_args has {odd[0]!r}; expected some of {', '.join(MODEL_ARGS)}")
    if given.device is None and "device" not in told:
        given.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return given


def make(
    pretrained: str, bits: Bits = 0, device: str = "cpu", *, report: OnProgress, stack: contextlib.ExitStack,
    **options: Any,
) -> AnyLM:  # fmt: skip
    """The model of a name or a folder, for the harness. stack: ends with the evaluation."""
    report(f"loading {pretrained}", 0, 0)
    made = _make_own if is_own(pretrained) else _make_hf
    found = made(pretrained, bits, _device(device), report, stack, options)
    report("preparing requests", 0, 0)
    return found


def is_own(name: str) -> bool:
    """Whether it is the folder of a run or of a model of spanformer."""
    return (Path(name) / META).exists() or (Path(name) / CHECKPOINTS).is_dir()


def _make_own(
    name: str, bits: Bits, device: torch.device, report: OnProgress, stack: contextlib.ExitStack,
    options: dict[str, Any],
) -> HarnessLM:  # fmt: skip
    if odd := sorted(set(options) - {"batch_size", "max_batch_size"}):  # it reads one text at a time
        raise ValueError(f"--model_args has {odd[0]!r}, which is for Hugging Face models; {name} takes none")
    meta, lm = load_meta(name), load_any(name, device=device)
    if not isinstance(lm, LM):
        raise ValueError(f"{name} holds a model of kind {lm.config.kind!r}; expected a language model")
    vocab = model_vocabulary(meta, name)
    if isinstance(vocab, Pixels):
        raise ValueError(f"{name} is a model of images; expected one of text")
    stack.enter_context(with_neighbours(lm, meta, name))
    text = Unended(vocab)
    start = text.encode("\n")
    if not start:
        raise ValueError(f"the vocabulary of {name} has no end of a line, with which texts without context begin")
    return HarnessLM(lm, text, start=start[-1], bits=bits, on_progress=report)


class Unended:
    """A vocabulary that encodes a part of a text: `Words` would end its last line."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab

    def encode(self, text: str) -> list[int]:
        ids = self.vocab.encode(text).tolist()
        return ids[:-1] if isinstance(self.vocab, Words) and text and not text.endswith("\n") else ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocab.decode(ids)


def _make_hf(
    name: str, bits: Bits, device: torch.device, report: OnProgress, _stack: contextlib.ExitStack,
    options: dict[str, Any],
) -> AnyLM:  # fmt: skip
    from spanformer.hf.lm_eval_hf import SpanHFLM
    from spanformer.hf.retrieval_heads import retrieve
    from spanformer.hf.saved import fitted_retrieval, load_fitted

    dtype = options.pop("dtype", "auto")
    if dtype != "auto" and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise ValueError(f"dtype of --model_args is {dtype!r}; expected auto, float32, bfloat16 or float16")
    model, tokenizer, fitted = load_fitted(name, dtype if dtype == "auto" else getattr(torch, dtype))
    if dtype == "auto":
        model.to(computing_dtype(model.dtype, device))  # pyright: ignore[reportArgumentType]
    model.to(device)  # pyright: ignore[reportArgumentType]
    if fitted and (settings := fitted_retrieval(name)):
        retrieve(model, **settings)
    return SpanHFLM(model, tokenizer, bits=bits, on_progress=report, **options)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device is {name!r}; expected a device of PyTorch, such as cpu or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {name!r}, and PyTorch finds no GPU here; give --device cpu")
    return device
