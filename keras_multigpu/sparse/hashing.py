"""The hash codes of a table's values, chunk by chunk; a distinct value is hashed once."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from keras_multigpu.sparse.code import HASH_BITS, Code, Layout
from keras_multigpu.sparse.missing import Missing
from keras_multigpu.sparse.tables import is_text, to_texts

# One number with as many bytes as a code has: NumPy copies it in one piece.
_WHOLE: dict[int, Any] = {1: np.dtype("int32"), 2: np.dtype("int64"), 4: np.dtype("complex128")}
# If the dictionary has over 4 times the chunk's rows, hash only the entries in use.
_MOSTLY_UNUSED = 4
_TRIED_GROUP = 1_000_003
_LARGE = (pa.large_string(), pa.large_binary())


class ColumnHasher:
    """Writes the codes of a column's values; a dictionary is not decoded.

    The latest dictionary is kept: if the next chunk has the same one, it is not hashed again.
    """

    def __init__(self, code: Code, missing: Missing):
        self._code = code
        self._find_missing = missing.find
        text = pa.array([missing.text], pa.string())
        self._missing = code.indices(hash_texts(text))[0]
        self._dictionary: pa.Array | None = None
        self._codes = np.empty((0, code.splits), "int32")

    def write(self, values: pa.Array, out: np.ndarray) -> None:
        """Writes the codes of an Arrow array into int32 of shape `(values, splits)`."""
        if pa.types.is_dictionary(values.type):
            self._write_encoded(values, out)
        elif is_text(values.type) and find_kernel() is not None:
            self._write_texts(values, out)
        else:
            self._write_encoded(_encoded(values), out)

    def _write_encoded(self, values: pa.DictionaryArray, out: np.ndarray) -> None:
        dictionary, indices = values.dictionary, values.indices
        if len(dictionary) > _MOSTLY_UNUSED * len(values):
            encoded = indices.dictionary_encode()
            dictionary, indices = dictionary.take(encoded.dictionary.drop_null()), encoded.indices
            codes = self._with_missing(dictionary)
        else:
            if self._dictionary is None or not self._dictionary.equals(dictionary):
                self._dictionary, self._codes = dictionary, self._with_missing(dictionary)
            codes = self._codes
        if indices.null_count:
            # A full index type, such as int8 with 128 values, has no number for the missing one.
            indices = indices.cast(pa.int64()).fill_null(len(dictionary))
        whole = _WHOLE[self._code.splits]
        out.view(whole)[:, 0] = codes.view(whole)[:, 0].take(indices.to_numpy())

    def _with_missing(self, dictionary: pa.Array) -> np.ndarray:
        """The codes of a dictionary's values, followed by the code of a missing value."""
        codes = np.empty((len(dictionary) + 1, self._code.splits), "int32")
        self._write_texts(to_texts(dictionary), codes[:-1])
        codes[-1] = self._missing
        return codes

    def _write_texts(self, strings: pa.Array, out: np.ndarray) -> None:
        """Writes the codes of Arrow strings or bytes."""
        compiled: Any = find_kernel()
        if compiled is None:
            out[:] = self._code.indices(hash_texts(strings))
        elif len(strings):
            _, offsets, data = strings.buffers()
            ends = np.frombuffer(offsets, "int64" if strings.type in _LARGE else "int32")
            ends = ends[strings.offset : strings.offset + len(strings) + 1]
            stored = np.frombuffer(data if data is not None else b"", "uint8")
            bits = HASH_BITS // self._code.splits
            compiled.write_codes(stored, ends, out, self._code.start, self._code.group, bits)
        out[self._find_missing(strings)] = self._missing


class TableHasher:
    """Computes the indices of tables that come one after the other, on `num_threads` threads."""

    def __init__(self, layout: Layout, num_threads: int = 1):
        missing = layout.missing
        self._hashers = {name: ColumnHasher(code, missing) for name, code in layout.codes.items()}
        self._splits = layout.splits
        self._num_threads = num_threads

    def __call__(self, columns: Mapping[str, pa.ChunkedArray]) -> np.ndarray:
        """The indices of a table's rows: int32 of shape `(rows, splits * columns)`."""
        rows = len(next(iter(columns.values())))
        out = np.empty((rows, self._splits * len(self._hashers)), "int32")

        def write(place: int, name: str) -> None:
            part = out[:, place * self._splits : (place + 1) * self._splits]
            first = 0
            for chunk in columns[name].chunks:
                self._hashers[name].write(chunk, part[first : first + len(chunk)])
                first += len(chunk)

        with ThreadPoolExecutor(self._num_threads) as pool:
            run = map if self._num_threads == 1 else pool.map
            list(run(write, range(len(self._hashers)), self._hashers))
        return out


def to_multi_hot(indices: np.ndarray, width: int, output: str) -> Any:
    """Multi-hot rows in one of the forms, from the indices of their ones."""
    if output == "indices":
        return indices
    from scipy.sparse import csr_matrix

    rows, ones = indices.shape
    bounds = np.arange(rows + 1) * ones
    values = np.ones(indices.size, "float32")
    matrix = csr_matrix((values, indices.ravel(), bounds), shape=(rows, width))
    return matrix if output == "csr" else matrix.toarray()


def hash_texts(strings: pa.Array) -> np.ndarray:
    """The xxh64 hashes, with seed 0, of Arrow strings or bytes: uint64 of shape `(strings,)`.

    Those of nulls mean nothing.
    """
    kind = pa.large_binary() if strings.type in _LARGE else pa.binary()
    as_bytes = strings.cast(kind).fill_null(b"").to_numpy(zero_copy_only=False)
    return np.fromiter(map(xxhash.xxh64_intdigest, as_bytes), "uint64", len(strings))


def find_distinct(values: pa.Array) -> pa.Array:
    """The distinct values of an array, without nulls."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary.take(values.indices.unique())
    return values.unique().drop_null()


@functools.cache
def find_kernel() -> types.ModuleType | None:
    """The compiled kernel; `None`, with one warning, if numba is installed but doesn't work."""
    try:
        from keras_multigpu.sparse import kernel as compiled

        _try(compiled)
    except Exception as error:  # numba, LLVM and the file system raise many kinds
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            return None
        warnings.warn(
            "numba is installed, but its compiled functions don't work. Values are hashed without "
            f"it: slower, with the same codes. Received: {type(error).__name__}: "
            f"{str(error)[:200]}. Repair or remove numba; if it finds no place for its cache, set "
            "the environment variable NUMBA_CACHE_DIR to a writable folder.",
            stacklevel=2,
        )
        return None
    return compiled


def _try(compiled: types.ModuleType) -> None:
    """Compiles the kernel and compares a code."""
    text, out = b"Rome", np.empty((1, 1), "int32")
    ends = np.array([0, len(text)], "int32")
    compiled.write_codes(np.frombuffer(text, "uint8"), ends, out, 0, _TRIED_GROUP, 64)
    if out[0, 0] != xxhash.xxh64_intdigest(text) % _TRIED_GROUP:
        raise RuntimeError(f"it gave {out[0, 0]} as the code of {text!r}")


def _encoded(values: pa.Array) -> pa.DictionaryArray:
    """The values by numbers: of short floats, which Arrow encodes since 26, by their bits."""
    if not pa.types.is_float16(values.type):
        return values.dictionary_encode()
    bits = values.view(pa.uint16()).dictionary_encode()
    return pa.DictionaryArray.from_arrays(bits.indices, bits.dictionary.view(pa.float16()))
