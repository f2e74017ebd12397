"""Multi-GPU training of any Keras model: `make_parallel(model, n_gpus, mode)`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from keras_multigpu.version import __version__

# `python -m keras_multigpu` reads its arguments first: `--help` should not wait for a backend.
# Python sets `sys.argv[0]` so while it looks for the module to run.
if sys.argv[:1] != ["-m"] or "keras_multigpu" not in sys.orig_argv:
    from keras_multigpu import (  # engines first: a missing backend is met there
        cluster,
        engines,
        layers,
        reports,
    )
    from keras_multigpu.devices import list_devices, use_virtual_devices
    from keras_multigpu.parallel import make_parallel

if TYPE_CHECKING:
    from keras_multigpu import sparse, zoo

__all__ = [
    "__version__",
    "cluster",
    "layers",
    "list_devices",
    "make_parallel",
    "reports",
    "use_virtual_devices",
]

_WITH_EXTRAS = ("sparse", "zoo")  # imported where they are used


def __getattr__(name: str) -> Any:
    if name not in _WITH_EXTRAS:
        text = f"module {__name__!r} has no attribute {name!r}"
        text += ". Keras 2's is `make_parallel` here" if name == "multi_gpu_model" else ""
        # With these two Python asks "Did you mean ...?".
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    try:
        return importlib.import_module(f"keras_multigpu.{name}")
    except ImportError as error:  # so that `hasattr`, `help` and completion work without the extra
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return sorted([*__all__, *_WITH_EXTRAS])
