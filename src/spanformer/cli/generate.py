"""`spanformer generate CHECKPOINT --prompt TEXT`: what a model writes after a prompt, as it writes it.

Text goes to standard output, all else to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING, Literal

import tyro

from spanformer.cli.leaf import Leaf

if TYPE_CHECKING:
    import numpy as np

    from spanformer.data import Vocab
    from spanformer.infer import Piece, Sampling
    from spanformer.memory.cache import Cache
    from spanformer.model.seq2seq import Seq2Seq

DEFAULT_TEMPERATURE = 0.8


@dataclass(frozen=True)
class GenerateOptions:
    """What a model writes after a prompt, as it writes it.

    For example:  spanformer generate out/demo --prompt "def main(" --temperature 0.8
    An encoder–decoder answers instead:  spanformer generate out/seq2seq --prompt 31407
    """

    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model"""
    prompt: tuple[str, ...] = ()
    """the text to go on from; several are continued side by side"""
    file: str = ""
    """a file to go on from, of any length; - is standard input; with --prompt, that text follows the file's"""
    max_tokens: int = 256
    """how many tokens to write, unless a stop string ends the text"""
    temperature: float | None = None
    """0: always the likeliest token; the higher, the more surprising; 0.8 if not given"""
    top_k: int = 0
    """choose among so many likeliest tokens; 0: all"""
    top_p: float = 1.0
    """choose among the likeliest tokens that together have this probability"""
    min_p: float = 0.0
    """leave out tokens that are less than this times as likely as the likeliest"""
    repetition: float = 1.0
    """above 1: tokens that came before are less likely"""
    repetition_window: int = 64
    """how many of the last tokens --repetition looks at"""
    seed: int | None = None
    """the same seed gives the same text"""
    stop: tuple[str, ...] = ()
    """texts that end the text, and are left out"""
    beams: int = 1
    """above 1: search for the likeliest text with so many beams, instead of drawing"""
    lookup: int = 0
    """guess up to so many tokens where the text repeats itself, and check them in one step: the same text, sooner"""
    chunk: int = 512
    """tokens of the prompt read at once"""
    cache_bits: Literal[0, 8] = 0
    """8: keep keys and values in 8 bits each; 0: as the model computes them, or as they were in --load-cache"""
    save_cache: str = ""
    """keep what was read of the prompt in this file (with --lookup, if it is to be used with --lookup)"""
    load_cache: str = ""
    """go on after the text in such a file; --prompt or --file is what follows it"""


def run(options: GenerateOptions) -> None:
    from spanformer.cli.progress import Progress
    from spanformer.cli.reading import TextFile, model_vocabulary, prompt_ids
    from spanformer.infer import generate_batch
    from spanformer.infer.counts import check_counts
    from spanformer.memory.cache import Cache
    from spanformer.model.lm import LM
    from spanformer.model.load import load_any, load_meta
    from spanformer.model.seq2seq import Seq2Seq

    check_counts(max_tokens=options.max_tokens, beams=options.beams, lookup=options.lookup, chunk=options.chunk)
    sampling, prompts = _sampling(options), _prompts(options)
    file = TextFile(options.file) if options.file else None
    with Progress(transient=True) as report:
        report(f"loading {options.checkpoint}", 0, 0)
        meta, lm = load_meta(options.checkpoint), load_any(options.checkpoint)
    vocab = model_vocabulary(meta, options.checkpoint)
    if isinstance(lm, Seq2Seq):
        _answers(lm, prompts, vocab, options)
        return
    if not isinstance(lm, LM):
        raise ValueError(f"{options.checkpoint} holds a model of kind {lm.config.kind!r}, which writes no text")
    if options.load_cache:
        cache = Cache.load(options.load_cache, lm)
    else:
        cache = lm.cache(len(prompts), slack=options.lookup, bits=options.cache_bits)
    count = _Count(int(cache.seen.sum()), options.beams, [0] * len(prompts))
    with Progress(transient=True) as report:

        def watched(row: int) -> Iterator[np.ndarray]:
            for part in prompt_ids(file, prompts[row], vocab):
                count.prompts[row] += len(part)
                if file:
                    report(f"reading {file.name}", file.done, file.size)
                yield part

        def on_read(done: int, total: int) -> None:
            count.matter = total
            count.note(cache)
            report("reading the prompt", done, total)
            if done == total and options.save_cache:
                cache.save(options.save_cache)
            if done == total:
                report("writing" if options.beams == 1 else f"searching with {options.beams} beams", 0, 0)

        pieces = generate_batch(
            lm, list(map(watched, range(len(prompts)))), vocab=vocab, sampling=sampling, max_tokens=options.max_tokens,
            stop=options.stop, seed=options.seed, beams=options.beams,
            lookup=options.lookup, chunk=options.chunk, cache=cache, on_read=on_read,
        )  # fmt: skip
        first = next(pieces)
    count.read = time.perf_counter()
    try:
        _write(chain([first], pieces), prompts, count)
    finally:
        count.note(cache)
        print(count.summary(cache), file=sys.stderr)


def _answers(model: Seq2Seq, prompts: list[str], vocab: Vocab, options: GenerateOptions) -> None:
    """The answer to each prompt on a line of its own."""
    from spanformer.cli.progress import Progress
    from spanformer.infer import answer

    default = GenerateOptions(options.checkpoint)
    taken = {"checkpoint", "prompt", "max_tokens", "beams"}
    others = [f.name for f in fields(options) if f.name not in taken]
    if unfit := [name for name in others if getattr(options, name) != getattr(default, name)]:
        named = ", ".join("--" + name.replace("_", "-") for name in unfit)
        raise ValueError(
            f"{named} is for language models; an encoder–decoder takes --prompt, --beams and --max-tokens, and answers "
            "with what is likeliest"
        )
    with Progress(transient=True) as report:
        report("answering", 0, 0)
        answers = answer(model, prompts, vocab=vocab, max_tokens=options.max_tokens, beams=options.beams)
    for ids in answers:
        _put(vocab.decode(ids) + "\n")


def _sampling(options: GenerateOptions) -> Sampling | None:
    """None: a search by beams, which draws nothing."""
    from spanformer.infer import Sampling

    temperature = DEFAULT_TEMPERATURE if options.temperature is None else options.temperature
    sampling = Sampling(
        temperature, options.top_k, options.top_p, options.min_p, options.repetition, options.repetition_window
    )
    return None if options.beams > 1 and sampling == Sampling(DEFAULT_TEMPERATURE) else sampling


def _prompts(options: GenerateOptions) -> list[str]:
    if options.file and len(options.prompt) > 1:
        raise ValueError(f"there is a file and {len(options.prompt)} prompts; expected at most one, to follow it")
    if not options.file and not options.prompt:
        raise ValueError("there is no prompt; give --prompt TEXT or --file PATH (- is standard input)")
    return list(options.prompt or [""])


def _write(pieces: Iterator[Piece], prompts: list[str], count: _Count) -> None:
    """One text as it comes; of several, the first as it comes and then the others, each under its prompt."""
    texts = [""] * len(prompts)
    if len(prompts) > 1:
        _put(_title(0, prompts))
    for piece in pieces:
        count.made += 1
        if piece.row == 0:
            _put(piece.text)
        texts[piece.row] += piece.text
    for row in range(1, len(prompts)):
        _put("\n" * (not texts[row - 1].endswith("\n")) + _title(row, prompts) + texts[row])
    _put("\n" * (not texts[-1].endswith("\n")))


def _title(row: int, prompts: list[str]) -> str:
    return f"--- {row + 1} of {len(prompts)}: {prompts[row]!r}\n"


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclass
class _Count:
    before: int
    """tokens that a loaded cache had seen"""
    beams: int
    prompts: list[int]
    """tokens of each"""
    matter: int = 0
    """of the longest prompt, how many tokens were read by the model"""
    made: int = 0
    bytes: int = 0
    """the most that the cache took: rows go when they end, and beams come"""
    start: float = field(default_factory=time.perf_counter)
    read: float = 0.0
    """when the prompt was read and the first token chosen"""

    def note(self, cache: Cache) -> None:
        self.bytes = max(self.bytes, cache.bytes())

    def summary(self, cache: Cache) -> str:
        seconds, reading = time.perf_counter() - self.read, self.read - self.start
        prompt = sum(self.prompts)
        lines = [f"prompt: {prompt:,} tokens in {reading:.2f} s"]
        if self.matter < max(self.prompts):
            lines[0] += f"; no head can see beyond the last {self.matter:,}, so only these were read"
        # The first token came with the prompt.
        rate = f", {(self.made - 1) / seconds:,.1f} tokens/s" if self.made > 1 else ""
        lines.append(f"written: {self.made:,} tokens in {seconds:.2f} s{rate}")
        tokens = self.before + prompt + self.made
        full = cache.full_bytes(tokens) // cache.batch * self.beams  # it counts each row the cache has now
        kept = f"{_size(full)} for these {tokens:,} tokens" + f" and {self.beams} beams" * (self.beams > 1)
        lines.append(f"cache: {_size(self.bytes)}; full attention would keep {kept}")
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


GENERATE = Leaf(GenerateOptions, run)
