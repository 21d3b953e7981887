"""`spanformer lm-eval` from end to end: tasks in local files, compared with what the models say themselves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason='needs lm-eval, which is large: pip install "spanformer[eval]"')
pytest.importorskip("accelerate", reason='needs lm-eval with its extra hf: pip install "spanformer[eval]"')

from spanformer import hf
from spanformer.cli.harness import Unended, evaluate, make
from spanformer.cli.main import main
from spanformer.core.fields import as_dict
from spanformer.data import Bytes, Words
from spanformer.hf.saved import load_fitted, save_fitted
from spanformer.model.config import ModelConfig
from spanformer.model.encoder import Encoder
from spanformer.model.folder import write_folder
from spanformer.model.load import load
from spanformer.train.run import train
from support.byte_llama import save_byte_llama
from support.tiny_runs import tiny
from support.workspace import ROOT

ROWS = [
    {"q": "The river stood behind the market, and nobody", "choices": ["had seen it.", "was"], "a": 0},
    {"q": "2+2=", "choices": ["4", "5", "6"], "a": 1},
    {"q": "A longer question, so that texts of a batch differ in length: one,", "choices": ["two", "1"], "a": 0},
]
CHOOSE = """
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: a
metric_list: [{metric: acc}]
"""
SAY = """
task: say
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{choices[a]}}"
generation_kwargs: {until: ["\\n", "z"], max_gen_toks: 40}
metric_list: [{metric: exact_match}]
"""
READ = """
task: read
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}"
metric_list: [{metric: bits_per_byte}]
"""
Score = Callable[[str, str], float]
"""nats of a text after another"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LMEVAL_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choose", CHOOSE), ("say", SAY), ("read", READ)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "data.jsonl")))
    return folder


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of bytes whose heads see 8 to 60 tokens."""
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("fitted")
    save_byte_llama(plain, 256, end="<end>")
    model, tokenizer, _ = load_fitted(str(plain))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.15)
    hf.attach(model, max_span=60, ramp=4, sink_tokens=2)
    with torch.no_grad():
        for n, spans in enumerate(hf.head_spans(model).values()):
            spans.ratio.copy_(torch.tensor([[0.07, 0.9], [1.0, 0.2]][n]))
    save_fitted(model, tokenizer, folder, {})
    return folder


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny(tmp_path_factory.mktemp("own"), {"train.steps": 3})).out


def run(model: Path | str, tasks: Path, out: Path, *more: str) -> dict[str, list[dict]]:
    """The rows that the harness writes for each task, in the order of the data."""
    main(["lm-eval", str(model), "--include_path", str(tasks), "--output_path", str(out), "--log_samples", *more])
    found = {}
    for file in out.rglob("samples_*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.name.removeprefix("samples_").rpartition("_")[0]] = sorted(rows, key=lambda row: row["doc_id"])
    return found


def check_scores(found: dict[str, list[dict]], score: Score, before: str) -> None:
    """Of `choose` and `read`. before: what the model reads before a text without context."""
    right = 0
    for row, asked in zip(found["choose"], ROWS, strict=True):
        want = [score(asked["q"], " " + choice) for choice in asked["choices"]]
        assert [float(scored[0][0]) for scored in row["resps"]] == pytest.approx(want, abs=2e-4)
        right += want.index(max(want)) == asked["a"]
    assert sum(row["acc"] for row in found["choose"]) == right
    for row, asked in zip(found["read"], ROWS, strict=True):
        assert float(row["resps"][0][0]) == pytest.approx(score(before, asked["q"]), abs=2e-4)


def cut(text: str) -> str:
    return text.split("\n")[0].split("z")[0].split("<end>")[0]


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["1", "2"])
def test_fitted_model(fitted: Path, tasks: Path, tmp_path: Path, monkeypatch, capsys, batch: str) -> None:
    made = []
    begin = hf.SpanCache.__init__
    monkeypatch.setattr(hf.SpanCache, "__init__", lambda cache, *a, **b: (made.append(cache), begin(cache, *a, **b))[1])
    found = run(fitted, tasks, tmp_path, "--tasks", "choose", "say", "read", "--batch_size", batch)
    shown = capsys.readouterr()
    assert "|choose|" in shown.out and f"'pretrained': '{fitted}'" in shown.out
    assert "Running" not in shown.err and "Tokenizing" not in shown.err  # the harness's own bars
    model, tokenizer, spans = load_fitted(str(fitted))
    assert spans

    @torch.no_grad()
    def score(before: str, text: str) -> float:
        ids = torch.tensor(tokenizer(before + text)["input_ids"])
        log_p = model(ids[None]).logits[0].double().log_softmax(-1)
        first = len(tokenizer(before)["input_ids"])
        return float(log_p[first - 1 : -1].gather(1, ids[first:, None]).sum())

    check_scores(found, score, "<end>")
    assert len(made) == {"1": 3, "2": 2}[batch] and {cache.layers[0].bits for cache in made} == {0}
    lengths = [cache.layers[0].rings.reach for cache in made]  # of rings, per head: 0.07 · 60 + 4 tokens or more
    assert all(one[0] < one[1] for one in lengths)
    for row, asked in zip(found["say"], ROWS, strict=True):
        ids = tokenizer(asked["q"], return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=40, do_sample=False, use_cache=False)
        assert row["resps"][0][0] == cut(tokenizer.decode(whole[0, ids.shape[1] :])) != ""


@pytest.mark.slow
@pytest.mark.parametrize("spans", [True, False], ids=["fitted", "plain"])
def test_bits_of_the_cache(fitted: Path, tasks: Path, tmp_path: Path, spans: bool) -> None:
    """Also of a model without spans, whose KV cache then holds everything."""
    model, tokenizer, _ = load_fitted(str(fitted))
    save_fitted(model if spans else hf.detach(model), tokenizer, tmp_path / "model", {})
    found = run(tmp_path / "model", tasks, tmp_path / "out", "--tasks", "say", "--bits", "4")
    if not spans:
        hf.attach(model)
    made: dict[int, list[str]] = {0: [], 4: []}
    for row in ROWS:
        ids = tokenizer(row["q"], return_tensors="pt")["input_ids"]
        for bits, texts in made.items():
            cache = hf.SpanCache(model, context=ids.shape[1] + 40, bits=bits)
            whole = model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False)
            texts.append(cut(tokenizer.decode(whole[0, ids.shape[1] :])))
    assert [row["resps"][0][0] for row in found["say"]] == made[4] != made[0]


@pytest.mark.slow
def test_retrieval_heads_of_a_fit(fitted: Path, tasks: Path, tmp_path: Path) -> None:
    settings = {"share": 0.5, "ring": 8, "k": 4}
    model, tokenizer, _ = load_fitted(str(fitted))
    save_fitted(model, tokenizer, tmp_path / "model", {"retrieve": settings})
    found = run(tmp_path / "model", tasks, tmp_path / "out", "--tasks", "say")
    hf.retrieve(model, **settings)
    for row, asked in zip(found["say"], ROWS, strict=True):
        ids = tokenizer(asked["q"], return_tensors="pt")["input_ids"]
        whole = model.generate(ids, past_key_values=hf.RetrievalCache(model), max_new_tokens=40, do_sample=False)
        assert row["resps"][0][0] == cut(tokenizer.decode(whole[0, ids.shape[1] :]))


@pytest.mark.slow
def test_own_model(own: Path, tasks: Path, tmp_path: Path) -> None:
    found = run(own, tasks, tmp_path, "--tasks", "choose", "say", "read", "--bits", "8")
    lm = load(own)

    @torch.no_grad()
    def score(before: str, text: str) -> float:
        ids = torch.tensor(list((before + text).encode()))
        log_p = lm(ids[None]).logits[0].double().log_softmax(-1)
        first = len(before.encode())
        return float(log_p[first - 1 : -1].gather(1, ids[first:, None]).sum())

    check_scores(found, score, "\n")
    for row, asked in zip(found["say"], ROWS, strict=True):
        cache, ids, made = lm.cache(1, bits=8), [10, *asked["q"].encode()], b""
        for _ in range(40):
            logits = lm.decode(torch.tensor([ids]), cache, logits="last")
            ids = [int(logits[0].argmax())]
            made += bytes(ids)
        assert row["resps"][0][0] == cut(made.decode(errors="replace"))


@pytest.mark.slow
def test_tasks_of_the_documentation(own: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    found = run(own, Path("examples/lm_eval"), tmp_path, "--tasks", "capitals", "capitals_write")
    assert [len(found[name]) for name in ("capitals", "capitals_write")] == [12, 12]
    for row in found["capitals"]:
        assert row["doc"]["cities"][int(row["target"])] == row["doc"]["capital"]


@pytest.mark.slow
def test_progress_counts_requests(fitted: Path, own: Path, tasks: Path) -> None:
    for model in (fitted, own):
        seen: list[tuple[str, float, float]] = []
        words = ["--include_path", str(tasks), "--tasks", "choose", "say", "--limit", "2"]
        table = evaluate(str(model), words, 0, lambda *stage, seen=seen: seen.append(stage))
        assert "|choose|" in table
        titles = list(dict.fromkeys(title for title, _, _ in seen))
        assert titles[:3] == ["loading tasks", f"loading {model}", "preparing requests"]
        choices = sum(len(row["choices"]) for row in ROWS[:2])
        for title, total in (("log-likelihoods", choices), ("generating", 2)):
            assert [stage for stage in seen if stage[0] == title] == [(title, n, total) for n in range(total + 1)]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture):
    def refused(*arguments: object) -> str:
        with pytest.raises(SystemExit) as end:
            main(["lm-eval", *map(str, arguments)])
        said = capsys.readouterr()
        assert end.value.code == 2 and "Traceback" not in said.err, said.err
        (sentence,) = [line for line in said.err.splitlines() if line.startswith("spanformer: ")]
        return sentence.removeprefix("spanformer: ")

    return refused


@pytest.mark.parametrize(
    "words, said",
    [
        (("--foo", "3"), "the harness does not take these options: unrecognized arguments: --foo 3"),
        (("--limit", "x"), "the harness does not take these options: argument --limit/-L: invalid float value: 'x'"),
        (("--model", "hf"), "--model is 'hf'; leave it out, the model is the argument before all options"),
        (("--model_args", "pretrained=x"), "--model_args has 'pretrained'; expected some of dtype, max_length,"),
        (("--trust_remote_code",), "trust_remote_code is given; code that comes with a model is never run"),
    ],
)
def test_option_of_the_harness_that_does_not_fit(refused, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert refused(tmp_path, "--tasks", "choose", *words).startswith(said)


def test_file_of_options(refused, tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text("limit: 3\n")
    assert refused(tmp_path, "-C", file) == f"{file} names no tasks; add them to it, or give --tasks"
    file.write_text("tasks: [choose]\nmodel_args: {dtype: float32}\n")
    assert refused(tmp_path, "-C", file).startswith(f"{file} sets model_args; leave it out, and give --model_args")


@pytest.mark.slow
def test_tasks_that_cannot_run(refused, own: Path, tasks: Path, tmp_path: Path) -> None:
    here = ("--include_path", tasks, "--tasks")
    assert refused(own, *here, "no_such_task") == "Tasks not found: no_such_task"
    assert refused(tmp_path, *here, "choose").startswith(f"{tmp_path} holds no model (0 .gguf files and no config.json")
    assert refused(own, *here, "say", "--apply_chat_template").startswith("a chat template is asked for, and a model")
    assert refused(own, *here, "say", "--gen_kwargs", "do_sample=True").startswith("this task asks for sampling; expe")


def test_models_that_do_not_fit(own: Path, fitted: Path, tmp_path: Path) -> None:
    def error(name: Path, **options: object) -> str:
        with contextlib.ExitStack() as stack, pytest.raises(ValueError) as caught:
            make(str(name), report=lambda *_: None, stack=stack, **options)
        return str(caught.value)

    assert (
        error(own, dtype="float32") == f"--model_args has 'dtype', which is for Hugging Face models; {own} takes none"
    )
    assert (
        error(fitted, dtype="float3")
        == "dtype of --model_args is 'float3'; expected auto, float32, bfloat16 or float16"
    )
    assert error(own, device="gpu").startswith("--device is 'gpu'; expected a device of PyTorch, such as cpu or cuda:0")
    endless = tmp_path / "endless"
    save_byte_llama(endless, 64)
    assert error(endless).startswith("the tokenizer has no end-of-text token, with which the harness begins texts")
    encoder = tmp_path / "encoder"
    config = ModelConfig(kind="encoder", vocab=256, dim=16, layers=1, heads=2)
    write_folder(encoder, {"model": Encoder(config).state_dict()}, {"model": as_dict(config)})
    assert error(encoder) == f"{encoder} holds a model of kind 'encoder'; expected a language model"


def test_part_of_a_text_has_no_end_of_a_line() -> None:
    words = Unended(Words(["<unk>", "<eos>", "the", "sky", "is", "blue"]))
    assert words.encode("the sky is") == [2, 3, 4] and words.encode("the sky is blue") == [2, 3, 4, 5]
    assert words.encode("the\nsky\n") == [2, 1, 3, 1] and words.encode("\n") == [1] and words.encode("") == []
    assert words.decode([2, 5]) == "the blue" and Unended(Bytes()).encode("a\n") == [97, 10]
