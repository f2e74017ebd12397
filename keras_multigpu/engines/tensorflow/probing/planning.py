"""Plans a call: can its batch be sliced, and how are the slices' results merged?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.engines import kinds
from keras_multigpu.engines.attributes import get_attributes
from keras_multigpu.engines.shared import SEED, is_training
from keras_multigpu.engines.structures import take_apart
from keras_multigpu.engines.templates import all_layers
from keras_multigpu.engines.tensorflow.probing.backward import Backward
from keras_multigpu.engines.tensorflow.probing.probe import Probe
from keras_multigpu.engines.tensorflow.probing.tries import DependenceError, ProbeError
from keras_multigpu.engines.tensorflow.tensors import floats, for_any_rows, is_float
from keras_multigpu.engines.tensorflow.tracing.inspection import (
    draws_numbers,
    find_chained,
    find_obstacle,
    layer_of,
)
from keras_multigpu.engines.tensorflow.tracing.sync import of_no_rows, replaced_statistics
from keras_multigpu.engines.tensorflow.tracing.trace import Trace
from keras_multigpu.engines.tensorflow.weights.sums import ONCE
from keras_multigpu.engines.values import Call, Plan

_PREFERRED = (kinds.SAME, kinds.MEAN, kinds.SUM, kinds.MAXIMUM, kinds.MINIMUM)

# Of made-up gradients of results: a custom gradient may have a threshold.
_SCALES = (1.0, 1e-4, 1e4)

# Operations whose gradient has rows, and those that may contain one.
_TAKING_ROWS = ("Gather", "Segment", "Call", "While", "If")


class _ObstacleError(Exception):
    """The batch can't be sliced, for the reason given."""


def make_plan(trace: Trace) -> Plan:
    """Decides whether the batch of a traced template can be sliced, and how it is merged."""
    plan = with_trace(Plan(), trace)
    try:
        if not (tf.executing_eagerly() or trace.cut):
            _check(trace)
        # `BatchNormalization` mixes rows, and is handled separately.
        tried = _without_statistics(trace)
        _check(tried)
        if trace.order > 1:
            _raise(find_chained(floats(tried.forward.structured_outputs["outputs"])))
        probe = Probe(tried)
        backward = Backward(tried.forward.graph, probe.wide) if trace.order else None
        sees_places = probe.wide.sees_places or bool(backward and backward.sees_places)
        _raise(probe.find_dependence(sees_places))
        plan.rows_for_each = probe.rows_for_each()
        _find_rules(plan, probe, tried)
        if backward is not None:
            trace.gradient_rules.update(_gradient_rules(probe, tried))
            _check_custom_gradients(backward, probe, tried)
    except ProbeError as error:
        plan.obstacle = f"it could not be tried on made-up rows ({error})"
    except (_ObstacleError, DependenceError) as error:
        plan.obstacle = str(error)
    return plan


def with_trace(plan: Plan, trace: Trace) -> Plan:
    """A plan for the call that was traced."""
    plan = dataclasses.replace(plan, trace=trace)

    def finish(outputs: Any) -> Any:
        """Merged outputs as they would be on one device, with what losses look for."""
        tensors, _ = take_apart(outputs)
        rows = None if tf.executing_eagerly() else _known_rows(plan.trace)
        for tensor, each in zip(tensors, plan.rows_for_each):
            if rows is not None and each and isinstance(tensor, tf.Tensor):
                tensor.set_shape([rows * each, *tensor.shape[1:]])
        return plan.trace.activate(tensors)

    plan.finish = finish
    return plan


def _known_rows(trace: Trace) -> int | None:
    """The rows of a call's batch, if a graph knows those of all arguments."""
    shapes = [one.shape for one in trace.arguments[0] if one.shape.rank != 0]
    found = {shape[0] if shape.rank else None for shape in shapes}
    return found.pop() if len(found) == 1 else None


def signature(template: keras.Model, call: Call) -> Any:
    """What a plan depends on: the key under which eager calls reuse it."""
    args, kwargs = call
    flat = keras.tree.flatten((args, kwargs))
    specs = [for_any_rows(one) if tf.is_tensor(one) else repr(one) for one in flat]
    attached = [sorted(get_attributes(one)) for one in flat if tf.is_tensor(one)]
    frozen = tuple(variable.trainable for variable in template.variables)
    known = str(specs), str(attached), tuple(kwargs), frozen
    return *known, is_training(), _settings(template)


def _settings(template: keras.Model) -> str:
    """What layers are set to: their attributes that are numbers, flags or texts."""
    kinds_of_settings = (bool, int, float, str, type(None))
    return repr(
        [
            (name, value)
            for layer in all_layers(template)
            for name, value in vars(layer).items()
            if isinstance(value, kinds_of_settings)
        ]
    )


def _check(trace: Trace) -> None:
    weights = trace.weights_of(trace.forward.inputs)
    _raise(find_obstacle(trace.forward, trace.number, weights))


def _raise(reason: str | None) -> None:
    if reason:
        raise _ObstacleError(reason)


def _without_statistics(trace: Trace) -> Trace:
    layers = [*trace.layers, *trace.apart]
    if not (layers or trace.cut or trace.compiled or tf.executing_eagerly()):
        return trace
    plain = trace.alone()
    with replaced_statistics(layers, of_no_rows):
        plain.forward  # noqa: B018  trace in this scope
    return plain


def _find_rules(plan: Plan, probe: Probe, tried: Trace) -> None:
    losses, updates = probe.find_rules()
    made = tried.forward.structured_outputs["losses"]
    plan.losses = [_loss_rule(found, loss) for found, loss in zip(losses, made)]
    rules: dict[int, str] = {}
    for key, found in updates.items():
        variable = tried.assigned[key]
        if variable.name == SEED:
            found = {kinds.SAME}
        rule = _first(found)
        if rule is None:
            raise _ObstacleError(
                f"the variable {variable.path!r} is assigned a value that is neither a mean, a "
                "sum nor an extreme over the rows of the batch"
            )
        rules[int(key)] = rule
    for layer in plan.trace.apart:
        rules.update({id(variable): kinds.MEAN for variable in layer.non_trainable_variables})
    plan.updates = rules


def _loss_rule(found: set[str], loss: Any) -> str:
    if kinds.ROWS in found:
        return kinds.ROWS
    # If all rules fit, prefer the mean, which gives all replicas gradients.
    rule = kinds.MEAN if kinds.MEAN in found else _first(found - {kinds.SAME})
    if rule is None:
        operation = loss.op
        while operation.type == "Identity":
            operation = operation.inputs[0].op
        raise _ObstacleError(
            f"{layer_of(operation.name)} adds a loss that is neither a mean nor a sum over the "
            "rows of the batch (give `add_loss` a value for each row, or compute it in the "
            "model's loss, which sees the whole batch)"
        )
    return rule


def _first(found: set[str]) -> str | None:
    return next((kind for kind in _PREFERRED if kind in found), None)


def _gradient_rules(probe: Probe, tried: Trace) -> dict[int, str]:
    """How to merge gradients that are not plain sums: table rows, and overwritten values."""
    every = enumerate(tried.variables)
    special = {place: v for place, v in every if _is_special(v, place, tried)}
    if not special:
        return {}
    rules = {}
    for variable, found in zip(special.values(), probe.gradients(list(special))):
        whole, _, _ = found[0]
        if variable.overwrite_with_gradient and whole is not None:
            rule = _first(set.intersection(*(kinds.find_kinds(*one) for one in found)))
            what = "is given a new value as its gradient"
        elif isinstance(whole, tf.IndexedSlices):
            rule = _table_rule(
                [[part.indices.numpy() for part in (one, *more)] for one, more, _ in found]
            )
            what = "has a gradient of rows, some for each row of the batch and some not"
        else:
            continue
        if rule is None:
            raise _ObstacleError(f"the variable {variable.path!r} {what}, which slices can't make")
        rules[id(variable)] = rule
    return rules


def _check_custom_gradients(backward: Backward, probe: Probe, tried: Trace) -> None:
    """Raises if a gradient is no sum over the rows, or one of a row depends on other rows."""
    _raise(backward.reason)
    if backward.doubtful is None or draws_numbers(tried.forward.graph):
        return  # random numbers of parts are others than those of the whole
    every = enumerate(tried.variables)
    places = [place for place, v in every if _is_summed(v)]
    for scale in _SCALES:
        rules = itertools.chain([kinds.SUM] * len(places), itertools.repeat(kinds.ROWS))
        for rule, tries in zip(rules, probe.gradients(places, scale, with_batch=True)):
            for whole, parts, counts in tries:
                if not isinstance(whole, tf.Tensor):
                    continue  # rows of a table are judged by their rules
                start = np.zeros(whole.shape)  # parts may be much larger than their sum
                if rule not in kinds.find_kinds(whole, parts, counts, start, probe.is_half):
                    raise _ObstacleError(backward.told())


def _is_summed(variable: keras.Variable) -> bool:
    is_overwritten = variable.overwrite_with_gradient
    return variable.trainable and not is_overwritten and is_float(variable._value)


def _is_special(variable: keras.Variable, place: int, tried: Trace) -> bool:
    if not (variable.trainable and is_float(variable._value)):
        return False
    if variable.overwrite_with_gradient:
        return True
    # The gradient has rows if an operation takes rows of the variable itself.
    waiting = [tried.forward.inputs[place]]
    while waiting:
        for operation in waiting.pop().consumers():
            if operation.type in ("Identity", "Cast"):
                waiting += operation.outputs
            elif any(name in operation.type for name in _TAKING_ROWS):
                return True
    return False


def _table_rule(found: Sequence[Sequence[np.ndarray]]) -> str | None:
    """The rule for gradients of table rows, from the rows in those of a batch and of its parts."""

    def fit(rule: Callable[[np.ndarray, np.ndarray, np.ndarray], bool]) -> bool:
        return all(rule(*named) for named in found)

    if fit(lambda whole, *parts: np.array_equal(np.sort(whole), np.sort(np.concatenate(parts)))):
        return kinds.ROWS
    # Before the next rule: on few values all parts may have the same rows by chance.
    if fit(lambda whole, *parts: np.array_equal(np.sort(whole), np.unique(np.concatenate(parts)))):
        return ONCE
    if fit(lambda whole, *parts: all(np.array_equal(whole, part) for part in parts)):
        return kinds.SAME
    return None
