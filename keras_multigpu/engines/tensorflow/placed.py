"""Tower and model mode on TensorFlow: Keras's steps, with parts on devices of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.engines.building import built_in
from keras_multigpu.engines.runners import TrainedModel
from keras_multigpu.engines.shared import SEED, check_alike, given_value, state_of_none, unique
from keras_multigpu.engines.templates import all_layers
from keras_multigpu.engines.tensorflow.places import ForeignWeightError, Places
from keras_multigpu.engines.tensorflow.regions import compiled
from keras_multigpu.engines.tensorflow.scope import ReplicaScope
from keras_multigpu.engines.tensorflow.tensors import tensors_of
from keras_multigpu.engines.tensorflow.weights.rows import fan_out
from keras_multigpu.engines.values import Call, Result


class Placed:
    """Runs steps whose parts are on devices.

    Attributes:
        places: the devices of the parts.
    """

    is_one_device = False

    def __init__(self, devices: Sequence[str]):
        self.places = Places(devices)

    def step(
        self,
        model: TrainedModel,
        step: Callable[..., Any],
        name: str,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        together: None = None,
    ) -> Any:
        """A step of Keras's trainer, or of the user's class."""
        args, kwargs = call
        if tf.executing_eagerly():
            return step(*args, **kwargs)
        return self._run(step, args, kwargs, bool(model.jit_compile))

    def function(self, step: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """A user's own step: see `ParallelModel.function`."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(step, args, kwargs, jit_compile, autograph=True)

        return tf.function(run, autograph=False, reduce_retracing=True)

    def _run(
        self, step: Any, args: Any, kwargs: Any, is_compiled: bool, autograph: bool = False
    ) -> Any:
        def run(args: Any, kwargs: Any) -> Any:
            return step(*args, **kwargs)

        if is_compiled:
            return compiled(run, (args, kwargs), self.places, autograph)
        with self.places.chosen():
            return (tf.function(run) if autograph else run)(args, kwargs)


class Replicas:
    """The replicas of a template, each on its device: its code, with variables of their own.

    Args:
        models: the models whose variables the replicas use; the template first.
        places: the replicas' devices.
    """

    def __init__(self, models: Sequence[keras.Model], places: Places):
        self._models, self._places = tuple(models), places
        self._template = self._models[0]
        self._have_own_weights = any(one is not self._template for one in models)
        self.is_checked = False  # whether a call that runs eagerly was traced, too

    def run(self, call: Call) -> list[Result]:
        """Calls all replicas with the same arguments."""
        count = len(self._template.variables)
        with built_in(tf.init_scope, [self._template]):
            if tf.executing_eagerly():
                self._check(call)
            results = self._run(call)
        # A call that builds layers is made again: in its scope, new variables are no variables yet.
        return results if len(self._template.variables) == count else self.run(call)

    def _run(self, call: Call) -> list[Result]:
        states = [unique(model.variables) for model in self._models]
        check_alike(states)
        if self._have_own_weights:
            self._places.owners = {
                id(one._value.handle): number
                for number, state in enumerate(states)
                for one in state
                if not self._is_shared(one)
            }
        is_one = self._have_own_weights or len(states) == 1
        tables = {} if is_one else self._tables()
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        begin = len(graph.get_operations()) if graph else 0
        results = [self._call(number, state, tables, call) for number, state in enumerate(states)]
        if graph and self._have_own_weights:
            self._places.check(graph.get_operations()[begin:])
        return results

    def _tables(self) -> dict[int, Sequence[Any]]:
        """The value of each table for each replica, by the `id` of the variable."""
        layers = all_layers(self._template)
        found = [one.embeddings for one in layers if isinstance(one, keras.layers.Embedding)]
        found += [one for one in self._template.variables if hasattr(one, "names_rows_once")]
        tables = unique([one for one in found if isinstance(one, keras.Variable)])
        return {id(one): fan_out(one, _value(one), len(self._models)) for one in tables}

    def _call(
        self,
        number: int,
        state: Sequence[keras.Variable],
        tables: Mapping[int, Sequence[Any]],
        call: Call,
    ) -> Result:
        args, kwargs = call
        own = dict(zip(map(id, unique(self._template.variables)), state))
        values = [
            (one, tables[id(one)][number] if id(one) in tables else _value(own[id(one)]))
            for one in unique(self._template.variables)
        ]
        scope = ReplicaScope(values, number, is_own=self._have_own_weights)
        with self._places.part(number), scope:
            outputs = self._template(*args, **kwargs)
            penalties = self._penalties() if self._have_own_weights else []
            updates = [
                (self._target(one, own), scope.new_value(one)) for one in scope.assigned.values()
            ]
        is_random = scope.draws_for(tensors_of(outputs))
        return Result(outputs, [*scope.losses, *penalties], updates, is_random)

    def _target(
        self, variable: keras.Variable, own: Mapping[int, keras.Variable]
    ) -> keras.Variable:
        """The replica's variable, for one that the template's code assigns."""
        is_known = id(variable) in own or variable.name == SEED or self._is_shared(variable)
        if self._have_own_weights and not is_known:
            raise state_of_none(variable)
        return own.get(id(variable), variable)

    def _penalties(self) -> list[Any]:
        regularized = [v for v in self._template.trainable_weights if v.regularizer is not None]
        return [variable.regularizer(variable.value) for variable in regularized]

    def _is_shared(self, variable: keras.Variable) -> bool:
        """Whether all replicas may use it."""
        return any(variable is one for one in self._template.metrics_variables)

    def _check(self, call: Call) -> None:
        """Traces a call that runs eagerly, once, to find weights of other replicas in it."""
        if self.is_checked or not self._have_own_weights:
            return
        self.is_checked = True
        try:
            tf.function(lambda: self._run(call) and None, autograph=False).get_concrete_function()
        except ForeignWeightError:
            self.is_checked = False
            raise
        except Exception:  # anything: code that runs eagerly only can't be looked through
            return


def _value(variable: keras.Variable) -> Any:
    """A variable's value in the active scope, or what stores it."""
    given = given_value(variable)
    return variable._value if given is None else given
