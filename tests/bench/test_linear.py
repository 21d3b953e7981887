"""The linear benchmark times only what is right: its oracles, its checks, its tables."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from torch import Tensor

from spanformer.bench import linear, linear_decode, linear_oracles, linear_peers, linear_table, linear_work
from spanformer.bench.results import PartsFile
from spanformer.bench.session import Bench
from spanformer.cli.main import main
from spanformer.ops import attend_linear, sum_linear


def wide(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return linear_work.to_dtype(inputs, torch.float64)


def bench(tmp_path, *arguments: str) -> dict:
    out = tmp_path / "linear.json"
    main(["bench", "linear", "--quick", "--threads", "1", "--out", str(out), *arguments])
    return {name: part["found"] for name, part in json.loads(out.read_text())["parts"].items()}


# ---- oracles, each against another way to compute the same


@pytest.mark.parametrize("length", [1, 31, 65])
def test_oracle_of_elu_is_the_recurrence(length):
    inputs = wide(linear_peers.tasks()["elu + 1"].inputs(length))

    def reference(i):
        return attend_linear(i["q"], i["k"], i["v"], elu=True, backend="reference")[0].out

    same(linear_peers.LINEAR, reference, inputs)


@pytest.mark.parametrize("length", [1, 31, 65])
def test_oracle_of_decay_is_the_recurrence(length):
    inputs = wide(linear_peers.tasks()["decay"].inputs(length))

    def reference(i):
        q = i["q"] * i["q"].shape[3] ** -0.5
        return sum_linear(q, i["k"], i["v"], i["decay"], backend="reference")[0][0]

    same(linear_peers.DECAYED, reference, inputs)


@pytest.mark.parametrize("length", [1, 63, 70])
def test_oracle_of_the_delta_rule_solves_its_triangle(length):
    """As a sum over pairs: with A_ij = β_i e^(G_i − G_j) k_i·k_j below the diagonal, u = (I + A)⁻¹ β v."""
    inputs = wide(linear_peers.tasks()["gated delta rule"].inputs(length))

    def dense(i):
        q, k, v, beta, total = i["q"] / 8, i["k"], i["v"], i["beta"][..., None], i["decay"].cumsum(2)
        fading = (total[..., None] - total[:, :, None]).tril().exp()
        below = beta * (k @ k.transpose(2, 3)) * fading
        u = torch.linalg.solve_triangular(below.tril(-1), beta * v, upper=False, unitriangular=True)
        return (q @ k.transpose(2, 3) * fading).tril() @ u

    same(linear_oracles.delta_rule, dense, inputs)


def test_oracle_of_performer_pytorch_has_its_constants():
    """Queries and keys so large that features are the constant alone: row i is Σ v / (i + 1 + 10⁻⁶ √8 / 10⁻⁴)."""
    inputs = wide(linear_peers.tasks()["FAVOR+"].inputs(5))
    large = {name: t.detach() * (100 if name in "qk" else 1) for name, t in inputs.items()}
    found = linear_oracles.performer_pytorch(large, torch.randn(8, 64, dtype=torch.float64))
    count = torch.arange(1, 6, dtype=torch.float64)[:, None] + 1e-2 * 8**0.5
    torch.testing.assert_close(found, large["v"].cumsum(2) / count, rtol=1e-9, atol=1e-9)


def test_oracle_of_favor_is_the_mechanism():
    """In chunks and with a running maximum of exponents, which cancels."""
    task, mechanism = linear_peers.tasks()["FAVOR+"], linear_work.make_kind("performer", 1).double()
    inputs = wide(task.inputs(70))
    forward = linear_work.of_mechanism(mechanism).forward
    same(task.ours().oracle, lambda i: forward(i | {"x": i["q"][:, 0]}), inputs)


def same(mine, theirs, inputs: dict[str, Tensor]) -> None:
    got, right = (linear_work.Contender(forward).step(inputs) for forward in (mine, theirs))
    assert got.keys() == right.keys() and len(got) >= 4
    for name, t in right.items():
        torch.testing.assert_close(got[name], t, rtol=1e-9, atol=1e-9)


# ---- checks


def test_kinds_with_a_state_are_checked_in_chunks_and_by_recurrence():
    linear_work.prove_chunks("linear")
    mechanism = linear_work.make_kind("linear", 70)
    checked = linear_work.check_mechanism(mechanism, linear_work.make_text(70))
    assert not checked.wrong and checked.off < 1e-4
    assert set(checked.verdict.errors) == {"out", "dq", "dk", "dv"} and mechanism.backend == "auto"


def test_wrong_mechanism_gets_no_speed(tmp_path, monkeypatch):
    right = linear_work.attended

    def wrong(mechanism, q, *rest):
        out = right(mechanism, q, *rest)
        return out * 1.001 if mechanism.backend == "auto" else out

    monkeypatch.setattr(linear_work, "attended", wrong)
    found = bench(tmp_path, "--parts", "speed", "--kinds", "linear", "--lengths", "64")["speed"]
    assert "out differs by" in found[0]["wrong"] and "times_as_fast" not in found[0]


def test_chunks_that_differ_from_the_recurrence_are_refused(monkeypatch):
    right = linear_work.attended
    linear_work.prove_chunks.cache_clear()

    def wrong(mechanism, *rest):
        out = right(mechanism, *rest)
        return out * (1 + 1e-6) if mechanism.backend == "banded" else out

    monkeypatch.setattr(linear_work, "attended", wrong)
    with pytest.raises(ValueError, match="out of linear in chunks differs from its recurrence by 1e-06"):
        linear_work.prove_chunks("linear")


def test_share_of_changed_rows():
    inputs = {name: t for name, t in linear_work.make_text(40).items() if name != "x"}
    assert linear_work.changed_rows(linear_work.sdpa, inputs) == 0
    assert linear_work.changed_rows(lambda i: linear_work.sdpa(i) + i["k"].amax((2, 3), keepdim=True), inputs) == 1
    half = lambda i: torch.cat([i["q"][:, :4], i["q"][:, 4:].flip(2)], 1)  # noqa: E731
    assert linear_work.changed_rows(half, inputs) == pytest.approx(0.5 / 39)


def test_step_that_is_wrong_is_refused(monkeypatch):
    mechanism, token = linear_work.make_kind("linear", 64), list(linear_decode.draw(1, torch.Generator()))
    with torch.no_grad():
        assert linear_decode.check_step(mechanism, 33, token) < 1e-5
        monkeypatch.setattr(linear_decode.Reader, "step", lambda reader, call: call.v)
        with pytest.raises(ValueError, match="a token of LinearAttention after 33 tokens is wrong: out differs by"):
            linear_decode.check_step(mechanism, 33, token)


# ---- runs


def test_peers_are_timed_or_skipped_with_a_reason(tmp_path, monkeypatch, capsys):
    """Two packages stand in: one that is right, and one that is not."""
    product = lambda a, b, v: (a @ b.transpose(2, 3)).tril() @ v  # noqa: E731
    monkeypatch.setitem(sys.modules, "fast_transformers", types.ModuleType("fast_transformers"))
    module = types.SimpleNamespace(causal_dot_product=product)
    monkeypatch.setitem(sys.modules, "fast_transformers.causal_product", module)
    folder = tmp_path / "clone" / "fla" / "ops" / "linear_attn"
    folder.mkdir(parents=True)
    (folder / "naive.py").write_text("def naive_chunk_linear_attn(q, k, v, normalize): return v")
    every = linear_peers.tasks
    monkeypatch.setattr(linear_peers, "tasks", lambda fla: {"elu + 1": every(fla)["elu + 1"]})
    found = bench(tmp_path, "--parts", "peers", "--fla", str(tmp_path / "clone"))["peers"]
    ours, fast, fla = found
    assert ours["changed_rows"] == 0 and ours["off"] < 1e-4
    assert fast["ours_times_as_fast"] > 0 and fast["aim"] == 1.5 and "wrong" not in fast
    assert "out differs by" in fla["wrong"] and "ms" not in fla
    assert "dq differs by" in fla["wrong"]  # it has no gradient at all
    assert "flash-linear-attention WRONG: out differs by" in capsys.readouterr().out
    (folder / "naive.py").write_text("raise RuntimeError('no driver')")
    found = bench(tmp_path, "--parts", "peers", "--fla", str(tmp_path / "clone"))["peers"]
    assert found[2]["skipped"] == "failed: RuntimeError: no driver"
    monkeypatch.setitem(sys.modules, "fast_transformers.causal_product", None)
    found = bench(tmp_path, "--parts", "peers")["peers"]
    assert "fast_transformers" in found[1]["skipped"] and found[0]["ms"] > 0


def test_beyond_16k_sdpa_is_extrapolated(tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "LONGEST_YARDSTICK", 64)
    short, long = bench(tmp_path, "--parts", "speed", "--kinds", "linear", "--lengths", "32", "128")["speed"]
    assert not short["sdpa_extrapolated"] and long["sdpa_extrapolated"]
    assert long["sdpa_ms"] == pytest.approx(16 * short["sdpa_ms"])
    assert long["times_as_fast"] == pytest.approx(long["sdpa_ms"] / long["ms"])


def test_tables_hold_every_part(tmp_path, capsys):
    file = PartsFile(tmp_path / "linear.json", "linear")
    speed = {"kind": "linear", "length": 1024, "times_as_fast": 6.04, "sdpa_extrapolated": False}
    far = {"kind": "linear", "length": 32768, "times_as_fast": 130.2, "sdpa_extrapolated": True}
    wrong = {"kind": "rfa", "length": 1024, "wrong": "dq differs by 1; expected at most 0.1"}
    peer = {"task": "decay", "length": 4096}
    ours = peer | {"name": "ours", "ms": 2.0, "ours_times_as_fast": 1.0, "off": 1e-6, "changed_rows": 0.0}
    found = {
        "speed": [speed, far, wrong],
        "flat": [{"kind": "linear", "lengths": [64, 128], "us_per_token": [5.0, 5.25], "spread": 0.05}],
        "memory": [{"kind": "linear", "length": 65536, "peak_mib": 524.3, "units_of_q": 4.096}],
        "peers": [ours, ours | {"name": "slow", "ours_times_as_fast": 3.25, "changed_rows": 1.0},
                  peer | {"name": "absent", "skipped": "not installed"}],
        "decode": [{"kind": "linear", "contexts": [1, 2], "us": [50.0, 51.0], "sdpa_us": 9000.0, "sdpa_context": 2,
                    "times_as_fast": 176.4, "state_bytes": 133120}],
    }  # fmt: skip
    for part, rows in found.items():
        file.keep(part, rows, {}, {})
    shown = linear_table.tables(file)
    for line in (
        "|  | 1,024 | 32,768 |", "| `linear` | 6.0× | 130×* |", "| `rfa` | WRONG | – |",
        "| `linear` | 5.00 | 5.25 | 1.05 |",
        "| `linear` | 65,536 | 524 | 4.1 |", "| decay | slow | 4,096 | 2.0 | 3.2× | 1e-06 | 100 % |",
        "| decay | absent | 4,096 | skipped: not installed | – | – | – |",
        "| `linear` | 50.0 | 51.0 | 9,000 | 176× | 130 |",
    ):  # fmt: skip
        assert line in shown.splitlines()
    main(["bench", "linear", "--parts", "table", "--out", str(file.path)])
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--parts", "fly"), "parts holds 'fly'; expected any of speed, flat, memory, peers, decode, table"),
        (("--kinds", "linar"), "kinds is 'linar'; did you mean linear?"),
        (("--lengths", "1"), "lengths holds 1; expected at least 2 tokens"),
        (("--lengths", "32768"), "lengths holds 32768 and no shorter one; expected one up to 16384"),
        (("--fla", "/nowhere"), "fla is /nowhere; expected a clone of flash-linear-attention"),
        (("--parts", "table"), "holds no measurements; measure first"),
    ],
)
def test_mistakes_give_one_sentence(arguments, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["bench", "linear", *arguments, "--out", str(tmp_path / "results.json")])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_every_kind_with_a_state_takes_part(tmp_path):
    chosen = Bench("linear", linear.LinearBench(out=tmp_path / "a.json")).options.chosen_kinds
    assert {"linear", "performer", "retention"} <= set(chosen) and "full" not in chosen
