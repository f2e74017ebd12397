"""HashedDataset: files larger than memory, hashed on the way to the model."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu import engines
from keras_multigpu.progress import ReadingBar
from keras_multigpu.sparse.encoder import HashEncoder
from keras_multigpu.sparse.files import find_files, make_source
from keras_multigpu.sparse.order import Order
from keras_multigpu.sparse.reading import ChunkReader
from keras_multigpu.sparse.sources import BadDataError, Chunk, Schema, Source


class HashedDataset(keras.utils.PyDataset):
    r"""Batches for `fit`, `evaluate` and `predict` from CSV and Parquet files.

    When it is made, the files are read once, without hashing: every bad row and every damaged
    page is known before training begins, and so are the number of batches and where each of them
    is. Later only some chunks are in memory at a time. The files must not change until the
    training ends: one that does is an error.

    Each epoch has an order of its own, drawn from the seed: of the chunks, and of the rows within
    a chunk. Chunks of a compressed CSV file, and of a row group of Parquet, stay in order; the
    files and the row groups do not. Give `fit` `shuffle=False`: otherwise Keras asks for the
    batches in disorder, and chunks are read again and again.

    Args:
        files: paths or patterns, of files named `.csv`, `.csv.gz`, `.parquet` or `.pq`.
        encoder: how the columns are hashed. Other columns are ignored. The fields of CSV files are
            hashed as they are written there, those of Parquet by their type.
        label: the column of labels, or a list of such columns; `None` for none, to predict.
        weight: the column of the rows' weights.
        batch_size: rows in a batch. The last batch of an epoch may have fewer.
        shuffle: draw an order for every epoch.
        seed: of that order, an integer from 0 up.
        chunk_rows: about how many rows are read, shuffled and kept in memory together.
        errors: `"raise"`, or `"skip"` to leave out and count files that can't be read, rows with
            too few or too many fields, and labels and weights that are no finite numbers.
        process: which of several processes this is, from 0. Each gets other rows, and as many.
        processes: how many there are.
        delimiter: what stands between the fields of CSV files.
        verbose: 1 for a progress bar while the files are scanned, 0 for silence.
        **kwargs: those of `keras.utils.PyDataset`.

    Item `i` is the `i`-th batch of the epoch: `(indices, labels)`, `(indices, labels, weights)`, or
    `(indices,)` without labels; int32 of shape `(rows, encoder.ones)`, float32 of shape
    `(rows, labels)`, float32 of shape `(rows,)`.

    Attributes:
        encoder: the encoder.
        skipped: how many rows and files were left out, by reason.
        left_out: the last rows of the data set that no process gets, so that all get as many.

    Raises:
        ValueError: if an argument is not of its kind, or no file matches; and, unless errors are
            skipped, for the first bad file or row, which it names.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "clicks.csv")
        >>> with open(path, "w") as file:
        ...     _ = file.write("city,age,clicked\nRome,41,1\nParis,7,0\nRome,7,1\n")
        >>> encoder = HashEncoder({"city": 1000, "age": 100})
        >>> data = HashedDataset(path, encoder, label="clicked", batch_size=2, shuffle=False)
        >>> len(data), data.rows
        (2, 3)
        >>> indices, labels = data[0]
        >>> indices.shape, labels.tolist()
        ((2, 8), [[1.0], [0.0]])
    """

    def __init__(
        self,
        files: Any,
        encoder: HashEncoder,
        label: str | Sequence[str] | None = None,
        weight: str | None = None,
        batch_size: int = 4096,
        shuffle: bool = True,
        seed: int = 0,
        chunk_rows: int = 65_536,
        errors: str = "raise",
        process: int = 0,
        processes: int = 1,
        delimiter: str = ",",
        verbose: int = 0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        labels = [label] if isinstance(label, str) else list(label or [])
        counts = {"batch_size": batch_size, "chunk_rows": chunk_rows, "processes": processes}
        _check(counts, seed, errors, process)
        self.encoder = encoder
        self.skipped: collections.Counter[str] = collections.Counter()
        self._start = 0
        self._has_begun = self._is_done = False
        self._num_labels, self._has_weight = len(labels), weight is not None
        numbers = (*labels, *([weight] if weight else []))
        schema = Schema(tuple(encoder.layout.codes), numbers)
        sources = [
            make_source(path, schema, chunk_rows, errors == "skip", delimiter)
            for path in find_files(files)
        ]
        chunks = self._scan(sources, ReadingBar([source.path for source in sources], verbose))
        order_seed = int(seed) if shuffle else None
        self._order = Order(chunks, batch_size, order_seed, process, processes)
        if not self._order.rows:
            raise ValueError(
                "The files must have at least one good row for each process. Received: "
                f"{len(sources)} files with {self._order.left_out} good rows for {processes} "
                f"processes, skipped: {dict(self.skipped)}."
            )
        self.left_out = self._order.left_out
        self._reader = ChunkReader(sources, chunks, encoder)
        self._lock = threading.Lock()

    def _scan(self, sources: Sequence[Source], bar: ReadingBar) -> list[Chunk]:
        """The chunks of all files; what is bad in them is told, or counted."""
        chunks: list[Chunk] = []
        for number, source in enumerate(sources):
            try:
                for one in source.scan():
                    chunks.append(Chunk(number, *one))
                    bar.show(number, source.position)
            except BadDataError:
                if not source.skips:
                    raise
                self.skipped["unreadable files"] += 1
                chunks = [chunk for chunk in chunks if chunk.file != number]
            else:
                self.skipped += source.skipped
        bar.finish()
        return chunks

    @property
    def rows(self) -> int:
        """The rows of an epoch, of this process."""
        return self._order.rows

    @property
    def fingerprint(self) -> str:
        """The encoder's fingerprint, which a model compares with its own."""
        return self.encoder.fingerprint

    @property
    def num_batches(self) -> int:
        """The batches of an epoch."""
        return self._order.num_batches

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self._start // self.num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        if not 0 <= index < self.num_batches:
            raise IndexError(
                f"A batch's number must be from 0 to {self.num_batches - 1}. "
                f"Received: index={index}."
            )
        with self._lock:
            self._is_done |= self._has_begun and index == self.num_batches - 1
            parts = self._order.batch(*divmod(self._start + index, self.num_batches))
            blocks = [(*self._reader.read(chunk), rows) for chunk, rows in parts]
        indices = np.concatenate([indices[rows] for indices, _, rows in blocks])
        numbers = np.concatenate([numbers[rows] for _, numbers, rows in blocks])
        labels = numbers[:, : self._num_labels]
        if self._has_weight:
            return indices, labels, numbers[:, self._num_labels]
        return (indices, labels) if self._num_labels else (indices,)

    def on_epoch_begin(self) -> None:
        """Goes on to the next epoch, if all batches of this one were asked for.

        Keras calls it before every epoch, and on JAX once more, only to look at the first batch.
        Of a dataset with no more batches than it then reads ahead, the first epoch is passed over.
        """
        if self._is_done:
            self._start += self.num_batches
        self._has_begun, self._is_done = True, False
        self._reader.begin_epoch()

    def resume(self, epoch: int, batch: int = 0) -> None:
        """Goes to a batch of an epoch, to train on from there.

        The batches that follow are those that would have followed, with the same files, seed and
        batch size. An epoch of Keras then still has all its batches: it begins with the rest of
        the one that was interrupted, and ends in the middle of the next. Batches that are done are
        not read.

        Args:
            epoch: the number of the epoch, from 0.
            batch: how many of its batches are done.

        Raises:
            ValueError: if there is no such batch.
        """
        if epoch < 0 or not 0 <= batch < self.num_batches:
            raise ValueError(
                f"An epoch has batches 0 to {self.num_batches - 1}. "
                f"Received: epoch={epoch}, batch={batch}."
            )
        self._start = epoch * self.num_batches + batch
        self._has_begun = self._is_done = False
        self._reader.begin_epoch()

    def to_tf_data(self) -> Any:
        """The batches as a `tf.data.Dataset`, which gives another epoch each time it is run.

        Raises:
            RuntimeError: on another Keras backend than TensorFlow.
        """

        def epoch() -> Iterator[tuple[np.ndarray, ...]]:
            self.on_epoch_begin()
            yield from (self[index] for index in range(self.num_batches))

        return engines.current().stream_batches(epoch, self[0])


def _check(counts: dict[str, Any], seed: Any, errors: Any, process: Any) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"`seed` must be an integer from 0 up. Received: seed={seed!r}.")
    if errors not in ("raise", "skip"):
        raise ValueError(f'`errors` must be "raise" or "skip". Received: errors={errors!r}.')
    if isinstance(process, bool) or process not in range(counts["processes"]):
        raise ValueError(
            f"`process` must be an integer from 0 to {counts['processes'] - 1}, one less than "
            f"`processes`. Received: process={process!r}."
        )
