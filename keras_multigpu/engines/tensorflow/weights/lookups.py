"""Sums of rows of tables whose rows are spread over the devices.

Each device adds the rows that it stores, for the whole batch, and each replica adds the devices'
sums of its own rows. So only indices and sums cross, however large the table, and a gradient is
made where its rows are.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.tensorflow.weights.divided import division_of
from keras_multigpu.engines.tensorflow.weights.division import Division
from keras_multigpu.engines.tensorflow.weights.rows import merge_rows, wide
from keras_multigpu.engines.values import Tensor

_JOINED = "joined_rows_of_parts"
"""In the names of operations that join the parts of a gradient of rows."""

LookUp = Callable[[keras.Variable, Tensor, Tensor | None, str], Tensor | None]
_current: contextvars.ContextVar[LookUp | None] = contextvars.ContextVar("_current", default=None)


@contextlib.contextmanager
def looking_up(by: LookUp) -> Iterator[None]:
    """Scope in which `look_up` is done by a function."""
    token = _current.set(by)
    try:
        yield
    finally:
        _current.reset(token)


def look_up(
    table: keras.Variable, indices: Tensor, weights: Tensor | None, dtype: str | None
) -> Tensor | None:
    """`sum_rows` of a table that stays where it is; `None` if it has to be read whole."""
    by = _current.get()
    return None if by is None else by(table, indices, weights, dtype or table.dtype)


def by_rows(variables: Sequence[keras.Variable]) -> dict[int, keras.Variable]:
    """The tables among variables whose rows are spread, by their `id`."""
    found = {}
    for variable in variables:
        division = division_of(variable)
        if division is not None and division.axis == 0 and is_table(variable):
            found[id(variable)] = variable
    return found


def is_table(variable: keras.Variable) -> bool:
    """Whether a layer looks up rows of a variable by the engine's `sum_rows`."""
    return hasattr(variable, "names_rows_once")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table in a step: the values of its parts, each on its own device."""

    variable: keras.Variable
    division: Division
    parts: Sequence[Tensor]


@dataclasses.dataclass(frozen=True)
class _Own:
    """What one device adds up, all of the same length.

    Attributes:
        rows: the rows of its part that the batch uses.
        sums: the rows of the batch to whose sums they belong.
        places: their places among all indices of the batch.
        weights: their weights; `None` for ones.
    """

    rows: Tensor
    sums: Tensor
    places: Tensor
    weights: Tensor | None


class Lookup:
    """One lookup in a step.

    Args:
        table: the table.
        dtype: the type to compute in.
        devices: each replica's device.
    """

    def __init__(self, table: Table, dtype: str, devices: Sequence[str]):
        self._table, self._dtype, self._devices = table, tf.as_dtype(dtype), devices
        self._homes = table.division.devices
        self._own: list[_Own] = []
        self._indices: Sequence[Tensor] = ()

    def forward(self, indices: Sequence[Tensor], weights: Sequence[Tensor] | None) -> list[Tensor]:
        """The sums of each replica's rows, on its device, from each replica's arguments."""
        indices = self._indices = [self._checked(*one) for one in zip(self._devices, indices)]
        counts = list(map(_count, indices))
        parts = []
        for number, (home, part) in enumerate(zip(self._homes, self._table.parts)):
            with tf.device(home):
                own = self._find_own(number, indices, weights)
                self._own.append(own)
                parts.append(tf.split(self._sum(part, own, sum(counts)), counts, num=len(counts)))
        sums = []
        for device, one in zip(self._devices, zip(*parts)):
            with tf.device(device):
                sums.append(tf.cast(tf.add_n(list(one)), self._dtype))
        return sums

    def backward(self, upstream: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor] | None]:
        """The gradient of each part, where it is, and of each replica's weights.

        A part's gradient has only the touched rows, each once, if the optimizer takes such.
        """
        by_parts, by_weights = [], []
        for number, (home, part, own) in enumerate(zip(self._homes, self._table.parts, self._own)):
            with tf.device(home):
                arrived = tf.gather(tf.concat(list(upstream), 0), own.sums)
                by_parts.append(self._of_part(number, arrived, own))
                if own.weights is not None:
                    taken = tf.cast(tf.gather(part, own.rows), self._dtype)
                    by_weights.append(self._of_weights(taken * arrived, own))
        if not by_weights:
            return by_parts, None
        added = []
        for device, indices, one in zip(self._devices, self._indices, zip(*by_weights)):
            with tf.device(device):
                added.append(tf.reshape(tf.add_n(list(one)), tf.shape(indices)))
        return by_parts, added

    def _checked(self, device: str, indices: Tensor) -> Tensor:
        """The indices; the step fails if the table has not all of their rows."""
        width = self._table.division.shape[0]
        with tf.device(device):
            number = tf.cast(indices, tf.int64)
            check = tf.debugging.Assert(
                tf.reduce_all((number >= 0) & (number < width)),
                [
                    f"Indices must be from 0 to {width - 1}, the last row of "
                    f"{self._table.variable.path!r}. Received: indices from",
                    tf.reduce_min(number),
                    "to",
                    tf.reduce_max(number),
                    "Give the layer the `width` of the encoder, or `padding` for what is no index.",
                ],
            )
            with tf.control_dependencies([check]):
                return tf.identity(indices)

    def _find_own(
        self, number: int, indices: Sequence[Tensor], weights: Sequence[Tensor] | None
    ) -> _Own:
        division = self._table.division
        is_large = division.shape[0] > tf.int32.max or indices[0].dtype.size > 4
        dtype = tf.int64 if is_large or indices[0].dtype == tf.uint32 else tf.int32
        flat = tf.concat([tf.reshape(tf.cast(one, dtype), [-1]) for one in indices], 0)
        rows = flat - tf.constant(division.start_of(number), dtype)
        places = tf.where((rows >= 0) & (rows < division.sizes[number]))[:, 0]
        given = (
            None if weights is None else tf.concat([tf.reshape(one, [-1]) for one in weights], 0)
        )
        return _Own(
            tf.gather(rows, places),
            tf.gather(_rows_of(indices), places),
            places,
            None if given is None else tf.gather(given, places),
        )

    def _sum(self, part: Tensor, own: _Own, count: Tensor | int) -> Tensor:
        if own.weights is None and part.dtype == self._dtype and self._dtype.size >= 4:
            # Faster: makes no tensor of all the rows taken.
            return tf.sparse.segment_sum(part, own.rows, own.sums, num_segments=count)
        taken = tf.cast(tf.gather(part, own.rows), self._dtype)
        taken = taken if own.weights is None else taken * own.weights[:, None]
        return tf.math.unsorted_segment_sum(wide(taken), own.sums, count)

    def _of_part(self, number: int, arrived: Tensor, own: _Own) -> Tensor:
        table = self._table
        shape, kept = table.division.shape_of(number), table.parts[number].dtype
        values = wide(arrived if own.weights is None else arrived * own.weights[:, None])
        if not table.variable.names_rows_once:
            total = tf.math.unsorted_segment_sum(values, own.rows, shape[0])
            return tf.cast(tf.cast(total, self._dtype), kept)
        merged = merge_rows(tf.IndexedSlices(values, own.rows, tf.constant(shape, own.rows.dtype)))
        values = tf.cast(tf.cast(merged.values, self._dtype), kept)
        return tf.IndexedSlices(values, merged.indices, merged.dense_shape)

    def _of_weights(self, by_units: Tensor, own: _Own) -> list[Tensor]:
        """The gradient of each replica's weights, flat, as far as this device can tell."""
        counts = [tf.size(one) for one in self._indices]
        values, size = tf.reduce_sum(by_units, axis=1), tf.add_n(counts)
        flat = tf.scatter_nd(own.places[:, None], values, tf.cast([size], tf.int64))
        return tf.split(flat, counts, num=len(counts))


def join_rows(parts: Sequence[Tensor], division: Division) -> Tensor:
    """The gradient of a table of those of its parts; `split_rows` undoes it."""
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.concat(list(parts), 0)
    rows = []
    for number, (one, home) in enumerate(zip(parts, division.devices)):
        with tf.device(home):
            rows.append(
                tf.add(one.indices, tf.constant(division.start_of(number), one.indices.dtype))
            )
    return tf.IndexedSlices(
        tf.concat([one.values for one in parts], 0, name=_JOINED),
        tf.concat(rows, 0, name=_JOINED),
        tf.constant(division.shape, rows[0].dtype),
    )


def split_rows(gradient: tf.IndexedSlices, division: Division) -> list[Tensor] | None:
    """The parts of what `join_rows` has just joined; `None` for other gradients of rows."""
    values, rows = gradient.values.op, gradient.indices.op
    starts = list(map(division.start_of, range(len(division.sizes))))
    if not all(_JOINED in one.name.rpartition("/")[2] for one in (values, rows)):
        return None
    added = [one.op.inputs for one in rows.inputs[:-1]]
    if [tf.get_static_value(start) for _, start in added] != starts:
        return None
    return [
        tf.IndexedSlices(value, own, tf.constant(division.shape_of(number), own.dtype))
        for number, (value, (own, _)) in enumerate(zip(values.inputs[:-1], added))
    ]


def _rows_of(indices: Sequence[Tensor]) -> Tensor:
    """The row of the batch that each index belongs to, of all replicas' flat indices."""
    found, before = [], tf.constant(0)
    for one in indices:
        rows, ones = tf.unstack(tf.shape(one))
        found.append(tf.repeat(tf.range(before, before + rows), ones))
        before += rows
    return tf.concat(found, 0)


def _count(tensor: Tensor) -> Tensor | int:
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]
