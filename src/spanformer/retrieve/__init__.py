"""Retrieval: a datastore of contexts and the tokens that followed them, and a language model that asks it (kNN-LM)."""

from spanformer.retrieve.header import Header
from spanformer.retrieve.mixture import Settings, mixed_log_probs, mixed_nll
from spanformer.retrieve.search import Neighbours, search
from spanformer.retrieve.store import Store
from spanformer.retrieve.writer import Writer

__all__ = ["Header", "Neighbours", "Settings", "Store", "Writer", "mixed_log_probs", "mixed_nll", "search"]
