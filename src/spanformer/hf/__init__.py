"""Learned spans for Hugging Face models, and spanformer models in their format. Importing this imports transformers."""

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError('spanformer.hf works on transformers, which is missing: pip install "spanformer[hf]"') from error

if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"transformers is {_transformers.__version__}, and spanformer.hf needs 5.0 or newer: "
        'pip install -U "spanformer[hf]"'
    )

from spanformer.hf.attach import attach, detach
from spanformer.hf.attention import register as _register
from spanformer.hf.cache import SpanCache
from spanformer.hf.export import compare_losses, to_windows
from spanformer.hf.granite import to_granite
from spanformer.hf.modeling import SpanformerConfig, SpanformerForCausalLM
from spanformer.hf.presets import presets
from spanformer.hf.retrieval_cache import RetrievalCache
from spanformer.hf.retrieval_heads import retrieve, stop_retrieving
from spanformer.hf.saved import fitted_retrieval
from spanformer.hf.saving import from_pretrained
from spanformer.hf.span_file import load_spans, save_spans
from spanformer.hf.spans import HeadSpans, cache_bytes, clamp_spans, head_spans, span_penalty
from spanformer.hf.trainer import SpanCallback

_register()  # so that a folder with spans that transformers loads without them says so, and not that it is unknown

__all__ = [
    "HeadSpans",
    "RetrievalCache",
    "SpanCache",
    "SpanCallback",
    "SpanformerConfig",
    "SpanformerForCausalLM",
    "attach",
    "cache_bytes",
    "clamp_spans",
    "compare_losses",
    "detach",
    "fitted_retrieval",
    "from_pretrained",
    "head_spans",
    "load_spans",
    "presets",
    "retrieve",
    "save_spans",
    "span_penalty",
    "stop_retrieving",
    "to_granite",
    "to_windows",
]
