"""A share of the random cases that `make fuzz` runs, and what it prints of one that fails."""

from __future__ import annotations

import pytest
import torch

import fuzz
from spanformer.ops import kernel
from support.cases import Case

pytestmark = pytest.mark.skipif(kernel.problem() is not None, reason=f"native: {kernel.problem()}")


@pytest.mark.parametrize("first", range(0, 200, 10))
def test_random_cases(first: int) -> None:
    wrong = [found for seed in range(first, first + 10) if (found := fuzz.failure(seed))]
    assert not wrong, "\n".join(wrong)


def test_draws_cover_every_kind_of_term() -> None:
    code = " ".join(fuzz.draw(seed).code for seed in range(400))
    terms = {f"'{term}'" for kinds in fuzz.KINDS.values() for term in kinds}
    options = {
        "clipped_value",
        "stride=",
        "skip=",
        "union_stride=",
        "second_group=",
        "sink_tokens=",
        "max_future=",
        "dropout=",
        "paper_compat=",
    }
    options |= {
        "positions='shuffled'",
        "positions='rows'",
        "layout='bthd'",
        "bits=8",
        "bits=4",
        "check_threads",
        "check_rings",
    }
    assert [what for what in sorted(terms | options) if what not in code] == []


def test_failure_is_printed_as_code_that_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    def refuse(*args, **options) -> None:
        calls.append((args, options))
        raise AssertionError("wrong")

    monkeypatch.setattr(fuzz, "check", refuse)
    seed = next(seed for seed in range(100) if fuzz.draw(seed).code.startswith("refuse("))
    message, code = (fuzz.failure(seed) or "").split("\n")
    assert message == f"# seed {seed}: AssertionError: wrong"
    with pytest.raises(AssertionError, match="wrong"):
        eval(code, {"refuse": refuse, "Case": Case, "torch": torch})
    assert calls[0] == calls[1]
