"""The making of a parallel model: its class, the model, what it is compiled with."""

from __future__ import annotations

from typing import Any

from keras_multigpu.engines import Request
from keras_multigpu.models.checks import check
from keras_multigpu.models.classes import parallel_class
from keras_multigpu.models.compiling import compile_like


def build_parallel(
    mode: Any,
    request: Request,
) -> Any:
    """A mode's parallel model, compiled like its template if that is compiled.

    Users' requests and files both come through here, so both are checked before anything is built.
    """
    check(mode, request)
    template = request.template
    classes: Any = (mode, type(template))
    parallel = parallel_class(*classes)(template, request.devices, **request.options)
    if template.compiled and parallel._parallel_keeps_outputs():
        compile_like(parallel, template)
    return parallel
