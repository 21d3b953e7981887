"""Generation from prompts, and scoring of texts."""

from spanformer.infer.answer import answer
from spanformer.infer.decode import Piece
from spanformer.infer.generate import generate, generate_batch
from spanformer.infer.sampling import Sampling
from spanformer.infer.score import Scored, score

__all__ = ["Piece", "Sampling", "Scored", "answer", "generate", "generate_batch", "score"]
