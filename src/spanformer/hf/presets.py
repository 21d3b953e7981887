"""Spans that come with this package, for models that can be had without asking anybody: a folder each, as `save_spans`
writes it, in `presets/`. Its model card says what was measured."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "presets"
PRESET = "preset:"


def presets() -> list[str]:
    """The names of all presets; `load_spans(model, f"preset:{name}")` attaches one."""
    return sorted(path.parent.name for path in FOLDER.glob("*/spans.safetensors"))


def span_folder(path: str | Path) -> Path:
    """A folder of spans as it was given, or that of preset:NAME."""
    given = str(path)
    if not given.startswith(PRESET):
        return Path(path)
    name = given.removeprefix(PRESET)
    if name not in presets():
        raise ValueError(f"there is no preset {name!r}; expected one of {', '.join(presets())}")
    return FOLDER / name
