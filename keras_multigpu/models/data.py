"""Data mode: slice the batch, a replica per device, merge the outputs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.engines import split_tensors
from keras_multigpu.layers import BatchMerge, BatchSlice
from keras_multigpu.layers.batch import batch_rows, slice_bounds
from keras_multigpu.models import checks
from keras_multigpu.models.base import ParallelModel


@keras.saving.register_keras_serializable(package="keras_multigpu")
class DataParallel(ParallelModel):
    """The maths of one device on n devices: a slice of the batch for each.

    Args:
        template: the model to make parallel.
        devices: the devices to use, as `keras_multigpu.list_devices` names them.
        wire_dtype: the type in which trainable weights and their gradients cross between
            devices: `None` (their own), `"bfloat16"` or `"float16"`. Must be `None` on JAX, whose
            compiler chooses what crosses; a file saved with another loads there with a warning.
        sync_batch_norm: let every `BatchNormalization` see the whole batch in training, as
            those built with `synchronized=True` do.
    """

    mode = "data"

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        sync_batch_norm: bool = False,
    ):
        super().__init__(
            template, devices, {"wire_dtype": wire_dtype, "sync_batch_norm": sync_batch_norm}
        )
        engine = engines.current()
        self._is_left_to_keras = len(self.devices) == 1 and engine.is_default(self.devices[0])
        if not engine.partitions:
            self._replicas = engine.make_replicas(
                [template] * len(self.devices),
                self.devices,
                wire_dtype=wire_dtype,
                synchronized="all" if sync_batch_norm else "marked",
            )

    @classmethod
    def _check(cls, template: keras.Model, devices: Sequence[str], options: dict[str, Any]) -> None:
        """Refuses what data mode can't do.

        Raises:
            ValueError: if an option is not one of those that are known, the batch size is built
                into the template, or a layer can't be made exact.
        """
        engine = engines.current()
        checks.check_names(template)
        checks.check_wire_dtype(options.get("wire_dtype"))
        checks.check_flag("sync_batch_norm", options.get("sync_batch_norm", False))
        if engine.partitions:  # nothing is sliced, so nothing can go wrong by it
            engine.check_process()
            return
        checks.check_sync_batch_norm(template, options.get("sync_batch_norm", False))
        if len(devices) > 1:
            checks.check_any_batch_size(template)
            checks.check_stateless(template)
            checks.warn_of_direct_calls(template)

    @classmethod
    def _options_here(cls, options: dict[str, Any]) -> dict[str, Any]:
        wire_dtype = options.get("wire_dtype")
        if wire_dtype is None or not engines.current().partitions:
            return options
        warnings.warn(
            f"The model was saved with wire_dtype={wire_dtype!r}, which this Keras backend, "
            f"{engines.current().name!r}, does not have: weights and gradients cross between "
            "devices in their own type.",
            stacklevel=3,
        )
        return {**options, "wire_dtype": None}

    def _call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = engines.current()
        if engine.partitions:
            with self._rows_sharded(args, kwargs) as (args, kwargs):
                return self._template(*args, **kwargs)
        if self._is_left_to_keras:
            with engine.call_scope(self._template, compiled=self.jit_compile):
                return self._template(*args, **kwargs)
        tensors, restore = split_tensors((args, kwargs), keras.ops.is_tensor)
        if not any(len(tensor.shape) for tensor in tensors):
            return self._template(*args, **kwargs)  # answers as one device would
        with engine.on_device("cpu:0"):
            slices = BatchSlice(len(self.devices), name="slice")(tensors)
        sizes, shares = self._portions(tensors)
        calls = [restore(part) for part in slices]
        assert self._replicas is not None
        results = self._replicas.run(calls, sizes, compiled=self.jit_compile)
        self._assign_updates([result.updates for result in results], shares)
        sums = self._replicas.find_sums(calls[0], len(results[0].losses))
        for is_sum, losses in zip(sums, zip(*(result.losses for result in results))):
            # Not `self.add_loss`: a functional model has it for symbolic losses only.
            keras.Layer.add_loss(self, _merge_loss(losses, is_sum, shares, tensors))
        if len(results) > 1:
            checks.check_outputs(self._template, args, kwargs, results[0].shapes)
        return BatchMerge(name="merge")([result.outputs for result in results], whole=tensors)

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with the values of its variables given, as Keras does."""
        if not engines.current().partitions:
            return super().stateless_call(*args, **kwargs)
        return self._call_with_state(*args, **kwargs)

    def _call_with_state(
        self, trainable_variables: Any, non_trainable_variables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the template with its part of the state; what this model has beside stays."""
        lists = (self.trainable_variables, self.non_trainable_variables)
        given = zip((*lists[0], *lists[1]), (*trainable_variables, *non_trainable_variables))
        values = {id(variable): value for variable, value in given}
        own = (self._template.trainable_variables, self._template.non_trainable_variables)
        state = [[values[id(variable)] for variable in part] for part in own]
        # Keras calls `call` here, and not `__call__`: of the template too.
        with self._rows_sharded(args, kwargs) as (inputs, kwargs):
            outputs, updated, *losses = self._template.stateless_call(*state, *inputs, **kwargs)
        values.update((id(variable), value) for variable, value in zip(own[1], updated))
        return outputs, [values[id(variable)] for variable in lists[1]], *losses

    @contextlib.contextmanager
    def _rows_sharded(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """The arguments of a call, whose rows the compiler is to spread over the devices."""
        tensors, restore = split_tensors((args, kwargs), keras.ops.is_tensor)
        with engines.current().shard_rows(tensors, self.devices) as sharded:
            yield restore(sharded)

    def _portions(self, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
        """Each replica's rows, 0 beyond the last one, and its part of the batch."""
        rows = batch_rows(tensors)
        count = len(self.devices)
        sizes = [slice_bounds(rows, index, count)[1] for index in range(count)]
        dtype = keras.config.floatx()
        total = keras.ops.cast(keras.ops.maximum(rows, 1), dtype)
        shares = [keras.ops.cast(size, dtype) / total for size in sizes]
        # Of a batch without rows, the first replica's results are those of one device.
        shares[0] = keras.ops.where(keras.ops.equal(rows, 0), keras.ops.ones_like(total), shares[0])
        return sizes, shares

    def _assign_updates(self, updates: Sequence[Any], shares: Sequence[Any]) -> None:
        """Moving statistics become the mean over the rows; counters and seeds are equal.

        The state of a metric is what was added up, so all the replicas' additions count.
        """
        in_metrics = {id(variable) for variable in self.metrics_variables}
        for column in zip(*updates):
            variable, first = column[0]
            values = [value for _, value in column]
            if id(variable) in in_metrics:
                before = keras.ops.convert_to_tensor(variable)
                own = [keras.ops.sign(share) for share in shares]
                added = _weighted_sum([value - before for value in values], own)
                variable.assign(before + added)
            elif keras.backend.is_float_dtype(variable.dtype):
                variable.assign(_weighted_sum(values, shares))
            else:
                variable.assign(first)


def _merge_loss(values: Sequence[Any], is_sum: bool, shares: Sequence[Any], whole: Any) -> Any:
    """The loss of the whole batch, of which each replica has its slice's."""
    if len(values[0].shape):
        return BatchMerge(name="merge_loss")(values, whole=whole)
    return _weighted_sum(values, [keras.ops.sign(share) if is_sum else share for share in shares])


def _weighted_sum(values: Sequence[Any], shares: Sequence[Any]) -> Any:
    stacked = keras.ops.stack(values, axis=-1)
    weights = keras.ops.cast(keras.ops.stack(shares), stacked.dtype)
    return keras.ops.sum(stacked * weights, axis=-1)
