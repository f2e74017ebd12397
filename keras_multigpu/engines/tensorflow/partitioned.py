"""Data mode on TensorFlow: Keras's steps, users' steps and calls, each partitioned as a whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines import templates
from keras_multigpu.engines.runners import PlacingRunner, TrainedModel
from keras_multigpu.engines.shared import in_fresh_thread
from keras_multigpu.engines.tensorflow.batch_rows import BatchRows
from keras_multigpu.engines.tensorflow.names import is_default
from keras_multigpu.engines.tensorflow.noted import Noted, OpaqueError
from keras_multigpu.engines.tensorflow.notices import Notices
from keras_multigpu.engines.tensorflow.partition.calls import ConnectedError
from keras_multigpu.engines.tensorflow.partition.calls import call as call_spread
from keras_multigpu.engines.tensorflow.partition.forms import NeedsOthers
from keras_multigpu.engines.tensorflow.partition.functions import on_all_devices
from keras_multigpu.engines.tensorflow.partition.planner import Record
from keras_multigpu.engines.tensorflow.partition.step import spread
from keras_multigpu.engines.tensorflow.partition.together import Together
from keras_multigpu.engines.tensorflow.partition.told import COMPILED_AROUND
from keras_multigpu.engines.tensorflow.partition.traced import is_one_device, one_device
from keras_multigpu.engines.tensorflow.tensors import (
    floats,
    gradient_order,
    is_compiled_around,
    values_of,
)
from keras_multigpu.engines.tensorflow.weights.homes import Homes, make_whole
from keras_multigpu.engines.tensorflow.weights.placing import (
    FollowingRunner,
    drop_functions,
    leave_to_one_device,
)
from keras_multigpu.engines.tensorflow.weights.reading import source
from keras_multigpu.engines.values import Call, Result


class Partition:
    """What runs on several devices, computed by them as one device would.

    Args:
        template: the model.
        names: of all devices, as users see them.
        devices: TensorFlow's names of those that this process has.
        wire_dtype: the type in which weights and gradients cross; `None` for their own.
        homes: where the devices keep parts of weights and slots; `None` for whole ones.
        splits_rows: whether the rows are split; without, only what meets a weight in parts is.
        width: how many devices have the parts of the weights, if these are not spread over all.

    Attributes:
        names, homes: the arguments.
        notices: tell a user of what one device computes.
        rows: those of batches.
        is_one_device: whether it is the one that TensorFlow uses by itself: nothing is changed.
    """

    def __init__(
        self,
        template: keras.Model,
        names: Sequence[str],
        devices: Sequence[str],
        wire_dtype: str | None,
        homes: Homes | None = None,
        *,
        splits_rows: bool = True,
        width: int = 1,
    ):
        self._template, self.names, self._devices = template, list(names), list(devices)
        self._wire_dtype, self.homes, self._splits_rows = wire_dtype, homes, splits_rows
        self._width = width
        self.is_one_device = len(names) == 1 and is_default(names[0])
        self.notices = Notices(
            template,
            names,
            splits_rows=splits_rows and len(names) > width,
            has_shards=homes is not None,
        )
        kind = "devices" if width == 1 else "groups of devices"
        self.rows = BatchRows(len(names) // width if splits_rows else 1, kind)

    def spread(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        name: str,
        compiled: bool,
        **more: Any,
    ) -> Any:
        """The result of `step(*args)`, computed by all devices; notes what one computes alone.

        `more`: see `partition.step.spread`.
        """
        records: list[Record] = []
        graphs: list[tf.Graph] = []

        def noted(*args: Any) -> Any:
            graphs.append(tf.compat.v1.get_default_graph())
            return step(*args)

        if self._width > 1:
            more["step"], more["width"] = self._by_row(noted, compiled, more), self._width
        else:
            more |= {"step": noted, "has_shards": self.homes is not None, "home": self._home}
        result = spread(
            args=args,
            devices=self._devices,
            compiled=compiled,
            wire_dtype=self._wire_dtype,
            records=records,
            splits_rows=self._splits_rows,
            **more,
        )
        self.notices.note(name, records, *graphs[-1:])
        return result

    def _by_row(
        self, step: Callable[..., Any], compiled: bool, more: dict[str, Any]
    ) -> Callable[..., Any]:
        """A step as the first row of a mesh computes it, which has the large layers in parts."""
        devices = self._devices[: self._width]
        names = [name for name in ("autograph", "are_known") if name in more]
        own: dict[str, Any] = {name: more.pop(name) for name in names}
        own |= {"has_shards": True, "splits_rows": False, "is_part": True, "home": devices[0]}
        return lambda *args: spread(step, args, devices, compiled=compiled, **own)

    @property
    def _home(self) -> str:
        """The device that has most of the whole variables, where they are updated.

        Of the model's devices, if one has any.
        """
        if self.homes is not None:
            return self._devices[0]
        sizes = dict.fromkeys(self._devices, 0)
        for one in self._template.variables:
            device = one._value.device
            sizes[device] = sizes.get(device, 0) + math.prod(one.shape)
        own = {device: sizes[device] for device in self._devices}
        found = own if any(own.values()) else sizes
        return max(found, key=found.__getitem__)

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        """A user's own step: see `DataParallel.function`."""
        compiled = bool(jit_compile)
        run = functools.partial(self.spread, compiled=compiled, autograph=True)

        def graph_or_eager(flat: Any, args: Any, **more: Any) -> Any:
            is_alone = tf.executing_eagerly() or self._is_compiled_around()
            if not is_alone:
                own = getattr(step, "__name__", "step")
                name = self.notices.name_for(graph_or_eager, own)
                result = run(flat, args, name=name, note_rows=self.rows.note, **more)
                self.notices.warn_of_slots(name)
                return result
            if tf.executing_eagerly():
                self.notices.warn_of_eager_steps()
            with one_device():
                return flat(*args)

        made = on_all_devices(step, graph_or_eager, rows, is_compiled=compiled)
        return self.rows.told_by(self.notices.errors_told_once()(made))

    def step(
        self,
        model: TrainedModel,
        step: Callable[..., Any],
        name: str,
        call: Call,
        together: Together | None = None,
    ) -> Any:
        """A step of Keras's trainer, or of the user's class, on all devices.

        `together`: with other processes, which make the same step.
        """
        args, kwargs = call
        if is_one_device():
            return step(*args, **kwargs)
        if tf.executing_eagerly():
            self.notices.warn_of_eager_steps()
            args, kwargs = call if together is None else together.whole(call)
            with one_device():
                result = step(*args, **kwargs)
            return result if together is None else together.own(result)
        if name == "train_step":
            self._build_optimizer(model)
        return self.spread(
            lambda args, kwargs: step(*args, **kwargs),
            (args, kwargs),
            name=self.notices.name_for(self, name),
            compiled=bool(model.jit_compile),
            together=together,
            are_known=functools.partial(_are_of_metrics, model),
            note_rows=self.rows.note,
            expected=self.rows.expected[name.partition("_")[0]],
        )

    def _build_optimizer(self, model: TrainedModel) -> None:
        """Creates the slots before a training step is traced, which would be traced twice.

        Not if the step builds layers, whose variables the optimizer has to know.
        """
        optimizer: Any = getattr(model, "optimizer", None)
        if not isinstance(optimizer, keras.Optimizer) or optimizer.built:
            return  # `compile` may be the user's, and the optimizer whatever it is given
        if all(one.built for one in templates.all_layers(model.template)):
            in_fresh_thread(lambda: optimizer.build(model.trainable_variables))
            self.lay_out(model)

    def lay_out(self, model: TrainedModel) -> None:
        """Moves the optimizer's slots to where they are kept.

        Not while a step is traced, unless they are new: another function may use them already.
        """
        homes, optimizer = self.homes, getattr(model, "optimizer", None)
        if homes is not None and isinstance(optimizer, keras.Optimizer):
            in_fresh_thread(lambda: homes.lay_out(optimizer.variables))

    def call(self, call: Call) -> Result:
        """A call of the template, outside of steps; its losses are in the result."""
        args, kwargs = call
        if is_one_device() or self.is_one_device:
            return Result(self._template(*args, **kwargs))
        call = args, kwargs = values_of(call)
        order, is_mesh = self.order(call), self._width > 1
        # What the groups divide again, a step for all devices can read in parts.
        is_alone = self.homes is not None and self.homes.are_again
        if order and tf.executing_eagerly():
            self.notices.warn_of_eager_calls()
        elif order and is_mesh:
            self.notices.warn_of_first_devices(1 if is_alone else self._width)
        if is_alone or tf.executing_eagerly() or self._is_compiled_around():
            with one_device():
                return Result(self._template(*args, **kwargs))
        noted, records = Noted(self._template), list[Record]()
        try:
            found = call_spread(
                noted.call,
                call,
                self._devices[: self._width] if is_mesh else self._devices,
                order=order,
                home=self._home,
                wire_dtype=self._wire_dtype,
                splits_rows=self._splits_rows and not is_mesh,
                records=records,
            )
        except (ConnectedError, OpaqueError, NeedsOthers) as error:
            why = str(error) or "a loop in it holds the rows of all devices together"
            self.notices.warn_of_whole_calls(why)
            with one_device():
                return Result(self._template(*args, **kwargs))
        if records:  # not of a single row
            self.notices.note(self.notices.name_for(self, "call"), records)
        return noted.result(*found)

    def _is_compiled_around(self) -> bool:
        """Whether XLA compiles the graph that is made; warns that it does so for one device."""
        is_compiled = is_compiled_around()
        if is_compiled:
            self.notices.warn_of_whole_calls(COMPILED_AROUND)
        return is_compiled

    def order(self, call: Call) -> int:
        """The highest derivative that active tapes may take of a call."""
        weights = [source(one) for one in self._template.trainable_variables]
        return gradient_order([*weights, *floats(call)])


class Partitioned(FollowingRunner, PlacingRunner):
    """A runner of steps that are partitioned, with weights where their partition's homes are.

    Attributes:
        template: the model.
        partition: spreads its steps.
        device: that of what is whole, where there are no homes.
    """

    template: keras.Model
    partition: Partition
    device: str

    def place(self) -> None:
        self._place()
        leave_to_one_device(self.template)

    def _place(self) -> None:
        if self._lay_out(self.template.variables):
            drop_functions(self.template)  # the parallel models' are dropped by their steps

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        if isinstance(optimizer, keras.Optimizer):  # not in every `compile` of a user's
            self._lay_out(optimizer.variables)

    def _lay_out(self, variables: Sequence[keras.Variable]) -> bool:
        homes = self.partition.homes
        return make_whole(variables, self.device) if homes is None else homes.lay_out(variables)


def _are_of_metrics(model: TrainedModel, made: Sequence[tf.Variable]) -> bool:
    """Whether variables are of Keras's own metrics, made for a name when there is a first batch."""
    inner = [getattr(one, "metrics", None) for one in model.metrics]  # those given to `compile`
    every = [metric for some in inner if isinstance(some, list) for metric in some]
    own = [one for one in every if getattr(keras.metrics, type(one).__name__, None) is type(one)]
    known = {id(one._value) for metric in own for one in metric.variables}
    return all(id(one) in known for one in made)
