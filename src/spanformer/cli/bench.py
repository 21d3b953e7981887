"""`spanformer bench …`: measure, write the result file, print its tables, draw its pictures."""

from __future__ import annotations

from spanformer.bench import AttentionBench, bench_attention
from spanformer.bench.attention import RESULT_FILE
from spanformer.cli.leaf import Leaf
from spanformer.cli.report import show_attention
from spanformer.cli.waiting import waiting


def run_attention(config: AttentionBench) -> None:
    """Benchmark with a progress bar, then show what came out."""
    path = config.out / RESULT_FILE
    with waiting() as on_step:
        try:
            bench_attention(config, on_step=on_step)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; what was measured until now is in {path}, if anything") from None
    show_attention(path)


ATTENTION = Leaf(AttentionBench, run_attention)
