"""Benchmarks: each result is checked before it is timed."""

from spanformer.bench.attention import bench_attention
from spanformer.bench.config import AttentionBench
from spanformer.bench.results import Results, Row

__all__ = ["AttentionBench", "Results", "Row", "bench_attention"]
