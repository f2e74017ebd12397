"""Tower mode on JAX: each device runs its replicas on the whole batch, in one step for all."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_multigpu.engines import templates
from keras_multigpu.engines.attributes import get_mask, set_mask
from keras_multigpu.engines.jax.acting import having_losses, having_state_of
from keras_multigpu.engines.jax.devices import is_traced
from keras_multigpu.engines.jax.joint_placement import placement_on
from keras_multigpu.engines.jax.mapped import map_devices
from keras_multigpu.engines.jax.placement import on_one_device
from keras_multigpu.engines.jax.pure import JaxRunner, NotingScope
from keras_multigpu.engines.jax.state.parted import make_whole
from keras_multigpu.engines.jax.state.shards import shard_alike
from keras_multigpu.engines.jax.state.slots import prepare
from keras_multigpu.engines.jax.state.stacked import StackedVariable, state_of
from keras_multigpu.engines.jax.threads import in_fresh_thread
from keras_multigpu.engines.runners import TowerRunner
from keras_multigpu.engines.shared import (
    SEED,
    SEED_STEP,
    check_alike,
    given_value,
    having,
    split_tensors,
    state_of_none,
    unique,
)
from keras_multigpu.engines.templates import forget_losses, is_built, metrics_variables
from keras_multigpu.engines.values import Call, Request, Result, Tensor

# The runner whose parallel model's `stateless_call` is running.
_in_stateless_call: contextvars.ContextVar[CommitteeRunner | None] = contextvars.ContextVar(
    "_in_stateless_call", default=None
)


class CommitteeRunner(JaxRunner, TowerRunner):
    """Runs replicas of the template on their devices, with their weights stacked.

    The number of devices in use divides the number of replicas: JAX has no uneven shards.

    Args:
        models: the model whose weights each replica uses.
        devices: each replica's device.
    """

    def __init__(self, models: Sequence[keras.Model], devices: Sequence[str]):
        self.models = tuple(models)
        self._template = self.models[0]
        names = tuple(dict.fromkeys(devices))
        counts = range(1, len(names) + 1)
        used = max(count for count in counts if not len(self.models) % count)
        if used < len(names):
            warnings.warn(
                f"{len(names) - used} of {len(names)} devices would do nothing: on JAX those in "
                f"use divide the number of replicas. Received: {len(self.models)} replicas on "
                f"{len(names)} devices. Give a number of replicas that they divide.",
                stacklevel=5,
            )
        self.where = placement_on(names[:used], spread_rows=False)
        self._has_own_weights = any(model is not self._template for model in self.models)
        self._stacks: dict[int, StackedVariable] = {}
        self._is_lent = False

    @classmethod
    def check(cls, request: Request) -> None:
        direct = templates.direct_calls(request.template)
        if direct and request.options.get("replicas") == "independent":
            raise ValueError(
                "On JAX the members of a committee compute together, through `self.stateless_call`"
                f": a part of the model has no values of its own in a step. Received: {direct}, of "
                f"{type(request.template).__name__}. Call the parts from `call`, use "
                "`replicas='shared'`, or train the members one after the other."
            )
        templates.warn_of_direct_calls(request.template)

    def place_updates(self, optimizer: keras.Optimizer, *, apart: bool) -> None:
        if not self._has_own_weights:
            return
        prepare(optimizer, shard_alike, self.models, apart=apart)

    @contextlib.contextmanager
    def acting(self, number: int, losses: Sequence[Tensor], *, keep: bool = True) -> Iterator[None]:
        self._make_stacks()
        state = having_state_of(number, self._stacks, keep=keep)
        with state, having_losses(self._template, losses):
            yield

    @contextlib.contextmanager
    def acting_for_all(self) -> Iterator[None]:
        if not self._has_own_weights:
            yield
            return
        self._make_stacks()
        with having_state_of(0, self._stacks, keep=True):
            yield

    def spread(self, optimizer: Any) -> None:
        """Nothing of its own: parts of stacked weights are always on their devices."""
        if not self._has_own_weights:
            make_whole(self._template.variables)

    def lend(self) -> None:
        own = [*self._stacks.values()]
        if _in_stateless_call.get() is self or any(given_value(one) is not None for one in own):
            return  # a step of this model's own
        if self._has_own_weights and not self._is_lent:
            self._is_lent = True  # from now on between loops, too: JAX mixes no devices in a step
            in_fresh_thread(self._bring_home)

    def _bring_home(self) -> None:
        for part in (part for model in self.models for part in model.variables):
            if part._value is not None and not part._value.is_deleted():
                part.assign(on_one_device(part._value))

    def kept(self, variables: list[keras.Variable], optimizer: Any) -> set[int]:
        if self._is_lent:
            return set()
        return {id(part) for stack in self._stacks.values() for part in stack.parts}

    def seen(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        """The variables as a step sees them: stacked where each replica has its own."""
        if not self._has_own_weights or not all(map(is_built, self.models)):
            return list(variables)
        self._make_stacks()
        parts = {id(part): id(s.parts[0]) for s in self._stacks.values() for part in s.parts}
        seen = {parts.get(id(variable), id(variable)): variable for variable in variables}
        return [self._stacks.get(key, variable) for key, variable in seen.items()]

    def _make_stacks(self) -> None:
        states = [state_of(model) for model in self.models]
        check_alike(states)
        if self._stacks.keys() != {id(variable) for variable in states[0]}:
            # A variable gets no value within Keras's scopes.
            self._stacks.clear()
            make = functools.partial(StackedVariable, sharding=self.where.sharded)
            make_all = lambda: {id(parts[0]): make(parts) for parts in zip(*states)}  # noqa: E731
            in_fresh_thread(lambda: self._stacks.update(make_all()))
            if self._is_lent:
                in_fresh_thread(self._bring_home)
        for key, stack in self._stacks.items():
            assert key == id(stack.parts[0])
            stack.trainable = stack.parts[0].trainable

    def run(self, call: Call) -> list[Result]:
        own, shared = self._values()
        masked = (call, [get_mask(part) for part in keras.tree.flatten(call)])
        inputs, restore = split_tensors(masked)
        made: list[tuple[Any, list[keras.Variable]]] = []

        def on_each_device(own_values: Any, shared_values: Any, inputs: Any) -> Any:
            rows = []
            for number in range(len(self.models) // self.where.count):
                values = [*(value[number] for value in own_values), *shared_values]
                variables = [variable for variable, _ in (*own, *shared)]
                row, *rest = self._call(list(zip(variables, values)), restore(inputs))
                made[:] = [tuple(rest)]
                rows.append(row)
            return jax.tree.map(lambda *parts: jax.numpy.stack(parts), *rows)

        given = self._place([value for _, value in own], [value for _, value in shared], inputs)
        results, updates = map_devices(on_each_device, self.where, *given)
        ((rebuild, assigned),) = made
        return [
            self._result(
                number, rebuild([part[number] for part in results]), list(zip(assigned, updates))
            )
            for number in range(len(self.models))
        ]

    def stateless_call(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # The template's would not do: it hides which variables are assigned.
        with having(_in_stateless_call, self):
            return own(*args, **kwargs)

    def _values(self) -> tuple[list[Any], list[Any]]:
        """The template's variables with values: separate ones, stacked; and shared ones.

        Each replica has separate seeds even if weights are shared.
        """
        if self._has_own_weights:
            self._make_stacks()
        stacks = self._stacks_in_use()
        own, shared = [], []
        states = [unique(model.variables) for model in self.models]
        check_alike(states)
        for parts in zip(*states):
            first = parts[0]
            if id(first) in stacks:
                own.append((first, stacks[id(first)].value))
            elif self._has_own_weights:
                own.append((first, jax.numpy.stack([part.value for part in parts])))
            elif first.name == SEED:
                steps = np.arange(len(parts), dtype="uint64") * SEED_STEP
                shifts = np.stack([steps, np.zeros_like(steps)], axis=1).astype("uint32")
                own.append((first, first.value + shifts))
            else:
                shared.append((first, first.value))
        return own, shared

    def _stacks_in_use(self) -> dict[int, StackedVariable]:
        """The stacked variables; none within a step of another model, which has the parts."""
        parts = (part for stack in self._stacks.values() for part in stack.parts)
        return {} if any(given_value(part) is not None for part in parts) else self._stacks

    def _place(self, own: list[Tensor], shared: list[Tensor], inputs: list[Any]) -> Any:
        """Puts the arguments on the devices, unless a larger step is being compiled."""

        def put(values: Any, sharding: Any) -> Any:
            return [
                value if is_traced(value) else jax.device_put(value, sharding) for value in values
            ]

        place = self.where
        return put(own, place.sharded), put(shared, place.replicated), put(inputs, place.replicated)

    def _call(self, state: list[Any], masked: Any) -> Any:
        """Calls the template; returns result tensors, how to rebuild them, and the updates."""
        (args, kwargs), masks = masked
        for part, mask in zip(keras.tree.flatten((args, kwargs)), masks):
            set_mask(part, mask)
        with NotingScope(state_mapping=state, collect_losses=True) as scope:
            outputs = self._outputs(args, kwargs)
            losses = self._template.losses
            if not self._has_own_weights:  # the parallel model adds penalties of shared weights
                weights = self._template.trainable_weights
                losses = losses[: len(losses) - sum(v.regularizer is not None for v in weights)]
        if self._has_own_weights:
            known = {id(variable) for variable, _ in state}
            known |= {id(variable) for variable in metrics_variables(self._template)}
            for variable in scope.assigned:
                if id(variable) not in known:
                    raise state_of_none(variable)
        masks = [get_mask(part) for part in keras.tree.flatten(outputs)]
        tensors, rebuild = split_tensors((outputs, masks, losses))
        after = [(variable, scope.get_current_value(variable)) for variable, _ in state]
        changed = [pair for pair, (_, before) in zip(after, state) if pair[1] is not before]
        return (tensors, [value for _, value in changed]), rebuild, [v for v, _ in changed]

    def _outputs(self, args: Any, kwargs: Any) -> Any:
        """Calls the template: as `stateless_call` would, within that of the parallel model."""
        template = self._template
        if _in_stateless_call.get() is not self:
            return template(*args, **kwargs)
        forget_losses(template)
        is_quantized = template.dtype_policy.quantization_mode is not None
        call = template.quantized_call if is_quantized else template.call
        if template._remat_mode is not None:
            call = template.rematerialized_call(call, *args, **kwargs)
        return call(*args, **kwargs)

    def _result(self, number: int, rebuilt: Any, updates: list[Any]) -> Result:
        outputs, masks, losses = rebuilt
        for part, mask in zip(keras.tree.flatten(outputs), masks):
            set_mask(part, mask)
        assigned: list[tuple[keras.Variable, Tensor]] = []
        stacks = self._stacks_in_use()
        for variable, values in updates:
            if id(variable) not in stacks:
                assigned.append((self._own(variable, number), values[number]))
            elif not number:  # the stacked value of all replicas
                assigned.append((stacks[id(variable)], values))
        is_random = any(variable.name == SEED for variable, _ in updates)
        return Result(outputs, losses, assigned, is_random)

    def _own(self, variable: keras.Variable, number: int) -> keras.Variable:
        """A replica's counterpart of a variable of the template."""
        places = [id(one) for one in unique(self._template.variables)]
        return unique(self.models[number].variables)[places.index(id(variable))]
