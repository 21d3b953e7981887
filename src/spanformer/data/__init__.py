"""Text to tokens on disk, and tokens to streams."""

from spanformer.data.bpe import BPE
from spanformer.data.config import DataConfig
from spanformer.data.images import Pixels
from spanformer.data.lanes import Batch, Lanes, Scored, every_token
from spanformer.data.masking import HiddenSegments, MaskedBatch, mask_segments, mask_tokens
from spanformer.data.pairs import PairBatch, Pairs, PairStream
from spanformer.data.prepare import Prepared, Split, load, prepare
from spanformer.data.sources import SOURCES
from spanformer.data.tasks import Task, TaskStream, parse_task, texts_of
from spanformer.data.vocab import Bytes, Chars, Vocab, Words, from_json

__all__ = [
    "BPE",
    "SOURCES",
    "Batch",
    "Bytes",
    "Chars",
    "DataConfig",
    "HiddenSegments",
    "Lanes",
    "MaskedBatch",
    "PairBatch",
    "PairStream",
    "Pairs",
    "Pixels",
    "Prepared",
    "Scored",
    "Split",
    "Task",
    "TaskStream",
    "Vocab",
    "Words",
    "every_token",
    "from_json",
    "load",
    "mask_segments",
    "mask_tokens",
    "parse_task",
    "prepare",
    "texts_of",
]
