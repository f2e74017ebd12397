"""Optimizers of spread or stacked variables: where slots are, and their files."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_multigpu.engines.jax.state.members import Members
from keras_multigpu.engines.jax.state.stacked import StackedVariable
from keras_multigpu.engines.optimizers import claim, inner_optimizers, slots_of

References = dict[int, keras.Variable]
"""The variable that each slot was made for, by the slot's `id`."""


Spread = Callable[[keras.Variable, keras.Variable], None]
"""Spreads a slot that was made for a variable."""


def prepare(
    optimizer: keras.Optimizer,
    spread: Spread,
    replicas: Sequence[keras.Model] = (),
    *,
    apart: bool = False,
) -> None:
    """Makes an optimizer spread each slot when it makes it.

    With `replicas`, it gets stacked variables: it updates each replica separately, and its files
    are as if it had the replicas' variables. With `apart`, the replicas are trained separately.
    """
    are_stacked = bool(replicas)
    if not claim(optimizer, ("slots by variable", apart, *map(id, replicas))):
        return
    known = [one.references for one in inner_optimizers(optimizer) if "references" in vars(one)]
    making = _Preparing(spread, known[0] if known else {}, are_stacked, apart)
    leaves = making.prepare(optimizer)
    if are_stacked:
        files = _Files(optimizer, leaves)
        optimizer.save_own_variables, optimizer.load_own_variables = files.save, files.load


@dataclasses.dataclass(frozen=True)
class _Preparing:
    """Prepares an optimizer and its inner ones; `references` are for all of them."""

    spread: Spread
    references: References
    are_stacked: bool
    apart: bool

    def prepare(self, optimizer: keras.Optimizer) -> list[Members]:
        """Prepares one; returns what maps it, and those within, over the replicas.

        `compile` sets an optimizer, and then, with `mixed_float16`, one that has it within.
        """
        if "references" not in vars(optimizer):
            optimizer.references = self.references
            vars(optimizer)["leaves"] = self._inside(optimizer)
        return vars(optimizer)["leaves"]

    def _inside(self, optimizer: keras.Optimizer) -> list[Members]:
        inner = inner_optimizers(optimizer)
        if inner or hasattr(optimizer, "optimizers"):
            leaves = [one for part in inner for one in self.prepare(part)]
            if self.are_stacked:
                _refuse_unprepared(optimizer)
            return leaves
        self._note_references(optimizer)
        return [Members(optimizer, self.apart)] if self.are_stacked else []

    def _note_references(self, optimizer: keras.Optimizer) -> None:
        make_slot = optimizer.add_variable_from_reference

        def note(slot: keras.Variable, reference: keras.Variable) -> None:
            self.references[id(slot)] = reference
            self.spread(slot, reference)

        def make_noted_slot(reference_variable: Any, *args: Any, **kwargs: Any) -> keras.Variable:
            slot = make_slot(reference_variable, *args, **kwargs)
            note(slot, reference_variable)
            return slot

        optimizer.add_variable_from_reference = make_noted_slot
        if optimizer.built and not self.are_stacked:
            for pair in slots_of(optimizer):
                note(*pair)


def _refuse_unprepared(optimizer: keras.Optimizer) -> None:
    """Makes the build of a `MultiOptimizer` refuse optimizers that were added later."""
    build = optimizer.build

    def build_prepared(variables: list[keras.Variable]) -> None:
        build(variables)
        for inner in inner_optimizers(optimizer):
            if not hasattr(inner, "references"):
                raise ValueError(
                    "On JAX the optimizers of independent replicas must be known before they are "
                    f"built. Received: {optimizer.name!r}, whose function made {inner.name!r} for "
                    "a variable. Use a `keras.optimizers.OptimizerMap` instead of a function."
                )

    optimizer.build = build_prepared


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A variable in a file.

    Attributes:
        variable: the optimizer's variable.
        number: the replica that this part belongs to; `None` if it is common to all.
        is_stacked: whether the variable has a first axis of replicas.
    """

    variable: keras.Variable
    number: int | None
    is_stacked: bool

    def value(self) -> np.ndarray:
        value = np.asarray(self.variable.value)
        return value[self.number or 0] if self.is_stacked else value


class _Files:
    """Writes an optimizer of stacked variables to a file, and reads it.

    `leaves` map the optimizer, or its inner ones, over the replicas.
    """

    def __init__(self, optimizer: keras.Optimizer, leaves: list[Members]):
        self._optimizer = optimizer
        self._leaves = leaves

    def save(self, store: Any) -> None:
        for place, entry in enumerate(self._entries()):
            store[str(place)] = entry.value()

    def load(self, store: Any) -> None:
        entries = self._entries()
        if len(store.keys()) != len(entries):  # as Keras does
            warnings.warn(
                f"Skipping variable loading for optimizer {self._optimizer.name!r}, because it has "
                f"{len(entries)} variables, counted for each replica, whereas the saved optimizer "
                f"has {len(store.keys())} variables. To load them, compile the model as the saved "
                "one, and call `parallel.optimizer.build(parallel.trainable_variables)` first.",
                stacklevel=2,
            )
            return
        rows: dict[int, list[np.ndarray]] = {}
        for place, entry in enumerate(entries):
            rows.setdefault(id(entry.variable), []).append(np.asarray(store[str(place)]))
        for entry in entries:
            values = rows.pop(id(entry.variable), None)
            if values is not None and entry.is_stacked:
                count = entry.variable.shape[0]
                entry.variable.assign(np.stack(values * (count // len(values))))
            elif values is not None:
                entry.variable.assign(values[0])

    def _entries(self) -> list[_Entry]:
        """The order of a file: of slots made one after the other, replica by replica."""
        variables, owners = self._optimizer.variables, self._owners()
        entries: list[_Entry] = []
        run: list[keras.Variable] = []
        made_for: list[int] = []  # the owners of the run, in their order
        for variable, owner in zip(variables, owners):
            is_stacked = isinstance(owner, StackedVariable)
            # An owner before the latest one begins the next kind of slot.
            begins_anew = id(owner) in made_for[:-1]
            if run and (not is_stacked or begins_anew):
                entries += self._by_replica(run, made_for)
                run, made_for = [], []
            if is_stacked:
                run.append(variable)
                if not made_for or made_for[-1] != id(owner):
                    made_for.append(id(owner))
            else:
                entries.append(_Entry(variable, None, self._is_stacked(variable)))
        return entries + self._by_replica(run, made_for)

    def _owners(self) -> list[keras.Variable | None]:
        """The weight that each of the optimizer's variables was made for.

        Adafactor makes some without a reference, with the weight's name, before the weight's slot.
        """
        references = self._optimizer.references
        owners: list[keras.Variable | None] = []
        following: keras.Variable | None = None
        for variable in reversed(self._optimizer.variables):
            if id(variable) in references:
                following = references[id(variable)]
            elif following is None or variable.name != following.name:
                following = None
            owners.append(following)
        return owners[::-1]

    def _is_stacked(self, variable: keras.Variable) -> bool:
        return any(leaf.is_stacked(variable) for leaf in self._leaves)

    def _by_replica(self, run: list[keras.Variable], made_for: list[int]) -> list[_Entry]:
        if not run:
            return []
        owners = {id(owner): owner for owner in self._optimizer.references.values()}
        count = len(owners[made_for[0]].parts)
        return [
            _Entry(variable, number, self._is_stacked(variable))
            for number in range(count)
            for variable in run
        ]
