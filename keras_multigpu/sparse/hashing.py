"""The codes of a column, chunk after chunk: each distinct value is hashed once."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from keras_multigpu.sparse.code import Code
from keras_multigpu.sparse.text import is_text, texts

# One number of as many bytes as a code has: NumPy moves it in one piece.
_WHOLE: dict[int, Any] = {1: np.dtype("int32"), 2: np.dtype("int64"), 4: np.dtype("complex128")}
# A dictionary so many times as long as the chunk that uses it is hashed as far as it is used.
_MOSTLY_UNUSED = 4
_TRIED_GROUP = 1_000_003


class ColumnHasher:
    """Writes the codes of a column's values.

    A column that comes as a dictionary, from Parquet or of categories, is never decoded, and a
    dictionary that is that of the chunk before is not hashed again. All that is kept from chunk
    to chunk is that dictionary.

    Args:
        code: the column's code.
        missing: the text that stands for a missing value.

    Example:
        >>> import numpy as np
        >>> out = np.empty((3, 4), "int32")
        >>> hasher = ColumnHasher(Code(start=0, group=8, splits=4), "nan")
        >>> hasher.write(pa.array(["Rome", None, "Rome"]), out)
        >>> out.tolist()
        [[0, 13, 16, 28], [5, 9, 18, 31], [0, 13, 16, 28]]
    """

    def __init__(self, code: Code, missing: str):
        self._code = code
        self._missing_text = missing
        self._missing = self._codes_of(pa.array([missing], pa.string()))[0]
        self._dictionary: pa.Array | None = None
        self._codes = np.empty((0, code.splits), "int32")

    def write(self, values: pa.Array, out: np.ndarray) -> None:
        """Writes the codes of values.

        Args:
            values: an Arrow array, or one of dictionary type, whose values have a text.
            out: int32 of shape `(values, splits)`, contiguous in each row.
        """
        if pa.types.is_dictionary(values.type):
            self._write_encoded(values, out)
        elif is_text(values.type) and kernel() is not None:
            _compiled_codes(values, self._code, out)
            if values.null_count:
                out[_is_null(values)] = self._missing
        else:
            self._write_encoded(_encode(values), out)

    def _write_encoded(self, values: pa.DictionaryArray, out: np.ndarray) -> None:
        dictionary, indices = values.dictionary, values.indices
        if len(dictionary) > _MOSTLY_UNUSED * len(values):
            encoded = indices.dictionary_encode()
            dictionary, indices = dictionary.take(encoded.dictionary.drop_null()), encoded.indices
            codes = self._with_missing(self._codes_of(dictionary))
        else:
            codes = self._remembered(dictionary)
        if indices.null_count:
            # A full type, 128 values in int8, has no number left for the missing one.
            indices = indices.cast(pa.int64()).fill_null(len(dictionary))
        whole = _WHOLE[self._code.splits]
        # Of one piece each: a fifth of the time that rows of integers take.
        out.view(whole)[:, 0] = codes.view(whole)[:, 0].take(indices.to_numpy())

    def _remembered(self, dictionary: pa.Array) -> np.ndarray:
        """The codes of a dictionary's values, and behind them that of a missing one."""
        if self._dictionary is None or not self._dictionary.equals(dictionary):
            self._codes = self._with_missing(self._codes_of(dictionary))
            self._dictionary = dictionary
        return self._codes

    def _with_missing(self, codes: np.ndarray) -> np.ndarray:
        return np.concatenate([codes, self._missing[None]])

    def _codes_of(self, values: pa.Array) -> np.ndarray:
        """The codes of distinct values, of which some may be null."""
        codes = np.empty((len(values), self._code.splits), "int32")
        if values.null_count:
            is_null = _is_null(values)
            codes[is_null] = self._missing
            codes[~is_null] = self._codes_of(values.drop_null())
            return codes
        strings = texts(values, self._missing_text)
        if kernel() is None:
            return self._code.indices(hashes(strings))
        _compiled_codes(strings, self._code, codes)
        return codes


class TableHasher:
    """Writes the codes of tables that come one after the other.

    Args:
        codes: the code of each column, in the order of the row.
        missing: the text that stands for a missing value.
        num_threads: how many columns are hashed at a time.
    """

    def __init__(self, codes: Mapping[str, Code], missing: str, num_threads: int = 1):
        self._hashers = {name: ColumnHasher(code, missing) for name, code in codes.items()}
        self._splits = next(iter(codes.values())).splits
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

        if self._num_threads == 1:
            for place, name in enumerate(self._hashers):
                write(place, name)
        else:
            with ThreadPoolExecutor(self._num_threads) as pool:
                list(pool.map(write, range(len(self._hashers)), self._hashers))
        return out


def hashes(strings: pa.Array) -> np.ndarray:
    """The xxh64 hashes, with seed 0, of Arrow strings or bytes: uint64 of shape `(strings,)`.

    Example:
        >>> [f"{code:016x}" for code in hashes(pa.array(["Rome", ""])).tolist()]
        ['f56804e558b0db3c', 'ef46db3751d8e999']
    """
    kind = pa.large_binary() if pa.types.is_large_string(strings.type) else pa.binary()
    stored = strings.cast(kind) if not pa.types.is_large_binary(strings.type) else strings
    as_bytes = stored.to_numpy(zero_copy_only=False)
    return np.fromiter(map(xxhash.xxh64_intdigest, as_bytes), "uint64", len(strings))


def distinct(values: pa.Array) -> pa.Array:
    """Each value of an array, or of its dictionary, once; without nulls."""
    if pa.types.is_dictionary(values.type):
        used = values.indices.unique().drop_null()
        return values.dictionary.take(used).drop_null()
    return _encode(values).dictionary


@functools.cache
def kernel() -> types.ModuleType | None:
    """The compiled kernel, or `None` where numba is not installed, or doesn't work.

    Warns:
        UserWarning: if numba is installed and doesn't work; once.
    """
    try:
        from keras_multigpu.sparse import kernel as compiled

        _try(compiled)
    except Exception as error:  # numba's, LLVM's and the file system's own
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            return None
        warnings.warn(
            "numba is installed, but its compiled functions don't work, so the slower way without "
            f"it is taken; the codes are the same. Received: {type(error).__name__}: "
            f"{str(error)[:200]}. Repair or remove numba; if it finds no place for its cache, set "
            "the environment variable NUMBA_CACHE_DIR to a folder that can be written to.",
            stacklevel=2,
        )
        return None
    return compiled


def _try(compiled: types.ModuleType) -> None:
    """Compiles the kernel and compares a code.

    Raises:
        RuntimeError: if the code is another one.
    """
    text, out = b"Rome", np.empty((1, 1), "int32")
    ends = np.array([0, len(text)], "int32")
    compiled.write_codes(np.frombuffer(text, "uint8"), ends, out, 0, _TRIED_GROUP, 64)
    if out[0, 0] != xxhash.xxh64_intdigest(text) % _TRIED_GROUP:
        raise RuntimeError(f"it gave {out[0, 0]} as the code of {text!r}")


def _encode(values: pa.Array) -> pa.DictionaryArray:
    """Each distinct value once, and where it is."""
    if pa.types.is_null(values.type):
        values = values.cast(pa.string())
    return values.dictionary_encode()


def _is_null(values: pa.Array) -> np.ndarray:
    return pc.is_null(values).to_numpy(zero_copy_only=False)


def _compiled_codes(strings: pa.Array, code: Code, out: np.ndarray) -> None:
    """Writes the codes of Arrow strings or bytes, of nulls too; those are not to be used."""
    is_large = strings.type in (pa.large_string(), pa.large_binary())
    _, offsets, data = strings.buffers()
    if offsets is None or not len(strings):
        return
    ends = np.frombuffer(offsets, "int64" if is_large else "int32")
    ends = ends[strings.offset : strings.offset + len(strings) + 1]
    stored = np.frombuffer(data if data is not None else b"", "uint8")
    compiled: Any = kernel()
    bits = 64 // code.splits
    compiled.write_codes(stored, ends, out, code.start, code.group, bits)
