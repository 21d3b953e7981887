"""Measure SnapKV, AdaKV, PyramidKV and others of kvpress at as many bytes as a row of `spanformer bench ruler`.

    python benchmarks/kvpress_methods.py --model out/smollm2 --results out/ruler.json --like out/smollm2@0.33 \\
        --tasks out/ruler-2048 --text valid.txt --calibration train.txt

Runs in an environment of its own with kvpress 0.5.5: docs/ruler.md. It adds a row for each method to the result file;
`spanformer bench ruler --out out/ruler.json` then prints and draws all rows. The row named by --like says which
questions and texts there are, and how many bytes its KV cache holds of each; every method gets as many.

Questions. The method compresses the prompt up to its last line, which is the question; then the question and the
answer are read token by token, and stay in the KV cache. The bytes are those at the end of the prompt. With
--question-seen the method compresses the whole prompt, and so knows what will be asked; the first token of the answer
then comes from full attention.

Loss. A method that compresses once after a prompt has no loss over a whole text. So the scored half of a text is cut
into pieces (the points "at" of the row). For each piece everything before it is read anew with full attention and
compressed once, and the piece is read token by token from what is left. Bytes are equal on average over the targets of
each piece. Errors of one compression therefore never reach the keys and values of the next, which flatters the methods.
"""

import argparse
import datetime
import hashlib
import itertools
import json
import math
import os
import time
from pathlib import Path

import kvpress_presses
import torch
import transformers
from kvpress_presses import TITLES, make_press

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder (benchmarks/hf_folder.py makes one)")
    parser.add_argument("--results", type=Path, required=True, help="the result file of bench ruler, with the row")
    parser.add_argument("--like", required=True, help="name of the row")
    parser.add_argument("--tasks", type=Path, required=True, help="the folder of questions that the row answered")
    parser.add_argument("--text", type=Path, help="the text of the row's loss; without it no loss is measured")
    parser.add_argument("--calibration", type=Path, help="a text from which DuoAttention scores its heads")
    parser.add_argument("--methods", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--question-seen", action="store_true", help="compress with the question in sight")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    if "duoattention" in options.methods and options.calibration is None:
        parser.error("calibration is not given, and DuoAttention needs a text; give one, or choose other --methods")
    like = read_rows(options.results, parser).get(options.like)
    if like is None:
        parser.error(f"like is {options.like!r}, which is no row of {options.results}")
    dtype = DTYPES[like["settings"]["dtype"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    run = Run(model.eval().requires_grad_(False), tokenizer, like, options.question_seen)
    questions = {name: read_questions(options.tasks / f"{name}.jsonl", name, like, parser) for name in like["tasks"]}
    windows = None
    if options.text is not None and like["settings"]["text"]:
        windows = run.windows(options.text.read_text(encoding="utf-8", errors="replace"), parser)
    if options.calibration is not None:
        kvpress_presses.calibrate_on(options.calibration.read_text(encoding="utf-8", errors="replace"))
    for method in options.methods:
        found = run.row(method, questions, windows)
        seen = " (question seen)" if options.question_seen else ""
        keep(options, f"{TITLES[method]}{seen}, bytes of {options.like}", found)


def read_rows(path: Path, parser: argparse.ArgumentParser) -> dict[str, dict]:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["kind"] != "spanformer benchmark ruler":
            raise ValueError
        return {name: part["found"] for name, part in held["parts"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        parser.error(f"results is {path}, which is not a result file of bench ruler; measure a row with it first")


def read_questions(path: Path, task: str, like: dict, parser: argparse.ArgumentParser) -> list[dict]:
    """Those that the row answered."""
    if not path.is_file():
        parser.error(f"tasks has no {path.name}; give the folder of questions that the row answered")
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    lines = lines[: len(like["tasks"][task]["scores"])]
    if digest("\n".join(lines)) != like["settings"]["questions"][task]:
        parser.error(f"{path} holds other questions than the row answered; give the same files")
    rows = [json.loads(line) for line in lines]
    if rows[0]["match"] == "choice":
        parser.error(f"{path} asks for a choice; these methods are measured by answers they write: leave it out")
    return rows


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def string_match(answer: str, question: dict) -> float:
    """As spanformer.bench.ruler_questions.score has it; a test compares the two."""
    said = "".join("\n" if char < " " else char for char in answer.strip()).strip().lower()
    found = [output.lower() in said for output in question["outputs"]]
    return float(any(found)) if question["match"] == "any" else sum(found) / len(found)


class Run:
    """One model, and the row whose bytes it gets."""

    def __init__(self, model, tokenizer, like: dict, question_seen: bool) -> None:
        self.model, self.tokenizer, self.like, self.question_seen = model, tokenizer, like, question_seen
        c = model.config
        size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        self.slots = c.num_hidden_layers * c.num_key_value_heads
        self.slot_bytes = 2 * size * model.dtype.itemsize
        """of a token's key and value in one KV head"""
        ends = model.generation_config.eos_token_id
        self.ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}

    def row(self, method: str, questions: dict[str, list[dict]], windows: torch.Tensor | None) -> dict:
        row = {"of": self.like["of"], "full": False, "bits": 16, "settings": self.like["settings"], "tasks": {}}
        for task, asked in questions.items():
            began, like = time.perf_counter(), self.like["tasks"][task]["kv_bytes"]
            answers = [self.answer(method, *each) for each in zip(asked, like, strict=True)]
            row["tasks"][task] = {"scores": [score for score, _ in answers], "kv_bytes": [held for _, held in answers]}
            mean = sum(row["tasks"][task]["scores"]) / len(answers)
            share = sum(row["tasks"][task]["kv_bytes"]) / sum(like)
            print(f"{method}, {task}: {100 * mean:.0f} % from {share:.3f} of the row's bytes, "
                  f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip
        if windows is not None:
            row["loss"] = self.loss(method, windows)
            print(f"{method}: {row['loss']['bits_per_byte']:.4f} bits per byte", flush=True)
        return row

    @torch.no_grad()
    def answer(self, method: str, question: dict, held: int) -> tuple[float, int]:
        """(score, bytes of the KV cache at the end of the prompt), with `held` bytes at most."""
        prompt = question["input"]
        ids = self.tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
        first = ids.shape[1] if self.question_seen else self.shared(ids[0].tolist(), prompt[: prompt.rfind("\n") + 1])
        kept = math.floor(held / self.slot_bytes / self.slots) - (ids.shape[1] - first)
        cache, logits = self.compressed(method, ids[:, :first], kept)
        for at in range(first, ids.shape[1]):
            logits = self.step(ids[:, at : at + 1], at, cache)
        used, found, score = self.kv_bytes(cache), [], 0.0
        while (token := int(logits.argmax())) not in self.ends:
            found.append(token)
            score = string_match(self.tokenizer.decode(found, skip_special_tokens=True), question)
            if score == 1.0 or len(found) == question["new_tokens"]:
                break
            logits = self.step(torch.tensor([[token]]), ids.shape[1] + len(found) - 1, cache)
        return score, used

    def shared(self, ids: list[int], text: str) -> int:
        """How many tokens at the beginning of ids spell (the beginning of) the text."""
        own = self.tokenizer(text, verbose=False)["input_ids"]
        return next((n for n, pair in enumerate(zip(ids, own)) if pair[0] != pair[1]), min(len(ids), len(own)))  # noqa: B905

    def compressed(self, method: str, ids: torch.Tensor, kept: int) -> tuple[transformers.Cache, torch.Tensor]:
        """Read ids with full attention, and keep that many tokens a KV head on average: (cache, the last logits)."""
        if kept < 8:
            raise SystemExit(f"{kept} tokens a KV head are left for a text of {ids.shape[1]}; choose a larger row")
        cache = transformers.DynamicCache()
        with make_press(method, self.model, ids.shape[1], kept)(self.model):
            states = self.model.model(input_ids=ids, past_key_values=cache).last_hidden_state
        return cache, self.model.lm_head(states[0, -1])

    def step(self, token: torch.Tensor, position: int, cache: transformers.Cache) -> torch.Tensor:
        """One token at a time: layers may hold different numbers of tokens, and transformers makes one mask for all."""
        where = torch.tensor([[position]])
        return self.model(input_ids=token, past_key_values=cache, position_ids=where).logits[0, -1]

    def kv_bytes(self, cache: transformers.Cache) -> int:
        """Of the keys that are seen: kvpress only masks those that AdaKV and DuoAttention drop."""
        tokens = 0
        for layer, block in zip(cache.layers, self.model.model.layers, strict=True):
            masked = getattr(block.self_attn, "masked_key_indices", None)
            tokens += layer.keys.shape[1] * layer.keys.shape[2] - (0 if masked is None else len(masked[0]))
        return tokens * self.slot_bytes

    def windows(self, text: str, parser: argparse.ArgumentParser) -> torch.Tensor:
        """[N, T] the tokens on which the row's loss was measured."""
        about = self.like["settings"]["text"]
        first, plain = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        first = first[: next((n for n in range(len(first)) if first[n : n + len(plain)] == plain), 0)]
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        size = about["context"] - len(first)
        found = ids[: len(ids) // size * size].view(-1, size)
        if about["windows"] < len(found):
            found = found[torch.linspace(0, len(found) - 1, about["windows"]).round().long()]
        found = torch.cat([torch.tensor(first, dtype=torch.long).expand(len(found), -1), found], 1)
        if digest(" ".join(map(str, found.flatten().tolist()))) != about["digest"]:
            parser.error("text gives other tokens than those of the row; give the same text and the same model")
        return found

    @torch.no_grad()
    def loss(self, method: str, windows: torch.Tensor) -> dict[str, float]:
        at = {int(n): held for n, held in self.like["loss"]["at"].items()}
        ends = sorted(at)
        nats, held, spelt = 0.0, 0, 0
        for ids in windows:
            for begin, end in itertools.pairwise(ends):
                budget = (at[begin] + at[end]) / 2 / self.slot_bytes / self.slots
                kept = math.floor(budget - (end - begin + 1) / 2)
                cache, _ = self.compressed(method, ids[None, : begin - 1], kept)
                for n in range(begin, end):
                    logits = self.step(ids[None, n - 1 : n], n - 1, cache)
                    nats -= float(logits.float().log_softmax(-1)[ids[n]])
                    held += self.kv_bytes(cache)
            text = self.tokenizer.decode(ids[ends[0] :].tolist(), clean_up_tokenization_spaces=False)
            spelt += len(text.encode())
        targets = len(windows) * (ends[-1] - ends[0])
        return {"bits_per_byte": nats / math.log(2) / spelt, "kv_bytes": held / targets}


def keep(options: argparse.Namespace, name: str, found: dict) -> None:
    """Add the row to the result file, which may have others by now."""
    held = json.loads(options.results.read_text(encoding="utf-8"))
    said = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    machine = {
        "threads": options.threads, "torch": torch.__version__, "transformers": transformers.__version__,
        "kvpress": kvpress_presses.VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    held["parts"][name] = {"machine": machine, "options": said, "found": found}
    new = options.results.with_suffix(".new")
    new.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(new, options.results)
    print(f"{options.results}: {name}", flush=True)


if __name__ == "__main__":
    main()
