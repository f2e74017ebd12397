"""Keras's training on JAX by several processes: what they compare, read and write together."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_multigpu.engines.cluster.calls import Call
from keras_multigpu.engines.cluster.joint import arguments, together, write_once, writing
from keras_multigpu.engines.cluster.listing import Listing
from keras_multigpu.engines.jax.checks import check_is_compiled
from keras_multigpu.engines.jax.cluster.compared import (
    Samples,
    compare_weights,
    listing_of,
    settings,
)
from keras_multigpu.engines.jax.cluster.joint import Step
from keras_multigpu.engines.jax.cluster.parts import own_rows
from keras_multigpu.engines.jax.cluster.processes import Group
from keras_multigpu.engines.jax.cluster.readings import Readings
from keras_multigpu.engines.jax.cluster.spread_variables import lending
from keras_multigpu.engines.jax.joint_placement import JointPlacement
from keras_multigpu.engines.jax.lent import LentState
from keras_multigpu.engines.jax.pure import JaxRunner
from keras_multigpu.engines.jax.steps import JaxSteps
from keras_multigpu.engines.runners import Runner, TrainedModel


class JointLentState(LentState):
    """A state of which the processes compare what somebody has assigned."""

    def __init__(self, model: TrainedModel):
        super().__init__(model)
        self._given: dict[str, dict[int, weakref.ref[Any]]] = {}
        self._weights: Sequence[Any] = ()

    def note(self, name: str, state: Any) -> None:
        """Notes the state that the latest step of a name gave."""
        self._given[name] = {id(leaf): weakref.ref(leaf) for leaf in jax.tree.leaves(state)}
        self._weights = _weights(state)

    def forget_weights(self) -> None:
        """Forgets what weights the latest step gave, which keeps their memory."""
        self._weights = ()

    def assigned(self, state: Any) -> set[int]:
        """The `id`s of whole arrays in a state that somebody has assigned since the latest step.

        Slots and metrics that come from no step; weights with other values. Their arrays may be
        new without that: the template moves the weights if one process calls its `predict`, say.
        """
        found = {id(one) for one in jax.tree.leaves(state[2:]) if self._is_assigned(one)}
        weights = _weights(state)
        if len(weights) == len(self._weights):
            found |= {id(new) for old, new in zip(self._weights, weights) if _differ(old, new)}
        return found

    def _is_assigned(self, leaf: Any) -> bool:
        """Whether a whole array comes from no step."""
        refs = (given.get(id(leaf)) for given in self._given.values())
        is_given = any(ref is not None and ref() is leaf for ref in refs)
        return leaf.is_fully_replicated and not is_given

    def paths(self) -> list[str]:
        """The paths of the variables whose arrays the latest state has, in its order."""
        return [variable.path for variable, value in self.pairs() for _ in jax.tree.leaves(value)]

    def current(self, variable: keras.Variable) -> Any:
        """A variable's array, which a step has while Keras has removed it from the variable."""
        if variable._value is not None:
            return variable._value
        return next(value for one, value in self.pairs() if one is variable)


def steps_of(model: TrainedModel, runner: Runner) -> JaxSteps:
    """The steps of a model on devices of this process, or of several."""
    assert isinstance(runner, JaxRunner)
    kind = JaxSteps if runner.where.group is None else JointJaxSteps
    return kind(model, runner)


class JointJaxSteps(JaxSteps):
    """Steps that several processes make together, of a model on their devices.

    Attributes:
        group: the processes.
        call: the latest call that they have made together.
        number: which of their models it is.
    """

    where: JointPlacement
    lent: JointLentState

    def __init__(self, model: TrainedModel, runner: Runner):
        super().__init__(model, runner)
        self.lent, self.group = JointLentState(model), self.where.group
        self.call: Call | None = None
        self.number: int | None = next(self.group.models)
        self._is_prepared = False  # whether what a loop's first call has made is spread
        self._readings = Readings(self, self.group) if self._runner.spreads_state else None
        self._samples, self._sample = Samples(), 0  # of the weights, on its way to other processes

    @property
    def settings(self) -> str:
        """Those of JAX that change what a step computes."""
        return settings()

    def make(self, name: str, make: Callable[[bool], Any], force: bool) -> Any:
        if self._readings is not None:
            check_is_compiled(self.model)
        return super().make(name, make, force)

    def _only_reads(self, name: str) -> bool:
        return False  # the processes compare the weights when they are new on the devices, in each

    def begin_step(self, kind: str) -> Step:
        if self.call is not None:
            self.group.calls.resume(self.call)
        sample, self._sample = self._sample, 0
        return dataclasses.replace(super().begin_step(kind), sample=sample, settings=settings())

    def run_step(
        self,
        name: str,
        function: Callable[..., Any],
        state: Any,
        batches: Iterator[Any],
        only_reads: bool,
    ) -> tuple[Any, Any]:
        where, lent = self.where, self.lent
        with where.together():
            self._prepare()
            if self.call is not None:
                self._sample = self._samples.take([*state[0], *state[1]], self.call)
            kind = name.replace("function", "step")
            where.compare_state(state, lent.assigned(state), lent.paths, kind)
            outputs, state = super().run_step(name, function, state, batches, only_reads)
            outputs = where.outputs(outputs)
            where.finish((outputs, state))
        lent.note(name, state)
        return outputs, state

    def _prepare(self) -> None:
        """Before a step: what is new in a spread state is spread, and compared."""
        if self._readings is None:
            return
        if not self._is_prepared:
            self._runner.spread(self._optimizer)
            self._is_prepared = True
        self._readings.compare_new()

    def own_outputs(self, name: str, outputs: Any, counts: list[list[int]]) -> Any:
        if name != "predict_function" or self.group.data == "same":
            return outputs
        return own_rows(outputs, counts, self.group.number)

    def _look(self, name: str, traced: Any, rows: int) -> None:
        if self.lent.latest:
            # With other sums in it the processes would wait for each other, or be aborted.
            self.group.compare("programs", listing_of(traced))

    def reading_weights(self) -> contextlib.AbstractContextManager[None]:
        if self._readings is None:
            return self.using_weights()
        return self._readings.whole(slots=False, wanted=True)

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        with writing(self) as is_mine:
            if self._readings is None:
                yield is_mine
                return
            with self._readings.whole(slots=True, wanted=is_mine, is_compared=True):
                yield is_mine

    @contextlib.contextmanager
    def joined(
        self, call: Callable[..., Any], args: Any, kwargs: Any, *, is_loop: bool
    ) -> Iterator[tuple[Any, Any]]:
        name = call.__name__ if is_loop else "single steps"
        with together(self, name, arguments(call, args, kwargs), is_loop=is_loop):
            self._is_prepared = False
            if not is_loop:
                yield args, kwargs
                return
            assert self.call is not None
            if self._readings is not None:
                self.call.take_part = self._readings.take_part
            yield write_once(self, call, args, kwargs)
            self.group.end(self.call)
            if name == "fit":
                self.compare_weights(self.group)

    def _bring_home(self) -> None:
        self.lent.forget_weights()
        super()._bring_home()

    def lending(self) -> contextlib.AbstractContextManager[None]:
        if self._readings is None:
            return contextlib.nullcontext()
        return lending(self._readings.meet)

    def compare_weights(self, group: Group) -> None:
        """Raises a `ClusterError` if another process has other weights or slots.

        Of what is spread over the processes, only what was assigned is compared.
        """
        slots = self._optimizer.variables if self._optimizer is not None else []
        parts = Listing() if self._readings is None else self._readings.take_new()
        compare_weights(group, [*self.model.variables, *slots], parts)


def _weights(state: Any) -> list[Any]:
    """The arrays of weights in a step's state."""
    return jax.tree.leaves(state[:2])


def _differ(old: Any, new: Any) -> bool:
    """Whether whole arrays that this process can read have other values."""
    if new is old or old.is_deleted() or not isinstance(new, jax.Array):
        return False
    if not (old.is_fully_replicated and new.is_fully_replicated):
        return False
    return np.asarray(old).tobytes() != np.asarray(new).tobytes()
