"""Trains a wide model from Parquet files, which are read and hashed chunk by chunk.

    python -m benchmarks.stream --rows 1000000 4000000
    KERAS_BACKEND=jax python -m benchmarks.stream --rows 100000000

The files are generated first, a million rows in each, in a temporary folder, or in `--folder`,
which is kept; existing files are used again. Each number of rows runs in a separate process, which
reads its files once. It prints the rate, the peak memory of the process, which should not grow
with the rows, and the time that 1.5 billion rows would take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import tempfile
import time
from typing import Any

from benchmarks import processes
from benchmarks.wide_data import COLUMNS, cardinalities, write_parquet

_FILE_ROWS = 1_000_000
_BATCH = 4096
_TIMEOUT_S = 6 * 3600.0


def train(folder: str, files: int) -> dict[str, Any]:
    """Trains the linear model for one epoch, with logistic loss and Adam, in this process."""
    from keras_multigpu.sparse import HashedDataset, HashEncoder
    from keras_multigpu.zoo.wide import wide

    paths = sorted(pathlib.Path(folder).glob("*.parquet"))[:files]
    begin = time.perf_counter()
    encoder = HashEncoder(cardinalities(), layout="published")
    data = HashedDataset(paths, encoder, label="label", batch_size=_BATCH)
    scanned = time.perf_counter()
    model = wide(encoder, optimizer="adam", loss="logistic", metrics=["accuracy"])
    found = model.fit(data, verbose=0).history
    end = time.perf_counter()
    return {
        "scan_s": scanned - begin,
        "rate": data.rows / (end - scanned),
        "loss": found["loss"][0],
        "peak_mib": processes.peak_mib(),
    }


def generate(folder: pathlib.Path, files: int) -> None:
    """Writes the files that don't exist yet."""
    for number in range(files):
        path = folder / f"{number:05}.parquet"
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            write_parquet(unfinished, _FILE_ROWS, 1000 * number)
            unfinished.rename(path)
            processes.progress(f"file {number + 1} of {files}")


def _folder(given: pathlib.Path | None) -> contextlib.AbstractContextManager[Any]:
    if given is None:
        return tempfile.TemporaryDirectory()
    given.mkdir(parents=True, exist_ok=True)
    return contextlib.nullcontext(given)


def main() -> None:
    parser = processes.make_parser("stream", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument("--folder", type=pathlib.Path, help="where to keep the files")
    parser.add_argument("--train", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        processes.answer(train, ("keras", "jax", "tensorflow"), options.train)
        return
    results, table = [], []
    counts = [-(-rows // _FILE_ROWS) for rows in options.rows]
    with _folder(options.folder) as folder:
        generate(pathlib.Path(folder), max(counts))
        for count in counts:
            request = json.dumps({"folder": str(folder), "files": count})
            found = processes.run_module(
                "benchmarks.stream", "--train", request, timeout=_TIMEOUT_S
            )
            processes.progress(f"{count} files: {found}")
            results.append(found)
            if "error" in found:
                table.append([f"{count * _FILE_ROWS:,}", found["error"], *["-"] * 4])
                continue
            hours = 1.5e9 / found["rate"] / 3600
            figures = [found["rate"], found["scan_s"], found["peak_mib"]]
            cells = [f"{figure:,.0f}" for figure in figures]
            table.append(
                [f"{count * _FILE_ROWS:,}", *cells, f"{found['loss']:.4f}", f"{hours:.1f}"]
            )
    setting = f"{COLUMNS} columns, batches of {_BATCH:,}, linear, Adam, one device"
    processes.report_setting(results, setting)
    header = ["rows", "examples/s", "scan, s", "peak memory, MiB", "loss"]
    print(processes.markdown_table([*header, "1.5 billion rows, hours"], table))


if __name__ == "__main__":
    main()
