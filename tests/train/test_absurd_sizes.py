"""Run files with absurd sizes: one sentence that names the option to lower, at once and without the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spanformer.core.memory import machine_bytes, shown_bytes
from spanformer.core.peak import peak_of, unsupported
from spanformer.train.run import train
from support.tiny_runs import tiny

ROOM = "of memory on this machine; lower "
ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"model.dim": 10**9}, ROOM + "model.dim (now 1,000,000,000)"),
    "width beyond tensors": ({"model.dim": 10**30}, f"model.dim is {10**30}; expected at most 2,147,483,648"),
    "layers": ({"model.layers": 10**7}, "model.layers is 10000000; expected at most 4,096"),
    "layers of some width": ({"model.layers": 4096, "model.dim": 2**16}, ROOM + "model.layers (now 4,096)"),
    "heads": ({"model.heads": 10**8, "model.dim": 10**8}, "model.heads is 100000000; expected at most 4,096"),
    "vocabulary": ({"model.vocab": 10**12}, "model.vocab is 1000000000000; expected at most 2,147,483,648"),
    "large vocabulary": ({"model.vocab": 2**31}, ROOM + "model.vocab (now 2,147,483,648)"),
    "feed-forward": ({"model.feedforward.dim": 2**31}, ROOM + "model.feedforward.dim (now 2,147,483,648)"),
    "experts": ({"model.feedforward.experts": 10**9}, "feedforward.experts is 1000000000; expected at most 4,096"),
    "persistent": ({"model.persistent": 10**9}, ROOM + "model.persistent (now 1,000,000,000)"),
    "learned positions": (
        {"model.position.kind": "learned", "model.position.length": 2**31}, ROOM + "model.position.length (now ",
    ),
    "table": (
        {"model.position.kind": "table", "model.attention.max_span": 2**31}, ROOM + "model.attention.max_span (now ",
    ),
    "batch": ({"train.batch": 10**10}, ROOM + "train.batch (now 10,000,000,000)"),
    "block": ({"train.block": 10**10}, ROOM + "train.block (now 10,000,000,000)"),
    "threads": ({"train.threads": 10**9}, "train.threads is 1000000000; expected at most 1,024"),
    "random blocks": ({"model.attention.kind": "Random(100000000)"}, "count is 100000000; expected a whole number"),
    "long pattern": ({"model.attention.kind": " | ".join(["Full()"] * 2000)}, "characters; expected at most 10,000"),
    "deep pattern": ({"model.attention.kind": "|".join(["Full()"] * 1400)}, "has too many parts; combine fewer by"),
}  # fmt: skip


@pytest.mark.skipif(unsupported() is not None, reason=str(unsupported()))
@pytest.mark.slow
def test_absurd_size_names_the_option_to_lower(tmp_path: Path) -> None:
    for name, (changes, expected) in ABSURD.items():
        said: list[str] = []

        def refuse(changes: dict[str, Any] = changes, said: list[str] = said) -> None:
            with pytest.raises(ValueError) as caught:
                train(tiny(tmp_path, changes))
            said.append(str(caught.value))

        peak, seconds = peak_of(refuse)
        assert expected in said[0] and "\n" not in said[0], (name, said)
        assert peak < 64e6 and seconds < 20, (name, peak, seconds)
        assert not list((tmp_path / "run").glob("*")), name


def test_memory_of_the_machine_is_known() -> None:
    assert 1e8 < machine_bytes() < 1e15
    assert [shown_bytes(n) for n in (12, 3200, 12.9e9, 5e18)] == ["12 bytes", "3.2 kB", "12.9 GB", "5,000.0 PB"]
