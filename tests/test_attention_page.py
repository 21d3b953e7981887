"""docs/attention.md lists every term of a Rule, and the backends that serve it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from spanformer.ops import Rule
from spanformer.ops.backends import banded, flex, native
from spanformer.ops.backends.triton import checks as triton
from spanformer.ops.lower import Lowered

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "attention.md").read_text(encoding="utf-8")
ROWS = {row[1]: row[2] for row in re.finditer(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", PAGE, flags=re.MULTILINE)}
BACKENDS = {"native": native, "triton": triton, "flex": flex, "banded": banded}


def test_attention_page_lists_every_term() -> None:
    assert {f.name for f in fields(Rule)} - ROWS.keys() == set()


@pytest.mark.parametrize("name", ["key_span", "orders", "distance_scale", "distance_bias", "max_future"])
def test_attention_page_names_the_backends_of(name: str) -> None:
    class Given:
        """A lowered call with this term alone."""

        def __getattr__(self, term: str) -> object:
            return "given" if term == name else Lowered.__dataclass_fields__[term].default

    serving = [backend for backend, module in BACKENDS.items() if not module._unserved(Given())]
    assert ROWS[name] == ("all" if len(serving) == len(BACKENDS) else ", ".join([*serving, "reference"]))
