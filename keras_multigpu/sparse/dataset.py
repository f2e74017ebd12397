"""HashedDataset: batches from files larger than memory, hashed while they are read."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from keras_multigpu import engines
from keras_multigpu.arguments import non_negative_integer, number_of, positive_integer
from keras_multigpu.progress import ReadingBar
from keras_multigpu.sparse.encoder import HashEncoder, copy_encoder
from keras_multigpu.sparse.epochs import EpochDataset
from keras_multigpu.sparse.files import make_sources
from keras_multigpu.sparse.order import Order, check_process, choose_shuffle
from keras_multigpu.sparse.reading import ChunkReader, Scanned
from keras_multigpu.sparse.sources import BadDataError, Chunk, Schema, Source


class HashedDataset(EpochDataset):
    r"""Batches for `fit`, `evaluate` and `predict` from CSV and Parquet files.

    The constructor reads all files once, without hashing. So every bad row and every damaged page
    is known before training begins, and so are the number of batches and where each of them is.
    After that, only some chunks are in memory at a time. The files must not change until the
    training ends: a changed file is an error.

    In `fit` each epoch has its own order of chunks, and of the rows within a chunk, drawn from the
    seed. The chunks of a compressed CSV file, and of a row group of Parquet, stay in order; files
    and row groups do not. Call `fit` with `shuffle=False`: otherwise Keras asks for the batches in
    disorder, and chunks are read again and again. `evaluate` and `predict` read the rows in the
    order of the files, so predictions come back in that order.

    Args:
        files: paths or patterns of files named `.csv`, `.csv.gz`, `.parquet` or `.pq`.
        encoder: hashes the columns; it is copied. Other columns are ignored. Fields of CSV files
            are hashed as they are written there, values of Parquet files by their type.
        label: the column of labels, or a list of such columns; `None` for none, to predict: `fit`
            then ends in the backend's error for a loss without labels.
        weight: the column of the rows' weights.
        batch_size: rows in a batch. The last batch of an epoch may have fewer.
        shuffle: draw an order for every epoch of `fit`; `None` does so if there are labels.
        seed: the seed of that order, an integer from 0 up.
        chunk_rows: about how many rows are read, shuffled and kept in memory together.
        errors: `"raise"`, or `"skip"` to leave out and count unreadable files, rows with too few
            or too many fields, and rows whose labels or weight are not finite numbers.
        process: the number of this process, from 0. Every process gets other rows, and the same
            number of them.
        processes: how many processes there are.
        delimiter: the ASCII character between the fields of CSV files.
        verbose: 1 for a progress bar while the files are scanned, 0 for silence.
        workers: how many workers read ahead, if more than 1; each opens the files itself. They
            don't change the order of the rows. A compressed file, or a row group of Parquet, is
            read by one worker.
        use_multiprocessing: whether the workers are processes instead of threads. A process takes
            some seconds to start, in the first epoch, and sends its chunks through a pipe. Use it
            where Python itself is the bottleneck.
        max_queue_size: how many chunks the workers together read ahead.

    Item `i` is the `i`-th batch of the epoch: `(indices, labels)`, `(indices, labels, weights)`, or
    `(indices,)` without labels; int32 of shape `(rows, encoder.ones)`, float32 of shape
    `(rows, labels)`, float32 of shape `(rows,)`.

    Attributes:
        encoder: the encoder.
        skipped: how many rows and files were left out, by reason.
        label_range: the least and the largest label; `None` without labels.
        left_out: the last rows of the data set that no process gets, because all processes get
            the same number.

    Raises:
        ValueError: if an argument is invalid, or no file matches; and, unless errors are skipped,
            for the first bad file or row, with its name and line.

    Warns:
        UserWarning: if `shuffle` is true without labels, or a label is a column that is hashed.

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
        ((2, 4), [[1.0], [0.0]])
    """

    def __init__(
        self,
        files: Any,
        encoder: HashEncoder,
        label: str | Sequence[str] | None = None,
        weight: str | None = None,
        batch_size: int = 4096,
        shuffle: bool | None = None,
        seed: int = 0,
        chunk_rows: int = 65_536,
        errors: str = "raise",
        process: int = 0,
        processes: int = 1,
        delimiter: str = ",",
        verbose: int = 0,
        workers: int = 1,
        use_multiprocessing: bool = False,
        max_queue_size: int = 10,
    ):
        batch_size = positive_integer("batch_size", batch_size)
        max_queue_size = positive_integer("max_queue_size", max_queue_size)
        processes = positive_integer("processes", processes)
        process = check_process(process, processes)
        seed = non_negative_integer("seed", seed)
        workers = non_negative_integer("workers", workers)
        self.encoder = copy_encoder(encoder)
        numbers = _list_numbers(label, weight)
        self._has_weight = weight is not None
        self._num_labels = len(numbers) - self._has_weight
        is_shuffled = choose_shuffle(shuffle, self._num_labels > 0)
        layout = self.encoder.layout_
        _warn_of_leaks(numbers[: self._num_labels], layout.codes)
        schema = Schema(tuple(layout.codes), numbers, layout.missing.is_empty_field)
        sources = make_sources(files, schema, chunk_rows, errors, delimiter)
        chunks = self._scan(sources, ReadingBar([source.path for source in sources], verbose))
        self._order = Order(chunks, batch_size, seed if is_shuffled else None, process, processes)
        self.left_out = self._order.left_out
        if not self._order.rows:
            raise ValueError(
                "The files must have at least one good row for each process. Received: "
                f"{number_of(len(sources), 'file')} with {number_of(self.left_out, 'good row')} "
                f"for {number_of(processes, 'process')}, skipped: {dict(self.skipped) or 'none'}."
            )
        self._scanned = Scanned(sources, chunks, self.encoder)
        self._latest: tuple[int | None, int] = (None, -1)
        super().__init__(
            workers=workers, use_multiprocessing=use_multiprocessing, max_queue_size=max_queue_size
        )

    def _scan(self, sources: Sequence[Source], bar: ReadingBar) -> list[Chunk]:
        """The chunks of all files; bad rows and files raise an error, or are counted."""
        self.skipped: collections.Counter[str] = collections.Counter()
        chunks: list[Chunk] = []
        extremes: list[float] = []
        for number, source in enumerate(sources):
            found = []
            try:
                for one in source.scan():
                    found.append(Chunk(number, *one))
                    bar.show(number, source.position)
            except BadDataError:
                if not source.skips:
                    raise
                self.skipped["unreadable files"] += 1
            else:
                self.skipped += source.skipped
                chunks += found
                extremes += [float(x) for row in source.extremes for x in row[: self._num_labels]]
        bar.finish()
        self.label_range = (min(extremes), max(extremes)) if extremes else None
        return chunks

    @property
    def rows(self) -> int:
        """The number of rows that this process reads in an epoch."""
        return self._order.rows

    @property
    def fingerprint(self) -> str:
        """The encoder's fingerprint, to compare with a model's."""
        return self.encoder.fingerprint

    def __len__(self) -> int:
        return self._order.num_batches

    def _make_batch(self, epoch: int | None, number: int) -> tuple[np.ndarray, ...]:
        parts = self._order.find_batch(epoch, number)
        ahead = self._order.find_following(epoch, number, len(parts) + self.max_queue_size)
        if self._latest not in ((epoch, number - 1), (epoch, number)) and number:
            ahead = []  # batches are asked for in disorder: the next one is unknown
        self._latest = (epoch, number)
        taken = []
        for place, (chunk, rows) in enumerate(parts):
            blocks = self._reader.read(chunk, ahead[place + 1 :])
            taken.append([block.take(rows, axis=0) for block in blocks])  # faster than block[rows]
        indices, numbers = (
            blocks[0] if len(blocks) == 1 else np.concatenate(blocks) for blocks in zip(*taken)
        )
        labels = numbers[:, : self._num_labels]
        if self._has_weight:
            return indices, labels, numbers[:, self._num_labels]
        return (indices, labels) if self._num_labels else (indices,)

    def _begin_reading(self) -> None:
        self._reader.begin_epoch()

    def _open_reader(self) -> None:
        options = self._workers, self._use_multiprocessing, self._max_queue_size
        self._reader = ChunkReader(self._scanned, *options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_reader": None}

    def to_tf_data(self) -> Any:
        """The batches as a `tf.data.Dataset`, with another epoch each time it is run.

        If this dataset shuffles, the result is shuffled in `predict` too.

        Raises:
            RuntimeError: on another Keras backend than TensorFlow.
        """
        stream = engines.current().stream_batches(self._stream, self[0], len(self))
        # For a model that compares them with its own.
        stream.encoder, stream.label_range = self.encoder, self.label_range
        return stream


def _list_numbers(label: Any, weight: Any) -> tuple[str, ...]:
    """The columns of the labels, followed by that of the weight."""
    labels = [label] if isinstance(label, str) else label
    labels = [] if labels is None else labels
    if not isinstance(labels, Sequence) or not all(isinstance(name, str) for name in labels):
        raise ValueError(
            "`label` must be the name of a column, a list of names, or None. "
            f"Received: label={label!r}."
        )
    if weight is not None and not isinstance(weight, str):
        raise ValueError(
            f"`weight` must be the name of a column, or None. Received: weight={weight!r}."
        )
    names = (*labels, *([] if weight is None else [weight]))
    if len(set(names)) < len(names):
        raise ValueError(
            "The labels and the weight must be different columns. "
            f"Received: label={label!r}, weight={weight!r}."
        )
    if weight is not None and not labels:
        raise ValueError(
            f"`weight` needs a `label` to weigh. Received: label={label!r}, weight={weight!r}."
        )
    return names


def _warn_of_leaks(labels: Sequence[str], features: Collection[str]) -> None:
    told = [name for name in labels if name in features]
    if told:
        warnings.warn(
            f"The label {told[0]!r} is also a column of the encoder: the model is given what it is "
            "to predict. Make the encoder without it.",
            stacklevel=3,
        )
