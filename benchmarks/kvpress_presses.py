"""The methods of kvpress that benchmarks/kvpress_methods.py measures, each for a number of tokens to keep.

Their settings are kvpress's own, except these. SnapKV and AdaKV observe the last 32 tokens, as SnapKV's authors do:
kvpress's 64 reach beyond RULER's questions, and found fewer needles in a trial. PyramidKV observes 8 tokens and has a
slope (beta) of at most 20, so that its smallest layer keeps what is observed; kvpress falls back to SnapKV otherwise. A
streaming head of DuoAttention keeps 128 first and 256 last tokens, or in this proportion half of what a head keeps on
average, if that is less. StreamingLLM keeps 4 first tokens; it checks the measurement, since uniform windows of
spanformer are nearly the same.
"""

import importlib.metadata
import math

import kvpress
import pandas
import torch
from kvpress.presses import duo_attention_press

VERSION = importlib.metadata.version("kvpress")
TITLES = {
    "snapkv": "SnapKV", "adakv": "AdaKV", "pyramidkv": "PyramidKV", "duoattention": "DuoAttention",
    "streamingllm": "StreamingLLM",
}  # fmt: skip
OBSERVED = 32
SAMPLES, CHARACTERS = 50, 2000
"""texts from which DuoAttention scores its heads, and the length of each"""


class Duo(kvpress.DuoAttentionPress):
    """With a streaming head of `stream` tokens."""

    stream = 384

    def post_init_from_model(self, model: torch.nn.Module) -> None:
        super().post_init_from_model(model)
        self.sink_size = self.stream // 3
        self.recent_size = self.stream - self.sink_size


def make_press(method: str, model: torch.nn.Module, tokens: int, kept: int) -> kvpress.BasePress:
    """A press that keeps `kept` of `tokens` tokens in each KV head, on average."""
    kept = min(kept, tokens)
    ratio = 0.0 if kept == tokens else 1 - (kept + 0.5) / tokens  # kvpress rounds down
    window = max(1, min(OBSERVED, kept // 2))
    if method == "snapkv":
        return kvpress.SnapKVPress(ratio, window_size=window)
    if method == "adakv":
        return kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=window))
    if method == "pyramidkv":
        return kvpress.PyramidKVPress(1 - kept / tokens, window_size=8, beta=max(1, min(20, kept // 8)))
    if method == "streamingllm":
        return kvpress.StreamingLLMPress(ratio, n_sink=4)
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    stream = max(2, min(384, kept // 2))
    streaming = 0 if tokens <= stream else min(heads, math.ceil(heads * (tokens - kept) / (tokens - stream)))
    press = Duo(head_compression_ratio=streaming / heads, on_the_fly_scoring=True)
    press.stream = stream
    return press


def calibrate_on(text: str) -> None:
    """Give DuoAttention pieces of this text in place of BookSum, which kvpress would download."""
    last = max(0, len(text) - CHARACTERS)
    starts = [round(last * n / (SAMPLES - 1)) for n in range(SAMPLES)]
    pieces = pandas.DataFrame({"chapter": [text[at : at + CHARACTERS] for at in starts]})

    class Pieces:
        def to_pandas(self) -> pandas.DataFrame:
            return pieces

    duo_attention_press.load_dataset = lambda *_args, **_options: Pieces()
