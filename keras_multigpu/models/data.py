"""Data mode: slice the batch, a replica per device, merge the outputs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_flag
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
        self._parallel_warnings: set[str] = set()
        self._parallel_is_left_to_keras = len(self.devices) == 1 and engine.is_default(
            self.devices[0]
        )
        if not engine.partitions:
            self._parallel_replicas = engine.make_replicas(
                [template] * len(self.devices),
                self.devices,
                wire_dtype=wire_dtype,
                synchronized="all" if sync_batch_norm else "marked",
            )

    @classmethod
    def _parallel_check(
        cls, template: keras.Model, devices: Sequence[str], options: dict[str, Any]
    ) -> None:
        """Refuses what data mode can't do.

        Raises:
            ValueError: if an option is not one of those that are known, the batch size is built
                into the template, or a layer can't be made exact.
        """
        engine = engines.current()
        checks.check_names(template)
        checks.check_wire_dtype(options.get("wire_dtype"))
        check_flag("sync_batch_norm", options.get("sync_batch_norm", False))
        if engine.partitions:  # nothing is sliced, so nothing can go wrong by it
            engine.check_process()
            return
        checks.check_sync_batch_norm(template, options.get("sync_batch_norm", False))
        if len(devices) > 1:
            checks.check_any_batch_size(template)
            checks.check_stateless(template)
            checks.warn_of_direct_calls(template)

    @classmethod
    def _parallel_options_here(cls, options: dict[str, Any], count: int) -> dict[str, Any]:
        wire_dtype = options.get("wire_dtype")
        if wire_dtype not in ("bfloat16", "float16") or not engines.current().partitions:
            return options
        warnings.warn(
            f"The model was saved with wire_dtype={wire_dtype!r}, which this Keras backend, "
            f"{engines.current().name!r}, does not have: weights and gradients cross between "
            "devices in their own type.",
            stacklevel=3,
        )
        return {**options, "wire_dtype": None}

    def _parallel_call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine = engines.current()
        if engine.partitions:
            with self._parallel_rows_sharded(args, kwargs) as (args, kwargs):
                return self.template(*args, **kwargs)
        tensors, restore = split_tensors((args, kwargs), keras.ops.is_tensor)
        if self._parallel_is_left_to_keras or not any(len(tensor.shape) for tensor in tensors):
            return self.template(*args, **kwargs)
        assert self._parallel_replicas is not None
        plan = self._parallel_replicas.plan((args, kwargs), compiled=self.jit_compile)
        obstacle = plan.obstacle or _other_rows(tensors)
        if obstacle:
            with engine.on_device(self.devices[0]):
                whole = self.template(*args, **kwargs)  # before the warning: its error comes first
            self._parallel_warn_of(obstacle, None)
            return whole
        self._parallel_warn_of(None, plan.doubt)
        with engine.on_device("cpu:0"):
            slices = BatchSlice(len(self.devices), name="slice")(tensors)
        sizes, shares = self._parallel_portions(tensors)
        calls = [restore(part) for part in slices]
        results = self._parallel_replicas.run(calls, sizes, compiled=self.jit_compile, plan=plan)
        self._parallel_assign_updates([result.updates for result in results], shares, plan)
        for rule, losses in zip(plan.losses, zip(*(result.losses for result in results))):
            # Not `self.add_loss`: a functional model has it for symbolic losses only.
            keras.Layer.add_loss(self, _merge_loss(rule, losses, shares, tensors))
        taken = [engines.take_apart(result.outputs) for result in results]
        merged = BatchMerge(name="merge")([parts for parts, _ in taken], whole=tensors)
        return self._parallel_replicas.finish(taken[0][1](merged), plan)

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with the values of its variables given, as Keras does."""
        if not engines.current().partitions:
            return super().stateless_call(*args, **kwargs)
        # Keras calls `call` here, and not `__call__`: of the template too.
        with self._parallel_rows_sharded(args[2:], kwargs) as (inputs, kwargs):
            return self.template.stateless_call(*args[:2], *inputs, **kwargs)

    @contextlib.contextmanager
    def _parallel_rows_sharded(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """The arguments of a call, whose rows the compiler is to spread over the devices."""
        tensors, restore = split_tensors((args, kwargs), keras.ops.is_tensor)
        with engines.current().shard_rows(tensors, self.devices) as sharded:
            yield restore(sharded)

    def _parallel_portions(self, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
        """Each replica's rows, 0 beyond the last one, and its part of the batch."""
        rows = batch_rows(tensors)
        count = len(self.devices)
        sizes = [slice_bounds(rows, index, count)[1] for index in range(count)]
        total = keras.ops.cast(keras.ops.maximum(rows, 1), "float64")
        shares = [keras.ops.cast(size, "float64") / total for size in sizes]
        # Of a batch without rows, the first replica's results are those of one device.
        shares[0] = keras.ops.where(keras.ops.equal(rows, 0), keras.ops.ones_like(total), shares[0])
        return sizes, shares

    def _parallel_warn_of(self, obstacle: str | None, doubt: str | None) -> None:
        """Says once what keeps the model from using its devices, or from being sure of it."""
        if len(self.devices) == 1:
            return
        if obstacle:
            text = (
                f"{self.name!r} runs on {self.devices[0]!r} alone, and not on "
                f"{len(self.devices)} devices: {obstacle}. The numbers are those of one device."
            )
        elif doubt:
            text = (
                f"{self.name!r} could not be tried on made-up rows ({doubt}). Its rows are taken "
                "to be independent of each other, and the losses and states that its layers add "
                "or assign to be means over the rows. If they are not, the numbers differ from "
                "those of one device."
            )
        if (obstacle or doubt) and text not in self._parallel_warnings:
            self._parallel_warnings.add(text)
            warnings.warn(text, stacklevel=2)

    def _parallel_assign_updates(
        self, updates: Sequence[Any], shares: Sequence[Any], plan: engines.Plan
    ) -> None:
        """Assigns the states that the replicas computed, put together by the plan's rules."""
        for column in zip(*updates):
            variable = column[0][0]
            is_float = keras.backend.is_float_dtype(variable.dtype)
            rule = plan.updates.get(id(variable), engines.MEAN if is_float else engines.SAME)
            before = keras.ops.convert_to_tensor(variable)
            variable.assign(engines.combine(rule, [value for _, value in column], shares, before))


def _merge_loss(rule: str, values: Sequence[Any], shares: Sequence[Any], whole: Any) -> Any:
    """The loss of the whole batch, of which each replica has its slice's."""
    if rule == engines.ROWS:
        return BatchMerge(name="merge_loss")(values, whole=whole)
    return engines.combine(rule, values, shares)


def _other_rows(tensors: Sequence[Any]) -> str | None:
    """Why arguments can't be sliced together: they are known to have other numbers of rows."""
    counts = {tensor.shape[0] for tensor in tensors if len(tensor.shape)} - {None}
    if len(counts) < 2:
        return None
    return f"its arguments have different numbers of rows, {', '.join(map(str, sorted(counts)))}"
