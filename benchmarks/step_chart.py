"""Draws the first table of a page: our step time over MirroredStrategy's, for each model.

python -m benchmarks.step_chart docs/overhead.md docs/step_time.svg
"""

from __future__ import annotations

import pathlib
import re

from matplotlib.figure import Figure

from benchmarks.processes import make_parser

_COUNTS = (2, 8)  # devices, as the columns have them
_COLORS = ("#4c72b0", "#dd8452")
_TEXT = "#808890"  # is read on a light page and on a dark one
_ROW = re.compile(r"^\| ([^|]+?)(?:, batch \d+)? \| (\d\.\d+)[^|]* \| (\d\.\d+)", re.MULTILINE)


def ratios(page: str) -> dict[str, tuple[float, ...]]:
    """The ratios for each model, on 2 and on 8 devices."""
    table = page.split("\n\n|")[1].split("\n\n")[0]
    return {name: tuple(map(float, found)) for name, *found in _ROW.findall(table)}


def draw(found: dict[str, tuple[float, ...]]) -> Figure:
    """The chart: a bar for each model and number of devices."""
    figure = Figure(figsize=(8, 1 + 0.55 * len(found)), layout="constrained")
    axes = figure.subplots()
    for number, (count, color) in enumerate(zip(_COUNTS, _COLORS)):
        places = [row + 0.4 * (number - 0.5) for row in range(len(found))]
        values = [one[number] for one in found.values()]
        bars = axes.barh(places, values, 0.36, label=f"{count} virtual devices", color=color)
        axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8, color=_TEXT)
    axes.axvline(1, color=_TEXT, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("time of a step / MirroredStrategy's: below 1 keras_multigpu is faster")
    axes.xaxis.label.set_color(_TEXT)
    axes.tick_params(colors=_TEXT)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, labelcolor=_TEXT)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_TEXT)
    return figure


def main() -> None:
    parser = make_parser("step_chart", __doc__)
    parser.add_argument("page", type=pathlib.Path, help="the page with the table")
    parser.add_argument("chart", help="the picture to write, by its ending: .svg, .png, .pdf")
    options = parser.parse_args()
    figure = draw(ratios(options.page.read_text()))
    figure.savefig(options.chart, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
