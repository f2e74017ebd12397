"""The speed and memory of `HashedDataset` with quoted CSV, and with many distinct values.

    python -m benchmarks.reading
    python -m benchmarks.reading --rows 200000 --repeats 1

Every measurement runs in a separate process. The sides take turns, round by round; ratios are
computed within a round. Times are processor times, the best of three runs, so that other programs
on the machine disturb them less. Progress goes to stderr, the tables to stdout. Memory needs Linux.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks import processes

_CHUNK = 65_536
_BATCH = 4096
_CSV_COLUMNS = 8
_REPEATS = 3
_SMALL_ROWS = 1000  # of the files that are read first, to load the libraries
# The name of a side: its file, and the function in `WAYS` that reads it.
CSV_SIDES = {
    "pyarrow.csv, unquoted": ("unquoted.csv", "arrow_csv"),
    "pyarrow.csv, quoted": ("quoted.csv", "arrow_csv"),
    "HashedDataset, unquoted": ("unquoted.csv", "ours"),
    "HashedDataset, quoted": ("quoted.csv", "ours"),
}
PARQUET_SIDES = {
    f"{reader}, {name.replace('_', ' ')}": (f"{name}.parquet", way)
    for name in ("3_columns_of_few", "3_columns_of_many", "8_columns_of_many")
    for reader, way in (("pyarrow in batches", "arrow_parquet"), ("HashedDataset", "ours"))
}


def write_files(folder: pathlib.Path, rows: int) -> None:
    """Writes the files; in `many`, all values are distinct."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    label = draw.integers(0, 2, rows)
    texts = {
        f"c{place}": [f"value {value}" for value in draw.integers(0, 1000, rows)]
        for place in range(_CSV_COLUMNS)
    }
    table = pa.table({**texts, "label": label})
    for name, style in (("unquoted", "none"), ("quoted", "needed")):
        options = pyarrow.csv.WriteOptions(quoting_style=style)
        pyarrow.csv.write_csv(table, folder / f"{name}.csv", options)
    pq.write_table(table.select(["c0", "c1", "c2", "label"]), folder / "3_columns_of_few.parquet")
    for columns in (3, 8):
        names = {f"c{place}": f"user_{place}_" for place in range(columns)}
        many = {name: [f"{text}{row}" for row in range(rows)] for name, text in names.items()}
        path = folder / f"{columns}_columns_of_many.parquet"
        pq.write_table(pa.table({**many, "label": label}), path, row_group_size=rows)


def _arrow_csv(path: str, rows: int) -> dict[str, Callable[[], Any]]:
    def scan() -> None:
        options = pyarrow.csv.ReadOptions(use_threads=False)
        for _ in pyarrow.csv.open_csv(path, options):
            pass

    return {"scan": scan, "epoch": scan}


def _arrow_parquet(path: str, rows: int) -> dict[str, Callable[[], Any]]:
    def scan() -> None:
        with pq.ParquetFile(path) as file:
            for _ in file.iter_batches(_CHUNK, use_threads=False):
                pass

    return {"scan": scan, "epoch": scan}


def _ours(path: str, rows: int) -> dict[str, Callable[[], Any]]:
    from keras_multigpu.sparse import HashedDataset, HashEncoder

    with open(path, "rb") as file:
        is_csv = path.endswith(".csv")
        columns = _CSV_COLUMNS if is_csv else len(pq.read_schema(file).names) - 1
    encoder = HashEncoder({f"c{place}": rows for place in range(columns)}, layout="published")
    encoder.transform({f"c{place}": ["a"] for place in range(columns)})  # compiles
    found: list[Any] = []

    def scan() -> None:
        found[:] = [HashedDataset(path, encoder, label="label", batch_size=_BATCH)]

    def epoch() -> None:
        found[-1].on_epoch_begin()
        for number in range(len(found[-1])):
            found[-1][number]

    return {"scan": scan, "epoch": epoch}


WAYS = {"arrow_csv": _arrow_csv, "arrow_parquet": _arrow_parquet, "ours": _ours}


def measure(way: str, path: str, small: str, rows: int) -> dict[str, Any]:
    """Rows per second of processor time in a scan and in an epoch, and the added memory."""
    pa.set_cpu_count(1)
    for warm_up in WAYS[way](small, rows).values():
        warm_up()
    steps = WAYS[way](path, rows)
    start, result = _reset_peak_mib(), {}
    for name, run in steps.items():
        seconds = []
        for _ in range(_REPEATS):
            begin = time.process_time()
            run()
            seconds.append(time.process_time() - begin)
        result[name] = rows / min(seconds)
    return {**result, "mib": _memory_mib("VmHWM") - start}


def _reset_peak_mib() -> float:
    """The memory of this process, after resetting its peak."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _memory_mib("VmRSS")


def _memory_mib(name: str) -> float:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def _turns(
    sides: dict[str, tuple[str, str]], folder: pathlib.Path, rows: int, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """All measurements of each side; the sides take turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, (file, way) in sides.items():
            paths = {"path": str(folder / "files" / file), "small": str(folder / "small" / file)}
            request = json.dumps({"way": way, "rows": rows, **paths})
            result = processes.run_module("benchmarks.reading", "--measure", request)
            if "error" in result:
                raise RuntimeError(f"{name}: {result['error']}")
            processes.progress(f"{name}: {result['scan']:,.0f}, {result['epoch']:,.0f} rows/s")
            found[name].append(result)
    return found


def _table(found: dict[str, list[dict[str, Any]]]) -> str:
    rows = [
        [
            name,
            *(
                processes.show_rounds([result[key] for result in results])
                for key in ("scan", "epoch", "mib")
            ),
        ]
        for name, results in found.items()
    ]
    return processes.markdown_table(
        ["side", "scan, rows/s of CPU", "epoch, rows/s of CPU", "memory added, MiB"], rows
    )


def _ratios(found: dict[str, list[dict[str, Any]]], pairs: Sequence[tuple[str, str]]) -> str:
    rows = []
    for side, other in pairs:
        cells = []
        for key in ("scan", "epoch"):
            both = zip(found[side], found[other])
            cells.append(
                processes.show_rounds([mine[key] / theirs[key] for mine, theirs in both], 2)
            )
        rows.append([side, other, *cells])
    return processes.markdown_table(
        ["side", "beside", "scan, times as fast", "epoch, times as fast"], rows
    )


def main() -> None:
    parser = processes.make_parser("reading", __doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--measure", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        processes.answer(measure, ("keras", "numba", "pyarrow", "xxhash"), options.measure)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_files(folder / "files", options.rows)
        write_files(folder / "small", _SMALL_ROWS)
        csv = _turns(CSV_SIDES, folder, options.rows, options.repeats)
        parquet = _turns(PARQUET_SIDES, folder, options.rows, options.repeats)
    results = [one for found in (csv, parquet) for several in found.values() for one in several]
    processes.report_setting(
        results,
        f"{options.rows:,} rows; CSV of {_CSV_COLUMNS} columns of text; one thread, its "
        f"processor time; chunks of {_CHUNK:,}, batches of {_BATCH:,}; {options.repeats} rounds, "
        "medians (lowest..highest)",
    )
    ours, sides = "HashedDataset, ", list(PARQUET_SIDES)
    print(_table(csv), _ratios(csv, [(f"{ours}quoted", f"{ours}unquoted")]), sep="\n\n")
    pairs = list(zip(sides[1::2], sides[::2]))
    print("", _table(parquet), _ratios(parquet, pairs), sep="\n\n")


if __name__ == "__main__":
    main()
