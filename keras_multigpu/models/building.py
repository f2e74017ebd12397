"""The making of a parallel model: its class, the model, what it is compiled with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.models.classes import parallel_class
from keras_multigpu.models.compiling import compile_like


def build_parallel(
    mode: Any,
    template: keras.Model,
    devices: Sequence[str],
    options: dict[str, Any],
) -> Any:
    """A mode's parallel model, compiled like its template where that is compiled.

    All that asks for a parallel model comes by here, a file too: it is refused before anything is
    built if the mode can't do it.

    Args:
        mode: the mode's class, a `ParallelModel`.
        template: the model to make parallel.
        devices: the canonical names of the devices.
        options: the mode's options.
    """
    engines.current().check_devices(devices, mode.mode)
    mode._parallel_check(template, devices, options)
    classes: Any = (mode, type(template))
    parallel = parallel_class(*classes)(template, devices, **options)
    if template.compiled and parallel._parallel_keeps_outputs():
        compile_like(parallel, template)
    return parallel
