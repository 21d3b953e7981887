"""Every benchmark runs at reduced size, explains itself, and keeps what it measured."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

from spanformer.bench import decode, positions
from spanformer.bench.contenders import unusable_backend
from spanformer.bench.depth import DepthBench
from spanformer.bench.depth_price import at_equal_bits, cheapest
from spanformer.bench.per_token import relative_per_token
from spanformer.bench.results import PartsFile
from spanformer.bench.session import Bench, BenchOptions, check_same, recorded
from spanformer.bench.timing import Timing
from spanformer.cli.main import COMMANDS, _parse, main
from spanformer.memory import HeadCache
from spanformer.model import linear

NAMES = sorted(words.removeprefix("bench ") for words in COMMANDS if words.startswith("bench "))
SHARED = ("--budget", "--quick", "--threads", "--out")
needs_native = pytest.mark.skipif(bool(unusable_backend("native")), reason="the native kernel cannot run here")


def bench(tmp_path: Path, name: str, *options: str) -> dict:
    """What the result file holds of each part after a quick run."""
    out = tmp_path / f"{name}.json"
    main(["bench", name, "--quick", "--threads", "1", "--out", str(out), *options])
    held = json.loads(out.read_text())
    assert held["kind"] == f"spanformer benchmark {name}"
    assert all(part["machine"]["torch"] and part["options"]["quick"] for part in held["parts"].values())
    return {name: part["found"] for name, part in held["parts"].items()}


@pytest.mark.parametrize("name", NAMES)
def test_help_explains_the_shared_options(name, capsys):
    if name in ("context", "hf", "fit-spans", "knn", "retrieval"):
        pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as end:
        main(["bench", name, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and all(option in shown for option in SHARED)
    assert f"spanformer bench {name}" in shown


@needs_native
def test_per_token(tmp_path, capsys):
    found = bench(tmp_path, "per-token", "--lengths", "64", "128")
    assert [row["length"] for row in found["per_token"]] == [64, 128]
    shown = capsys.readouterr()
    assert "longest over shortest" in shown.out and f"results: {tmp_path / 'per-token.json'}" in shown.out


def test_reversible(tmp_path, capsys):
    found = bench(tmp_path, "reversible")
    assert [row["layers"] for row in found["memory"]] == [1, 2, 4] * 4
    assert all(row["mib"] is not None for row in found["memory"]), found["memory"]
    assert set(found["step"]) == {"residual", "reversible"}
    assert set(found["chunks of a reversible stack"]) == {"all at once", "chunks of 1,024"}


def test_rl(tmp_path, capsys):
    pytest.importorskip("gymnasium")
    found = bench(tmp_path, "rl", "--envs", "4")["throughput"]
    assert set(found) == {"t_maze", "CartPole"} and {"GTrXL, batch", "LSTM, batch"} < set(found["t_maze"])
    assert all(row["steps_per_second"] > 0 for rows in found.values() for row in rows.values())
    assert "t_maze: 4 environments, windows of 8 steps" in capsys.readouterr().out


def test_positions(tmp_path, capsys):
    found = bench(tmp_path, "positions", "--length", "32")["positions"]
    assert set(found["over_none"]) == set(positions.encodings(32))
    assert all(row["everything"] > 0 and row["window"] > 0 for row in found["over_none"].values())
    assert "transformer_xl" in capsys.readouterr().out


def test_positions_that_are_wrong_get_no_speed(monkeypatch):
    right = positions.step

    def wrong(position, *rest):
        found = right(position, *rest)
        return found if "reference" in rest else [t * 1.001 for t in found]

    positions.check(60, 20)
    monkeypatch.setattr(positions, "step", wrong)
    with pytest.raises(ValueError, match="none differs from the dense reference"):
        positions.check(60, 20)


@needs_native
def test_longformer(tmp_path):
    found = bench(tmp_path, "longformer")
    assert found["dense"]["off"] < 1e-4 and found["dense"]["rows"]["ours"]["times_as_fast_as_dense"] > 0
    assert [row["length"] for row in found["flat"]] == [256, 512]


@needs_native
def test_patterns(tmp_path, capsys):
    found = bench(tmp_path, "patterns", "--parts", "speed", "flat")
    assert found["speed"][0]["name"] == "window 256" and found["speed"][0]["off"] < 1e-4
    assert len(found["flat"]) == 10
    assert "blockwise, blocks of 256" in capsys.readouterr().out


@needs_native
def test_linear(tmp_path, capsys):
    found = bench(tmp_path, "linear", "--kinds", "linear")
    assert [row["length"] for row in found["speed"]] == [64, 128] and found["speed"][0]["times_as_fast"] > 0
    assert found["flat"][0]["us_per_token"][0] > 0 and len(found["decode"][0]["us"]) == 3
    assert all(row["off"] < 1e-4 for part in ("speed", "flat", "decode") for row in found[part])
    peak = found["memory"][0]
    assert "reason" in peak or 3.9 < peak["units_of_q"] < 9  # out and the gradients of q, k and v are four
    assert {row["name"] for row in found["peers"]} >= {"ours", "transformers"}
    assert all(row["changed_rows"] == 0 for row in found["peers"] if row["name"] == "ours")
    capsys.readouterr()
    bench(tmp_path, "linear", "--parts", "table")
    assert "Times as fast as full causal SDPA" in capsys.readouterr().out


def test_products(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(linear, "_onednn", object())
    monkeypatch.setattr(linear, "_run", lambda x, weight, _bias, _activation: x @ weight.t())
    found = bench(tmp_path, "products", "--rows", "4")["products"]
    assert len(found) == 12 and found[0]["gflops"]["mkl"] > 0
    monkeypatch.setattr(linear, "_onednn", None)
    main(["bench", "products", "--out", str(tmp_path / "none.json")])
    shown = capsys.readouterr().out
    assert "there is nothing to compare" in shown and not (tmp_path / "none.json").exists()


def test_decode(tmp_path, capsys):
    found = bench(tmp_path, "decode", "--tokens", "256")
    assert found["decode"]["attention_ms"]["rings"] > 0 and found["decode"]["cache_bytes"] > 0
    assert found["prefill"]["tokens"] == 256 and found["prefill"]["sdpa"]["seconds"] > 0
    assert found["stream"]["rows"][-1]["seen"] >= 256
    assert "times as fast as SDPA over a full cache" in capsys.readouterr().out


def test_full_prefill_computes_the_model(monkeypatch):
    """The contender of prefill, where every head sees everything: the same keys and values as the model's own."""
    lm, x = decode.model(3, dim=32, heads=4, long=64), torch.randint(0, 256, (1, 24))
    read, seen = HeadCache.read, []

    def spy(layer, q, k, v, rule, **options):
        seen.append((k, v))
        return read(layer, q, k, v, rule, **options)

    monkeypatch.setattr(HeadCache, "read", spy)
    with torch.no_grad():
        for spans in lm.spans_modules():
            spans.ratio.fill_(1.0)
    kept = decode.full_prefill(lm, x, piece=7)
    lm.decode(x, lm.cache(1), logits="none")
    assert len(kept) == len(seen) == 3
    for mine, theirs in zip(kept, seen, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_train_step_without_a_clone(tmp_path, capsys):
    found = bench(tmp_path, "train-step", "--rounds", "1", "--profiles", "small-ramp")["small-ramp"]
    assert found["seconds"]["ours"] > 0 and found["peak_bytes"]["ours"] > 0 and "speedup" not in found
    assert "s a step; peak memory" in capsys.readouterr().out


def test_quality_without_a_clone(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the quick brown fox {n} jumps over the lazy dog\n" for n in range(400)))
    found = bench(tmp_path, "quality", "--source", str(text))
    assert set(found) == {"ours", "modern"} and found["ours"]["steps"] == 3 and 0 < found["ours"]["bits"] < 12
    assert "modern: bits " in capsys.readouterr().out


def test_gallery_measures_and_writes_its_page(tmp_path):
    pytest.importorskip("matplotlib")
    found = bench(tmp_path, "gallery", "--names", "window", "alibi")
    assert set(found["attention"]["ratios"]) == {"window"} and set(found["position"]["ratios"]) == {"alibi"}
    found = bench(tmp_path, "gallery", "--names", "full")
    assert set(found["attention"]["ratios"]) == {"window", "full"}
    from spanformer.bench.gallery_page import page

    text = page(PartsFile(tmp_path / "gallery.json", "gallery").parts)
    assert "### window" in text and text.count("Measured:") == 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of bytes, and prose to read."""
    pytest.importorskip("transformers")
    from support.byte_llama import save_byte_llama

    folder = tmp_path_factory.mktemp("llama")
    save_byte_llama(folder, 256)
    for name in ("train.txt", "valid.txt"):
        (folder / name).write_text("The river stood behind the market, and nobody had ever seen it so quiet.\n" * 40)
    return folder


def test_hf(llama, tmp_path, capsys):
    found = bench(tmp_path, "hf", "--model", str(llama), "--new", "2")
    assert found["logits"]["between"] < 1e-3 and found["prefill"]["off"] < 1e-4
    held = found["decode"]["rows"]
    assert 0 < held["8 bits, short spans"]["bytes"] < held["SpanCache, short spans"]["bytes"] / 2
    assert "generate() after 48 tokens" in capsys.readouterr().out


def test_retrieval(llama, tmp_path, capsys):
    found = bench(
        tmp_path, "retrieval", "--model", str(llama), "--text", str(llama / "valid.txt"), "--context", "160", "--texts",
        "1", "--k", "8", "--new", "2", "--divisor", "16",
    )  # fmt: skip
    assert found["certificates"]["broken"] == 0 and found["certificates"]["left_out_most"] > 0
    assert len(found["key"]["full"]) == 5 and found["bits"]["full"] > 0
    held = found["decode"]["bytes"]
    assert held["retrieval heads"] == held["rings alone"] < held["full attention, float32"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["bench", "retrieval", "--quick"])
    assert "text is empty; expected a file for bits and certificates" in capsys.readouterr().err


def test_fit_spans(llama, tmp_path, capsys):
    options = ("--model", str(llama), "--prose", str(llama), "--dtype", "float32", "--divisors", "3")
    found = bench(tmp_path, "fit-spans", *options)
    assert set(found) == {"survey:prose", "fit:prose:3", "measure:prose"}
    assert {"full", "uniform /3", "learned, prose /3"} <= set(found["measure:prose"])
    capsys.readouterr()
    bench(tmp_path, "fit-spans", *options, "--parts", "survey:prose")
    assert "survey:prose: already measured" in capsys.readouterr().out
    rows = bench(tmp_path, "fit-spans", *options, "--parts", "kv:prose")["kv:prose"]
    assert [rows[f"all tokens, {bits} bits"]["rise"] != 0 for bits in (16, 8, 4)] == [False, True, True]
    shares = [rows[f"learned /3, {bits} bits"]["share"] for bits in (16, 8, 4)]
    # of heads of 8 numbers: 16 bytes, 8 and a scale of 4, and 16 of a whole group of 32 with its step and low
    assert shares == pytest.approx([shares[0], shares[0] * 12 / 16, shares[0] * 20 / 16]) and shares[0] < 1 / 3
    found = bench(tmp_path, "fit-spans", *options, "--parts", "far:prose:3", "--far-features", "2")["far:prose:3"]
    assert found["state_bytes"] >= 0 and 0 < found["share"] <= 1 / 3 and found["bits"] > 0 and found["kl"]
    more = ("layered:prose", "layers:prose:3", "exported:prose:3", "long:prose:3", "recall:prose:3")
    found = bench(tmp_path, "fit-spans", *options, "--tasks", "1", "--parts", *more)
    assert set(found["layers:prose:3"]["bits"]) == {"full", "fitted windows", "windows by head, as surveyed"}
    assert found["exported:prose:3"]["longest"]["share"] >= found["exported:prose:3"]["shortest"]["share"]
    rows = found["long:prose:3"]["rows"]
    assert rows["full"]["share"] == 1 and 0.3 < rows["windows that grow"]["share"] <= 1 / 3
    assert rows["uniform windows that grow"]["share"] == pytest.approx(1 / 3, abs=0.02)
    assert {name: len(each) for name, each in found["recall:prose:3"].items()} == dict.fromkeys(rows, 5)


def test_knn(llama, tmp_path, capsys):
    (tmp_path / "other.txt").write_text("The market stood behind the river, and it was quiet.\n" * 8)
    found = bench(
        tmp_path, "knn", "--model", str(llama), "--train", str(llama / "train.txt"), "--valid",
        str(tmp_path / "other.txt"), "--test", str(tmp_path / "other.txt"), "--store", str(tmp_path / "store"),
        "--name", "prose", "--k", "8",
    )["prose"]  # fmt: skip
    (row,) = found["sizes"]
    assert row["entries"] == found["entries"] == 73 * 40 - 1 and row["change"] < -0.1
    assert set(found["forms"]["rows"]) == {"float16", "int8"}  # its keys have fewer than 256 numbers
    assert (
        found["forms"]["rows"]["float16"]["recall"] == 1 and found["forms"]["rows"]["int8"]["recall"] > 0.5
    )  # of keys that are nearly alike
    assert "frequencies of its tokens alone" in capsys.readouterr().out


@needs_native
def test_search(tmp_path, capsys):
    found = bench(tmp_path, "search", "--k", "8")
    assert set(found) == {"heads", "store"} and found["store"]["dim"] == 576
    assert all(row["recall"] > 0.9 for rows in found["heads"]["queries"].values() for row in rows.values())
    assert "700 keys of 576, k 8, 64 queries at a time" in capsys.readouterr().out


# ---- published figures

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "docs" / "results" / "README.md"]
NAMED = r"(?:^ {4}|`)spanformer bench ([a-z-]+ --[^`\n]*(?:\n[^`\n]+)?)(?=`|$)"
PUBLISHED = sorted({
    " ".join(found.split("\n    ")[0].split())
    for page in PAGES if page.name not in ("LOG.md", "CHANGELOG.md")
    for found in re.findall(NAMED, page.read_text(encoding="utf-8"), flags=re.MULTILINE)
})  # fmt: skip


@pytest.mark.parametrize("line", PUBLISHED)
def test_published_commands_have_options_that_exist(line, tmp_path):
    name, *options = line.split()
    if name in ("context", "hf", "fit-spans", "knn", "retrieval"):
        pytest.importorskip("transformers")
    for file in ("models.py", "train.txt", "valid.txt"):
        (tmp_path / file).touch()
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    (tmp_path / "triton").mkdir()
    stands_for = {"CLONE": str(tmp_path), "FOLDER": str(tmp_path), "lagged": "window"}  # CONTRIBUTING's new mechanism
    options = [stands_for.get(word, word) for word in options]
    leaf = getattr(importlib.import_module(COMMANDS[f"bench {name}"].module), COMMANDS[f"bench {name}"].name)
    if options == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            _parse(leaf, f"spanformer bench {name}", options)
    else:
        assert _parse(leaf, f"spanformer bench {name}", options)


def test_published_commands_are_found():
    assert "train-step --original CLONE" in PUBLISHED and "decode --quick --parts decode" in PUBLISHED
    assert any(line.startswith("attention --parts cost") and line.endswith("--budget 12") for line in PUBLISHED)
    assert any(line.startswith("fit-spans --model") for line in PUBLISHED)


# ---- what all share


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("decode", "--parts", "fly"), "parts holds 'fly'; expected any of decode, prefill, stream"),
        (("decode", "--tokens", "-1"), "tokens is -1"),
        (("per-token", "--rounds", "0"), "rounds is 0; expected at least 1"),
        (("patterns", "--budget", "-1"), "budget is -1.0; expected seconds, 0 or more"),
        (("train-step", "--profiles", "huge"), "profiles holds 'huge'"),
        (("train-step", "--original", "/nowhere"), "original is /nowhere; expected a clone"),
        (("quality", "--only", "original"), "needs a clone of its code: --original PATH"),
        (("gallery", "--names", "nobody"), "names holds 'nobody'"),
        (("gallery", "--parts", "page"), "holds no part attention; measure it first"),
    ],
)
def test_mistakes_give_one_sentence(arguments, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments, "--out", str(tmp_path / "results.json")])
    shown = capsys.readouterr()
    assert end.value.code == 2 and shown.out == "" and said in shown.err and "Traceback" not in shown.err


def test_other_files_are_not_overwritten(tmp_path):
    path = tmp_path / "notes.json"
    for text in ('{"kind": "spanformer benchmark patterns", "parts": {}}', "[1]", "no json"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a file of spanformer benchmark decode; choose another with --out"):
            PartsFile(path, "decode")
        assert path.read_text() == text


def test_parts_that_are_not_measured_stay(tmp_path):
    first = Bench("decode", BenchOptions(out=tmp_path / "a.json"))
    first.keep("decode", {"ms": 1.0})
    first.keep("stream", [1, 2])
    again = Bench("decode", BenchOptions(out=tmp_path / "a.json"))
    again.keep("decode", {"ms": 2.0})
    held = PartsFile(tmp_path / "a.json", "decode")
    assert held.found("decode") == {"ms": 2.0} and held.found("stream") == [1, 2] and held.found("prefill") is None


def test_comparisons_report_how_far_they_are(tmp_path):
    told: list[tuple[str, float, float]] = []
    session = Bench("x", BenchOptions(rounds=2, budget=0.0, out=tmp_path / "a.json"), lambda *row: told.append(row))
    session.plan(2)
    session.compare("first", {"f": lambda: None}, shortest=0.0)
    session.compare("second", {"f": lambda: None}, shortest=0.0)
    assert told == [("first", 0.0, 2), ("first", 0.5, 2), ("first", 1.0, 2), ("second", 1.0, 2), ("second", 1.5, 2),
                    ("second", 2.0, 2)]  # fmt: skip


def test_interrupted_bench_says_where_its_results_are(tmp_path, capsys, monkeypatch):
    def stop(_bench):
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "run", stop)
    with pytest.raises(SystemExit) as end:
        main(["bench", "decode", "--out", str(tmp_path / "a.json")])
    assert end.value.code == 130 and f"if any, are in {tmp_path / 'a.json'}" in capsys.readouterr().err


def test_settings_leave_threads_as_they_were(tmp_path):
    before = torch.get_num_threads()
    with Bench("x", BenchOptions(threads=before + 1, out=tmp_path / "a.json")).settings():
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_different_results_get_no_speed():
    a = [torch.ones(3)]
    assert check_same("same", a, [t.clone() for t in a]) == 0.0
    for wrong in (1.001, float("nan")):
        with pytest.raises(ValueError, match="ours differs from its peer"):
            check_same("ours", [wrong * a[0]], a)


def test_time_per_token_is_relative_within_each_round():
    times = {"10": Timing([1.0, 2.0, 4.0]), "20": Timing([2.0, 4.0, 8.0])}
    assert relative_per_token(times, (10, 20)) == [1.0, 1.0]
    times["20"] = Timing([6.0, 12.0, 24.0])  # three times as long a token, in slow rounds and quick ones
    assert relative_per_token(times, (10, 20)) == pytest.approx([0.5, 1.5])


def test_tasks(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    found = bench(tmp_path, "tasks", "--parts", "recall", "duplicate", "--kinds", "lsh(4, 4, 2)")
    row = found["recall"]["lsh(4, 4, 2)"]
    assert row["steps"] == 2 and list(row["right"]) == ["16", "32", "64", "128", "256", "512"]
    assert all(0 <= share <= 1 for share in row["right"].values())
    assert list(found["duplicate"]["lsh(4, 4, 2)"]["right"]) == ["1", "2", "4", "8"]
    assert (tmp_path / "tasks.png").stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "| `lsh(4, 4, 2)` |" in shown
    again = bench(tmp_path, "tasks", "--parts", "recall", "--kinds", "window(3)")
    assert list(again["recall"]) == ["lsh(4, 4, 2)", "window(3)"] and again["duplicate"] == found["duplicate"]


def test_depth(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat; " * 2000)
    found = bench(tmp_path, "depth", "--source", str(text), "--positions", "sinusoids", "sharper")
    assert all(part.endswith(", seed 1") for part in found)
    found = {part.removesuffix(", seed 1"): each for part, each in found.items()}
    assert found["chase"]["ratio"] == found["chase"]["layers"]["6"] / found["chase"]["layers"]["1"]
    assert list(found["chase"]["right"]) == list(found["chase"]["layers"]) == list("123456")
    assert all(1 <= layers <= 8 for layers in found["chase"]["layers"].values())
    sizes = [row["parameters"] for row in found["words"].values()]
    assert len(sizes) == 8 and max(sizes) < 1.01 * min(sizes)
    ponder = found["ponder"]
    assert (
        ponder["steps"]["8 steps"] == 8
        and 2 < ponder["steps"]["4 steps"] < 6
        and set(ponder["pass"]) == set(ponder["steps"])
    )
    cells = found["span_depth"]
    assert len(cells["neither"]) == 1 and len(cells["both"]) == len(cells["depth"]) == len(cells["both_by_span"]) > 5
    assert [at["price"] for at in cells["span"]] == [0.1, 1.0, 10.0]
    assert cells["ratio"]["neither"] == 1 and cells["neither"][0]["layers"] == 6
    assert cells["span"][0]["keys"] < cells["neither"][0]["keys"] == 16
    assert list(found["exits"]["static"]) == list("12345678") == list(found["pairs"]["static"])
    assert len(found["pairs"]["pairs"]) == 6
    for row in found["pairs"]["pairs"].values():
        assert 1 <= row["layers"] <= 8 and row["excess"] == pytest.approx(row["bits"] / row["full"] - 1)
    assert found["exits"]["step_ratio"] > 0
    for consistency in ("textual", "risk"):
        for rows in found["calm"][consistency].values():
            assert set(rows) == {"0.25", "0.1"} and all(0 <= row["resplits"] <= 100 for row in rows.values())
    with pytest.raises(SystemExit):
        bench(tmp_path / "other", "depth", "--parts", "calm", "--source", str(text))


def test_depth_keeps_seeds_beside_each_other(tmp_path):
    small = ["--parts", "chase", "--steps", "1"]
    first = bench(tmp_path, "depth", *small)
    both = bench(tmp_path, "depth", *small, "--seed", "2")
    assert set(both) == {"chase, seed 1", "chase, seed 2"} and both["chase, seed 1"] == first["chase, seed 1"]
    assert both["chase, seed 2"] != both["chase, seed 1"]


def test_depth_refuses_an_odd_width():
    with pytest.raises(ValueError, match="width is 100; expected a multiple of 8"):
        DepthBench(width=100)


def test_files_elsewhere_are_recorded_by_their_names():
    assert recorded((Path("/home/me/enwik8.gz"), "/home/me/model@0.33", "out/x", 3, None)) == [
        "enwik8.gz", "model@0.33", "out/x", 3, None,
    ]  # fmt: skip


def test_operations_at_equal_bits():
    def at(*points: tuple[float, float]) -> list[dict]:
        return [{"operations": operations, "bits": bits} for operations, bits in points]

    curve = at((2.0, 3.2), (4.0, 2.8), (6.0, 2.6))
    assert cheapest(curve, 3.0) == {"operations": pytest.approx(3.0), "bits_away": 0.0}
    assert cheapest(curve, 2.5) == {"operations": 6.0, "bits_away": pytest.approx(0.04)}
    assert cheapest(curve, 3.5) == {"operations": 2.0, "bits_away": pytest.approx(3.2 / 3.5 - 1)}
    found = at_equal_bits({"neither": at((8.0, 3.0)), "span": at((6.0, 2.9)), "depth": curve, "both": at((2.0, 3.0))})
    assert found["ratio"] == {"neither": 1.0, "span": 0.75, "depth": pytest.approx(0.375), "both": 0.25}
    assert found["both_by_better_single"] == pytest.approx(2 / 3)
    assert found["both_by_product"] == pytest.approx(0.25 / (0.75 * 0.375))
    assert found["both_by_span"] == [{"bits": 3.0, "ratio": pytest.approx(2 / 6)}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "needles"], "parts holds 'needles'; expected any of recall, copy, duplicate, needle, table"),
        (["--kinds", "windw(3)"], "kinds is 'windw(3)'; did you mean window?"),
        (["--steps", "-1"], "steps is -1; expected 0 or more"),
    ],
)
def test_tasks_that_cannot_be(tmp_path, options, message, capsys):
    with pytest.raises(SystemExit):
        bench(tmp_path, "tasks", *options)
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_memories(tmp_path, capsys):
    found = bench(tmp_path, "memories", "--parts", "compression", "--source", str(_text(tmp_path)))["compression"]
    assert found.keys() == {"conv", "mean", "max"} and all(error > 0 for error in found.values())
    assert "of the squared output of attention" in capsys.readouterr().out


def test_stream_through_a_memory_keeps_every_row_right(tmp_path):
    found = bench(tmp_path, "memories", "--parts", "stream")["stream"]
    assert found["wrong"] == 0 and found["checks"] > 3 and len(found["seconds"]) >= 9


def _text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"line {n} of a text about {n * n}\n" for n in range(2000)))
    return path
