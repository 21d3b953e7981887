"""A whole benchmark, small; and the promise that a wrong contender gets no speed."""

import dataclasses
import json

from spanformer.bench import AttentionBench, bench_attention
from spanformer.bench.contenders import REFERENCE
from spanformer.bench.plan import steps

TINY = {
    "lengths": (64,),
    "heads": 2,
    "dim": 8,
    "repeats": 2,
    "threads": 1,
    "quick": True,
    "contenders": ("reference", "rings-torch"),
}


def test_end_to_end(tmp_path):
    titles = []
    config = AttentionBench(profiles=("A", "S"), parts=("cost", "decode", "overhead"), out=tmp_path, **TINY)
    bench_attention(config, on_progress=lambda title, done, total: titles.append((title, done, total)))
    assert titles[-1][0] == "done" and titles[-1][1] == titles[-1][2]
    saved = json.loads((tmp_path / "attention.json").read_text())
    assert saved["machine"]["cpu"] and saved["machine"]["threads"] == 1 and saved["sgemm_gflops"] > 0
    timed = [row for row in saved["rows"] if row["status"] == "ok"]
    assert {row["mode"] for row in timed} == {"forward+backward", "decode"}
    for row in timed:
        assert row["ms"] > 0 and row["speedup"] > 0 and row["errors"]["out"] <= row["allowed"]["out"]
    ours = next(row for row in timed if row["contender"] == "reference" and row["part"] == "cost")
    assert 0 < ours["limit_share"] < 1 and {"dq", "dk", "dv", "dspan"} < set(ours["errors"])
    assert {row["part"] for row in saved["rows"] if row["contender"] == "rings-torch"} == {"decode"}
    assert all(row["reason"] and row["ms"] is None for row in saved["rows"] if row["status"] == "skipped")


def test_wrong_contender_gets_no_speed(tmp_path):
    def build(inputs):
        forward = REFERENCE.build(inputs)
        return lambda: forward() * 1.001

    def explode(inputs):
        raise RuntimeError("no such luck\nand more")

    liar = dataclasses.replace(REFERENCE, name="liar", label="A liar", build=build)
    bomb = dataclasses.replace(REFERENCE, name="bomb", label="A bomb", build=explode)
    config = AttentionBench(profiles=("A",), parts=("cost",), out=tmp_path, **TINY)
    rows = {row.contender: row for row in bench_attention(config, extra=(liar, bomb)).rows}
    assert rows["liar"].status == "WRONG" and "out differs by" in rows["liar"].reason
    assert rows["liar"].ms is None and rows["liar"].speedup is None and rows["liar"].gflops is None
    assert rows["bomb"].status == "skipped" and rows["bomb"].reason == "failed: RuntimeError: no such luck"
    assert rows["reference"].status == "ok" and rows["reference"].ms > 0


def test_plan_holds_every_table():
    plan = steps(AttentionBench())
    works = {part: [s.work for s in plan if s.part == part] for part in dict.fromkeys(s.part for s in plan)}
    assert len(works["cost"]) == 2 * 5 * 5
    assert max(w.length for w in works["decode"]) == 32768
    assert {w.length for w in works["overhead"]} == {16}
    assert {w.batch for w in works["short"]} == {1, 4} and min(w.length for w in works["short"]) == 128
    assert [w.length for w in works["per_token"]] == [1024 * 2**n for n in range(7)]
    assert works["long"][0].length == 65536 and works["memory"][0].length == 4096
    assert works["streaming"][0].streaming == 512 and works["streaming"][0].length == 8192
    assert all("sdpa" in s.without for s in plan if s.part == "per_token" and s.work.length > 16384)
