"""The product: every mechanism × position × backend, trained and decoding from a KV cache, in one direction and in
both; cross-attention; layers of different kinds. A combination equals the dense float64 oracle (support/oracles.py) or
is refused, as the mechanism's `supports()`, its spec or the backend says. Rows come from each kind's `tested`.

`make test` runs a covering array: every pair of a kind, a position, a backend, a use and a sort of model occurs.
`make test-all` runs all of it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from spanformer.kinds import KINDS
from spanformer.model.build import make_block, make_heads
from support.compatibility import PAGE, page, refusals
from support.covering import covering
from support.linear_oracle import WEIGHTS
from support.low_rank_oracle import POOLED
from support.memory_oracle import MEMORIES
from support.oracles import BY_CONTENT, ORACLES, TWO_STREAMS, parts
from support.product import (
    KIND_ROWS,
    ROWS,
    TABLES,
    TERMS,
    Case,
    cases,
    configured,
    outcome,
    product,
    unbuildable,
    unsupported,
)
from support.state_oracle import STATES

ON_THE_PAGE = refusals(PAGE.read_text(encoding="utf-8"))
WHOLE = product()
COVERING = [  # by themselves: a pair that occurs only in a combination that is refused would not be tested
    *covering([case for case in WHOLE if case not in ON_THE_PAGE]),
    *covering([case for case in WHOLE if case in ON_THE_PAGE]),
]
AGAIN = "python tests/support/compatibility.py writes docs/compatibility.md again"


def check(case: Case) -> None:
    said = outcome(case)
    if unbuildable(case):
        assert said, "it runs, and its spec says that no such model exists"
    elif reasons := unsupported(case):
        assert said in reasons, f"supports() says {reasons}, and the run says {said or 'nothing'!r}"
    elif said:
        assert TERMS.search(said), f"the backend refuses and names no term: {said}"
    assert said == ON_THE_PAGE.get(case, ""), f"{said or 'it works'!r}; {AGAIN}"


@pytest.mark.parametrize("case", COVERING, ids="-".join)
def test_case_equals_the_oracle_or_is_refused(case: Case) -> None:
    check(case)


@pytest.mark.product
@pytest.mark.parametrize(("title", "row"), [(title, row) for title, table in TABLES.items() for row in table.rows])
def test_whole_product_equals_the_oracle_or_is_refused(title: str, row: str) -> None:
    done = set(COVERING)
    for case in cases(replace(TABLES[title], rows=(row,))):
        if case not in done:
            check(case)


def test_page_is_written_from_its_refusals() -> None:
    """No more and no less than what `check` compares case by case."""
    assert PAGE.read_text(encoding="utf-8") == page(ON_THE_PAGE), AGAIN


def test_covering_array_has_every_pair() -> None:
    def pairs(rows: list[Case]) -> set:
        return {(a, row[a], b, row[b]) for row in rows for a in range(5) for b in range(a)}

    assert pairs(COVERING) == pairs(WHOLE)
    assert len(COVERING) < len(WHOLE) / 5


def test_every_kind_has_a_row_and_an_oracle() -> None:
    assert {spec.kind for row in KIND_ROWS for spec in parts(row)} == set(KINDS), "a kind without `tested`"
    missing = set(KINDS) - {*ORACLES, *TWO_STREAMS, *BY_CONTENT, *WEIGHTS, *STATES, *POOLED, *MEMORIES}
    assert not missing, f"{sorted(missing)} have no dense oracle; add one to ORACLES in tests/support/oracles.py"


@pytest.mark.parametrize("row", ROWS)
def test_mixture_is_built_unless_supports_says_no(row: str) -> None:
    table = TABLES["Encoders" if row.startswith(("etc", "linformer")) else "Language models"]
    specs = parts(row)
    config = configured(table, row, "none", "reference")
    reasons = [reason for spec in config.layer_specs()[0] for reason in make_heads(config, spec).supports(mixed=True)]
    if len(specs) > 1:
        assert not reasons
        return
    mixed = replace(config.attention, kind=f"2 window(9) + 2 {row}")
    config = replace(config, attention=mixed)
    if reasons:
        with pytest.raises(ValueError) as said:
            make_block(config, config.layer_specs()[0])
        assert str(said.value) in reasons
    else:
        make_block(config, config.layer_specs()[0])


@pytest.mark.parametrize("row", ROWS)
def test_persistent_vectors_are_built_unless_supports_says_no(row: str) -> None:
    table = TABLES["Encoders" if row.startswith(("etc", "linformer")) else "Language models"]
    config = configured(table, row, "none", "reference")
    reasons = make_block(config, config.layer_specs()[0]).attention.mechanism.supports(persistent=True)
    config = replace(config, persistent=2)
    if reasons:
        with pytest.raises(ValueError) as said:
            make_block(config, config.layer_specs()[0])
        assert str(said.value) in reasons
    else:
        make_block(config, config.layer_specs()[0])
