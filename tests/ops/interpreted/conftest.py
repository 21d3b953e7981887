"""These tests run Triton's interpreter, which must be chosen before triton is imported. tests/ops/test_triton.py runs
them in a process of their own; elsewhere this folder is empty. With a GPU, that process runs the kernels themselves,
with their own tiles."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OURS = "SPANFORMER_TRITON_TESTS"
"""set in the process that runs these tests"""
collect_ignore_glob = [] if OURS in os.environ else ["*"]


class _Kept:
    def restore(self) -> None:
        """The patches stay."""


def _quicken() -> None:
    """The interpreter patches triton.language in every call of a function, and computes every sum of integers twice, to
    see overflows. Once is enough, and without the second sums it takes a third of the time."""
    from triton.runtime import interpreter

    patched, patch = set(), interpreter._patch_lang

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return _Kept()

    interpreter._patch_lang = patch_once
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


if INTERPRETED:
    _quicken()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from spanformer.ops.backends.triton import tiles

    if not INTERPRETED:
        return
    small = {"backward_kv": tiles.Tile(16, 32, 4, 1), "decode": tiles.Tile(4, 16, 4, 1)}
    monkeypatch.setattr(tiles, "tile", lambda step, *_: small.get(step, tiles.Tile(32, 16, 4, 1)))
