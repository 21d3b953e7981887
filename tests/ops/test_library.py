"""Loading the compiled kernel: a damaged file, another path, an instruction set that is not there."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spanformer import Rule, attend, backends
from spanformer.ops import c_layout, kernel, library

pytestmark = pytest.mark.skipif(kernel.problem() is not None, reason=f"native: {kernel.problem()}")
LIBRARY = library.find()


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the beginning of a process."""
    monkeypatch.setattr(kernel, "_library", None)
    monkeypatch.setattr(kernel, "_problem", None)


def damaged(path: Path, how: str) -> Path:
    content = bytearray(LIBRARY.read_bytes())
    if how == "changed":
        content[len(content) // 2] ^= 1
    elif how == "longer":
        content += b"\0"
    else:
        del content[int(how) :]
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("how", ["0", "10", "4096", "300000", "-1", "-1000", "changed", "longer"])
def test_damaged_library_is_not_loaded(tmp_path: Path, how: str) -> None:
    path = damaged(tmp_path / "_kernel.so", how)
    with pytest.raises(RuntimeError, match=r"the compiled kernel .*_kernel\.so is damaged.*; reinstall spanformer"):
        library.load(path)


@pytest.mark.usefixtures("unloaded")
def test_damaged_library_is_warned_of_and_backends_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = damaged(tmp_path / "_kernel.so", "300000")
    monkeypatch.setattr(kernel, "find", lambda: path)
    with caplog.at_level(logging.WARNING, "spanformer"):
        assert "is damaged" in backends()["native"][0]
    assert "is damaged" in caplog.text


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("backend", ["native", "auto"])
def test_kernel_variable_names_no_file(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv("SPANFORMER_KERNEL", "/nonexistent.so")
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"SPANFORMER_KERNEL is '/nonexistent\.so', which is not a file"):
        attend(q, q, q, Rule(1), backend=backend)


@pytest.mark.usefixtures("unloaded")
def test_kernel_variable_names_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no library")
    monkeypatch.setenv("SPANFORMER_KERNEL", str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match=r"SPANFORMER_KERNEL is '.*notes\.txt', which cannot be loaded: .*damaged"):
        kernel.problem()


@pytest.mark.parametrize("isa", ["avx512", "bogus", "AVX2", "portable,avx2"])
def test_isa_variable_names_none_of_the_choices(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("SPANFORMER_ISA", isa)
    if isa == "avx512" and kernel.library().isa == "avx512":
        pytest.skip("this processor has it")
    with pytest.raises(
        ValueError, match=rf"SPANFORMER_ISA is '{isa}'; expected an instruction set that .* have: .*portable"
    ):
        library.load(LIBRARY)


WRONG = {
    "another order": (
        "int threads dtype",
        r"Call\.threads is int at byte 8 in the compiled kernel and int at byte 0 in",
    ),
    "another kind": ("float dtype", r"Call\.dtype is int at byte 0 in the compiled kernel and float at byte 0 in this"),
    "a field more": ("int dtype window", r"Call\.window is missing in the compiled kernel and int at byte 8 in"),
    "a field less": ("int dtype", r"Call\.B is int at byte 16 in the compiled kernel and int at byte 8 in"),
}


@pytest.mark.parametrize("how", WRONG)
def test_library_with_another_layout_is_refused(how: str) -> None:
    line, sentence = WRONG[how]
    rest = [f"{kind} {name}" for name, kind in c_layout.CALL.fields[1 if how == "another kind" else 2 :]]
    table = c_layout.Table("Call", line, *rest)
    with pytest.raises(RuntimeError, match=f"^{sentence}.*; reinstall spanformer to rebuild it$"):
        library.load(LIBRARY, (table, c_layout.DECODE))


def test_layout_names_a_struct_of_another_size() -> None:
    layout = "\n".join(f"{name} {where}" for name, where in c_layout.DECODE.layout().items())
    assert c_layout.differs(layout, (c_layout.DECODE,)) is None
    longer = layout.replace("Decode 448 bytes", "Decode 456 bytes")
    assert c_layout.differs(longer, (c_layout.DECODE,)) == (
        "Decode is 456 bytes in the compiled kernel and 448 bytes in this version of spanformer"
    )


def test_packed_call_reads_by_name() -> None:
    """Each value that `pack_call` packs stands in the field of its name."""
    q, out, g = torch.randn(2, 4, 5, 8), torch.empty(2, 4, 5, 16), torch.randn(2, 4, 5, 16)
    k, v, lse = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 16), torch.empty(2, 4, 5)
    terms = kernel.Terms(
        torch.ones(2, 4, 5), torch.ones(4, 9), torch.ones(4, 10, 8), torch.ones(2, 2, 7), torch.ones(4),
        torch.ones(2, 4, 7),
    )  # fmt: skip
    ids = [torch.zeros(2, n, dtype=torch.int64) for n in (5, 7, 5, 7)]
    ids += [torch.zeros(3, 2, n, dtype=torch.int64) for n in (5, 7)]
    blocks = [torch.zeros(4, 3, dtype=torch.int64), *(torch.zeros(6, dtype=torch.int64) for _ in range(3))]
    drop = [torch.zeros(2, n, dtype=torch.int64) for n in (4, 5, 7)]
    reach, seed = torch.ones(4, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    fixed = kernel.Fixed(0.5, 3.0, 0.25, True, 1, 6, reach, seed, *ids, 32, *blocks, *drop)
    gradients = (*kernel.rows(g), *kernel.rows(q), *kernel.rows(k), *kernel.rows(v), *range(1, 8))
    packed = kernel.pack_call(q, k, v, out, lse, terms, fixed, gradients)
    call = c_layout.CALL.structure.from_buffer_copy(packed)
    expected = {
        "B": 2, "H": 4, "Hkv": 2, "Tq": 5, "Tk": 7, "D": 8, "Dv": 16, "causal": 1, "shift": 1, "max_future": 6,
        "scale": 0.5, "ramp": 3.0, "dropout": 0.25, "lse": lse.data_ptr(), "reach": reach.data_ptr(),
        "dynamic": 1, "bias_length": 9, "vec_length": 10, "vec_head": 80, "key_bias_batch": 14, "key_bias_head": 7,
        "key_bias_group": 2, "key_span_batch": 28, "key_span_head": 7, "q_positions_batch": 5, "k_positions_batch": 7,
        "q_documents_batch": 5, "k_documents_batch": 7, "orders": 3, "q_orders_order": 10,
        "q_orders_batch": 5, "k_orders_order": 14, "k_orders_batch": 7, "block_size": 32,
        "block_rows": 2, "block_head": 3,
        "drop_queries_batch": 5, "drop_keys_batch": 7, "seed": seed.data_ptr(),
    }  # fmt: skip
    expected |= {name: t.data_ptr() for name, t in terms._asdict().items()}
    names = ("q_positions", "k_positions", "q_documents", "k_documents", "q_orders", "k_orders",
             "block_offsets", "block_columns", "block_mask_ids", "block_masks",
             "drop_heads", "drop_queries", "drop_keys")  # fmt: skip
    expected |= {name: t.data_ptr() for name, t in zip(names, (*ids, *blocks, *drop), strict=True)}
    for name, t in (("q", q), ("k", k), ("v", v), ("out", out), ("g", g), ("dq", q), ("dk", k), ("dv", v)):
        expected |= dict(zip((f"{name}_{part}" for part, _ in c_layout.ROWS), kernel.rows(t), strict=True))
    last = ("g_lse", "d_span", "d_distance_bias", "d_distance_vec", "d_key_bias", "d_sink_logits", "d_key_span")
    expected |= dict(zip(last, range(1, 8), strict=True))
    given = {name for name, _ in c_layout.CALL.numbers()} - {"dtype", "threads"}
    assert {name: getattr(call, name) for name in given} == expected


COLD = """
import torch
from spanformer import Rule, attend
q = torch.randn(1, 1, 4, 8)
for _ in range(2):
    try:
        attend(q, q, q, Rule(1))
    except ValueError as error:
        print(error)
"""


def test_isa_variable_is_refused_by_every_call_of_a_process() -> None:
    environment = os.environ | {"SPANFORMER_ISA": "bogus", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", COLD], env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("SPANFORMER_ISA is 'bogus'; expected") for line in lines), (
        done.stderr
    )


def test_sealing_again_replaces_the_digest(tmp_path: Path) -> None:
    path, build = damaged(tmp_path / "_kernel.so", "changed"), Path(__file__).parents[2] / "csrc" / "build.py"
    assert not library.is_whole(path)
    subprocess.run([sys.executable, str(build), "--seal", str(path)], check=True)
    assert library.is_whole(path) and path.stat().st_size == LIBRARY.stat().st_size
