"""An optimizer of stacked variables, whose files are those of one that has each by itself."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from keras_multigpu.engines.jax.shards import shard_alike
from keras_multigpu.engines.jax.stacked import StackedVariable

Entry = tuple[keras.Variable, int | None]
"""A variable in a file, or the part of it that is one replica's."""


def save_by_replica(optimizer: keras.Optimizer, are_stacked: bool) -> None:
    """Has an optimizer write and read its slots replica by replica, as on other backends.

    Args:
        optimizer: the optimizer.
        are_stacked: whether it is to have the variables of several replicas as one.
    """
    if "add_variable_from_reference" in vars(optimizer):
        return  # done already
    if are_stacked:
        _warn_of_whole_variables(optimizer)
    references: dict[int, keras.Variable] = {}
    make_slot, build = optimizer.add_variable_from_reference, optimizer.build

    def build_excluding(variables: list[keras.Variable]) -> None:
        for variable in variables:
            if isinstance(variable, StackedVariable):
                _exclude_as_its_parts(optimizer, variable)
        build(variables)

    def make_noted_slot(reference_variable: Any, *args: Any, **kwargs: Any) -> keras.Variable:
        slot = make_slot(reference_variable, *args, **kwargs)
        references[id(slot)] = reference_variable
        shard_alike(slot, reference_variable)
        return slot

    optimizer.build = build_excluding
    optimizer.add_variable_from_reference = make_noted_slot
    optimizer.references = references
    if are_stacked:
        files = _Files(optimizer, references)
        optimizer.save_own_variables, optimizer.load_own_variables = files.save, files.load
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        save_by_replica(optimizer.inner_optimizer, are_stacked)


def spread_slots(optimizer: keras.Optimizer) -> None:
    """Spreads the slots of variables that are spread, where they are not."""
    references = getattr(optimizer, "references", {})
    for slot in optimizer.variables:
        if id(slot) in references:
            shard_alike(slot, references[id(slot)])
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        spread_slots(optimizer.inner_optimizer)


class _Files:
    """What an optimizer of stacked variables writes to a file, and reads from one.

    Args:
        optimizer: the optimizer.
        references: the variable that each slot was made for, by the slot's `id`.
    """

    def __init__(self, optimizer: keras.Optimizer, references: dict[int, keras.Variable]):
        self._optimizer = optimizer
        self._references = references

    def save(self, store: Any) -> None:
        for place, (variable, number) in enumerate(_entries(self._optimizer, self._references)):
            value = np.asarray(variable.value)
            store[str(place)] = value if number is None else value[number]

    def load(self, store: Any) -> None:
        entries = _entries(self._optimizer, self._references)
        if len(store.keys()) != len(entries):
            raise ValueError(
                f"The optimizer {self._optimizer.name!r} has {len(entries)} variables, counted for "
                f"each replica. Received: a file with {len(store.keys())}. Compile the model as "
                "the one that was saved, with as many replicas, and train it before loading."
            )
        rows: dict[int, list[np.ndarray]] = {}
        for place, (variable, number) in enumerate(entries):
            if number is None:
                variable.assign(store[str(place)])
            else:
                rows.setdefault(id(variable), []).append(np.asarray(store[str(place)]))
        for variable in self._optimizer.variables:
            if id(variable) in rows:
                variable.assign(np.stack(rows[id(variable)]))


def _exclude_as_its_parts(optimizer: keras.Optimizer, variable: StackedVariable) -> None:
    """Excludes a stacked variable from weight decay if a replica's own was excluded."""
    excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    if any(optimizer._var_key(part) in excluded for part in variable.parts):
        excluded.add(optimizer._var_key(variable))


def _warn_of_whole_variables(optimizer: keras.Optimizer) -> None:
    """Tells where an update depends on more of a variable than its own elements."""
    classes = [getattr(keras.optimizers, name, None) for name in ("Adafactor", "Lamb", "Muon")]
    is_one = any(cls is not None and isinstance(optimizer, cls) for cls in classes)
    if is_one or getattr(optimizer, "clipnorm", None):
        warnings.warn(
            "On JAX the weights of independent replicas are stacked, and the optimizer sees all of "
            "a weight's replicas as one. Received: an optimizer that looks at a whole weight, "
            f"{type(optimizer).__name__} with clipnorm={optimizer.clipnorm}: its updates differ "
            "from those of replicas one by one. `global_clipnorm`, `clipvalue` and optimizers that "
            "go element by element, such as Adam, do not.",
            stacklevel=5,
        )


def _entries(optimizer: keras.Optimizer, references: dict[int, keras.Variable]) -> list[Entry]:
    """The order of a file: of slots made one after the other, replica by replica."""
    entries: list[Entry] = []
    run: list[keras.Variable] = []
    made_for: list[int] = []  # the references of the run, in the order in which they came
    for variable in optimizer.variables:
        reference = references.get(id(variable))
        is_stacked = isinstance(reference, StackedVariable)
        # A reference before the latest one begins the next kind of slot.
        begins_anew = id(reference) in made_for[:-1]
        if run and (not is_stacked or begins_anew):
            entries += _by_replica(run, references)
            run, made_for = [], []
        if is_stacked:
            run.append(variable)
            if not made_for or made_for[-1] != id(reference):
                made_for.append(id(reference))
        else:
            entries.append((variable, None))
    return entries + _by_replica(run, references)


def _by_replica(run: list[keras.Variable], references: dict[int, Any]) -> list[Entry]:
    count = len(references[id(run[0])].parts) if run else 0
    return [(variable, number) for number in range(count) for variable in run]
