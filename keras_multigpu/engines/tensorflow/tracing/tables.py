"""The tables of a template that stay where they are, while its call is traced."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Sequence

import keras
import tensorflow as tf

from keras_multigpu.engines.tensorflow.tracing.scope import ReplicaScope
from keras_multigpu.engines.tensorflow.weights.lookups import LookUp, by_rows, looking_up
from keras_multigpu.engines.values import Tensor


class UnsentTables:
    """Tables that are spread by rows, and not sent to the replicas.

    A replica takes no rows of them, so nothing but lookups may use them. What else does is found
    out when the call is traced; then it is traced again, with the table sent, and a warning says
    so: the table is to fit into the memory of every device.

    Args:
        variables: those of the template.

    Attributes:
        unsent: the tables, by `id`.
        look_up: looks rows up, in a call that is traced to be cut there.
    """

    def __init__(self, variables: Sequence[keras.Variable]):
        self.unsent = by_rows(variables)
        self.look_up: LookUp | None = None
        self._read: set[int] = set()

    def send_all(self, why: str) -> None:
        """Sends them all.

        Warns:
            UserWarning: of each.
        """
        self._send(set(self.unsent), why)

    def send_read(self) -> bool:
        """Sends those of which a trace has read more than rows; returns whether there are any.

        Warns:
            UserWarning: of each.
        """
        read = self._read & self.unsent.keys()
        why = "the model uses it in a loop, a branch or a function, or not for sums of rows only"
        self._send(read, why)
        self._read.clear()
        return bool(read)

    def _send(self, keys: Collection[int], why: str) -> None:
        for key in keys:
            table = self.unsent[key]
            warnings.warn(
                f"The table {table.path!r} of shape {tuple(table.shape)} is spread over the "
                f"devices by rows, but it is sent to each of them whole: {why}.",
                stacklevel=2,
            )
        self.unsent = {key: one for key, one in self.unsent.items() if key not in keys}

    def spec_of(self, variable: keras.Variable) -> tf.TensorSpec:
        """What a traced function takes for a variable."""
        shape = tuple(variable.shape)
        if id(variable) in self.unsent:
            shape = (None, *shape[1:])
        return tf.TensorSpec(shape, variable._value.dtype)

    def value_of(self, variable: keras.Variable, argument: Tensor) -> Tensor:
        """A variable's value in a traced call; in place of a table, nothing of its shape."""
        if id(variable) not in self.unsent:
            return argument
        none = tf.identity(argument)
        none.set_shape(variable.shape)
        return none

    @contextlib.contextmanager
    def looked_up_in(self, scope: ReplicaScope) -> Iterator[None]:
        """Scope in which rows are looked up, and other reads of tables noted."""
        scope.note_reads(self.unsent, self._read)
        with looking_up(self._look_up):
            yield

    def _look_up(
        self, table: keras.Variable, indices: Tensor, weights: Tensor | None, dtype: str
    ) -> Tensor | None:
        if id(table) not in self.unsent or self.look_up is None:
            return None
        found = self.look_up(table, indices, weights, dtype)
        if found is None:
            self._read.add(id(table))
        return found
