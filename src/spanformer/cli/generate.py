"""`spanformer generate CHECKPOINT --prompt TEXT`: generate text from a prompt and print it as it is generated.

Text goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING, Literal

import tyro

from spanformer.cli.command import Command

if TYPE_CHECKING:
    import numpy as np

    from spanformer.cli.text_input import TextFile
    from spanformer.data import Vocab
    from spanformer.depth import Exits
    from spanformer.infer import Piece, Sampling
    from spanformer.memory.cache import Cache
    from spanformer.model.lm import LM
    from spanformer.model.seq2seq import Seq2Seq

DEFAULT_TEMPERATURE = 0.8


@dataclass(frozen=True)
class GenerateOptions:
    """Generate text from a prompt and print it as it is generated.

    For example:  spanformer generate out/demo --prompt "def main(" --temperature 0.8
    With an encoder–decoder, print its answer:  spanformer generate out/seq2seq --prompt 31407
    With a model of images, write a picture of samples:  spanformer generate out/images
    """

    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model; or a pretrained model of Llama's form
    (a folder in Hugging Face's format, a .gguf file), which is continued greedily"""
    prompt: tuple[str, ...] = ()
    """the text to continue; several prompts are continued as one batch"""
    file: str = ""
    """a file with the prompt, of any length; -: standard input; the text of --prompt is appended to it"""
    max_tokens: int = 256
    """maximum number of tokens to generate; a stop string can end the text sooner"""
    temperature: float | None = None
    """sampling temperature; 0: greedy decoding; 0.8 if not given"""
    top_k: int = 0
    """sample from this many most likely tokens; 0: all"""
    top_p: float = 1.0
    """sample from the most likely tokens whose probabilities sum to this"""
    min_p: float = 0.0
    """exclude tokens whose probability is below this times the highest"""
    repetition: float = 1.0
    """repetition penalty: above 1, tokens that already occurred become less likely"""
    repetition_window: int = 64
    """number of recent tokens that --repetition applies to"""
    seed: int | None = None
    """random seed; the same seed gives the same text"""
    stop: tuple[str, ...] = ()
    """stop strings; not included in the output"""
    beams: int = 1
    """above 1: search for the most likely text with this many beams instead of sampling"""
    lookup: int = 0
    """prompt-lookup decoding: propose up to this many tokens from a repeated passage and verify them in one step;
    same text, faster"""
    draft: str = ""
    """LAYERS:TOKENS, such as 3:4, for a model with exits: draft this many tokens by the first layers and verify them in
    one step; same text"""
    exits: str = ""
    """leave layers early, for a model with exits: "calibrated" (by calibrate-exits; greedy decoding only), or a measure
    and a threshold, such as softmax:0.3; for a pretrained model also a file that calibrate-exits wrote"""
    chunk: int = 512
    """prompt tokens per forward pass"""
    cache_bits: Literal[0, 8, 4] = 0
    """8 or 4: store the KV cache in this many bits per number; 0: in the model's dtype, or as stored in --load-cache"""
    datastore: str = ""
    """folder of a datastore to mix in (spanformer datastore build, then fit)"""
    save_cache: str = ""
    """save the KV cache of the prompt to this file (give --lookup too if you will load it with --lookup)"""
    load_cache: str = ""
    """continue from a KV cache saved by --save-cache; --prompt or --file is appended to its text"""
    image: str = ""
    """for a model of images: complete the upper half of this PNG file or, with `test`, of images of the test split"""
    images: int = 0
    """for a model of images: how many to draw, or of the test split to complete; 0: 16, or 8"""
    out: str = ""
    """for a model of images: the PNG file to write; by default samples.png or completions.png in the model's folder"""


def run(options: GenerateOptions) -> None:
    from spanformer.cli.generate_exits import use_exits
    from spanformer.cli.generate_images import drawn
    from spanformer.cli.hf_exits import generate_hf, is_hf
    from spanformer.cli.progress import Progress
    from spanformer.cli.retrieval import used, with_datastore, with_neighbours
    from spanformer.cli.text_input import TextFile, model_vocabulary
    from spanformer.infer.counts import check_counts
    from spanformer.model.lm import LM
    from spanformer.model.load import load_any, load_meta
    from spanformer.model.seq2seq import Seq2Seq

    check_counts(max_tokens=options.max_tokens, beams=options.beams, lookup=options.lookup, chunk=options.chunk)
    if is_hf(options.checkpoint):
        generate_hf(options)
        return
    if drawn(options):
        return
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
        raise ValueError(f"{options.checkpoint} holds a model of kind {lm.config.kind!r}, which cannot generate")
    found = with_neighbours(lm, meta, options.checkpoint)
    with found, with_datastore(lm, vocab, options.datastore, options.checkpoint) as retrieval:
        exits = use_exits(lm, meta, options) if options.exits else None
        _generate(lm, vocab, prompts, file, options, sampling, exits)
    for line in used(retrieval):
        print(line, file=sys.stderr)


def _generate(
    lm: LM, vocab: Vocab, prompts: list[str], file: TextFile | None, options: GenerateOptions,
    sampling: Sampling | None, exits: Exits | None,
) -> None:  # fmt: skip
    from spanformer.cli.generate_exits import read_draft
    from spanformer.cli.progress import Progress
    from spanformer.cli.text_input import prompt_ids
    from spanformer.infer import generate_batch
    from spanformer.infer.exits import by_exits
    from spanformer.memory.cache import Cache

    draft = read_draft(options.draft)
    if options.load_cache:
        cache = Cache.load(options.load_cache, lm)
    else:
        slack = options.lookup if draft is None else draft.tokens
        cache = lm.cache(len(prompts), slack=slack, bits=options.cache_bits)
    count = _Count(int(cache.seen.sum()), options.beams, [0] * len(prompts), exits)
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
            report("prefilling the prompt", done, total)
            if done == total and options.save_cache:
                cache.save(options.save_cache)
            if done == total:
                report("generating" if options.beams == 1 else f"searching with {options.beams} beams", 0, 0)

        pieces = generate_batch(
            lm, list(map(watched, range(len(prompts)))), vocab=vocab, sampling=sampling, max_tokens=options.max_tokens,
            stop=options.stop, seed=options.seed, beams=options.beams,
            lookup=options.lookup, draft=draft, chunk=options.chunk, cache=cache, on_read=on_read,
        )  # fmt: skip
        pieces = pieces if exits is None else by_exits(exits, pieces)
        first = next(pieces)
    count.read = time.perf_counter()
    try:
        _write(chain([first], pieces), prompts, count)
    finally:
        count.note(cache)
        print(count.summary(cache), file=sys.stderr)


def _answers(model: Seq2Seq, prompts: list[str], vocab: Vocab, options: GenerateOptions) -> None:
    """Print the answer to each prompt on its own line."""
    from spanformer.cli.progress import Progress
    from spanformer.infer import answer

    default = GenerateOptions(options.checkpoint)
    taken = {"checkpoint", "prompt", "max_tokens", "beams"}
    others = [f.name for f in fields(options) if f.name not in taken]
    if unfit := [name for name in others if getattr(options, name) != getattr(default, name)]:
        named = ", ".join("--" + name.replace("_", "-") for name in unfit)
        raise ValueError(
            f"{named} is for language models; with an encoder–decoder use --prompt, --beams and --max-tokens only "
            "(it does not sample)"
        )
    with Progress(transient=True) as report:
        report("answering", 0, 0)
        answers = answer(model, prompts, vocab=vocab, max_tokens=options.max_tokens, beams=options.beams)
    for ids in answers:
        _put(vocab.decode(ids) + "\n")


def _sampling(options: GenerateOptions) -> Sampling | None:
    """None: beam search, which does not sample."""
    from spanformer.infer import Sampling

    temperature = DEFAULT_TEMPERATURE if options.temperature is None else options.temperature
    sampling = Sampling(
        temperature, options.top_k, options.top_p, options.min_p, options.repetition, options.repetition_window
    )
    return None if options.beams > 1 and sampling == Sampling(DEFAULT_TEMPERATURE) else sampling


def _prompts(options: GenerateOptions) -> list[str]:
    if options.file and len(options.prompt) > 1:
        raise ValueError(f"--file is given with {len(options.prompt)} prompts; expected at most one, appended to it")
    if not options.file and not options.prompt:
        raise ValueError("no prompt is given; expected --prompt TEXT or --file PATH (- is standard input)")
    return list(options.prompt or [""])


def _write(pieces: Iterator[Piece], prompts: list[str], count: _Count) -> None:
    """Print the first text as it is generated and then the others, each below its prompt."""
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
    """tokens in the loaded KV cache"""
    beams: int
    prompts: list[int]
    """tokens of each prompt"""
    exits: Exits | None
    matter: int = 0
    """tokens of the longest prompt that the model processed"""
    made: int = 0
    bytes: int = 0
    """peak size of the KV cache: rows are removed when they end, and beams are added"""
    start: float = field(default_factory=time.perf_counter)
    read: float = 0.0
    """time at which the prompt was processed and the first token chosen"""

    def note(self, cache: Cache) -> None:
        self.bytes = max(self.bytes, cache.bytes())

    def summary(self, cache: Cache) -> str:
        seconds, reading = time.perf_counter() - self.read, self.read - self.start
        prompt = sum(self.prompts)
        lines = [f"prompt: {prompt:,} tokens in {reading:.2f} s"]
        if self.matter < max(self.prompts):
            lines[0] += f"; heads see only the last {self.matter:,}, so the others were skipped"
        # The first token came with the prompt.
        rate = f", {(self.made - 1) / seconds:,.1f} tokens/s" if self.made > 1 else ""
        lines.append(f"generated: {self.made:,} tokens in {seconds:.2f} s{rate}")
        if self.exits is not None and self.exits.counted()[1]:
            lines.append(f"layers: {self.exits.mean_run():.2f} of {self.exits.layers} per token")
            if cache.deferred is not None and (all_of := cache.deferred.counts).deferred:
                lines.append(
                    f"skipped layers: {all_of.saved:,} of {all_of.deferred:,} keys and values were never computed"
                )
        tokens = self.before + prompt + self.made
        full = cache.full_bytes(tokens) // cache.batch * self.beams  # full_bytes counts each row the cache has now
        kept = f"{_size(full)} for these {tokens:,} tokens" + f" and {self.beams} beams" * (self.beams > 1)
        lines.append(f"KV cache: {_size(self.bytes)}; full attention would need {kept}")
        return "\n".join(lines)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


GENERATE = Command(GenerateOptions, run)
