"""What a backend has to provide: an `Engine`, with one runner for each mode, and `Steps`.

A third backend would be a package beside `tensorflow` and `jax` that implements the classes in this
file and in `runners.py`, and one more line in `engines.current`. Modes and layers talk to these
classes only.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_multigpu.engines.cluster.processes import Processes
from keras_multigpu.engines.cluster.remote import Address, Remote
from keras_multigpu.engines.runners import (
    DataRunner,
    ModelRunner,
    Runner,
    Steps,
    TowerRunner,
    TrainedModel,
)
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.values import Call, Holding, Request, Tensor, Transfer


class Engine(abc.ABC):
    """One Keras backend: its devices, its tensors, and its runners."""

    name: str
    """The backend's name in Keras."""

    title: str
    """The backend's name for people."""

    partitions: bool
    """Whether the compiler spreads one program over the devices: for predictions, not for modes."""

    shares_memory: bool
    """Whether virtual devices of a process share their memory: nothing is copied between them."""

    remote: Remote
    """Devices of other machines."""

    processes: Processes[Any]
    """Those that have joined."""

    data_runner: type[DataRunner]
    tower_runner: type[TowerRunner]
    model_runner: type[ModelRunner]
    steps: Callable[[TrainedModel, Runner], Steps]

    # Devices

    def divides(self, devices: Sequence[str], rows: int, together: int = 1) -> bool:
        """Whether devices share the rows of a batch; `together` devices have the same rows."""
        return True

    @abc.abstractmethod
    def list_devices(self, kind: str) -> tuple[str, ...]:
        """Names of the devices of a kind (`"gpu"` or `"cpu"`): `("gpu:0", ...)`.

        Includes the devices of joined processes, numbered process by process. Does not start the
        backend's runtime, so that virtual devices may still follow.
        """

    @abc.abstractmethod
    def find_device(self, name: str) -> str | None:
        """The canonical form of a device's name; `None` if there is no such device."""

    @abc.abstractmethod
    def name_of(self, device: Any) -> str | None:
        """The name of one of the backend's own device objects; `None` for anything else."""

    def parts_of(self, thing: Any) -> tuple[str, ...]:
        """The names of the devices that another of the backend's own objects stands for."""
        return ()

    @property
    @abc.abstractmethod
    def no_gpu_support(self) -> str:
        """Why the backend, as installed and set up, can't use GPUs; `""` if it can."""

    @abc.abstractmethod
    def describe_device(self, name: str) -> str:
        """What a device is: a GPU's product name, or `"CPU"`."""

    @abc.abstractmethod
    def use_virtual_devices(self, count: int) -> None:
        """Splits the host's processor into `count` CPU devices.

        Raises:
            RuntimeError: if the backend's runtime has started with another number.
        """

    def join(
        self, address: Address, num_processes: int, process_id: int, timeout: float, data: str
    ) -> tuple[str, ...]:
        """Joins this process to others, so that one model can use the devices of all.

        `address` is where process 0 listens; a process that is silent for `timeout` seconds is
        given up. `data` says what each gives to the steps: `"same"` or `"parts"` of the batches.
        Returns a name for each process: its host, its number and its process id there.

        Raises:
            ClusterError: if not all processes join in time, or if they don't fit together.
            RuntimeError: if the backend can't join processes, or has started.
        """
        return self.processes.join(address, num_processes, process_id, timeout, data)

    @property
    def num_processes(self) -> int:
        """How many joined processes `list_devices` covers."""
        return 1 if self.processes.group is None else len(self.processes.group.names)

    @abc.abstractmethod
    def host_of(self, name: str) -> str:
        """The host that a device is on; `""` for this process's host."""

    @abc.abstractmethod
    def on_host(self) -> contextlib.AbstractContextManager[Any]:
        """A scope whose operations are on this process's processor."""

    @abc.abstractmethod
    def on_device(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A scope whose operations and new variables are on a device."""

    @abc.abstractmethod
    def copy(self, tensor: Tensor, name: str) -> Tensor:
        """A copy of a dense tensor on a device; it has arrived when this returns."""

    @abc.abstractmethod
    def relay(self, names: Sequence[str]) -> Callable[[Tensor], Tensor]:
        """A function that sends a tensor from device to device, in one step where there are steps.

        The tensor has arrived on the last device when the function returns. To measure copies.
        """

    # Tensors

    @abc.abstractmethod
    def take_rows(self, tensor: Tensor, start: Tensor, size: Tensor) -> Tensor:
        """Rows `start` to `start + size` of a dense, sparse or ragged tensor."""

    @abc.abstractmethod
    def join_rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of one kind, one after the other along their first axis."""

    @abc.abstractmethod
    def check_equal(self, counts: Sequence[Tensor]) -> Tensor:
        """The common row count of tensors, some of them known only at run time.

        Raises an error, at run time, if they differ.
        """

    @abc.abstractmethod
    def sum_rows(
        self, table: Any, indices: Tensor, weights: Any, dtype: str | None, sparse_gradient: bool
    ) -> Tensor:
        """The sums of rows of a table: `sum_j weights[:, j] * table[indices[:, j]]`.

        `table` has the shape `(width, units)`, `indices` and `weights` (`None` for ones) have
        `(rows, ones)`, the result has `(rows, units)`. The table is cast to `dtype` first. If it is
        a variable that several devices store by rows, it may stay where it is: then only indices
        and sums cross. The gradient of the table has each row once,
        summed over the indices that name it. With `sparse_gradient` it holds only the touched rows,
        on backends whose optimizers take such gradients; XLA can't compile it.
        """

    @abc.abstractmethod
    def stream_batches(self, epoch: Callable[[], Iterator[Any]], example: Any, batches: int) -> Any:
        """The backend's own stream of batches.

        `epoch` starts an epoch of `batches` batches, tuples of arrays that have the types and
        shapes of `example` but for the rows.

        Raises:
            RuntimeError: if the backend has no streams of its own.
        """

    # Models

    @abc.abstractmethod
    def check(self, request: Request) -> None:
        """Refuses settings of the process, and devices, with which a mode can't work.

        Raises:
            ValueError: if there are any.
        """

    @abc.abstractmethod
    def build(
        self, function: Callable[..., Any], call: Call, models: Sequence[keras.Layer]
    ) -> None:
        """Creates the variables of models for a call of a function, without computing anything.

        They exist when this returns, whatever scope of Keras or of the backend the caller is in.
        """

    def in_fresh_thread(self, function: Callable[[], Any]) -> None:
        """Calls a function outside the caller's scopes: it may make variables, and compute."""
        in_fresh_thread(function)

    @abc.abstractmethod
    def places_kept(self, model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        """Restores the device of every variable of a model on exit."""

    @abc.abstractmethod
    def weights_whole(self, model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        """Scope in which no weight of a model is divided, for files that can't have it so."""

    @abc.abstractmethod
    def count_transfers(self, model: TrainedModel, batch: Any, training: bool) -> list[Transfer]:
        """What crosses between devices in one step of a built parallel model.

        Compiles the step anew and may run it; the caller restores the model's state. `batch` holds
        inputs, targets and sample weights, `None` where absent. For `training`, the model must be
        compiled and its optimizer built.
        """

    @abc.abstractmethod
    def find_memory(self, model: keras.Model, batch: Any, training: bool) -> list[Holding]:
        """What each device holds in one step of a built model, parallel or not.

        Otherwise as `count_transfers`.
        """
