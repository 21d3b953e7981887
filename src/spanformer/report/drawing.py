"""Helpers of all pictures: a figure without a screen, its frame, labels of lines, axes for spans and times.

matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from spanformer.core.files import replace_file
from spanformer.report.events import Run
from spanformer.report.measures import amount

GREEN, BLUE, RED, GREY, INK, FAINT = "#0b6e4f", "#3f88c5", "#d1495b", "#8a8a8a", "#222222", "#e5e5e5"
DPI = 130
CYCLE = (GREEN, BLUE, RED, "#e08e1b", "#8d5a97", "#7a4419", "#2a9d8f", "#c2185b", "#5c6bc0", "#6b8e23")


@dataclass(frozen=True)
class Picture:
    """A figure, its file name, and one sentence that describes it."""

    name: str
    title: str
    sentence: str
    figure: Any

    def save(self, path: Path) -> Path:
        return save_figure(self.figure, path, DPI)


def save_figure(figure: Any, path: Path, dpi: int) -> Path:
    """Write a picture completely or not at all, in the format of the path's suffix."""
    with replace_file(path) as new:
        figure.savefig(new, dpi=dpi)
    return path


def subplots(lines: int, columns: int, *, width: float, height: float, **options: Any):
    """A figure of that many inches and its axes [lines, columns], drawn without a screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib; install it with: pip install 'spanformer[plot]'") from None
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False, **options)
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def frame(figure, title: str, below: str, *, beside: float = 0.0) -> None:
    """Title above, small print below; `beside`: free inches to the right of every panel."""
    inches, lines = figure.get_size_inches()[1], below.count("\n") + 1
    right = 1 - beside / figure.get_size_inches()[0]
    room = (0, (0.12 + 0.14 * lines) / inches, right, 1 - 0.4 / inches)
    figure.tight_layout(rect=room, pad=0.7, w_pad=1.5 + beside * 72 / 10, h_pad=2.0)
    head = figure.suptitle(title, x=0.012, y=1 - 0.1 / inches, ha="left", va="top", fontsize=13, fontweight="bold")
    # shrink a long title instead of cutting it
    if (wide := head.get_window_extent().width / figure.bbox.width) > 0.976:
        head.set_fontsize(13 * 0.976 / wide)
    figure.text(0.012, 0.08 / inches, below, fontsize=8, color="#555555", va="bottom")


def colours(count: int) -> list[str]:
    """One for each line, the same for the same place."""
    return [CYCLE[at % len(CYCLE)] for at in range(count)]


def grid(axis) -> None:
    axis.grid(True, which="major", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)


def label_ends(axis, ends: list[tuple[float, float, str, str]], gap: float = 11.5) -> None:
    """Write each line's name beside its end (x, y, name, colour), moved apart where ends lie close together."""
    last, scale = max(x for x, *_ in ends), axis.figure.dpi / 72
    height = lambda y: axis.transData.transform((last, y))[1] / scale  # noqa: E731
    beside = sorted((end for end in ends if end[0] == last), key=lambda end: end[1])
    floor = axis.transAxes.transform((0, 0))[1] / scale + gap / 2  # names stay above the numbers of the x axis
    at = apart([max(height(y), floor + gap * n) for n, (_, y, *_) in enumerate(beside)], gap)
    for (x, y, label, colour), points in zip(beside, at, strict=True):
        axis.annotate(label, (x, y), xytext=(9, points - height(y)), textcoords="offset points", va="center",
                      fontsize=8, color=colour, fontweight="bold", annotation_clip=False)  # fmt: skip
    for x, y, label, colour in ends:
        if x < last:  # a line that stops early is named above its last point
            axis.annotate(label, (x, y), xytext=(4, 7), textcoords="offset points", ha="right", fontsize=8,
                          color=colour, fontweight="bold", annotation_clip=False)  # fmt: skip


def apart(wanted: list[float], gap: float) -> list[float]:
    """Ascending places as close as possible to the wanted ones, at least `gap` apart: neighbours share the shift."""
    runs: list[list[float]] = []  # each a run of touching labels, as wanted places
    for place in wanted:
        runs.append([place])
        while len(runs) > 1 and _start(runs[-1], gap) - _start(runs[-2], gap) < gap * len(runs[-2]):
            last = runs.pop()
            runs[-1] += last
    return [_start(run, gap) + gap * n for run in runs for n in range(len(run))]


def _start(run: list[float], gap: float) -> float:
    return sum(run) / len(run) - gap * (len(run) - 1) / 2


def span_ticks(top: float) -> list[int]:
    """0, 1, powers of four up to the limit, and the limit."""
    powers = [4**n for n in range(1 + int(math.log(max(top, 1), 4) + 1e-9))]
    return [0, *(power for power in powers if power <= top / 2), round(top)]


def span_axis(axis, top: float) -> None:
    """y as spans in tokens, on a logarithmic scale that includes 0."""
    from matplotlib.ticker import NullFormatter, NullLocator

    axis.set_yscale("symlog", base=2, linthresh=1, linscale=0.8)
    axis.set_yticks(span_ticks(top), [f"{tick:,}" for tick in span_ticks(top)])
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_ylim(-0.3, top * 1.35)
    axis.set_ylabel("tokens (each doubling the same height)")


def bits_axis(axis, unit: str, bits: np.ndarray) -> None:
    """y as bits per unit, logarithmic, so that later differences stay visible."""
    axis.set_yscale("log")
    log_ticks(axis.yaxis, list(bits), lambda value: f"{value:g}")
    axis.set_ylabel(f"bits per {unit} (lower is better)")


def log_ticks(along, values: list[float], show) -> None:
    """Ticks of a logarithmic axis at round numbers, as many as read well; show: the number's words."""
    from matplotlib.ticker import NullFormatter, NullLocator

    values = [value for value in values if value > 0] or [1.0]
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    near = (
        (1, 1.5, 2, 3, 4, 5, 6, 8) if high > 3 * low else (1, 1.2, 1.4, 1.6, 1.8, 2, 2.25, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
    )
    steps = (1,) if high > 300 * low else (1, 2, 5) if high > 10 * low else near
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    if high < 1.6 * low:  # too narrow for round numbers of a whole decade
        size = 10.0 ** math.floor(math.log10(max(high - low, low / 1e3) / 2))
        ticks = [size * n for n in range(math.floor(low / size), math.ceil(high / size) + 1)]
        ticks = ticks[:: max(1, len(ticks) // 6)]
    kept: list[float] = []
    for tick in (tick for tick in ticks if low / 1.1 <= tick <= high * 1.1):
        if kept and show(tick) == show(kept[-1]):  # two ticks with one label: keep the visible one
            kept[-1] = tick if kept[-1] < low else kept[-1]
        elif not kept or tick > kept[-1] * (high / low) ** 0.18:  # labels do not overlap
            kept.append(tick)
    along.set_ticks(kept, [show(tick) for tick in kept])
    along.set_minor_locator(NullLocator())
    along.set_minor_formatter(NullFormatter())


def time_unit(longest: float) -> tuple[float, str]:
    """Seconds of the unit an axis up to this many seconds is best read in, and its name."""
    return (1, "seconds") if longest < 300 else (60, "minutes") if longest < 3 * 3600 else (3600, "hours")


def whole_steps(axis) -> None:
    """x as step numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda step, _at: f"{step:,.0f}"))
    axis.set_xlabel("training step")


def plain(text: str, longest: int = 48, *, family: str = "DejaVu Sans") -> str:
    """Text from a file made safe to draw: no line breaks, no formulas (matplotlib reads $…$ as one), not too long."""
    text = text if len(text) <= longest else text[: longest - 1] + "…"
    glyphs = _glyphs(family)
    text = "".join(" " if not char.isprintable() else char if ord(char) in glyphs else "□" for char in text)
    return text.replace("$", r"\$")


@cache
def _glyphs(family: str) -> frozenset[int]:
    """The characters a font can draw."""
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(font_manager.findfont(family)).get_charmap())


def small_print(run: Run) -> str:
    """Which run, how large, and where it ran, in one line."""
    machine = {key: plain(str(value), 24) for key, value in run.start.machine.items()}
    parts = [plain(run.name), f"{amount(run.start.parameters)} parameters"]
    parts += [f"{machine['threads']} threads"] if "threads" in machine else []
    parts += [machine["device"]] if "device" in machine else []
    parts += [f"torch {machine['torch']}"] if "torch" in machine else []
    return "  ·  ".join(parts)
