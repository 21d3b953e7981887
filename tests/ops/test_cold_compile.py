"""What torch.compile and exported programs need of a process in which nothing of ours has run yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spanformer import Rule, attend
from spanformer.ops import kernel

pytestmark = pytest.mark.skipif(kernel.problem() is not None, reason=f"native: {kernel.problem()}")

COLD = """
import torch, spanformer
q = torch.randn(1, 2, 20, 16)

def run(q):
    rings = spanformer.Rings(q[:, 0, :8], q[:, 1, :8], [5, 3], torch.tensor([12]))
    decoded = spanformer.attend_rings(q[:, :, :1], rings, spanformer.Rule(2, reach=3))
    return spanformer.attend(q, q, q, spanformer.Rule(2, reach=7)).out, decoded.out

traced = torch.compile(run, fullgraph=True, backend="eager")(q)
assert all(map(torch.equal, traced, run(q)))
"""


@pytest.mark.slow
def test_attend_and_attend_rings_compile_whole_as_first_calls() -> None:
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Layer(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return attend(q, q, q, Rule(2, reach=7)).out


@pytest.mark.slow
def test_exported_program_runs_where_operators_are_imported(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 20, 16)
    torch.export.save(torch.export.export(Layer(), (q,)), tmp_path / "layer.pt2")
    torch.save((q, Layer()(q)), tmp_path / "expected.pt")
    code = """
import sys, torch
import spanformer.ops.operators
assert torch.ops.spanformer.decode.default
q, expected = torch.load(f"{sys.argv[1]}/expected.pt")
assert torch.equal(torch.export.load(f"{sys.argv[1]}/layer.pt2").module()(q), expected)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
