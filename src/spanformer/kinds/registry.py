"""The registries of attention mechanisms and position encodings: mappings from names to specs.

Built-in specs are imported when a registry is first read. A package of your own adds one:

    spanformer.kinds.register(Kind("my_attention", …))
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from spanformer.kinds.spec import Kind, PositionKind

T = TypeVar("T", Kind, PositionKind)


class Registry(Mapping[str, T], Generic[T]):
    """Specs by name, in the order in which they were registered."""

    def __init__(self, package: str, modules: tuple[str, ...]) -> None:
        """modules: of the package; each holds KIND, or KINDS where several share a class."""
        self._package, self._modules, self._specs = package, modules, dict[str, T]()
        self._loaded = False

    def register(self, spec: T) -> None:
        """Add a spec; a name that is already registered raises ValueError."""
        self._load()
        if spec.name in self._specs:
            raise ValueError(f"{spec.name!r} is already registered; choose another name")
        self._specs[spec.name] = spec

    def unregister(self, name: str) -> None:
        """Remove a spec, for tests."""
        del self._specs[name]

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for name in self._modules:
            module = importlib.import_module(f"{self._package}.{name}")
            for spec in getattr(module, "KINDS", None) or (module.KIND,):
                self._specs[spec.name] = spec

    def __getitem__(self, name: str) -> T:
        self._load()
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(list(self._specs))

    def __len__(self) -> int:
        self._load()
        return len(self._specs)


KINDS: Registry[Kind] = Registry(
    "spanformer.kinds",
    (
        "adaptive_span",
        "dynamic_span",
        "window",
        "full",
        "dilated",
        "strided",
        "fixed",
        "image_local",
        "blockwise",
        "big_bird",
        "expire_span",
        "forgetting",
        "sinks",
        "scoring",
        "chunked",
        "longformer",
        "etc",
        "lsh",
        "routing",
        "hard",
        "indexed",
        "linear",
        "gated",
        "span_linear",
        "linformer",
        "low_rank",
        "sinkhorn",
        "compressive",
        "retrieval",
    ),
)
POSITIONS: Registry[PositionKind] = Registry(
    "spanformer.kinds.positions",
    (
        "none",
        "sinusoidal",
        "learned",
        "table",
        "shaw",
        "transformer_xl",
        "rotary",
        "alibi",
        "t5",
        "distance_bias",
        "da_transformer",
    ),
)
