"""What each device holds in a step, read from the compiled program.

XLA says how many bytes a program needs for its arguments, results and temporary values. How it
divides the temporary ones between gradients, activations and the rest is estimated from the order
of its operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import keras

from keras_multigpu.engines.jax.counting.compiled import CompiledStep, compile_step, state_of
from keras_multigpu.engines.jax.counting.transfers import (
    BACKWARD,
    GATHERED,
    bytes_on,
    origin_of,
    shape_bytes,
)
from keras_multigpu.engines.jax.devices import name_of
from keras_multigpu.engines.liveness import TEMPORARIES, Operation, find_peaks
from keras_multigpu.engines.values import Holding

_LINE = re.compile(
    r"\s+(?P<root>ROOT )?%(?P<name>\S+) = (?P<shapes>\(.*?\)|\S+) "
    r"(?P<kind>[a-z][\w-]*)\((?P<inputs>[^)]*)\)"
)
_INPUT = re.compile(r"%([\w.-]+)")
_VIEWS = ("bitcast", "get-tuple-element", "tuple", "while", "optimization-barrier")
_GIVEN = ("parameter", "constant")  # in memory before the step


def find_memory(model: Any, batch: Any, training: bool) -> list[Holding]:
    """What each device holds in one step of a model, parallel or not."""
    if hasattr(model, "_parallel_steps"):
        step = model._parallel_steps.compile_step(batch, training)
    else:
        data = keras.utils.pack_x_y_sample_weight(*batch) if training else batch[:1]
        data = jax.device_put(data)
        function = model.train_step if training else model.predict_step
        step = compile_step(function, state_of(model, training), data, training)
    state = (*step.state, [], [])
    arrays = {
        "weights": [*state[0], *state[1]],
        "slots": state[2],
        "other": state[3],
        "batch": jax.tree.leaves(step.data),
    }
    devices = {device for one in arrays.values() for array in one for device in array.devices()}
    program = _find_program_memory(step)
    results = program.pop("results")
    found = []
    for device in sorted(devices, key=lambda one: one.id):
        sizes = {kind: bytes_on(device, own) for kind, own in arrays.items()}
        sizes["other"] += results
        found += [Holding(name_of(device), *one, is_counted=True) for one in sizes.items()]
        found += [Holding(name_of(device), *one, is_counted=False) for one in program.items()]
    return found


def _find_program_memory(step: CompiledStep) -> dict[str, int]:
    """The bytes that a program needs on each device beside its arguments, by kind."""
    told = step.program.memory_analysis()
    total = told.temp_size_in_bytes
    found = find_peaks(list(_operations(step.program.as_text()))).get("", {})
    simulated = sum(found.values())
    if simulated > total:  # XLA reuses more memory than was seen
        found = {kind: size * total // simulated for kind, size in found.items()}
    rest = total - sum(found.values())
    found[TEMPORARIES] = found.get(TEMPORARIES, 0) + rest
    return {**found, "results": told.output_size_in_bytes - told.alias_size_in_bytes}


def _operations(text: str) -> Iterator[Operation]:
    """The operations of a compiled program, in the order in which it runs them."""
    lines = text[text.index("\nENTRY ") :].splitlines()
    found = [match for match in map(_LINE.match, lines) if match and match["kind"] not in _GIVEN]
    # The results have memory of their own.
    results = {name for one in found if one["root"] for name in _INPUT.findall(one["inputs"])}
    for one in found:
        is_result = one["root"] or one["name"] in results
        origin = origin_of(one.string)
        yield Operation(
            _INPUT.findall(one["inputs"]),
            [(one["name"], 0 if is_result else shape_bytes(one["shapes"]))],
            is_backward=BACKWARD in origin,
            is_view=one["kind"] in _VIEWS,
            may_overwrite=one["kind"] == "fusion",
            kind=_kind(origin),
        )


def _kind(origin: str) -> str | None:
    if GATHERED in origin and BACKWARD not in origin:
        return "copies"
    return None if origin else TEMPORARIES
