"""`bench context`: the same questions to our models and to Hugging Face's, answers by hand, and rows that add up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from spanformer import LM, ModelConfig, hf
from spanformer.bench.context import ContextBench, open_model
from spanformer.bench.context_models import Cost, HuggingFaceModel, OurModel, Predicted
from spanformer.bench.context_tasks import copied, copy_task, found_facts, loss_by_position, ranges
from spanformer.cli.main import main
from spanformer.core.fields import as_dict
from spanformer.model.folder import write_folder
from spanformer.train.run import train
from support.byte_llama import save_byte_llama
from support.tiny_runs import tiny, write_text

SMALL = ("--quick", "--threads", "1", "--texts", "1", "--tasks", "1", "--rounds", "1")


def nothing() -> None:
    pass


class Bytes:
    """A model of bytes, from outside: it knows what it has seen once within `sight` tokens after the same 8 tokens."""

    longest = 0

    def __init__(self, sight: int) -> None:
        self.sight = sight

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def predict(self, ids: list[int], start: int) -> Predicted:
        right = []
        for at in range(start, len(ids)):
            seen = range(max(8, at - self.sight), at)
            right.append(any(ids[n - 8 : n + 1] == ids[at - 8 : at + 1] for n in seen))
        found = torch.tensor(right)
        return Predicted(torch.where(found, 0.5, 3.0), found)

    def cost(self, context: int, rounds: int) -> Cost:
        return Cost(self.sight, None, 1.0)


def test_a_model_finds_what_is_within_its_sight() -> None:
    far, near = Bytes(1000), Bytes(300)
    for find in ("key", "pair"):
        assert found_facts(far, find, 600, 3, 0, nothing) == 1.0 and found_facts(near, find, 600, 3, 0, nothing) == 0.0
    assert copied(far, 600, 3, 0, nothing) == 1.0
    assert copied(near, 600, 3, 0, nothing) < 0.2 and copied(near, 200, 3, 0, nothing) == 1.0


def test_a_copy_is_as_far_as_asked() -> None:
    ids, start = copy_task(Bytes(1), 500, 0)
    text = bytes(ids).decode()
    words = text.partition(" The list: ")[2].partition(".")[0].split()
    assert len(words) == 12 and text.endswith(" The list: " + " ".join(words) + ".")
    assert bytes(ids[start:]).decode() == " " + " ".join(words[2:]) + "."
    assert 440 <= text.rindex(" The list: ") <= 500
    with pytest.raises(ValueError, match=r"distance is 20, and the list alone takes \d+ tokens; ask for more"):
        copy_task(Bytes(1), 20, 0)


def test_positions_are_octaves_and_bits_are_per_byte() -> None:
    assert ranges(256) == [(1, 64), (64, 128), (128, 256)] and ranges(100) == [(1, 100)]
    text = "".join(chr(97 + n * n % 26) for n in range(600))
    rows = loss_by_position(Bytes(0), text, "text", 256, 2, nothing)
    assert [(row["from"], row["to"]) for row in rows] == ranges(256)
    assert all(row["bits"] == pytest.approx(3.0 / math.log(2)) for row in rows)
    with pytest.raises(ValueError, match=r"text has 99 tokens from character 0 on, and positions up to 256 are asked"):
        loss_by_position(Bytes(0), text[:99], "text", 256, 2, nothing)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("context")
    torch.set_num_threads(1)
    train(tiny(path, {"train.steps": 2, "train.eval_every": 0}))
    save_byte_llama(path / "llama", 512)
    write_text(path / "prose.txt", 4000)
    return path


def test_both_kinds_of_models_predict_as_their_own_logits_do(folder: Path) -> None:
    ids = list(b"To be, or not to be, that is the question. " * 8)[:300]
    ours = OurModel(str(folder / "run"))
    theirs = HuggingFaceModel(str(folder / "llama"), torch.float32, 0.0, 512, 4)
    for model, logits in (
        (ours, ours.lm(torch.tensor([ids[:-1]])).logits[0]),
        (theirs, theirs.model(torch.tensor([ids[:-1]])).logits[0]),
    ):
        found = model.predict(ids, 40)
        wanted = -logits.float().log_softmax(-1)[torch.arange(39, 299), torch.tensor(ids[40:])]
        torch.testing.assert_close(found.nats, wanted, rtol=1e-3, atol=1e-4)
        assert torch.equal(found.right, logits.argmax(-1)[39:] == torch.tensor(ids[40:]))


def test_cost_is_that_of_the_tokens_that_are_seen(folder: Path) -> None:
    full = HuggingFaceModel(str(folder / "llama"), torch.float32, 0.0, 512, 4).cost(512, 1)
    half = HuggingFaceModel(str(folder / "llama"), torch.float32, 0.25, 512, 4).cost(512, 1)
    assert full.kv_bytes == 2 * 2 * 2 * 512 * 8 * 4  # layers, key and value, heads, tokens, size, bytes
    assert half.kv_bytes == full.kv_bytes // 4 and full.flops and half.flops and half.seconds > 0
    dense = 2 * 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 2 * 32 * 256
    assert full.flops == dense + 4 * 8 * 2 * 4 * 513 and half.flops == dense + 4 * 8 * 2 * 4 * 128
    own = OurModel(str(folder / "run")).cost(512, 1)
    assert own.flops and 0 < own.kv_bytes < full.kv_bytes


def test_windows_that_grow_are_counted_at_the_length_of_the_text(folder: Path) -> None:
    model = HuggingFaceModel(str(folder / "llama"), torch.float32, 0.0, 512, 4)
    hf.attach(model.model, max_span=128, ramp=1, sink_tokens=0)
    model.spans = True
    for spans in hf.head_spans(model.model).values():
        spans.growth.fill_(0.25)
        torch.nn.init.constant_(spans.ratio, 31 / 128)
    seen = 129  # of 513 tokens: 31 + 0.25 · (513 − 128) and the ramp of 1, rounded up
    dense = 2 * 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 2 * 32 * 256
    assert model.cost(512, 1).flops == dense + 4 * 8 * 2 * 4 * seen


def test_rows_add_up_and_are_equal_twice(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "context.json"
    asked = [*SMALL, "--text", str(folder / "prose.txt"), "--code", str(folder / "prose.txt"), "--out", str(out)]
    main(["bench", "context", str(folder / "run"), *asked])
    main(["bench", "context", f"{folder}/llama", f"{folder}/llama@0.5", *asked])
    shown = capsys.readouterr().out
    assert "| model | text, early | text, late |" in shown and "context.png" in shown
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == [str(folder / "run"), f"{folder}/llama", f"{folder}/llama@0.5"]
    row = parts[f"{folder}/llama"]["found"]
    assert row["text"] == row["code"] and set(row["key"]) == {"128", "256"} and row["settings"]["context"] == 256
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    main(["bench", "context", f"{folder}/llama", *asked])
    again = json.loads(out.read_text())["parts"][f"{folder}/llama"]["found"]
    same = ("text", "code", "key", "pair", "copy", "kv_bytes", "flops")
    assert {name: again[name] for name in same} == {name: row[name] for name in same}
    main(["bench", "context", "--out", str(out)])  # the table again
    assert "| model |" in capsys.readouterr().out


def test_mistakes_are_one_sentence(folder: Path, tmp_path: Path, capsys: Any) -> None:
    def refused(*words: object) -> str:
        with pytest.raises(SystemExit) as end:
            main(["bench", "context", *map(str, words), *SMALL])
        assert end.value.code == 2
        return capsys.readouterr().err

    out, prose = tmp_path / "a.json", folder / "prose.txt"
    assert "no model is named; expected at least one" in refused("--out", out)
    assert "context is 1024, and" in refused(folder / "llama", "--context", 1024, "--out", out, "--code", prose)
    assert "was made for 512 tokens" in refused(folder / "llama", "--context", 1024, "--out", out, "--code", prose)
    assert "asks for uniform windows in a model of this" in refused(f"{folder}/run@0.5", "--out", out, "--code", prose)
    said = refused(folder / "run", "--context", 9000, "--out", out, "--code", prose)
    assert "tokens from character 0 on, and positions up to 9,000 are asked for; give a longer text" in said
    assert "distances is [512]; expected 1 … 256" in refused(folder / "run", "--distances", 512)
    assert "text and code are both empty" in refused(folder / "run", "--code", "")
    assert "expected each model once" in refused("a", "a")
    train(tiny(tmp_path, {"model.kind": "encoder", "train.steps": 1, "train.eval_every": 0}))
    assert "a model of kind 'encoder'; bench context expects" in refused(
        tmp_path / "run", "--code", prose, "--out", out
    )
    main(["bench", "context", str(folder / "run"), *SMALL, "--out", str(out), "--code", str(prose)])
    assert "measured with other questions, texts or settings" in refused(
        folder / "llama", "--code", prose, "--seed", 3, "--out", out
    )


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    lm = LM(ModelConfig(vocab=9, dim=16, layers=1, heads=2))
    write_folder(tmp_path / "bare", {"model": lm.state_dict()}, {"model": as_dict(lm.config)})
    with pytest.raises(ValueError, match="bare has no vocabulary; bench context expects a model that can"):
        open_model(str(tmp_path / "bare"), ContextBench(models=("bare",)))
    save_byte_llama(tmp_path / "llama", 512)
    for file in (tmp_path / "llama").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"llama has no tokenizer; expected tokenizer\.json or the like beside"):
        open_model(str(tmp_path / "llama"), ContextBench(models=("llama",)))
