"""Every option of every command with a value that will not do: one sentence that names the option and its range."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path

import pytest
import tyro

from spanformer.cli.main import COMMANDS, main
from spanformer.cli.options import _explain, _shown
from spanformer.core.fields import build, members, walk
from spanformer.train.config import RunConfig
from spanformer.train.run import train
from support.tiny_runs import options, tiny

HUGE = "9" * 30
(POSITIONAL,) = typing.get_args(tyro.conf.Positional[str])[1:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("options")
    return str(train(tiny(folder, {"train.steps": 1})).out)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture):
    def refused(arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        said = capsys.readouterr()
        assert end.value.code == 2 and "Traceback" not in said.err, said.err
        (sentence,) = [line for line in said.err.splitlines() if line.startswith("spanformer: ")]
        return sentence.removeprefix("spanformer: ")

    return refused


@pytest.mark.parametrize("words", COMMANDS)
def test_word_for_a_number_names_the_option(words: str) -> None:
    leaf = getattr(importlib.import_module(COMMANDS[words].module), COMMANDS[words].name)
    seen = {key for key, _ in walk(RunConfig)} if words in ("compare", "sweep") else ()  # read as `train` reads them
    for key, entry in walk(leaf.options):
        numbers = [kind for kind in members(entry.hint) if kind in (int, float)]
        if POSITIONAL in entry.notes or not numbers or key in seen:
            continue
        kind = "a number" if float in numbers else "a whole number"
        for wrong in ("", "1e" if float in numbers else "1.5"):
            assert _explain(leaf.options, [f"{_shown(key)}={wrong}"]) == f"{_shown(key)} is {wrong!r}; expected {kind}"


NO_NUMBER = "expected a finite number, 0 or more"
TRAIN: dict[tuple[str, str], str] = {
    ("--train.batch", "0"): "train.batch is 0; expected at least 1",
    ("--train.block", "-1"): "train.block is -1; expected at least 1",
    ("--train.steps", "0"): "train.steps is 0; expected at least 1",
    ("--train.minutes", "-1"): f"train.minutes is -1.0; {NO_NUMBER}",
    ("--train.minutes", "inf"): f"train.minutes is inf; {NO_NUMBER}",
    ("--train.eval-every", "-1"): f"train.eval_every is -1; {NO_NUMBER}",
    ("--train.threads", "-1"): f"train.threads is -1; {NO_NUMBER}",
    ("--train.masked", "0"): "train.masked is 0.0; expected a share of the tokens, above 0 and at most 1",
    ("--train.masked", "1e30"): "train.masked is 1e+30; expected a share of the tokens, above 0 and at most 1",
    ("--train.seed", HUGE): f"train.seed is {HUGE}; expected 0 … 2147483647",
    ("--model.dim", "0"): "model.dim is 0; expected at least 1",
    ("--model.heads", HUGE): f"model.heads is {HUGE}; expected at most 4,096",
    ("--model.layers", HUGE): f"model.layers is {HUGE}; expected at most 4,096",
    ("--model.vocab", HUGE): f"model.vocab is {HUGE}; expected at most 2,147,483,648",
    ("--model.attention.max-span", str(2**63 - 1)): f"model.attention.max_span is {2**63 - 1}; expected at most 2,147",
    ("--model.attention.ramp", "1e300"): "model.attention.ramp is 1e+300; expected a positive, finite number of tokens",
    ("--model.kv-heads", "-1"): "model.kv_heads is -1; expected at least 0",
    ("--model.attention.init", "1e30"): "model.attention.init is 1e+30; expected a share of max_span, 0 … 1",
    ("--model.attention.kind", ""): "model.attention.kind is ''; expected a kind (adaptive_span, ",
    ("--model.attention.kind", "window(1.5)"): "window in model.attention.kind, 'window(window=1.5)', is 1.5; expected",
    ("--model.attention.kind", "sink_window(64, 1.5)"):
        "sink_tokens in model.attention.kind, 'sink_window(window=64, sink_tokens=1.5)', is 1.5",
    ("--model.attention.kind", f"window({HUGE})"):
        f"window in model.attention.kind, 'window({HUGE})', is '{HUGE}'; expected",
    ("--model.attention.kind", f"window({'9' * 5000})"): "window in model.attention.kind, 'window(9999",
    ("--data.valid", "0"): "valid is 0.0; expected a share of the text, between 0 and 1",
    ("--data.limit", "-1"): "limit is -1; expected a number of bytes, or 0 for all",
}  # fmt: skip


@pytest.mark.parametrize("option, value", TRAIN, ids=lambda text: text[:40])
def test_training_option_out_of_range_names_it(tmp_path: Path, refused, option: str, value: str) -> None:
    """Of `train`, `compare` and `sweep`, which read the same fields."""
    assert refused(["train", *options(tmp_path), f"{option}={value}"]).startswith(TRAIN[option, value])
    assert not (tmp_path / "run").exists()


GENERATE = ("--prompt", "abc", "--max-tokens", "3")
READ: dict[tuple[str, ...], str] = {
    ("generate", "{}", *GENERATE, "--max-tokens", "0"): "max_tokens is 0; expected 1 or more",
    ("generate", "{}", *GENERATE, "--lookup", "-1"): "lookup is -1; expected 0 … 1,024",
    ("generate", "{}", *GENERATE, "--lookup", HUGE): f"lookup is {HUGE}; expected 0 … 1,024",
    ("generate", "{}", *GENERATE, "--beams", "0"): "beams is 0; expected 1 … 1,024",
    ("generate", "{}", *GENERATE, "--beams", HUGE): f"beams is {HUGE}; expected 1 … 1,024",
    ("generate", "{}", *GENERATE, "--chunk", "0"): "chunk is 0; expected 1 or more",
    ("generate", "{}", *GENERATE, "--temperature", "-1"): "temperature is -1.0; expected 0 or more",
    ("generate", "{}", *GENERATE, "--temperature", "inf"): "temperature is inf; expected 0 or more",
    ("generate", "{}", *GENERATE, "--top-k", "-1"): "top_k is -1; expected a number of tokens, or 0 for all",
    ("generate", "{}", *GENERATE, "--top-p", "1e30"): "top_p is 1e+30; expected a probability above 0, up to 1",
    ("generate", "{}", *GENERATE, "--repetition", "1e-300"): "repetition is 1e-300; expected 0.001 … 1,000; 1 is no pe",
    ("generate", "{}", *GENERATE, "--repetition-window", "0"): "repetition_window is 0; expected 1 or more tokens",
    ("generate", "{}", *GENERATE, "--seed", HUGE): f"seed is {HUGE}; expected 0 … 2⁶³ − 1",
    ("generate", "{}", *GENERATE, "--cache-bits", "5"): "--cache-bits is '5'; expected one of 0, 8, 4",
    ("score", "{}", __file__, "--chunk", "-1"): "chunk is -1; expected 1 or more",
    ("eval", "{}", "--lanes", HUGE): f"lanes is {HUGE}; expected at most 315, the tokens of the text",
    ("eval", "{}", "--block", "-1"): "block is -1; expected 0 or more",
    ("eval", "{}", "--beams", "0"): "beams is 0; expected 1 or more",
    ("eval", "{}", "--rounds", "-1"): "rounds is -1; expected 0 or more",
    ("eval", "{}", "--rounds", HUGE): f"rounds is {HUGE}, and the model has no attention of kind lsh; expected 0",
    ("heatmap", "{}", "--text", "x" * 5000): "--text has 5,000 tokens; expected 1 … 1,024, the limit of a picture",
    ("heatmap", "{}", "--text", ""): "text is empty; expected a text for the model to process",
    ("heatmap", "{}", "--text", "abc", "--layer", HUGE): f"layer is {HUGE}; the model has 2, counted from 1",
    ("heatmap", "{}", "--text", "abc", "--head", "-1"): "head is -1; expected a number from 1 on, or 0",
    ("show", "Window(4)", "--length", "0"): "length is 0; expected 1 … 1024, the limit of a picture",
    ("show", "Window(4)", "--length", HUGE): f"length is {HUGE}; expected 1 … 1024, the limit of a picture",
    ("show", "Window(4)", "--dim", "-1"): "dim is -1; expected at least 1",
    ("show", f"window({HUGE})"): f"window in model.attention.kind, 'window({HUGE})', is '{HUGE}'; expected",
    ("cost", "--length", "-1"): "length is -1; expected at least 1",
    ("cost", "--kv-heads", "-1"): "kv_heads is -1; expected a whole number, 0 or more",
    ("cost", "--kinds", ""): "--kinds is ''; expected a kind (adaptive_span, dynamic_span, window, full",
    ("data", "stdlib", "--test", "1e30"): "test is 1e+30; expected a share of the text, between 0 and 1",
    ("fit-spans", "none", "--data", "x", "--context", "0"): "context is 0; expected",
    ("fit-spans", "none", "--data", "x", "--budget", "1e30"): "budget is 1e+30; expected",
    ("fit-spans", "none", "--data", "x", "--lr", "nan"): "lr is nan; expected a positive number",
    ("export-windows", "none", "--data", "x", "--out", "{}new", "--texts", "0"): "texts is 0 and context 0; expected",
    ("fit-spans", "none", "--data", "x", "--sink-tokens", "-1"): "sink_tokens is -1; expected a number of tokens",
    ("probe", "none", "--contexts", "0"): "contexts is [0]; expected at least one length, each at least 1",
    ("probe", "none", "--depths", "0"): "depths is 0; expected 2 or more",
    ("probe", "none", "--tasks", "-1"): "tasks is -1; expected 1 or more",
    ("probe", "none", "--sink-tokens", "-1"): "sink_tokens is -1; expected 0 or more",
    ("probe", "none", "--budget", "-1"): "budget is -1.0; expected 0 or more",
    ("probe", "none", "--budget", "1e30"): "budget is 1e+30; expected a share of the full key/value memory, up to 1",
}  # fmt: skip


@pytest.mark.parametrize("words", READ, ids=lambda words: " ".join(words)[:60])
def test_option_out_of_range_names_it(refused, model: str, words: tuple[str, ...]) -> None:
    assert refused([word.format(model) for word in words]).startswith(READ[words])


RIGHT = [
    ("generate", "{}", *GENERATE, "--temperature", "1e-300"),
    ("generate", "{}", *GENERATE, "--temperature", "5e-324"),
    ("generate", "{}", *GENERATE, "--temperature", "1e30"),
    ("generate", "{}", *GENERATE, "--top-k", HUGE),
    ("generate", "{}", *GENERATE, "--chunk", HUGE),
    ("score", "{}", str(Path(__file__).with_name("test_help.py")), "--chunk", HUGE),
    ("eval", "{}", "--limit", "50", "--block", HUGE),
    ("eval", "{}", "--limit", HUGE),
    ("cost", "--length", HUGE, "--kinds", "window(2147483648)"),
]


@pytest.mark.parametrize("words", RIGHT, ids=lambda words: " ".join(words)[:60])
def test_extreme_value_that_has_a_meaning_is_taken(capsys, model: str, words: tuple[str, ...]) -> None:
    main([word.format(model) for word in words])
    assert capsys.readouterr().out


def test_lowest_temperature_takes_the_likeliest_token(capsys, model: str) -> None:
    texts = []
    for temperature in ("0", "1e-300"):
        main(["generate", model, *GENERATE, "--temperature", temperature])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("key, meant", [("name", ""), ("resum", "; did you mean resume?")])
def test_unknown_key_of_a_run_file_is_a_sentence(key: str, meant: str) -> None:
    with pytest.raises(ValueError, match=r"^unknown key") as caught:
        build(RunConfig, {key: "a"}, "x.toml")
    known = "out, resume, data, model, optim, train, retrieve"
    assert str(caught.value) == f"unknown key {key} in x.toml{meant} (known: {known})"


def test_sizes_that_no_memory_holds_are_one_sentence(refused, monkeypatch, model: str) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory\nstack")

    monkeypatch.setattr("spanformer.model.load.load_any", fail)
    said = refused(["spans", model])
    assert said.startswith("out of memory (") and said.endswith("); choose smaller sizes")
