"""`spanformer cost`: the table, the JSON, the figures of others."""

from __future__ import annotations

import json

import pytest

from spanformer.cli.main import main
from spanformer.kinds import KINDS


@pytest.mark.parametrize("columns", [80, 120, 140, 141, 150, 160, 200])
def test_table_names_every_mechanism(capsys, monkeypatch, columns):
    """Whole, numbers and all, however wide the terminal is."""
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["cost", "--length", "512", "--heads", "4", "--dim", "64"])
    shown = capsys.readouterr().out
    assert all(f"\n{name}" in shown for name in KINDS)
    assert "512 tokens, one layer, 4 heads of 16, float32" in shown
    assert ("every token up to max_span" in shown) == (columns >= 140)
    (full,) = [line for line in shown.splitlines() if line.startswith("full ")]
    assert full.split()[1:3] == ["256.5", "33.6"] and "keys a query" in shown


def test_mixtures_and_patterns(capsys):
    kinds = ["2 window(64) + 2 full", "Window(64) | Global([0])", "window(64)", "full"]
    main(["cost", "--length", "512", "--heads", "4", "--dim", "64", "--json", "-", "--kinds", *kinds])
    mixed, pattern, window, full = json.loads(capsys.readouterr().out)["mechanisms"]
    for name in ("flops", "flops_backward", "weight_bytes", "activation_bytes", "cache_bytes", "pairs"):
        assert mixed[name] == (window[name] + full[name]) / 2, name
    for kind in ("dynamic_span", "forgetting", "window", "general", "strided(32)"):  # heads of one kind, in two parts
        arguments = ["--length", "512", "--heads", "4", "--dim", "64", "--json", "-", "--kinds"]
        main(["cost", *arguments, kind, f"1 {kind} + 3 {kind}"])
        one, two = json.loads(capsys.readouterr().out)["mechanisms"]
        assert {key: one[key] for key in one if key not in ("kind", "about")} == {
            key: two[key] for key in two if key not in ("kind", "about")
        }
    assert pattern["pairs"] == window["pairs"] + 512 - 64 and pattern["activation_bytes"] is None
    assert pattern["cache_bytes"] == full["cache_bytes"] and pattern["kind"] == "Window(64) | Global([0])"


def test_json_holds_the_numbers(capsys, tmp_path):
    main(["cost", "--length", "100", "--heads", "2", "--dim", "8", "--kinds", "window(10)", "full", "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in found["mechanisms"]] == ["window(window=10)", "full"]
    assert found["mechanisms"][1]["flops"] == 2 * 4 * 4 * 100 * 101 // 2
    assert found["dense_bytes"] == 2 * 100 * 100 * 4
    main(["cost", "--layers", "3", "--json", str(tmp_path / "cost.json"), "--kinds", "full", "--length", "100"])
    assert "full" in capsys.readouterr().out
    assert json.loads((tmp_path / "cost.json").read_text())["mechanisms"][0]["flops"] == 3 * 768 * 4 * 100 * 101 // 2


def test_published_figures_are_compared_with_ours(capsys):
    main(["cost", "--published"])
    shown = capsys.readouterr().out
    assert shown.count(" agrees") == 15 and shown.count(" differs") == 10
    assert "not 16" in " ".join(shown.split())


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--dim", "10", "--heads", "3"), "dim is 10; expected a multiple of heads, 3"),
        (("--kinds", "windo:3"), "did you mean window"),
        (("--length", "0"), "length is 0; expected at least 1"),
        (("--kinds", "2 window + 3 full"), "--kinds is '2 window + 3 full', which has 5 heads; expected 12"),
        (("--kinds", "1 window + 11 full", "--kv-heads", "6"), "expected multiples of 2 heads"),
        (
            ("--kinds", "6 etc + 6 window"),
            "etc(radius=32, segment=16, clip=12) cannot share a layer with other kinds",
        ),
        (("--kinds", "6 longformer(8, 4) + 6 window"), "cannot share a layer with other kinds"),
        (("--kinds", "Wndow(3)"), "is not a pattern; expected one of"),
        (("--kinds", "Every(8)", "--length", "1000000"), "expected at most 131,072 for Every(8), whose pairs are"),
    ],
)
def test_mistakes_are_one_sentence(capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        main(["cost", *arguments])
    assert end.value.code == 2 and said in capsys.readouterr().err
