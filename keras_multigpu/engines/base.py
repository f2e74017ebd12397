"""The contract of an engine: what differs from one Keras backend to the next."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_multigpu.engines.remote import Address, Remote
from keras_multigpu.engines.values import Call, Replicas, Tensor, Transfer


class Engine(abc.ABC):
    """One Keras backend, as the modes see it."""

    name: str
    """The backend's name in Keras."""

    title: str
    """The backend's name for people."""

    partitions: bool = False
    """Whether the backend's compiler spreads one computation over several devices itself.

    Data mode then calls the template once, on the whole batch, with `shard_rows`. Elsewhere it
    slices the batch and merges the outputs of replicas.
    """

    remote: Remote
    """Devices of other machines."""

    mixins: tuple[type, ...] = ()
    """Classes that the class of a parallel model inherits from, before the template's class."""

    @abc.abstractmethod
    def list_devices(self, kind: str) -> tuple[str, ...]:
        """Names of the devices of a kind (`"gpu"` or `"cpu"`): `("gpu:0", ...)`.

        Those of processes that have joined are among them, numbered process by process.

        Does not start the backend's runtime, so that virtual devices may still follow.
        """

    @abc.abstractmethod
    def find_device(self, name: str) -> str | None:
        """The canonical form of a device's name, or `None` where there is no such device."""

    @abc.abstractmethod
    def describe_device(self, name: str) -> str:
        """What a device is: a GPU's product name, or `"CPU"`.

        Args:
            name: its canonical name.
        """

    @abc.abstractmethod
    def use_virtual_devices(self, count: int) -> None:
        """Splits the host's processor into `count` CPU devices.

        Raises:
            RuntimeError: if the backend's runtime has started with another number.
        """

    def join(
        self, address: Address, num_processes: int, process_id: int, timeout: float
    ) -> tuple[str, ...]:
        """Joins this process to others, whose devices one model can then use together.

        Args:
            address: where process 0 is reached.
            num_processes: how many processes there are.
            process_id: this one's number.
            timeout: after how many seconds of silence a process is given up.

        Returns:
            What to call each process: its host, its number and its process id there.

        Raises:
            ClusterError: if they don't come together in time, or don't fit together.
            RuntimeError: if the backend has no such processes, or has started.
        """
        raise RuntimeError(
            "`join` needs the Keras backend 'jax', where every machine runs the same script. "
            f"Received: keras.backend.backend()={self.name!r}. On TensorFlow one process uses "
            "them all: start `python -m keras_multigpu serve` on the other machines, and call "
            "`keras_multigpu.cluster.connect` in the script."
        )

    @property
    def num_processes(self) -> int:
        """How many processes have joined, whose devices `list_devices` names."""
        return 1

    def writing(self, model: keras.Model) -> contextlib.AbstractContextManager[bool]:
        """A scope in which a file of a model's is written, if by this process; else waited for.

        Gives whether it is this process that writes: one of those that have the model's devices.
        """
        return contextlib.nullcontext(True)

    def check_devices(self, names: Sequence[str], mode: str) -> None:  # noqa: B027  as below
        """Refuses devices that a mode can't use together.

        Args:
            names: their canonical names.
            mode: the mode's name.

        Raises:
            ValueError: if it can't.
        """

    def host_of(self, name: str) -> str:
        """Which host a device is of; `""` for that of this process.

        Args:
            name: its canonical name.
        """
        return name.rpartition("/")[0]

    def check_process(self) -> None:  # noqa: B027  most have nothing to refuse
        """Refuses settings of the process under which parallel models don't work.

        Raises:
            ValueError: if there are such settings.
        """

    def shard_rows(
        self, tensors: Sequence[Tensor], devices: Sequence[str]
    ) -> contextlib.AbstractContextManager[list[Tensor]]:
        """A scope in which the rows of tensors are to be spread over devices by the compiler.

        It gives the same tensors, so marked. Only where `partitions`. Computations that are not
        compiled are left as they are.
        """
        raise NotImplementedError(f"{self.name} does not partition.")

    @abc.abstractmethod
    def take_rows(self, tensor: Tensor, start: Tensor, size: Tensor) -> Tensor:
        """Rows `start` to `start + size` of a dense, sparse or ragged tensor."""

    @abc.abstractmethod
    def join_rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of one kind, one after the other along their first axis."""

    @abc.abstractmethod
    def sum_rows(
        self,
        table: Tensor,
        indices: Tensor,
        weights: Tensor | None = None,
        *,
        sparse_gradient: bool = False,
    ) -> Tensor:
        """The sums of rows of a table: `sum_j weights[:, j] * table[indices[:, j]]`.

        The gradient of the table has each row once, summed over the indices that name it.

        Args:
            table: of shape `(width, units)`.
            indices: integers of shape `(rows, ones)`, from 0 to `width - 1`.
            weights: of shape `(rows, ones)`, of the table's type; `None` for ones.
            sparse_gradient: give the gradient of the rows touched only, where the backend's
                optimizers take one; it is then not compiled by XLA.

        Returns:
            A tensor of shape `(rows, units)`.
        """

    @abc.abstractmethod
    def storage(self, tensor: Tensor) -> dict[str, bool]:
        """How a tensor is stored, as `keras.KerasTensor` is told: `{"sparse": True}`, say."""

    @abc.abstractmethod
    def check_equal(self, counts: Sequence[Tensor]) -> Tensor:
        """The one value of numbers of rows of which some are known in the step only.

        Where they differ, the step fails with an error that says so.
        """

    @abc.abstractmethod
    def on_device(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A scope whose operations and new variables are on a device."""

    @abc.abstractmethod
    def copy(self, tensor: Tensor, name: str) -> Tensor:
        """A tensor of the same values on a device; it is there when this returns.

        Args:
            tensor: a dense tensor, on any device.
            name: the canonical name of the device to copy it to.
        """

    @abc.abstractmethod
    def build(self, function: Callable[..., Any], call: Call) -> None:
        """Creates the variables that a call with these arguments would; computes nothing.

        They are made at once, whatever scope of Keras or of the backend the caller is in.

        Args:
            function: calls the models and layers that are to be built.
            call: its arguments; of tensors the types count.
        """

    @abc.abstractmethod
    def make_replicas(
        self,
        models: Sequence[keras.Model],
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        synchronized: str = "none",
    ) -> Replicas:
        """Replicas of a template.

        Args:
            models: the model whose weights each replica uses: the template, first, and either
                the template again or models built alike.
            devices: where each replica runs, as `find_device` gives them.
            wire_dtype: the type in which trainable weights and their gradients cross between
                devices, `None` for their own.
            synchronized: which `BatchNormalization` layers see all the replicas' rows:
                `"none"`, `"marked"` (those with `synchronized=True`) or `"all"`.
        """

    def stream_batches(self, epoch: Callable[[], Iterator[Any]], example: Any, batches: int) -> Any:
        """The backend's own stream of batches.

        Args:
            epoch: starts an epoch: an iterator over batches, tuples of arrays.
            example: one of the batches, whose types and shapes all have, but for the rows.
            batches: how many there are in an epoch.

        Raises:
            RuntimeError: if the backend has no streams of its own.
        """
        raise RuntimeError(
            "A `tf.data.Dataset` needs the Keras backend 'tensorflow'. Received: "
            f"keras.backend.backend()={self.name!r}. Give the dataset itself to `fit`."
        )

    @abc.abstractmethod
    def place_updates(
        self, optimizer: keras.Optimizer, model: keras.Model, *, apart: bool = False
    ) -> None:
        """Has an optimizer keep and update the slots of a variable on that variable's device.

        Args:
            optimizer: the optimizer.
            model: the parallel model whose variables it updates.
            apart: the model's replicas are trained each by itself: gradients are clipped by the
                norm of one replica's, not by that of all.
        """

    def move_variables(
        self, homes: Sequence[tuple[keras.Variable, str]], model: keras.Model
    ) -> None:
        """Moves variables to devices, with their values. Only where not `partitions`.

        Args:
            homes: pairs of a variable and the device that it is to be on.
            model: the model that has them; what it traced before is dropped.
        """
        raise NotImplementedError(f"{self.name} has no variables on single devices.")

    def places_kept(self, model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        """A scope after which a model's variables are on the devices that they were on."""
        return contextlib.nullcontext()

    def find_shards(self, model: keras.Model, count: int) -> dict[str, int]:
        """The weights of large layers to spread over devices. Only where `partitions`.

        Args:
            model: a built model.
            count: how many devices there are.

        Returns:
            The axis to spread, by the weight's path.

        Raises:
            ValueError: if there is none whose axes the devices divide.
        """
        raise NotImplementedError(f"{self.name} does not partition.")

    def shard(self, model: keras.Model, axes: dict[str, int], devices: Sequence[str]) -> None:
        """Spreads weights over devices. Only where `partitions`.

        Args:
            model: a built model.
            axes: what `find_shards` gave.
            devices: the devices.
        """
        raise NotImplementedError(f"{self.name} does not partition.")

    @abc.abstractmethod
    def count_transfers(self, model: keras.Model, batch: Any, training: bool) -> list[Transfer]:
        """What crosses between devices in one step of a parallel model.

        Compiles the step anew, and may run it: the caller gives the model its state again.

        Args:
            model: a parallel model that is built; for a training step compiled, and its
                optimizer built.
            batch: the inputs, the targets and the weights of the samples, `None` where absent.
            training: a training step, or a prediction.
        """

    @abc.abstractmethod
    def step_scope(self, model: keras.Model, alone: bool) -> contextlib.AbstractContextManager[Any]:
        """A scope around the making of Keras's step functions for a parallel model.

        Args:
            model: the parallel model.
            alone: its step is that of one device.
        """

    def is_default(self, name: str) -> bool:
        """Whether a device is the one on which the backend computes by itself.

        Args:
            name: its canonical name.
        """
        return False
