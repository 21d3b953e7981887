"""The original code, imported from a clone: only where ADAPTIVE_SPAN_CLONE says there is one."""

import os
import sys
from pathlib import Path

import pytest

from spanformer.bench import peers
from spanformer.bench.oracle import check, find_truth
from spanformer.bench.work import Work, make_inputs

CLONE = os.environ.get("ADAPTIVE_SPAN_CLONE")


@pytest.mark.skipif(not CLONE, reason="ADAPTIVE_SPAN_CLONE names no clone of facebookresearch/adaptive-span")
@pytest.mark.parametrize("profile", ["A", "S", "F"])
def test_original_equals_our_rule_with_its_conventions(profile):
    contender = peers.original(Path(CLONE))
    inputs = make_inputs(Work(profile, 256, terms="distance_vec", streaming=48, dim=16, batch=2))
    verdict = check(contender.build(inputs), inputs, find_truth(inputs, inputs.rule()), floor=contender.floor)
    assert verdict.right, verdict.wrong


def test_importing_from_a_folder_leaves_no_trace(tmp_path):
    (tmp_path / "models.py").write_text("from helper_of_models import VALUE\n")
    (tmp_path / "helper_of_models.py").write_text("VALUE = 7\n")
    assert peers.import_from(tmp_path, "models").VALUE == 7
    assert not {"models", "helper_of_models"} & set(sys.modules)
    assert str(tmp_path) not in sys.path


def test_without_a_clone_there_is_a_reason():
    work = Work("A", 256, terms="distance_vec", streaming=48)
    assert "--original PATH" in peers.original(None).cannot(work)
    assert "no models.py" in peers.original(Path("/nowhere")).cannot(work)
    assert "streaming" in peers.original(Path("/nowhere")).cannot(Work("A", 256))
