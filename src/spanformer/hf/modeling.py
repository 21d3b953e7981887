"""Our language model as a Hugging Face model: AutoModelForCausalLM loads it, generate() and Trainer use it.

    SpanformerForCausalLM.from_lm(spanformer.load("out/enwik8_small")).save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)      # after `import spanformer.hf`

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from spanformer.core.fields import as_dict, build
from spanformer.hf.padding import Read, pack_real
from spanformer.memory import Cache as Rings
from spanformer.model.config import ModelConfig
from spanformer.model.lm import LM

SLACK = 64  # tokens that assisted decoding may remove


class SpanformerConfig(PreTrainedConfig):
    """`model` is a ModelConfig as plain values; attributes under transformers' names are read from it."""

    model_type = "spanformer"

    def __init__(self, model: dict[str, Any] | None = None, **others: Any) -> None:  # others: transformers' arguments
        self.model = as_dict(build(ModelConfig, model or {}, where="config.json"))
        self.vocab_size, self.hidden_size = self.model["vocab"], self.model["dim"]
        self.num_hidden_layers, self.num_attention_heads = self.model["layers"], self.model["heads"]
        others.setdefault("tie_word_embeddings", False)  # the model ties them itself
        super().__init__(**others)


class SpanformerForCausalLM(PreTrainedModel, GenerationMixin):
    """A PreTrainedModel around an `LM`, which is its `lm`."""

    config_class = SpanformerConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean over the batch: Trainer divides it by its accumulation steps

    def __init__(self, config: SpanformerConfig) -> None:
        super().__init__(config)
        settings = build(ModelConfig, config.model, where="config.json")
        self.lm = LM(settings)
        if settings.embedding.tied:
            names = [n for n, _ in self.lm.named_parameters(remove_duplicate=False)]
            kept = {n for n, _ in self.lm.named_parameters()}
            own = {id(self.lm.get_parameter(n)): n for n in kept}
            twice = {n: own[id(self.lm.get_parameter(n))] for n in names if n not in kept}
            self._tied_weights_keys = {f"lm.{n}": f"lm.{first}" for n, first in twice.items()}
            self.config.tie_word_embeddings = True
        self.post_init()

    @classmethod
    def from_lm(cls, lm: LM) -> SpanformerForCausalLM:
        """Wrap this model without copying it."""
        with torch.random.fork_rng(devices=[]):
            made = cls(SpanformerConfig(as_dict(lm.config)))
        made.lm = lm
        return made.train(lm.training)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: LMCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others: Any,  # position ids and the like, which this model does not need
    ) -> CausalLMOutputWithPast:
        """input_ids [B, T] → logits [B, T, V], the last logits_to_keep of them if given. attention_mask [B, M + T]: 0
        for padding, with M tokens in the KV cache. labels [B, T]: ids, −100 for none; the loss is their
        mean in nats, plus the span penalty in training."""
        if others.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds is given; this model takes input_ids only")
        real = None
        if attention_mask is not None:
            if attention_mask.ndim != 2:
                raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; expected [batch, tokens]")
            real = attention_mask[:, -input_ids.shape[1] :].bool()
        if labels is None and (use_cache or past_key_values is not None) and not self.training:
            return self._read(input_ids, real, past_key_values, logits_to_keep)
        if past_key_values is not None:
            raise ValueError(
                "past_key_values is given with labels or in training; a KV cache works in eval mode without labels, so "
                "leave it out"
            )
        found = self.lm(input_ids, padding=None if real is None else ~real)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].reshape(-1)
            loss = torch.nn.functional.cross_entropy(found.logits[:, :-1].flatten(0, 1).float(), targets)
            loss = loss + found.penalty if self.training else loss
        return CausalLMOutputWithPast(loss=loss, logits=found.logits[:, -logits_to_keep:])  # pyright: ignore

    def _read(self, ids: Tensor, real: Tensor | None, cache: LMCache | None, keep: int) -> CausalLMOutputWithPast:
        cache = LMCache(self.lm) if cache is None else cache
        if not isinstance(cache, LMCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; this model makes its own KV cache, so leave it out"
            )
        rings = cache.begin(len(ids))
        packed = None if real is None else pack_real(real)
        cache.tokens.add(ids.shape[1], None if packed is None else real)
        if packed is None:
            logits = self.lm.decode(ids, rings)
        else:
            order, back, lengths = packed
            logits = self.lm.decode(ids.gather(1, order), rings, lengths=lengths)
            assert logits is not None
            logits = logits.gather(1, back[..., None].expand_as(logits))
        assert logits is not None
        return CausalLMOutputWithPast(logits=logits[:, -keep:], past_key_values=cache)  # pyright: ignore

    def after_step(self) -> None:
        """Clamp spans to their range; call it after every optimiser step."""
        self.lm.after_step()

    def get_input_embeddings(self):
        return self.lm.embedding

    def get_output_embeddings(self):
        return None

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *_others: Any) -> None:
        """Give generate() a KV cache in which each head keeps only the tokens it sees."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}; this model makes its own KV "
                "cache, so leave it out"
            )
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = LMCache(self.lm)

    def _init_weights(self, module: torch.nn.Module) -> None:
        """LM has initialised its weights already."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: object = None, every_n_layers: int = 1
    ) -> None:
        if every_n_layers != 1:
            raise ValueError(f"every_n_layers is {every_n_layers}; this model recomputes all of its layers or none")
        self.lm.checkpointing = enable


class LMCache(Cache):
    """The per-head KV cache of an LM with the interface that generate() expects."""

    def __init__(self, lm: LM) -> None:
        super().__init__(layers=[])
        self.lm = lm
        self.rings: Rings | None = None
        self.tokens = Read()

    def begin(self, batch: int) -> Rings:
        """The rings, allocated when the number of rows is known."""
        if self.rings is None:
            self.rings = self.lm.cache(batch, slack=SLACK)
        return self.rings

    def bytes(self) -> int:
        """The exact number of bytes allocated for keys and values."""
        return 0 if self.rings is None else self.rings.bytes()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.tokens.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reset(self) -> None:
        self.rings, self.tokens = None, Read()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.rings is not None:
            self._reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove this many tokens, given as a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop was given {tokens_to_remove}; expected a negative number, minus the number of tokens to remove"
            )
        if self.rings is not None:
            self.rings.crop(self.rings.seen - self.tokens.last(-tokens_to_remove))
            self.tokens.drop(-tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rings is not None:
            self.tokens.rows(torch.arange(self.rings.batch).repeat_interleave(repeats))
            self.rings = self.rings.fork(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.rings is not None:
            self._reorder(torch.arange(self.rings.batch)[indices.cpu()])

    def _reorder(self, index: Tensor) -> None:
        assert self.rings is not None
        self.tokens.rows(index)
        self.rings.reorder(index)

    @property
    def batch_size(self) -> int:
        return -1 if self.rings is None else self.rings.batch

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.rings is not None


AutoConfig.register(SpanformerConfig.model_type, SpanformerConfig, exist_ok=True)
AutoModelForCausalLM.register(SpanformerConfig, SpanformerForCausalLM, exist_ok=True)
