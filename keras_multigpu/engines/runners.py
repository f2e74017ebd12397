"""What a backend has to provide for each mode: a runner of the template's calls, and `Steps`.

Modes talk to these classes only. What an engine may ask of a parallel model is in `TrainedModel`.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras

from keras_multigpu.engines.values import Call, Request, Result, Tensor


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
    weights: list[keras.Variable]
    trainable_variables: list[keras.Variable]
    """As `Steps.seen` gives them, like `non_trainable_variables`."""
    non_trainable_variables: list[keras.Variable]
    metrics: list[Any]
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
    _parallel_options: dict[str, Any]
    """The mode's options."""
    _parallel_steps: Any
    """The engine's own `Steps`."""


class Runner(abc.ABC):
    """What the parallel models of a mode run on: one object for each model."""

    spreads_steps = True
    """Whether of a user's own step all is spread, and not what calls the parallel model alone."""

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

    @classmethod
    def moves_weights(cls, devices: Sequence[str], options: Mapping[str, Any]) -> bool:
        """Whether the template's weights are moved, so that they need not fit where it is made."""
        return False

    @abc.abstractmethod
    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        """A user's own training step, compiled for all devices: see `ParallelModel.function`."""

    def stateless_call(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answers `stateless_call` of the parallel model, whose own method is `own`.

        Keras's trainer may step by this method, which calls a model's `call`, not its `__call__`.
        The template is then called in the same way: a layer within one that is not being called
        drops the losses of its earlier calls, for example.
        """
        return own(*args, **kwargs)


class PlacingRunner(Runner):
    """A runner of one model that may keep its weights, and the optimizer's slots, anywhere.

    It is made with the mode's options, by their names.
    """

    def __init__(self, template: keras.Model, devices: Sequence[str], **options: Any): ...

    @classmethod
    def make(cls, template: keras.Model, devices: Sequence[str], options: Mapping[str, Any]) -> Any:
        """The runner for the options."""
        return cls(template, devices, **options)

    @abc.abstractmethod
    def run(self, call: Call) -> Result:
        """Calls the template on all devices; its state is assigned.

        The result has the losses that the call's caller has to add.
        """

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
    """Spreads the rows of a batch, in whole steps and in calls.

    `wire_dtype` is the type in which weights and gradients cross.
    `shard` says what is spread over the devices: `"optimizer"` (slots), `"weights"` (both), `None`.
    `model_devices` is the number of devices that have a large layer together.
    """

    @classmethod
    def moves_weights(cls, devices: Sequence[str], options: Mapping[str, Any]) -> bool:
        """With `shard` or `model_devices` they are."""
        return options.get("shard") is not None or options.get("model_devices", 1) > 1

    @classmethod
    @abc.abstractmethod
    def fullest(
        cls, template: keras.Model, count: int, shard: str
    ) -> tuple[float, float, Sequence[keras.Variable]]:
        """What the fullest of `count` devices keeps with `shard`; they need not be here.

        The shares of all weights and slots, and the weights that no step gathers: their rows are
        added up where they are.
        """

    @classmethod
    def why_whole(cls, template: keras.Model, count: int) -> str:
        """Why each of `count` devices keeps large weights whole with `shard`; `""` if none does."""
        return ""

    partitions_steps: bool = False
    """Whether a whole step is spread, so that calls of parts of the model need no scope."""

    @abc.abstractmethod
    def explain(self) -> str:
        """What of each step that has run is computed by one device alone."""

    def for_part(self, part: keras.Layer) -> DataRunner | None:
        """A runner, on the same devices, of a part that a step of the template calls directly.

        `None` if such calls stay as they are: on one device, or where the whole step is spread.
        """
        return None


class TowerRunner(Runner):
    """Runs several models on the same batch, each on its device.

    The first model is the template. The others are the template again, or models built alike.
    """

    spreads_steps = False

    @abc.abstractmethod
    def __init__(self, models: Sequence[keras.Model], devices: Sequence[str]): ...

    def lay_out(self) -> None:
        """Nothing: each model is on its device."""

    def place(self) -> None:
        """Nothing."""

    @abc.abstractmethod
    def run(self, call: Call) -> list[Result]:
        """Calls every model with the same arguments, without side effects."""

    @abc.abstractmethod
    def place_updates(self, optimizer: keras.Optimizer, *, apart: bool) -> None:
        """Has an optimizer keep and update each slot on the device of its variable.

        With shared weights it sees the sum of what the replicas give to a row of a table. With
        `apart` the models are trained separately: gradients are clipped by the norm of one
        model's gradients, not by the norm of all.
        """

    @abc.abstractmethod
    def acting(
        self, number: int, losses: Sequence[Tensor], *, keep: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Scope in which the template has the weights and the other state of a model with its own.

        `losses` are those of the model's latest call. What is assigned goes to the model; without
        `keep` it is dropped.
        """

    def lend(self) -> None:
        """Another model is to call this one, and to have its weights in steps of its own."""

    def acting_for_all(self) -> contextlib.AbstractContextManager[None]:
        """Scope in which the template can be read, with its own weights."""
        return contextlib.nullcontext()


class ModelRunner(PlacingRunner):
    """Runs one model whose weights are on different devices.

    `placement` maps layer names, or regular expressions, to device numbers; `"spread"` has large
    layers on all devices; `None` lets the runner choose.
    """

    @classmethod
    def moves_weights(cls, devices: Sequence[str], options: Mapping[str, Any]) -> bool:
        """They always are."""
        return True

    stages: Any = None
    """The parts of the graph, each on one device; `None` if there are none."""

    def least_bytes(self, rows: int) -> int | None:
        """The bytes that the default placement sends in a training step; `None` if not known."""
        return None


class Steps(abc.ABC):
    """The hook around Keras's loops and step functions: one object for each parallel model."""

    traces_all = True  # also steps that are not compiled

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

    def seen(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        """The variables as a step sees them."""
        return variables

    @abc.abstractmethod
    def using_weights(self) -> contextlib.AbstractContextManager[None]:
        """Scope for reading or setting weights outside a step: names the machine that failed."""

    def reading_weights(self) -> contextlib.AbstractContextManager[None]:
        """Scope for reading all weights; where processes have parts, all take part."""
        return self.using_weights()

    @abc.abstractmethod
    def writing(self) -> contextlib.AbstractContextManager[bool]:
        """Scope for writing a file: yields True in the process that writes; the others wait."""
