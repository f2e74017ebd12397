"""Data mode on JAX: one program, whose rows the compiler spreads over all devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_multigpu.engines.attributes import get_mask, set_mask
from keras_multigpu.engines.cluster.errors import OF_ONE_PROCESS
from keras_multigpu.engines.functions import have_rows
from keras_multigpu.engines.jax.arguments import with_arguments_told
from keras_multigpu.engines.jax.batches import Undivided
from keras_multigpu.engines.jax.devices import is_traced
from keras_multigpu.engines.jax.joint_placement import placement_on
from keras_multigpu.engines.jax.pure import JaxRunner, pure
from keras_multigpu.engines.jax.rows import spreading
from keras_multigpu.engines.jax.spreading import spread_function
from keras_multigpu.engines.jax.state.parted import make_whole
from keras_multigpu.engines.jax.state.shards import spread_ids
from keras_multigpu.engines.jax.state.slots import prepare
from keras_multigpu.engines.jax.state.state_shards import (
    StateShards,
    kept_share,
    tables_by_rows,
    why_whole,
)
from keras_multigpu.engines.jax.threads import in_fresh_thread
from keras_multigpu.engines.runners import DataRunner
from keras_multigpu.engines.shared import split_tensors, value_of
from keras_multigpu.engines.templates import forget_losses, is_built
from keras_multigpu.engines.values import Call, Request, Result


class RowsRunner(JaxRunner, DataRunner):
    """Calls the template once, on the whole batch; the compiler spreads the rows.

    Every `BatchNormalization` sees the whole batch.
    """

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        shard: str | None = None,
        model_devices: int = 1,
    ):
        assert wire_dtype is None
        self._template = template
        self._devices = tuple(devices)
        self._shard = shard
        if shard is not None:  # a mesh always does
            self.spreads_state = True
        self._parts = None if shard is None else StateShards(devices, shard, model_devices)
        self.where = placement_on(devices, width=model_devices)

    @classmethod
    def check(cls, request: Request) -> None:
        wire_dtype = request.options.get("wire_dtype")
        if wire_dtype is not None:
            raise ValueError(
                "`wire_dtype` must be None on the Keras backend 'jax', whose compiler "
                "chooses what crosses between devices, and in which type. Received: "
                f"wire_dtype={wire_dtype!r}. Leave it out; the dtype policy 'mixed_bfloat16' "
                "halves the bytes of activations."
            )

    @classmethod
    def adapt(cls, request: Request) -> Request:
        wire_dtype = request.options.get("wire_dtype")
        if wire_dtype not in ("bfloat16", "float16"):
            return request
        warnings.warn(
            f"The model was saved with wire_dtype={wire_dtype!r}, which this Keras backend, "
            "'jax', does not have: weights and gradients cross between devices in their own type.",
            stacklevel=3,
        )
        return dataclasses.replace(request, options={**request.options, "wire_dtype": None})

    def run(self, call: Call) -> Result:
        given: Call = self.where.bring(call) if self.spreads_state else call
        weights = (value_of(one) for one in self._template.trainable_variables)
        with self._rows_spread(*given, weights) as (args, kwargs):
            return Result(self._template(*args, **kwargs))

    def function(
        self, step: Callable[..., Any], jit_compile: bool | None, rows: Any
    ) -> Callable[..., Any]:
        run_pure, where, scatters = pure(step, self._template), self.where, self.spreads_state
        if where.group is not None:
            raise ValueError(OF_ONE_PROCESS)

        undivided = Undivided("`parallel.function`")

        @functools.cache
        def compiled(rows: int) -> Callable[..., Any]:
            return jax.jit(spread_function(run_pure, where, rows, scatters))

        def run(*args: Any, **kwargs: Any) -> Any:
            marks = have_rows(step, rows, args, kwargs)
            pairs = zip(keras.tree.flatten((args, kwargs)), keras.tree.flatten(marks))
            batch = [leaf for leaf, has_rows in pairs if has_rows]
            undivided.see(batch, where)

            def put(leaf: Any, has_rows: bool) -> Any:
                if isinstance(leaf, keras.Variable):
                    raise ValueError(
                        "On JAX a step takes arrays, and gives new ones back. Received: the "
                        f"variable {leaf.path!r}. Give its value: `variable.value`."
                    )
                if is_traced(leaf):  # within another function of JAX's
                    return where.constrain(leaf) if has_rows else leaf
                if not hasattr(leaf, "shape"):
                    return leaf
                if hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array):
                    leaf = np.asarray(leaf)  # of pandas, or TensorFlow
                if not has_rows and where.is_on_all(leaf):
                    return leaf  # whole, or in parts
                return jax.device_put(leaf, where.of_rows(leaf) if has_rows else where.replicated)

            args, kwargs = keras.tree.map_structure(put, (args, kwargs), marks)
            results = compiled(where.spread_rows(batch))(*args, **kwargs)
            return jax.tree.map(where.at_rest, results) if where.is_mesh else results

        return with_arguments_told(step, run)

    def explain(self) -> str:
        return (
            "XLA partitions every step, operation by operation; what it copies whole it does not "
            "say. `reports.transfers` counts what crosses between the devices."
        )

    def for_part(self, part: keras.Layer) -> RowsRunner | None:
        # Unmarked, a part that gets no rows of the batch (noise, say) runs whole on every device.
        if len(self._devices) == 1:
            return None
        return RowsRunner(part, self._devices, shard=self._shard)

    def stateless_call(self, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        values, inputs = args[:2], args[2:]
        if self._parts is not None:
            lists = self._template.trainable_variables, self._template.non_trainable_variables
            are_spread = self.where.spread_rows((inputs, kwargs)) > 0
            pairs = zip(values, lists)
            values = [self._parts.gathered(*pair, are_spread) for pair in pairs]
        forget_losses(self._template)
        with self._rows_spread(inputs, kwargs, values[0]) as (inputs, kwargs):
            return self._template.stateless_call(*values, *inputs, **kwargs)

    def around(self, step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return step if self._parts is None else self._parts.kept(step, self._template)

    @classmethod
    def fullest(
        cls, template: keras.Model, count: int, shard: str
    ) -> tuple[float, float, Sequence[keras.Variable]]:
        share = kept_share([one.shape for one in template.trainable_variables], count)
        if shard != "weights":
            return 1.0, share, ()
        return share, share, tables_by_rows(template.weights, count)

    @classmethod
    def why_whole(cls, template: keras.Model, count: int) -> str:
        return why_whole(template.variables, count)

    def lay_out(self) -> None:
        if self._parts is not None:
            self._warn_of_whole_parts(self._parts)
        in_fresh_thread(lambda: self.spread(None))

    def _warn_of_whole_parts(self, parts: StateShards) -> None:
        if why := parts.why_whole(self._template.variables):
            warnings.warn(why, stacklevel=3)

    def place_updates(self, optimizer: keras.Optimizer) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self._shard == "optimizer" and self.where.group and getattr(inner, "use_ema", False):
            raise ValueError(
                "With `shard='optimizer'` over several processes no process has a whole average "
                "of a weight, which replaces the weight after `fit`. Received: an optimizer with "
                "use_ema=True. Use `shard='weights'`, or leave `use_ema` out."
            )
        if self._parts is not None:
            parts = self._parts
            prepare(optimizer, lambda slot, _: parts.put([slot]))

    @property
    def placement(self) -> dict[str, tuple[int, ...]]:
        parts, template = self._parts, self._template
        if parts is None:
            return {}
        kept = template.variables if parts.of_weights else template.trainable_variables
        return {variable.path: parts.share(variable.shape) for variable in kept}

    def spread(self, optimizer: Any) -> None:
        if self._shard != "weights" and self.where.group is None:
            make_whole(self._template.variables)
        if self._parts is not None:
            self._spread_parts(self._parts, optimizer)

    def _spread_parts(self, parts: StateShards, optimizer: Any) -> None:
        if parts.of_weights and is_built(self._template):
            parts.put(self._template.variables)
            parts.release(self._template)
        if optimizer is not None:
            parts.put(optimizer.variables)

    def kept(self, variables: list[keras.Variable], optimizer: Any) -> set[int]:
        return set() if self._parts is None else spread_ids(variables, optimizer)

    def _marks_rows(self, given: Any, weights: Iterable[Any]) -> bool:
        return True

    @contextlib.contextmanager
    def _rows_spread(
        self, args: Any, kwargs: Any, weights: Iterable[Any]
    ) -> Iterator[tuple[Any, Any]]:
        """The arguments of a call with weights, with rows marked for the compiler to spread."""
        if not self._marks_rows((args, kwargs), weights):
            yield args, kwargs
            return
        tensors, restore = split_tensors((args, kwargs), keras.ops.is_tensor)
        is_spread = self._parts.is_by_rows if self._parts is not None else lambda shape: False
        with self.where.as_current(), spreading(is_spread):
            yield restore([set_mask(self.where.constrain(one), get_mask(one)) for one in tensors])
