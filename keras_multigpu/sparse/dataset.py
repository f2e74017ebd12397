"""HashedDataset: files larger than memory, hashed on the way to the model."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_multigpu import engines
from keras_multigpu.progress import ReadingBar
from keras_multigpu.sparse import dataset_checks as checks
from keras_multigpu.sparse.encoder import HashEncoder
from keras_multigpu.sparse.epochs import EpochDataset
from keras_multigpu.sparse.files import find_files, make_source
from keras_multigpu.sparse.order import Order
from keras_multigpu.sparse.reading import ChunkLoader, ChunkReader
from keras_multigpu.sparse.sources import BadDataError, Chunk, Schema, Source


class HashedDataset(EpochDataset):
    r"""Batches for `fit`, `evaluate` and `predict` from CSV and Parquet files.

    When it is made, the files are read once, without hashing: every bad row and every damaged
    page is known before training begins, and so are the number of batches and where each of them
    is. Later only some chunks are in memory at a time. The files must not change until the
    training ends: one that does is an error.

    In `fit` each epoch has a separate order, drawn from the seed: of the chunks, and of the rows
    within a chunk. Chunks of a compressed CSV file, and of a row group of Parquet, stay in order;
    the files and the row groups do not. Give `fit` `shuffle=False`: otherwise Keras asks for the
    batches in disorder, and chunks are read again and again. `evaluate` and `predict` read the
    rows in the order of the files, so predictions come back in that order.

    Args:
        files: paths or patterns, of files named `.csv`, `.csv.gz`, `.parquet` or `.pq`.
        encoder: how the columns are hashed; it is copied. Other columns are ignored. The fields of
            CSV files are hashed as they are written there, those of Parquet by their type.
        label: the column of labels, or a list of such columns; `None` for none, to predict.
        weight: the column of the rows' weights.
        batch_size: rows in a batch. The last batch of an epoch may have fewer.
        shuffle: draw an order for every epoch of `fit`; `None` to do so if there are labels.
        seed: of that order, an integer from 0 up.
        chunk_rows: about how many rows are read, shuffled and kept in memory together.
        errors: `"raise"`, or `"skip"` to leave out and count files that can't be read, rows with
            too few or too many fields, and labels and weights that are no finite numbers.
        process: which of several processes this is, from 0. Each gets other rows, and as many.
        processes: how many there are.
        delimiter: what stands between the fields of CSV files, one ASCII character.
        verbose: 1 for a progress bar while the files are scanned, 0 for silence.
        workers: how many read ahead, if more than 1; each opens the files itself. The order of
            the rows doesn't depend on them. A compressed file, and a row group of Parquet, is read
            by one of them.
        use_multiprocessing: whether the workers are processes, and not threads. A process starts
            with the first epoch, in some seconds, and sends its chunks over a pipe: worth it where
            Python itself is the bottleneck.
        max_queue_size: how many chunks the workers read ahead, together.

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

    Warns:
        UserWarning: if `shuffle` is asked for without labels.

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
        checks.check_numbers(
            batch_size=batch_size,
            chunk_rows=chunk_rows,
            processes=processes,
            max_queue_size=max_queue_size,
        )
        checks.check_choices(seed, errors, delimiter, workers)
        checks.check_process(process, processes)
        self.encoder = checks.copy_encoder(encoder)
        numbers = checks.number_columns(label, weight)
        self._has_weight = weight is not None
        self._num_labels = len(numbers) - self._has_weight
        order_seed = seed if checks.is_shuffled(shuffle, self._num_labels > 0) else None
        self.skipped: collections.Counter[str] = collections.Counter()
        schema = Schema(tuple(self.encoder.layout.codes), numbers)
        sources = [
            make_source(path, schema, chunk_rows, errors == "skip", delimiter)
            for path in find_files(files)
        ]
        chunks = self._scan(sources, ReadingBar([source.path for source in sources], verbose))
        self._order = Order(chunks, batch_size, order_seed, process, processes)
        if not self._order.rows:
            raise ValueError(
                "The files must have at least one good row for each process. Received: "
                f"{len(sources)} files with {self._order.left_out} good rows for {processes} "
                f"processes, skipped: {dict(self.skipped)}."
            )
        self.left_out = self._order.left_out
        self._loader = ChunkLoader(sources, chunks, self.encoder)
        self._ahead = max_queue_size
        self._latest: tuple[int | None, int] = (None, -1)
        super().__init__(
            workers=workers, use_multiprocessing=use_multiprocessing, max_queue_size=max_queue_size
        )
        self._begin_reading()

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

    def __len__(self) -> int:
        return self._order.num_batches

    def _make_batch(self, epoch: int | None, number: int) -> tuple[np.ndarray, ...]:
        """A batch of an epoch; in the order of the files where the epoch is `None`."""
        parts = self._order.batch(epoch, number)
        ahead = self._order.following(epoch, number, len(parts) + self._ahead)
        if self._latest not in ((epoch, number - 1), (epoch, number)) and number:
            ahead = []  # in disorder: nobody knows what is next
        self._latest = (epoch, number)
        blocks = [
            (*self._reader.read(chunk, ahead[place + 1 :]), rows)
            for place, (chunk, rows) in enumerate(parts)
        ]
        indices = np.concatenate([indices[rows] for indices, _, rows in blocks])
        numbers = np.concatenate([numbers[rows] for _, numbers, rows in blocks])
        labels = numbers[:, : self._num_labels]
        if self._has_weight:
            return indices, labels, numbers[:, self._num_labels]
        return (indices, labels) if self._num_labels else (indices,)

    def on_epoch_begin(self) -> None:
        """Goes on to the next epoch, if all batches of this one were asked for."""
        self._reader.begin_epoch()
        super().on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Notes whether all batches of the epoch were asked for; outside of Keras, goes on."""
        self._reader.begin_epoch()  # what Keras asks for next may be a look at the first batches
        super().on_epoch_end()

    def resume(self, epoch: int, batch: int = 0) -> None:
        """Goes to a batch of an epoch, to train on from there, without reading those before it.

        The batches that follow are those that would have followed, with the same files, seed and
        batch size. An epoch of Keras then still has all its batches: it begins with the rest of
        the one that was interrupted, and ends in the middle of the next.

        Args:
            epoch: the number of the epoch, from 0.
            batch: how many of its batches are done.

        Raises:
            ValueError: if there is no such batch.
        """
        super().resume(epoch, batch)
        self._reader.begin_epoch()

    def _use_workers(self, workers: int, use_multiprocessing: bool) -> None:
        """See `EpochDataset._use_workers`."""
        self._reader = ChunkReader(self._loader, workers, use_multiprocessing, self._ahead)

    def to_tf_data(self) -> Any:
        """The batches as a `tf.data.Dataset`, which gives another epoch each time it is run.

        A dataset that shuffles gives them shuffled in `predict` too.

        Raises:
            RuntimeError: on another Keras backend than TensorFlow.
        """
        stream = engines.current().stream_batches(self._stream, self[0], len(self))
        stream.encoder = self.encoder  # for a model that compares it with its own
        return stream
