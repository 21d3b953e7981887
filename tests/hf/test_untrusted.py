"""Folders of Hugging Face from elsewhere: code in them is never run, and whatever lies in them ends in one sentence."""

from __future__ import annotations

import ast
import io
import json
import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import tokenizers
import transformers

from spanformer import hf
from spanformer.core.peak import peak_of
from spanformer.hf.pretrained import load_causal_lm, load_config, load_tokenizer
from spanformer.hf.saved import load_fitted
from spanformer.hf.text import load_model
from spanformer.model.config import FeedForwardConfig, ModelConfig
from spanformer.model.lm import LM
from support.refusals import refusal

ROOT = Path(__file__).resolve().parents[2]
LOADERS: dict[str, Callable[[Path], object]] = {
    "load_model": lambda folder: load_model(str(folder)),
    "load_fitted": lambda folder: load_fitted(str(folder)),
    "from_pretrained": hf.from_pretrained,
    "load_config": load_config,
    "load_tokenizer": load_tokenizer,
    "load_causal_lm": load_causal_lm,
}
COMMANDS = {
    "fit-spans": ["fit-spans", "{folder}", "--data", "{folder}/text.txt", "--out", "{folder}/out"],
    "probe": ["probe", "{folder}"],
    "export-windows": ["export-windows", "{folder}", "--data", "{folder}/text.txt", "--out", "{folder}/out"],
}


def tiny_folder(path: Path) -> Path:
    """A Llama of bytes with a tokenizer and a text."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: n for n, c in enumerate(letters)}, []))
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(path)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=256, max_position_embeddings=256, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "text.txt").write_text("Some words of text. " * 400)
    return path


@pytest.fixture
def malicious(tmp_path: Path) -> tuple[Path, Path]:
    """(folder, the file that its code would write)"""
    folder, trace = tmp_path / "model", tmp_path / "it-ran"
    folder.mkdir()
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config = {"model_type": "evil", "auto_map": auto_map, "spanformer": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})
    )
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass Config: pass\n")
    (folder / "text.txt").write_text("text " * 1000)
    return folder, trace


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard input full of y."""
    typed = io.StringIO("y\n" * 100)
    monkeypatch.setattr(sys, "stdin", typed)
    return typed


@pytest.mark.parametrize("name", LOADERS)
def test_code_in_a_folder_is_never_run(name: str, malicious: tuple[Path, Path], yes: io.StringIO) -> None:
    folder, trace = malicious
    with pytest.raises(ValueError, match=r"could not be loaded .*it comes with its own code, which is never run"):
        LOADERS[name](folder)
    assert not trace.exists() and yes.tell() == 0, "nobody was asked"


@pytest.mark.parametrize("name", COMMANDS)
def test_command_never_runs_code_in_a_folder(
    name: str, malicious: tuple[Path, Path], yes: io.StringIO, capsys: pytest.CaptureFixture
) -> None:
    folder, trace = malicious
    assert "its own code, which is never run" in refusal([w.format(folder=folder) for w in COMMANDS[name]], capsys)
    assert not trace.exists() and yes.tell() == 0


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def with_pickle(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Bomb(folder / "it-ran")}, folder / "pytorch_model.bin")
    return "its weights are a pickle of more than tensors, which is never run; convert them to safetensors"


def with_other_pickle(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(folder / "it-ran")))
    return "could not be loaded as a causal language model: "


def with_config(**changes: object) -> Callable[[Path], str]:
    def change(folder: Path) -> str:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return "could not be loaded as a "

    return change


def with_gguf(header: bytes) -> Callable[[Path], str]:
    def change(folder: Path) -> str:
        (folder / "config.json").unlink()
        (folder / "model.gguf").write_bytes(header + bytes(100))
        return "the file is damaged" if header[8:] else "could not be loaded as a "

    return change


HOSTILE: dict[str, Callable[[Path], str]] = {
    "a pickle": with_pickle,
    "an older pickle": with_other_pickle,
    "hidden_size": with_config(hidden_size=10**6),
    "hidden_size that no tensor has": with_config(hidden_size=10**18),
    "hidden_size a little off": with_config(hidden_size=64),
    "layers": with_config(num_hidden_layers=10**7),
    "layers a few more": with_config(num_hidden_layers=3000),
    "one layer more": with_config(num_hidden_layers=3),
    "vocabulary": with_config(vocab_size=10**12),
    "heads as text": with_config(num_attention_heads="many"),
    "no heads": with_config(num_attention_heads=0),
    "unknown type": with_config(model_type="no-such-model"),
    "weights cut short": lambda folder: cut(folder / "model.safetensors"),
    "GGUF of 2^60 tensors": with_gguf(struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 1)),
    "GGUF of 2^60 values": with_gguf(struct.pack("<4sIQQ", b"GGUF", 3, 1, 2**60)),
    "GGUF of nothing": with_gguf(b"GGUF\x03\0\0\0"),
}


def cut(file: Path) -> str:
    file.write_bytes(file.read_bytes()[:-100])
    return "could not be loaded as a causal language model: "


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folder_ends_fitting_in_one_sentence(
    name: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    expected = HOSTILE[name](folder)
    said: list[str] = []
    arguments = [word.format(folder=folder) for word in COMMANDS["fit-spans"]]
    peak, seconds = peak_of(lambda: said.append(refusal(arguments, capsys)))
    assert expected in said[0], said
    assert not (folder / "it-ran").exists() and peak < 100e6 and seconds < 30, (peak, seconds)


def test_whole_folder_is_loaded(whole: Path) -> None:
    model, _ = load_model(str(whole))
    again = transformers.AutoModelForCausalLM.from_pretrained(whole)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, again.eval()(ids).logits)


def test_our_model_in_their_format_is_not_built_from_a_lie(tmp_path: Path) -> None:
    small = ModelConfig(vocab=17, dim=16, layers=2, heads=2, feedforward=FeedForwardConfig(dim=16))
    hf.SpanformerForCausalLM.from_lm(LM(small)).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    for lie in ({"dim": 2**31}, {"layers": 10**7}, {"layers": 4096}, {"vocab": 2**31}, {"vocab": 10**12}):
        (tmp_path / "config.json").write_text(json.dumps(whole | {"model": whole["model"] | lie}))

        def refuse() -> None:
            with pytest.raises(ValueError, match="could not be loaded as a c"):
                load_causal_lm(tmp_path)

        peak, seconds = peak_of(refuse)
        assert peak < 100e6 and seconds < 30, (lie, peak, seconds)


def test_only_one_module_asks_transformers_for_models() -> None:
    """A second one would forget `trust_remote_code=False` some day."""
    asking = set()
    for folder in ("src", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if "from_pretrained" not in source and "from_config" not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
                if name in ("from_pretrained", "from_config"):
                    asking.add((path.name, ast.unparse(node.func), "trust_remote_code=False" in ast.unparse(node)))
    assert asking == {
        ("pretrained.py", "kind.from_pretrained", True),
        ("pretrained.py", "AutoModelForCausalLM.from_config", True),
        # runs in an environment of its own, without spanformer
        ("kvpress_methods.py", "transformers.AutoModelForCausalLM.from_pretrained", True),
        ("kvpress_methods.py", "transformers.AutoTokenizer.from_pretrained", True),
    }
