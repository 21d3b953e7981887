"""Hugging Face models with learned spans, and ours as one of theirs. Importing this room imports transformers."""

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError('spanformer.hf works on transformers, which is missing: pip install "spanformer[hf]"') from error

if int(_transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"transformers is {_transformers.__version__}, and spanformer.hf needs 5.0 or newer: "
        'pip install -U "spanformer[hf]"'
    )

from spanformer.hf.attach import attach as attach
from spanformer.hf.attach import detach as detach
from spanformer.hf.cache import SpanCache as SpanCache
from spanformer.hf.export import compare_losses as compare_losses
from spanformer.hf.export import to_windows as to_windows
from spanformer.hf.modeling import SpanformerConfig as SpanformerConfig
from spanformer.hf.modeling import SpanformerForCausalLM as SpanformerForCausalLM
from spanformer.hf.saving import from_pretrained as from_pretrained
from spanformer.hf.spans import HeadSpans as HeadSpans
from spanformer.hf.spans import cache_bytes as cache_bytes
from spanformer.hf.spans import clamp_spans as clamp_spans
from spanformer.hf.spans import head_spans as head_spans
from spanformer.hf.spans import span_penalty as span_penalty
from spanformer.hf.trainer import SpanCallback as SpanCallback
