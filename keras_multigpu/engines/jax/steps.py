"""Keras's training on JAX, with batches and state on a parallel model's devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_multigpu.engines.jax.batches import PlacedBatches, Undivided
from keras_multigpu.engines.jax.cluster.joint import meet, part, write_once
from keras_multigpu.engines.jax.placement import Placement, on_one_device, placement
from keras_multigpu.engines.jax.replicas import JaxReplicas
from keras_multigpu.engines.jax.shards import is_spread, shard
from keras_multigpu.engines.jax.slots import spread_slots
from keras_multigpu.engines.jax.spreading import SpreadSteps
from keras_multigpu.engines.jax.stacked import StackedVariable


class PlacedSteps(SpreadSteps):
    """What the class of a parallel model adds to Keras's trainer on JAX.

    The step functions of Keras's loops are given their batches with each device's rows on that
    device, and the state with a copy on every device; from there the compiler does the rest.
    When a loop is over, the weights are again where one device would have them, so that the
    template can be used by itself, or in a parallel model on other devices.
    """

    devices: tuple[str, ...]
    _parallel_spreads_weights: bool
    _parallel_axes: tuple[tuple[str, int], ...]
    variables: list[keras.Variable]
    template: keras.Model
    _parallel_is_running = False
    _parallel_latest_state: Any = ()
    _parallel_has_met = False  # with other processes, since the latest loop or error
    _parallel_replicas: JaxReplicas | None

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function of a training step, as Keras does."""
        return self._parallel_make_placed("train_function", super().make_train_function, force)

    def make_test_function(self, force: bool = False) -> Any:
        """Makes the function of an evaluation step, as Keras does."""
        return self._parallel_make_placed("test_function", super().make_test_function, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes the function of a prediction step, as Keras does."""
        return self._parallel_make_placed("predict_function", super().make_predict_function, force)

    def _parallel_placement(self) -> Placement:
        if self._parallel_replicas is not None:
            return self._parallel_replicas.placement
        return placement(self.devices, spread=not self._parallel_spreads_weights)

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """The variables that are trained, as the step sees them."""
        return self._parallel_as_in_step(super().trainable_variables)

    @property
    def non_trainable_variables(self) -> list[keras.Variable]:
        """The variables that are not trained, as the step sees them."""
        return self._parallel_as_in_step(super().non_trainable_variables)

    @property
    def trainable_weights(self) -> list[keras.Variable]:
        """The weights that are trained, as the step sees them."""
        return self._parallel_as_in_step(super().trainable_weights)

    def _parallel_as_in_step(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        return (
            variables
            if self._parallel_replicas is None
            else self._parallel_replicas.stacked(variables)
        )

    def _parallel_make_placed(self, name: str, make: Callable[[bool], Any], force: bool) -> Any:
        check_no_distribution()
        before = getattr(self, name)
        made = make(force)
        function = getattr(self, name)
        if function is not before:
            setattr(self, name, self._parallel_placed(function, self._parallel_placement()))
        return made

    def _parallel_placed(
        self, function: Callable[..., Any], place: Placement
    ) -> Callable[..., Any]:
        """A step function of Keras's that is given its state and batches on the devices."""
        undivided = Undivided()

        def step(state: Any, iterator: Iterator[Any]) -> Any:
            batches = PlacedBatches(iterator, place, undivided)
            self._parallel_latest_state = state
            with place.together():
                outputs, state = function(place.put_state(state), batches)
                outputs = place.outputs(outputs)
                place.finish((outputs, state))
            self._parallel_latest_state = state
            return outputs, state

        return step

    def _parallel_restore(self) -> None:
        """Gives the variables the latest state again, after an error or an interruption.

        Keras takes the state out of them for the time of the steps, so that it would be lost.
        """
        state, self._parallel_latest_state = self._parallel_latest_state, ()
        lists = [self.trainable_variables, self.non_trainable_variables]
        if len(state) == 4:
            lists.append(self.optimizer.variables)
        if len(state) > 2:
            lists.append(self.metrics_variables)
        for variables, values in zip(lists, state):
            for variable, value in zip(variables, values):
                is_stacked = isinstance(variable, StackedVariable)
                is_lent = variable.is_lent if is_stacked else variable._value is None
                if is_lent and not value.is_deleted():
                    variable.assign(value)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Trains the model, as Keras does."""
        return self._parallel_run(super().fit, args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model, as Keras does."""
        return self._parallel_run(super().evaluate, args, kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts, as Keras does."""
        return self._parallel_run(super().predict, args, kwargs)

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on one batch, as Keras does."""
        return self._parallel_run_one(super().train_on_batch, args, kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates on one batch, as Keras does."""
        return self._parallel_run_one(super().test_on_batch, args, kwargs)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts one batch, as Keras does."""
        return self._parallel_run_one(super().predict_on_batch, args, kwargs)

    def _parallel_spread(self) -> None:
        """Spreads weights again that were assigned from elsewhere, a file say, and their slots."""
        if self._parallel_spreads_weights and self._parallel_axes:
            shard(self.template, dict(self._parallel_axes), self.devices)
            optimizer = getattr(self, "optimizer", None)
            if optimizer is not None:
                spread_slots(optimizer)

    def _parallel_run_one(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._parallel_spread()
        try:
            if not self._parallel_has_met:
                meet(self, "a step on one batch")
            result = step(*args, **kwargs)
        except BaseException as error:
            self._parallel_restore()
            part(self, error)
            raise
        self._parallel_has_met, self._parallel_latest_state = True, ()
        # To bring the weights back after every step would be slow. They stay, unless the
        # template's own optimizer or metrics are tied to other devices, with which JAX would
        # refuse to use them.
        template = self.template
        own = [*template.metrics_variables[:1]]
        if getattr(template, "optimizer", None) is not None:
            own.append(template.optimizer.iterations)
        here = placement(self.devices).replicated.device_set
        if any(one.value.committed and one.value.sharding.device_set != here for one in own):
            self._parallel_bring_home()
        return result

    def _parallel_run(self, loop: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._parallel_is_running:
            return loop(*args, **kwargs)  # the evaluation of a `fit`, say
        self._parallel_is_running, self._parallel_has_met = True, False
        try:
            self._parallel_spread()
            meet(self, loop.__name__)
            args, kwargs = write_once(self, loop, args, kwargs)
            result = loop(*args, **kwargs)
            part(self)
            return result
        except BaseException as error:
            self._parallel_restore()
            part(self, error)
            raise
        finally:
            self._parallel_is_running, self._parallel_latest_state = False, ()
            self._parallel_bring_home()

    def _parallel_bring_home(self) -> None:
        there = set() if self._parallel_replicas is None else self._parallel_replicas.parts()
        if self._parallel_spreads_weights:
            spread = [variable for variable in self.variables if is_spread(variable)]
            self._parallel_own_arrays(spread)
            there |= set(map(id, spread))
        place = self._parallel_placement()
        for variable in self.variables:
            # A value is missing if the step lost it: XLA had taken its memory when it failed.
            value = variable._value if id(variable) not in there else None
            if value is not None and not value.is_deleted() and place.can_read(value):
                variable.assign(on_one_device(place.outputs(value)))

    def _parallel_own_arrays(self, variables: list[keras.Variable]) -> None:
        """Gives variables arrays of their own where they share one with the optimizer.

        They do when the optimizer has set them to averages; and a step of the template's may
        take the memory of its arrays.
        """
        optimizer: Any = getattr(self, "optimizer", None)
        shared = set() if optimizer is None else {id(slot._value) for slot in optimizer.variables}
        for variable in variables:
            if id(variable._value) in shared:
                variable.assign(jax.numpy.copy(variable._value))


def check_no_distribution() -> None:
    """Refuses a distribution that was set in Keras.

    Raises:
        ValueError: if there is one.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ValueError(
            "A parallel model puts its weights and batches on the devices itself, and a "
            f"distribution of Keras's would do so too. Received: keras.distribution."
            f"distribution()={distribution!r}. Call `keras.distribution.set_distribution(None)` "
            "before the model is built, or train the template with the distribution."
        )
