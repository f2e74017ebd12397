"""A user's own step as a function that runs on all devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from keras_multigpu.engines.functions import have_rows


def on_all_devices(
    step: Callable[..., Any],
    spread: Callable[..., Any],
    rows: Collection[int | str] | None,
    *,
    is_compiled: bool = False,
) -> Callable[..., Any]:
    """`step` as a `tf.function` that `spread` computes on several devices.

    `spread` is `partition.step.spread` with devices and settings; `rows` as in `have_rows`. What
    XLA compiles for each shape is traced for each: some operations have no gradient otherwise.
    """

    def traced(call: Any) -> Any:
        def flat(args: Any, names: Any) -> Any:
            return step(*args, **names)

        marks = have_rows(step, rows, *call)
        return spread(flat, call, have_rows=tf.nest.flatten(marks))

    # TensorFlow warns of retracing by the code: that of one step is not that of another.
    traced.__code__ = traced.__code__.replace(co_name=getattr(step, "__name__", "step"))
    compiled = tf.function(traced, autograph=False, reduce_retracing=not is_compiled)

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        have_rows(step, rows, args, kwargs)  # raises, on the actual shapes
        # As one argument: with `*args`, `reduce_retracing` fails on a call with more of them.
        return compiled((args, kwargs))

    return run
