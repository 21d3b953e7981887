"""The steps of the attention benchmark, by table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spanformer.bench.config import AttentionBench
from spanformer.bench.contenders import YARDSTICK
from spanformer.bench.work import Work
from spanformer.cost import attention as cost

LONGEST_YARDSTICK = 16384  # above this length one call of full attention takes minutes
UNIFORM = ("64", "128", "256", "512", "1024", "2048")


@dataclass(frozen=True)
class Step:
    part: str
    work: Work
    in_process: bool = True
    """False: measure memory, in a separate process"""
    without: tuple[str, ...] = ()
    """contenders to omit"""

    @property
    def title(self) -> str:
        work = self.work
        return f"{self.part.replace('_', ' ')}: {work.mode}, profile {work.profile}, length {work.length}"

    def seconds(self, rounds: int) -> float:
        """A rough estimate, for the progress bar."""
        work, calls = self.work, rounds + 3 if self.in_process else 2
        full = cost.flops([work.length] * work.heads, work.queries, work.dim, mode=work.mode, keys=work.keys)
        slowest = work.flops() if YARDSTICK in self.without else full
        return 1.0 + 3 * calls * work.batch * slowest / 1e11 + (0 if self.in_process else 20)


def steps(config: AttentionBench) -> list[Step]:
    """All steps, in the order of the tables."""
    makers = {
        "cost": _cost, "decode": _decode, "overhead": _overhead, "memory": _memory, "short": _short,
        "per_token": _per_token, "limit": _limit, "streaming": _streaming, "long": _long,
    }  # fmt: skip
    return [step for part in config.chosen_parts for step in makers[part](config)]


def _work(config: AttentionBench, profile: str, length: int, mode: str, terms: str = "plain") -> Work:
    return Work(profile, length, mode, config.batch, config.heads, config.dim, terms, config.dtype)


def _one(config: AttentionBench, profile: str, length: int, mode: str, batch: int = 1) -> Work:
    """A work with plain terms and the given batch."""
    return Work(profile, length, mode, batch, config.heads, config.dim, "plain", config.dtype)


def _training_modes(config: AttentionBench) -> list[str]:
    return [mode for mode in config.chosen_modes if mode != "decode"]


def _cost(config: AttentionBench) -> Iterator[Step]:
    for mode in _training_modes(config):
        for terms in config.terms:
            for profile in config.chosen_profiles:
                for length in config.chosen_lengths:
                    yield Step("cost", _work(config, profile, length, mode, terms))


def _decode(config: AttentionBench) -> Iterator[Step]:
    if "decode" not in config.chosen_modes:
        return
    lengths = config.lengths or (config.chosen_lengths[-1:] if config.quick else (*config.chosen_lengths, 32768))
    for terms in config.terms:
        for profile in config.chosen_profiles:
            for length in lengths:
                yield Step("decode", _work(config, profile, length, "decode", terms))


def _overhead(config: AttentionBench) -> Iterator[Step]:
    for mode in _training_modes(config):
        yield Step("overhead", _one(config, "F", 16, mode))


def _short(config: AttentionBench) -> Iterator[Step]:
    for mode in _training_modes(config):
        for profile in ("A", "F"):
            for batch in (1, 4):
                for length in (128, 256, 512, 1024):
                    yield Step("short", _one(config, profile, length, mode, batch=batch))


def _per_token(config: AttentionBench) -> Iterator[Step]:
    for length in (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        without = (YARDSTICK,) if length > LONGEST_YARDSTICK else ()
        yield Step("per_token", _one(config, "S", length, "forward+backward"), without=without)


def _limit(config: AttentionBench) -> Iterator[Step]:
    for span in UNIFORM:
        yield Step("limit", _one(config, span, 4096, "forward+backward"))


def _streaming(config: AttentionBench) -> Iterator[Step]:
    for mode in _training_modes(config):
        yield Step("streaming", _streamed(config, 8192, 512, mode))


def _streamed(config: AttentionBench, span: int, queries: int, mode: str) -> Work:
    return Work("A", span, mode, 1, config.heads, config.dim, "distance_vec", config.dtype, streaming=queries)


def _memory(config: AttentionBench) -> Iterator[Step]:
    length = max(config.chosen_lengths) if config.quick or config.lengths else 4096
    yield Step("memory", _one(config, "A", length, "forward+backward"), in_process=False)
    if config.original is not None:
        yield Step("memory", _streamed(config, length, length, "forward+backward"), in_process=False)


def _long(config: AttentionBench) -> Iterator[Step]:
    yield Step("long", _one(config, "A", 65536, "forward+backward"), in_process=False, without=(YARDSTICK,))
