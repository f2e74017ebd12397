"""Times one way to hash a table, in this process: see `hashing`.

    python -m benchmarks.hashing_worker '{"side": "ours", "path": "table.parquet", "rows": 65536}'

The last line on stdout is a JSON object: rows per second of every repetition, the peak of the
process's memory in MiB, and the versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from benchmarks.processes import answer, peak_mib
from benchmarks.wide_data import cardinalities
from keras_multigpu.sparse import HashEncoder, hashing

_CHUNK = 65_536
_REPEATS = 3


def _strings(path: str, rows: int) -> list[pa.Table]:
    """The table in memory, as strings, in chunks."""
    table = pq.read_table(path, columns=list(cardinalities()))[:rows].combine_chunks()
    chunks = [table[first : first + _CHUNK] for first in range(0, rows, _CHUNK)]
    return [pa.Table.from_batches(chunk.to_batches()).combine_chunks() for chunk in chunks]


def _stream(encoder: HashEncoder, tables: Iterable[Any]) -> int:
    """Hashes tables one after the other, without keeping any."""
    encode = encoder.stream()
    return sum(len(encode(table)) for table in tables)


def ours(path: str, rows: int, compiled: bool = True, threads: int = 1) -> Callable[[], Any]:
    if not compiled:
        hashing.find_kernel = lambda: None  # as if numba were not installed
    tables = _strings(path, rows)
    encoder = HashEncoder(cardinalities(), layout="published", num_threads=threads)
    return lambda: _stream(encoder, tables)


def ours_from_parquet(
    path: str, rows: int, compiled: bool = True, threads: int = 1
) -> Callable[[], Any]:
    if not compiled:
        hashing.find_kernel = lambda: None
    names = list(cardinalities())
    encoder = HashEncoder(cardinalities(), layout="published", num_threads=threads)

    def run() -> int:
        with pq.ParquetFile(path, read_dictionary=names) as file:
            return _stream(encoder, file.iter_batches(_CHUNK, columns=names))

    return run


def decode_parquet(path: str, rows: int) -> Callable[[], Any]:
    """Pyarrow reads the file's strings, and nothing is hashed."""
    names = list(cardinalities())

    def run() -> int:
        with pq.ParquetFile(path) as file:
            return sum(len(batch) for batch in file.iter_batches(_CHUNK, columns=names))

    return run


def feature_hasher(path: str, rows: int) -> Callable[[], Any]:
    """scikit-learn's `FeatureHasher` end to end, including its strings `column=value`."""
    from sklearn.feature_extraction import FeatureHasher

    frames = [table.to_pandas() for table in _strings(path, rows)]
    names = list(cardinalities())
    hasher = FeatureHasher(2**15, input_type="string", alternate_sign=False)

    def run() -> None:
        for frame in frames:
            named = [[f"{name}={value}" for value in frame[name]] for name in names]
            hasher.transform(zip(*named))

    return run


def prepared_feature_hasher(path: str, rows: int) -> Callable[[], Any]:
    """scikit-learn's `FeatureHasher`, with its lists of strings ready in memory."""
    from sklearn.feature_extraction import FeatureHasher

    names = list(cardinalities())
    ready = []
    for table in _strings(path, rows):
        named = [[f"{name}={value}" for value in table.column(name).to_pylist()] for name in names]
        ready.append([list(row) for row in zip(*named)])
    hasher = FeatureHasher(2**15, input_type="string", alternate_sign=False)
    return lambda: [hasher.transform(chunk) for chunk in ready]


def keras_hashing(path: str, rows: int) -> Callable[[], Any]:
    """`keras.layers.Hashing` end to end, from pandas to one array, with one index for a value."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    frames = [table.to_pandas() for table in _strings(path, rows)]
    encoder = HashEncoder(cardinalities(), layout="published")
    layers = {
        name: keras.layers.Hashing(code.group * code.splits)
        for name, code in encoder.layout_.codes.items()
    }

    def run() -> None:
        for frame in frames:
            codes = [
                np.asarray(layer(tf.constant(frame[name].to_numpy(dtype=object))))
                for name, layer in layers.items()
            ]
            np.stack(codes, axis=1)

    return run


def recipe(path: str, rows: int) -> Callable[[], Any]:
    """The recipe as published: pandas `apply` for each value, and a loop over the rows."""
    frame = pa.concat_tables(_strings(path, rows)).to_pandas()
    codes = HashEncoder(cardinalities(), layout="published").layout_.codes

    def run() -> None:
        parts = []
        for name, code in codes.items():
            digits = frame[name].apply(lambda value: xxhash.xxh64(str(value).encode()).hexdigest())
            for split in range(4):
                first = code.start + split * code.group
                parts.append(
                    digits.apply(
                        lambda text, s=split, c=code, f=first: (
                            f + int(text[4 * s : 4 * s + 4], 16) % c.group
                        )
                    )
                )
        columns = [part.tolist() for part in parts]
        indices: list[int] = []
        for row in range(len(frame)):
            indices.extend(column[row] for column in columns)

    return run


SIDES: dict[str, Callable[..., Callable[[], Any]]] = {
    "ours": ours,
    "ours_from_parquet": ours_from_parquet,
    "decode_parquet": decode_parquet,
    "feature_hasher": feature_hasher,
    "prepared_feature_hasher": prepared_feature_hasher,
    "keras_hashing": keras_hashing,
    "recipe": recipe,
}


def measure(side: str, path: str, rows: int, **options: Any) -> dict[str, Any]:
    """Rows per second, after a first run that warms up."""
    pa.set_cpu_count(options.get("threads", 1))
    pa.set_io_thread_count(1)
    run = SIDES[side](path, rows, **options)
    rates = []
    for number in range(_REPEATS + 1):
        begin = time.perf_counter()
        run()
        if number:
            rates.append(rows / (time.perf_counter() - begin))
    peak = peak_mib()
    return {"rates": rates, "peak_mib": peak}


def main() -> None:
    answer(measure, ("keras", "numba", "pandas", "pyarrow", "sklearn", "tensorflow", "xxhash"))


if __name__ == "__main__":
    main()
