"""The picture of `wide_quality`: quality, width, memory and speed of the layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks import wide_tables

_GROUPS = {
    1: ("1 one a value", "#55a868", "s"),
    2: ("2 ones a value", "#4c72b0", "o"),
    4: ("4 ones a value", "#dd8452", "^"),
    0: ('4 ones, layout="published"', "#c44e52", "D"),
}
_BYTES = 8  # of an index: a weight, and Adagrad's sum of squares


def draw(
    choices: Sequence[Mapping[str, Any]],
    figures: Mapping[str, tuple[Sequence[Mapping[str, Any]], Mapping[str, float]]],
) -> Figure:
    """A column for each table: AUC and speed over width and memory."""
    figure = Figure(figsize=(4.6 * len(figures) + 0.4, 6), layout="constrained")
    panels = figure.subplots(2, len(figures), squeeze=False, sharex="col", height_ratios=(3, 2))
    for (quality, speed), (name, (found, peers)) in zip(panels.T, figures.items()):
        _plot(quality, choices, found, "auc")
        for style, (peer, auc) in zip(("--", ":"), peers.items()):
            quality.axhline(auc, color="gray", linestyle=style, lw=1, label=peer)
        _plot(speed, choices, [{**one, "rate": one["rate"] / 1e3} for one in found], "rate")
        quality.set_title(wide_tables.NAMES[name].split(":")[0], loc="left", fontsize=11)
        speed.set(xscale="log", xlabel="width of the row", ylim=(0, None))
        memory = quality.secondary_xaxis(
            "top", functions=(lambda x: x * _BYTES / 2**20, lambda x: x * 2**20 / _BYTES)
        )
        memory.set_xlabel("weights and optimizer, MiB", fontsize=8)
    panels[0, 0].set_ylabel("AUC of other rows")
    panels[1, 0].set_ylabel("1,000 rows/s of CPU time")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _plot(axes: Any, choices: Sequence[Any], found: Sequence[Any], figure: str) -> None:
    """One figure of all layouts over their widths; a ring around the default."""
    for group, (label, color, marker) in _GROUPS.items():
        rows = [one for choice, one in zip(choices, found) if _group(choice) == group]
        points = sorted((one["width"], one[figure]) for one in rows)
        axes.plot(*zip(*points), color=color, marker=marker, lw=1, ms=5, label=label)
    default = found[choices.index({"buckets": 8})]
    ring = {"ms": 12, "mfc": "none", "mec": _GROUPS[2][1], "ls": "none"}
    axes.plot(default["width"], default[figure], "o", label="the default", **ring)
    axes.grid(alpha=0.3)


def _group(choice: Mapping[str, Any]) -> int:
    return 0 if choice.get("layout") == "published" else choice.get("splits", 2)
