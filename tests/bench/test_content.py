"""The content benchmark times only what is right: its oracles, its checks, its tables."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch

from spanformer.bench import content_decode, content_oracles, content_peers, content_table, content_work, linear_work
from spanformer.bench.results import PartsFile
from spanformer.cli.main import main


def bench(tmp_path, *arguments: str) -> dict:
    out = tmp_path / "content.json"
    main(["bench", "content", "--quick", "--threads", "1", "--out", str(out), *arguments])
    return {name: part["found"] for name, part in json.loads(out.read_text())["parts"].items()}


def same(mine, theirs, inputs) -> None:
    got, right = (linear_work.Contender(forward).step(inputs) for forward in (mine, theirs))
    assert got.keys() == right.keys() and len(got) >= 3
    for name, t in right.items():
        torch.testing.assert_close(got[name], t, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("title", ["LSH, 4 rounds", "routing, w 64", "Linformer 256, both directions"])
def test_oracle_of_ours_is_the_mechanism_in_float64(title):
    task = content_peers.tasks(256)[title]
    inputs = linear_work.to_dtype(task.inputs(256), torch.float64)
    made = task.ours()
    mechanism = getattr(made.oracle, "args", [None])[0]
    if mechanism is not None:
        ids = mechanism.hashed(mechanism.queries(inputs["q"].float()))
        mechanism.double().hashed = lambda x: ids
    same(made.oracle, made.forward, inputs)


def test_oracle_of_reformer_pytorch_with_one_chunk_is_full_attention():
    """Two chunks hold the whole text in each round, so that every token sees its past; both look at both."""
    inputs = {name: t for name, t in linear_work.to_dtype(linear_work.make_text(32), torch.float64).items()
              if name in ("q", "v", "toward")}  # fmt: skip

    def full(i):
        q, v = i["q"], i["v"]
        k = torch.nn.functional.normalize(q, dim=3)
        score = (q @ k.mT / 8).masked_fill(~torch.ones(32, 32, dtype=torch.bool).tril(-1), -torch.inf)
        score[:, :, 0, 0] = 0
        return score.softmax(3) @ v

    same(lambda i: content_oracles.reformer_pytorch(torch.randn(1, 64, 1, 1), 16, i), full, inputs)


def test_oracle_of_routing_transformer_with_one_cluster_is_full_attention():
    inputs = {name: t for name, t in linear_work.to_dtype(linear_work.make_text(20), torch.float64).items()
              if name in ("q", "v", "toward")}  # fmt: skip

    def full(i):
        q, v = i["q"], i["v"]
        score = q @ torch.nn.functional.normalize(q, dim=3).mT / 8
        score = score.masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(-1), -torch.inf)
        score[:, :, 0, 0] = 0
        return score.softmax(3) @ v / (1 + 1e-5)

    same(lambda i: content_oracles.routing_transformer(torch.randn(8, 1, 64), 20, i), full, inputs)


def test_every_part_runs(tmp_path):
    found = bench(tmp_path, "--parts", "speed", "decode", "--lengths", "128")
    assert [row["length"] for row in found["speed"]] == [128] * 4
    assert all(row["off"] < 1e-4 and row["times_as_fast"] > 0 for row in found["speed"])
    assert {row["kind"] for row in found["decode"]} == set(content_decode.KINDS)
    assert all(row["times_a_window"] > 0 and row["off"] < 1e-4 for row in found["decode"])


def test_wrong_mechanism_gets_no_speed(tmp_path, monkeypatch):
    right = linear_work.attended

    def wrong(mechanism, q, *rest):
        out = right(mechanism, q, *rest)
        return out * 1.001 if mechanism.backend == "auto" else out

    monkeypatch.setattr(linear_work, "attended", wrong)
    found = bench(tmp_path, "--parts", "speed", "--lengths", "128")["speed"]
    assert all("out differs by" in row["wrong"] and "times_as_fast" not in row for row in found)


def test_peers_are_timed_or_skipped_with_a_reason(tmp_path, monkeypatch):
    """A package stands in for linformer; the others are absent."""

    class Attention(torch.nn.Module):
        def __init__(self, dim, length, k, heads):
            super().__init__()
            self.proj_k, self.proj_v = (torch.nn.Parameter(torch.zeros(length, k)) for _ in range(2))

        def forward(self, x):
            q, k, v = (m(x).unflatten(2, (8, 64)).transpose(1, 2) for m in (self.to_q, self.to_k, self.to_v))
            score = q @ (self.proj_k.mT @ k).mT / 8
            return (score.softmax(3) @ (self.proj_v.mT @ v)).transpose(1, 2).flatten(2)

    for name in ("reformer_pytorch", "routing_transformer", "routing_transformer.routing_transformer"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "linformer", types.ModuleType("linformer"))
    monkeypatch.setitem(sys.modules, "linformer.linformer", types.SimpleNamespace(LinformerSelfAttention=Attention))
    rows = bench(tmp_path, "--parts", "peers")["peers"]
    ours = [row for row in rows if row["name"] == "ours"]
    assert [row["changed_rows"] for row in ours] == [0, 0, 1] and all(row["off"] < 1e-4 for row in ours)
    peers = {row["name"]: row for row in rows if row["name"] != "ours"}
    assert "skipped" in peers["reformer-pytorch"] and "skipped" in peers["routing-transformer"]
    assert peers["linformer"]["ours_times_as_fast"] > 0 and "wrong" not in peers["linformer"]


def test_tables_hold_every_part(tmp_path, capsys):
    file = PartsFile(tmp_path / "content.json", "content")
    speed = {"name": "LSH", "kind": "lsh", "length": 1024, "times_as_fast": 1.94}
    peer = {"task": "LSH", "length": 4096, "name": "slow", "ms": 2.0, "off": 1e-6}
    found = {
        "speed": [speed, speed | {"length": 2048, "wrong": "dq is off"}],
        "memory": [{"name": "LSH", "length": 65536, "peak_mib": 633.4, "units_of_q": 4.95},
                   {"name": "routing", "length": 65536, "reason": "no /proc"}],
        "decode": [{"kind": "lsh(1)", "us": 120.4, "window": "window(8)", "window_us": 80.2, "times_a_window": 1.5,
                    "cache_bytes": 4096}],
        "peers": [peer | {"ours_times_as_fast": 5.25, "changed_rows": 0.86}],
    }  # fmt: skip
    for part, rows in found.items():
        file.keep(part, rows, {}, {})
    shown = content_table.tables(file)
    for line in (
        "| LSH | 1.9× | WRONG |", "| LSH | 65,536 | 633 | 5.0 |", "| routing | 65,536 | no /proc | – |",
        "| `lsh(1)` | 120 | `window(8)` | 80 | 1.5 | 4 |", "| LSH | slow | 4,096 | 2.0 | 5.2× | 1e-06 | 86 % |",
    ):  # fmt: skip
        assert line in shown.splitlines(), line
    main(["bench", "content", "--parts", "table", "--out", str(file.path)])
    assert shown in capsys.readouterr().out


def test_memory_is_measured_in_a_process_of_its_own():
    peak = content_work.peak_memory("lsh(128, 16, 2)", 1024, 1)
    assert peak.reason or 2 < peak.mib < 200  # pyright: ignore[reportOptionalOperand]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--parts", "fly"), "parts holds 'fly'; expected any of speed, memory, decode, peers, table"),
        (("--lengths", "64"), "lengths holds 64; expected 128 … 16384 tokens, where SDPA is timed"),
        (("--lengths", "1024", "32768"), "lengths holds 32768; expected 128 … 16384 tokens"),
        (("--parts", "table"), "holds no measurements; measure first"),
    ],
)
def test_mistakes_give_one_sentence(arguments, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["bench", "content", *arguments, "--out", str(tmp_path / "results.json")])
    assert end.value.code == 2 and said in capsys.readouterr().err
