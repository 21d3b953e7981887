"""Pictures of the benchmarks `knn` and `retrieval`: bits per byte against bytes, and what is found by distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spanformer.report.drawing import BLUE, DPI, GREEN, GREY, RED, colours, grid, label_ends, save_figure, subplots


def draw_datastores(parts: dict[str, dict[str, Any]], path: Path) -> Path | None:
    """parts: what `bench knn` found for each text, by name. Left: what a datastore saves, by how keys are stored;
    right: by the share of searches that λ(c) skips. None: there is nothing to draw."""
    forms = {name: found["forms"] for name, found in parts.items() if "forms" in found}
    if not forms:
        return None
    figure, (axes,) = subplots(1, 2, width=10, height=3.9, sharey=True)
    figure.set_layout_engine("constrained")
    for colour, (name, found) in zip(colours(len(forms)), forms.items(), strict=True):
        rows = sorted(found["rows"].values(), key=lambda row: row["entry_bytes"])
        label = f"{name}, {rows[0]['entries']:,} entries"
        saved = [100 * row["change"] for row in rows]
        axes[0].plot([row["entry_bytes"] for row in rows], saved, "o-", color=colour, label=label)
        if "unigrams" in found:
            axes[0].axhline(100 * found["unigrams"]["change"], color=colour, linestyle=":", linewidth=1.2,
                            label="frequencies of its tokens alone")  # fmt: skip
        skips = sorted((row["skipped"], 100 * row["change"]) for row in found.values() if "skipped" in row)
        if skips:
            constant = 100 * found["rows"]["float16"]["change"]
            axes[1].plot(*zip(*((100 * at, change) for at, change in skips), strict=True), "o-", color=colour)
            axes[1].axhline(constant, color=colour, linestyle="--", linewidth=1.2)
            axes[1].annotate("a constant λ, nothing skipped", (0.03, constant), xycoords=("axes fraction", "data"),
                             xytext=(0, 4), textcoords="offset points", fontsize=8, color=colour)  # fmt: skip
    axes[0].axhline(0, color=GREY, linewidth=0.8)
    axes[0].set_xscale("log", base=2)
    sizes = sorted({row["entry_bytes"] for found in forms.values() for row in found["rows"].values()})
    axes[0].set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes[0].set_xlabel("bytes an entry")
    axes[0].set_ylabel("change of bits per byte, %")
    axes[0].legend(fontsize=8, loc="center left")
    axes[1].set_xlabel("searches that λ(c) skips, %")
    axes[1].set_xlim(0, 100)
    for axis in axes:
        grid(axis)
    return save_figure(figure, path, DPI)


def draw_retrieval(parts: dict[str, dict[str, Any]], path: Path) -> Path | None:
    """parts: what `bench retrieval` found, by part. Left: bits against bytes in RAM; right: the pass key by depth.
    None: a part is missing."""
    if not {"bits", "decode", "key"} <= parts.keys():
        return None
    bits, held, key = parts["bits"], parts["decode"]["bytes"], parts["key"]
    rows = {
        "full attention": ("full", held["full attention, float32"], GREY),
        "rings alone": ("rings alone", held["rings alone"], RED),
        "retrieval heads, all in files": ("retrieval heads", held["retrieval heads"], GREEN),
        "retrieval heads, codes in RAM": ("retrieval heads", held["retrieval heads, codes in RAM"], BLUE),
    }
    figure, (axes,) = subplots(1, 2, width=10, height=3.9)
    figure.set_layout_engine("constrained")
    for name, (part, size, colour) in rows.items():
        rise = 100 * (bits[part] / bits["full"] - 1)
        axes[0].plot([size / 1e6], [rise], "o", color=colour, markersize=8, label=f"{name}: {rise:+.2f} %")
    axes[0].set_xscale("log")
    axes[0].set_xticks([3, 10, 30, 100], ["3", "10", "30", "100"])
    axes[0].set_xlabel("KV cache in RAM after 2,048 tokens, MB")
    axes[0].set_ylabel("rise of bits per byte, %")
    axes[0].legend(fontsize=8, loc="upper right")
    ends = []
    for name, colour in (("full", GREY), ("retrieval heads", GREEN)):
        at = [row["depth"] for row in key[name]]
        nats = [row["nats"] for row in key[name]]
        axes[1].plot(at, nats, "o-", color=colour)
        ends.append((at[-1], nats[-1], {"full": "full attention"}.get(name, name), colour))
        for row in key[name]:
            axes[1].annotate(f"{sum(row['found'])}/{len(row['found'])}", (row["depth"], row["nats"]), fontsize=7,
                             xytext=(0, 6 if name != "full" else -13), textcoords="offset points", ha="center",
                             color=colour)  # fmt: skip
    axes[1].set_ylim(0)
    axes[1].set_xlabel("depth of the pass key (0: beginning of the text)")
    axes[1].set_ylabel("nats a token of the pass key; right answers")
    label_ends(axes[1], ends)
    for axis in axes:
        grid(axis)
    return save_figure(figure, path, DPI)
