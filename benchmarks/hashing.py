"""The speed of hashing tables: `HashEncoder` beside its alternatives.

    python -m benchmarks.hashing
    python -m benchmarks.hashing --rows 1000000 --repeats 3

Every measurement runs in a separate process (`hashing_worker`). The sides take turns, round by
round, so that other programs on the machine disturb all of them alike; ratios are computed within
a round. Progress goes to stderr, the tables to stdout.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import processes
from benchmarks.wide_data import COLUMNS, write_parquet


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to hash the table.

    Attributes:
        name: its name in the table.
        options: of `hashing_worker.measure`.
        share: the part of the rows that it gets; less than 1 for slow ways.
        rivals: the names of the ways to compare with.
    """

    name: str
    options: dict[str, Any]
    share: float = 1.0
    rivals: tuple[str, ...] = ()


_OTHERS = ("FeatureHasher, end to end", "keras.layers.Hashing, end to end", "pandas apply")
_PREPARED = "FeatureHasher, lists of strings ready"
_DECODE = "Parquet: decode the strings only"
WAYS = (
    Way("pandas apply", {"side": "recipe"}, share=0.02),
    Way("FeatureHasher, end to end", {"side": "feature_hasher"}, share=0.1),
    Way(_PREPARED, {"side": "prepared_feature_hasher"}, share=0.1),
    Way("keras.layers.Hashing, end to end", {"side": "keras_hashing"}, share=0.5),
    Way("HashEncoder, xxhash", {"side": "ours", "compiled": False}, rivals=(*_OTHERS, _PREPARED)),
    Way("HashEncoder, numba", {"side": "ours"}, rivals=(*_OTHERS, _PREPARED)),
    Way(
        "HashEncoder, numba, 2 threads",
        {"side": "ours", "threads": 2},
        rivals=("HashEncoder, numba",),
    ),
    Way(_DECODE, {"side": "decode_parquet"}),
    Way(
        "Parquet: HashEncoder, xxhash",
        {"side": "ours_from_parquet", "compiled": False},
        rivals=(_DECODE,),
    ),
    Way("Parquet: HashEncoder, numba", {"side": "ours_from_parquet"}, rivals=(_DECODE,)),
    Way(
        "Parquet: HashEncoder, numba, 2 threads",
        {"side": "ours_from_parquet", "threads": 2},
        rivals=("Parquet: HashEncoder, numba",),
    ),
)


def measure(way: Way, path: pathlib.Path, rows: int) -> dict[str, Any]:
    """Runs one measurement in a separate process."""
    request = {**way.options, "path": str(path), "rows": max(1, int(rows * way.share))}
    found = processes.run_module("benchmarks.hashing_worker", request)
    if "error" not in found:
        found["rate"] = statistics.median(found["rates"])
    processes.progress(f"{way.name}: {found.get('error') or round(found['rate'])}")
    return {"name": way.name, **found}


def report(rounds: Sequence[Sequence[dict[str, Any]]]) -> str:
    """A Markdown table of rates, and one of ratios."""
    found: dict[str, list[float]] = {}
    for results in rounds:
        for result in results:
            found.setdefault(result["name"], []).append(result.get("rate", float("nan")))
    rates = [
        [name, processes.show_rounds(values, 0), f"{statistics.median(values) * COLUMNS / 1e6:.1f}"]
        for name, values in found.items()
    ]
    ratios = [
        [
            way.name,
            rival,
            processes.show_rounds([a / b for a, b in zip(found[way.name], found[rival])], 1),
        ]
        for way in WAYS
        for rival in way.rivals
    ]
    return "\n\n".join(
        [
            processes.markdown_table(["way", "rows/s", "million values/s"], rates),
            processes.markdown_table(["way", "beside", "times as fast"], ratios),
        ]
    )


def memory(folder: pathlib.Path, rows: int) -> str:
    """The peak memory of a stream from Parquet, for files of different lengths."""
    table = []
    for count in (rows, 4 * rows):
        path = write_parquet(folder / f"{count}.parquet", count)
        request = {"side": "ours_from_parquet", "path": str(path), "rows": count}
        found = processes.run_module("benchmarks.hashing_worker", request)
        processes.progress(
            f"memory, {count} rows: {found.get('error') or round(found['peak_mib'])}"
        )
        table.append([f"{count:,}", found.get("error") or f"{found['peak_mib']:.0f}"])
    return processes.markdown_table(
        ["rows in the Parquet file", "peak memory of the process, MiB"], table
    )


def main() -> None:
    parser = processes.make_parser("hashing", __doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        path = write_parquet(folder / "table.parquet", options.rows)
        rounds = [
            [measure(way, path, options.rows) for way in WAYS] for _ in range(options.repeats)
        ]
        peaks = memory(folder, options.rows)
    processes.report_setting(
        (one for found in rounds for one in found),
        f"{options.rows:,} rows, {COLUMNS} columns of strings, in chunks of 65,536; one thread "
        f"unless said; {options.repeats} rounds, medians (lowest..highest)",
    )
    print(report(rounds), peaks, sep="\n\n")


if __name__ == "__main__":
    main()
