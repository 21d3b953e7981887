"""Pictures of an attention benchmark, from its result file: cost against length, and speed-ups.

matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from pathlib import Path

from spanformer.report.attention import groups, machine_line, meaning, mostly_disturbed
from spanformer.report.drawing import frame, label_ends, save_figure, subplots

YARDSTICK = "sdpa"
COLOURS = {
    "native": "#0b6e4f",
    "rings-native": "#0b6e4f",
    "banded": "#3f88c5",
    "rings-torch": "#3f88c5",
    "sdpa": "#222222",
    "sdpa-mask": "#d1495b",
    "flex": "#8d5a97",
    "x-transformers": "#8a8a8a",
    "local-attention": "#e08e1b",
    "original": "#7a4419",
    "reference": "#b0b0b0",
}
MODES = {"forward": "forward", "forward+backward": "forward and backward", "decode": "one decoding step"}


def draw(results: dict, folder: Path) -> list[Path]:
    """Write every picture the results allow, as PNG and SVG; returns their paths."""
    timed = [
        row for row in results["rows"] if row["status"] == "ok" and row["ms"] and row["part"] in ("cost", "decode")
    ]
    written = []
    for (mode, terms), rows in groups(timed, "mode", "terms").items():
        name = "-".join([mode.replace("+", "-"), *([terms.replace("_", "-")] if terms != "plain" else [])])
        written += _save(_cost_picture(rows, mode, terms, results), folder / f"cost-{name}")
        figure = _speed_picture(rows, mode, terms, results)
        if figure is not None:
            written += _save(figure, folder / f"speedup-{name}")
    return written


def _cost_picture(rows: list[dict], mode: str, terms: str, results: dict):
    """Time against length, both logarithmic; a panel for each profile, a line for each contender."""
    panels = groups(rows, "profile")
    figure, axes = _panels(len(panels), width=5.3, height=4.1, sharey=True)
    for axis, ((profile,), some) in zip(axes, panels.items(), strict=True):
        ends = []
        for (name, label), line in groups(some, "contender", "label").items():
            line.sort(key=lambda row: row["length"])
            x, y = [row["length"] for row in line], [row["ms"] for row in line]
            strong = name in ("native", "rings-native")
            axis.plot(
                x, y, color=COLOURS.get(name), marker="o", markersize=4, linewidth=2.6 if strong else 1.6,
                linestyle="--" if not line[0]["same_work"] else "-", zorder=3 if strong else 2,
            )  # fmt: skip
            ends.append((x[-1], y[-1], label, COLOURS.get(name, "#555555")))
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        _ticks(axis, sorted({row["length"] for row in some}))
        axis.set_title(f"Profile {profile}\n{meaning(profile)}", fontsize=10, loc="left")
        axis.set_xlabel("cache length (tokens)" if mode == "decode" else "sequence length (tokens)")
        axis.grid(True, which="major", color="#e5e5e5", linewidth=0.8)
        axis.margins(x=0.05)
        axis.tick_params(labelleft=True)
        axis.ends = ends
    axes[0].set_ylabel("milliseconds per call (lower is better)")
    low, high = axes[0].get_ylim()
    if high < 100 * low:  # two decades at least, so that a logarithmic axis has numbers on it
        axes[0].set_ylim(low / 3, max(high, 100 * low / 3))
    note = "Solid lines compute soft spans and their gradients; dashed lines compute something simpler."
    _frame(figure, f"Attention cost, {_work(mode, terms, rows)}", results, note, beside=1.85)
    for axis in axes:
        label_ends(axis, axis.ends)
    return figure


def _speed_picture(rows: list[dict], mode: str, terms: str, results: dict):
    """Bars of speed-up over SDPA's full attention at the longest length; a panel for each profile."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in rows if row["speedup"] and row["contender"] != YARDSTICK]
    panels = groups(rows, "profile")
    if not panels:
        return None
    longest = {profile: max(row["length"] for row in some) for profile, some in panels.items()}
    tallest = max(sum(row["length"] == longest[profile] for row in some) for profile, some in panels.items())
    figure, axes = _panels(len(panels), width=5.3, height=1.2 + 0.4 * tallest, sharey=False)
    low, high = min(1.0, *(row["speedup"] for row in rows)), max(1.0, *(row["speedup"] for row in rows))
    for axis, ((profile,), some) in zip(axes, panels.items(), strict=True):
        length = longest[profile,]
        bars = sorted((row for row in some if row["length"] == length), key=lambda row: row["speedup"])
        for at, row in enumerate(bars):
            times, faster = row["speedup"], row["speedup"] >= 1
            axis.barh(at, times - 1, left=1, height=0.62, color=COLOURS.get(row["contender"], "#555555"))
            axis.annotate(_times(times), (times, at), xytext=(4 if faster else -4, 0), textcoords="offset points",
                          ha="left" if faster else "right", va="center", fontsize=9, fontweight="bold")  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlim(low / 2.2, high * 2.6)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda times, _at: f"{times:g}×"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_yticks(range(len(bars)), [row["label"] for row in bars], fontsize=9)
        axis.set_ylim(len(bars) - tallest - 0.6, len(bars) - 0.4)
        axis.axvline(1, color="#222222", linewidth=1.2)
        axis.set_title(f"Profile {profile}, length {length:,}\n{meaning(profile)}", fontsize=10, loc="left")
        axis.set_xlabel("speed, with SDPA full causal = 1×")
    _frame(figure, f"Speed-up over full attention, {_work(mode, terms, rows)}", results,
           "Bars to the right are faster than full attention, to the left slower.")  # fmt: skip
    return figure


def _panels(count: int, *, width: float, height: float, sharey: bool):
    """A figure of this many panels, three in a line."""
    columns = min(count, 3)
    lines = -(-count // columns)
    figure, axes = subplots(
        lines, columns, width=max(width * columns, 6.5), height=(height + 0.5) * lines + 0.9, sharey=sharey
    )
    axes = axes.ravel()
    for axis in axes[count:]:
        axis.remove()
    return figure, list(axes[:count])


def _frame(figure, title: str, results: dict, note: str, *, beside: float = 0.0) -> None:
    """Title above, legend and machine below; `beside`: free inches to the right of a panel."""
    below = f"{note} Every speed shown equalled a float64 oracle on that shape.\n{machine_line(results)}"
    if mostly_disturbed(results):
        below += "  ·  OTHER PROCESSES DISTURBED THIS RUN: measure again on a quiet machine"
    frame(figure, title, below, beside=beside)


def _ticks(axis, lengths: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths])
    axis.yaxis.set_major_formatter(FuncFormatter(lambda ms, _at: f"{ms:g}"))
    for each in (axis.xaxis, axis.yaxis):
        each.set_minor_formatter(NullFormatter())


def _work(mode: str, terms: str, rows: list[dict]) -> str:
    """What was computed, in words."""
    row = rows[0]
    parts = [MODES.get(mode, mode), f"{row['heads']} heads of {row['dim']}", row["dtype"]]
    parts += [f"batch {row['batch']}"] if row["batch"] > 1 else []
    parts += [f"with {terms.replace('_', ' ')}"] if terms != "plain" else []
    return ", ".join(parts)


def _times(value: float) -> str:
    return f"{value:.2g}×" if value < 10 else f"{value:.0f}×"


def _save(figure, stem: Path) -> list[Path]:
    return [save_figure(figure, stem.with_suffix(ending), 150) for ending in (".png", ".svg")]
