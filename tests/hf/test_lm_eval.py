"""Our model in the evaluation harness."""

from __future__ import annotations

import pytest
import torch

from spanformer import LM, ModelConfig
from spanformer.data.vocab import Bytes
from spanformer.model.config import AttentionConfig

lm_eval = pytest.importorskip("lm_eval", reason='needs lm-eval, which is large: pip install "spanformer[eval]"')

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from spanformer.hf.lm_eval import HarnessLM  # noqa: E402


@pytest.fixture
def harness() -> HarnessLM:
    torch.manual_seed(0)
    attention = AttentionConfig(max_span=32, ramp=4, init=0.3)
    lm = LM(ModelConfig(vocab=256, dim=32, layers=2, heads=2, attention=attention))
    return HarnessLM(lm, Bytes(), start=10, longest=12)


def ask(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=n) for n, a in enumerate(arguments)]


def score(lm: LM, before: bytes, text: bytes) -> float:
    ids = torch.tensor([list(before + text)])
    with torch.no_grad():
        log_p = lm(ids).logits[0, :-1].double().log_softmax(-1)
    return sum(float(log_p[len(before) - 1 + n, byte]) for n, byte in enumerate(text))


def test_likelihoods(harness: HarnessLM) -> None:
    found = harness.loglikelihood(ask("loglikelihood", ("The sky is", " blue"), ("", "So"), ("a ", "b")))
    want = [(b"The sky is", b" blue"), (b"\n", b"So"), (b"a", b" b")]
    assert [s for s, _ in found] == pytest.approx([score(harness.lm, *pair) for pair in want], abs=1e-6)
    text = "Round the rugged rock the ragged rascal ran. " * 3
    (whole,) = harness.loglikelihood_rolling(ask("loglikelihood_rolling", (text,)))
    assert whole == pytest.approx(score(harness.lm, b"\n", text.encode()), abs=1e-5)


def test_greedy_and_stops(harness: HarnessLM) -> None:
    (text,) = harness.generate_until(ask("generate_until", ("Once upon", {"until": []})))
    ids = [10, *b"Once upon"]
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(harness.lm(torch.tensor([ids])).logits[0, -1].argmax()))
    assert text == Bytes().decode(ids[10:])
    stop = text[4:6]
    (short,) = harness.generate_until(ask("generate_until", ("Once upon", {"until": [stop], "max_gen_toks": 12})))
    assert short == text[: text.find(stop)]
    with pytest.raises(ValueError, match="this task asks for sampling; expected greedy generation"):
        harness.generate_until(ask("generate_until", ("a", {"until": [], "do_sample": True})))


def test_options_of_greedy_tasks(harness: HarnessLM) -> None:
    """Those that do not change the likeliest token, under the names that tasks use."""
    plain = {"until": [], "max_gen_toks": 5}
    others = [
        {"until": [], "max_new_tokens": 5, "num_beams": 1}, plain | {"do_sample": False, "temperature": 0.7},
        plain | {"top_p": 0.95, "temperature": 0.0},
    ]  # fmt: skip
    texts = harness.generate_until(ask("generate_until", *(("Once", options) for options in [plain, *others])))
    assert len(set(texts)) == 1
    for wrong in ({"num_beams": 4}, {"temperature": 0.7}, {"repetition_penalty": 1.2}):
        with pytest.raises(ValueError, match=r"this task asks for .*; expected greedy generation"):
            harness.generate_until(ask("generate_until", ("Once", plain | wrong)))


def test_continuation_that_is_the_start_alone(harness: HarnessLM) -> None:
    assert harness.loglikelihood(ask("loglikelihood", ("", "\n"))) == [(0.0, True)]


@pytest.mark.slow  # the harness brings much with it
def test_task_of_the_harness(harness: HarnessLM, tmp_path, monkeypatch) -> None:
    """From end to end, on a task of three questions in a file."""
    (tmp_path / "data.jsonl").write_text('{"q": "2+2=", "a": 1}\n{"q": "3+1=", "a": 0}\n{"q": "1+1=", "a": 1}\n')
    task = {
        "task": "three_sums", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "train",
        "dataset_kwargs": {"data_files": str(tmp_path / "data.jsonl"), "cache_dir": str(tmp_path)},
        "doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "doc_to_choice": ["4", "5"],
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    known = TaskManager(include_defaults=False)
    results = lm_eval.simple_evaluate(model=harness, tasks=[task], task_manager=known, bootstrap_iters=0)
    assert results is not None
    found = results["results"]["three_sums"]
    right = 0
    for question, answer in (("2+2=", 1), ("3+1=", 0), ("1+1=", 1)):
        scores = [score(harness.lm, question.encode(), choice) for choice in (b"4", b"5")]
        right += int(scores[answer] > scores[1 - answer])
    assert found["acc,none"] == pytest.approx(right / 3)


def test_start_outside_the_vocabulary() -> None:
    lm = LM(ModelConfig(vocab=256, dim=32, layers=1, heads=2))
    with pytest.raises(ValueError, match="start is 256; expected an id of the vocabulary, 0 … 255"):
        HarnessLM(lm, Bytes(), start=256)
