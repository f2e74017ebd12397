"""Draws the figures of `step_time`: our time over the peer's, one bar per model and device count.

python -m benchmarks.step_time --json figures.json
python -m benchmarks.step_chart figures.json docs/step_time.svg
"""

from __future__ import annotations

import json
import statistics

from matplotlib.figure import Figure

from benchmarks.processes import make_parser
from benchmarks.step_time import Figures

_NAMES = {
    "mlp": "MLP 4x1024",
    "convnet": "conv net with BatchNorm",
    "text": "Embedding + LSTM",
    "transformer": "small transformer",
    "wide": "wide sparse",
    "resnet50": "ResNet50 at 64x64",
}
_COLORS = ("#4c72b0", "#dd8452", "#55a868")


def draw(results: list[dict], environment: dict[str, str], title: str, peer: str) -> Figure:
    """The chart: bars for the median of the rounds, points for the rounds."""
    figures = Figures(results)
    models = list(dict.fromkeys(result["model"] for result in results))
    counts = sorted({one["devices"] for one in results if one["side"] == peer})
    figure = Figure(figsize=(8, 0.9 + 0.62 * len(models)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(counts)
    for number, count in enumerate(counts):
        places = [row + (number - (len(counts) - 1) / 2) * height for row in range(len(models))]
        ratios = [figures.ratios("step_ms", model, peer, count) for model in models]
        medians = [statistics.median(found) if found else 0.0 for found in ratios]
        label, color = f"{count} CPU devices", _COLORS[number % len(_COLORS)]
        axes.barh(places, medians, 0.9 * height, label=label, color=color)
        for place, found, median in zip(places, ratios, medians):
            axes.plot(found, [place] * len(found), ".", color="#333333", markersize=4)
            axes.text(max([0.02, *found]) + 0.015, place, f"{median:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="#333333", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(models)), [_NAMES.get(model, model) for model in models])
    axes.invert_yaxis()
    axes.set_xlabel(f"keras_multigpu's time / {title}'s: below 1 keras_multigpu is faster")
    figure.legend(loc="outside lower center", ncols=len(counts), frameon=False)
    figure.suptitle(f"A training step on CPU devices, against {title}", fontsize=11)
    axes.set_title(f"{environment['host']}\n{environment['versions']}", fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def main() -> None:
    parser = make_parser("step_chart", __doc__)
    parser.add_argument("figures", help="what `step_time --json` has written")
    parser.add_argument("chart", help="the picture to write, by its ending: .svg, .png, .pdf")
    options = parser.parse_args()
    with open(options.figures) as file:
        found = json.load(file)
    results = found["measurements"]
    has_mirrored = any(result["side"] == "mirrored" for result in results)
    peer, title = (
        ("mirrored", "MirroredStrategy") if has_mirrored else ("distributed", "DataParallel")
    )
    draw(results, found["environment"], title, peer).savefig(options.chart)


if __name__ == "__main__":
    main()
