"""What a backend has to provide: an `Engine`, one runner for each mode, and `Steps`.

A third backend would be a package beside `tensorflow` and `jax` that implements the classes in this
file, and one more line in `engines.current`. Modes and layers talk to these classes only; what an
engine may ask of a parallel model is in `TrainedModel`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import keras

from keras_multigpu.engines.remote import Address, Remote
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.values import (
    Call,
    Holding,
    Kept,
    Plan,
    Request,
    Result,
    Tensor,
    Transfer,
)


class Engine(abc.ABC):
    """One Keras backend: its devices, its tensors, and its runners."""

    name: str
    """The backend's name in Keras."""

    title: str
    """The backend's name for people."""

    partitions: bool
    """Whether the compiler spreads one program over the devices: for predictions, not for modes."""

    remote: Remote
    """Devices of other machines."""

    data_runner: type[DataRunner]
    tower_runner: type[TowerRunner]
    model_runner: type[ModelRunner]
    steps: type[Steps]

    # Devices

    @abc.abstractmethod
    def list_devices(self, kind: str) -> tuple[str, ...]:
        """Names of the devices of a kind (`"gpu"` or `"cpu"`): `("gpu:0", ...)`.

        Includes the devices of joined processes, numbered process by process. Does not start the
        backend's runtime, so that virtual devices may still follow.
        """

    @abc.abstractmethod
    def find_device(self, name: str) -> str | None:
        """The canonical form of a device's name; `None` if there is no such device."""

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

    @abc.abstractmethod
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

    @property
    @abc.abstractmethod
    def num_processes(self) -> int:
        """How many joined processes `list_devices` covers."""

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
        self,
        table: Tensor | keras.Variable,
        indices: Tensor,
        weights: Tensor | None = None,
        *,
        dtype: str | None = None,
        sparse_gradient: bool = False,
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
    def storage(self, tensor: Tensor) -> dict[str, bool]:
        """How a tensor is stored, as arguments of `keras.KerasTensor`: `{"sparse": True}`, say."""

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


class TrainedModel(Protocol):
    """All that an engine may ask of a parallel model."""

    template: keras.Model
    name: str
    devices: tuple[str, ...]
    jit_compile: bool
    run_eagerly: bool
    steps_per_execution: int
    optimizer: Any
    variables: list[keras.Variable]
    trainable_variables: list[keras.Variable]
    """As `Steps.seen` gives them, like `non_trainable_variables`."""
    non_trainable_variables: list[keras.Variable]
    metrics_variables: list[keras.Variable]
    train_function: Any
    test_function: Any
    predict_function: Any
    train_step: Callable[..., Any]
    predict_step: Callable[..., Any]
    make_train_function: Callable[..., Any]
    make_predict_function: Callable[..., Any]
    train_on_batch: Callable[..., Any]
    predict_on_batch: Callable[..., Any]
    _parallel_steps: Any
    """The engine's own `Steps`."""


class Runner(abc.ABC):
    """What the parallel models of a mode run on: one object for each model."""

    @classmethod
    @abc.abstractmethod
    def check(cls, request: Request) -> None:
        """Refuses templates, devices and options that this backend can't serve in this mode.

        Raises:
            ValueError: if the request can't be met.
        """

    @classmethod
    def adapt(cls, request: Request) -> Request:
        """The request of a file that another backend or machine wrote, changed to fit this one.

        Warns:
            UserWarning: if the file asks for an option that this backend does not have.
        """
        return request

    @abc.abstractmethod
    def retrace(self) -> None:
        """Drops everything that was traced or planned: the template's layers may have changed."""


class PlacingRunner(Runner):
    """A runner that may keep weights, and the optimizer's slots, on different devices."""

    @abc.abstractmethod
    def lay_out(self) -> None:
        """Decides what is where, and moves the weights of the built template there.

        They are there when this returns, whatever scope the caller is in.
        """

    @abc.abstractmethod
    def place(self) -> None:
        """Moves the weights back to this model's devices, if another model has moved them."""

    @abc.abstractmethod
    def place_updates(self, optimizer: keras.Optimizer) -> None:
        """Has an optimizer keep and update each slot on the device of its variable."""

    @property
    @abc.abstractmethod
    def placement(self) -> dict[str, Any]:
        """Where the weights are: see `ModelParallel.placement` and `DataParallel.placement`."""


class DataRunner(PlacingRunner):
    """Runs slices of a batch, or a whole batch whose rows the compiler spreads.

    With `sync_batch_norm` every `BatchNormalization` sees the whole batch; where the compiler
    spreads the rows it always does. `wire_dtype` is the type in which weights and gradients cross.
    `shard` says what is spread over the devices: `"optimizer"` (slots), `"weights"` (both), `None`.
    """

    @abc.abstractmethod
    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        sync_batch_norm: bool = True,
        shard: str | None = None,
    ): ...

    @classmethod
    @abc.abstractmethod
    def fullest(cls, template: keras.Model, count: int, shard: str) -> Kept:
        """What the fullest of `count` devices keeps with `shard`; they need not be here."""

    @abc.abstractmethod
    def plan(self, call: Call, *, compiled: bool) -> Plan:
        """Decides whether a call is sliced, and how the results are merged.

        With `compiled`, XLA compiles each replica.
        """

    @abc.abstractmethod
    def run(self, calls: Sequence[Call], sizes: Sequence[Any], plan: Plan) -> list[Result]:
        """Calls the template on each slice, or on the one whole call of `plan.is_whole`.

        Slices run without side effects; a whole call has them, and its result has only outputs.
        Gradients flow back to the watched variables, summed over the replicas, and to the inputs.
        Each replica draws different random numbers; the first draws the template's own. Results
        arrive on the first device. `sizes` are the rows that belong to each slice: 0 for a slice
        beyond the last row, which holds a copy of that row.
        """

    @abc.abstractmethod
    def for_part(self, part: keras.Layer) -> DataRunner | None:
        """A runner, on the same devices, of a part that a step of the template calls directly.

        `None` if such calls stay as they are: on one device.
        """

    @abc.abstractmethod
    def stateless_call(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answers `stateless_call` of the parallel model, whose own method is `own`."""


class TowerRunner(Runner):
    """Runs several models on the same batch, each on its device.

    The first model is the template. The others are the template again, or models built alike.
    """

    @abc.abstractmethod
    def __init__(self, models: Sequence[keras.Model], devices: Sequence[str]): ...

    @abc.abstractmethod
    def run(self, call: Call, *, compiled: bool) -> list[Result]:
        """Calls every model with the same arguments, otherwise as `DataRunner.run` calls slices."""

    @abc.abstractmethod
    def place_updates(self, optimizer: keras.Optimizer, *, apart: bool) -> None:
        """Has an optimizer keep and update each slot on the device of its variable.

        With `apart` the models are trained separately: gradients are clipped by the norm of one
        model's gradients, not by the norm of all.
        """


class ModelRunner(PlacingRunner):
    """Runs one model whose weights are on different devices.

    `placement` maps layer names, or regular expressions, to device numbers; `None` lets the runner
    choose.
    """

    @abc.abstractmethod
    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        placement: Mapping[str, int] | None = None,
    ): ...

    @abc.abstractmethod
    def run(self, call: Call, *, compiled: bool) -> Result:
        """Calls the template across its devices; its state is assigned."""

    @property
    @abc.abstractmethod
    def stages(self) -> Any:
        """The parts of the graph, each on one device; `None` if there are none."""

    @abc.abstractmethod
    def least_bytes(self, rows: int) -> int | None:
        """The bytes that the default placement sends in a training step; `None` if not known."""


class Steps(abc.ABC):
    """The hook around Keras's loops and step functions: one object for each parallel model."""

    @abc.abstractmethod
    def __init__(self, model: TrainedModel, runner: Runner): ...

    @abc.abstractmethod
    def run_loop(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls Keras's `fit`, `evaluate` or `predict`."""

    @abc.abstractmethod
    def run_batch(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls Keras's `train_on_batch`, `test_on_batch` or `predict_on_batch`."""

    @abc.abstractmethod
    def make(self, name: str, make: Callable[[bool], Any], force: bool) -> Any:
        """Has Keras make a step function, which it keeps under `name` (`"train_function"`, ...)."""

    @abc.abstractmethod
    def around(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        """What runs in place of `train_step`, `test_step` or `predict_step`, which is its name."""

    @abc.abstractmethod
    def begin_pass(self) -> None:
        """Called when a pass over the data begins: an epoch, or an evaluation."""

    @abc.abstractmethod
    def seen(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        """The variables as a step sees them."""

    @abc.abstractmethod
    def using_weights(self) -> contextlib.AbstractContextManager[None]:
        """Scope for reading or setting weights outside a step: names the machine that failed."""

    def reading_weights(self) -> contextlib.AbstractContextManager[None]:
        """Scope for reading all weights; where processes have parts, all take part."""
        return self.using_weights()

    @abc.abstractmethod
    def writing(self) -> contextlib.AbstractContextManager[bool]:
        """Scope for writing a file: yields True in the process that writes; the others wait."""
