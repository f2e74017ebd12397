"""Data mode: slice the batch, run a replica per device, merge the outputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_choice, check_flag
from keras_multigpu.engines import split_tensors
from keras_multigpu.layers import BatchMerge, BatchSlice
from keras_multigpu.layers.batch import batch_rows, slice_bounds
from keras_multigpu.modes.base import ParallelModel


@keras.saving.register_keras_serializable(package="keras_multigpu")
class DataParallel(ParallelModel):
    """Computes on n devices what one device would: each takes a slice of the batch.

    Args:
        template: the model to make parallel.
        devices: the devices to use, as `keras_multigpu.list_devices` names them.
        wire_dtype: the type in which trainable weights and their gradients cross between
            devices: `None` (their own), `"bfloat16"` or `"float16"`. Must be `None` on JAX, whose
            compiler chooses what crosses; files saved with another value load there with a warning.
        sync_batch_norm: in training, every `BatchNormalization` uses the statistics of the whole
            batch, as on one device. With `False`, on TensorFlow, each replica uses those of its
            slice, which is faster; layers with `synchronized=True` still see the whole batch.
    """

    mode = "data"
    _parallel_runner: engines.DataRunner

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        wire_dtype: str | None = None,
        sync_batch_norm: bool = True,
    ):
        options: dict[str, Any] = {"wire_dtype": wire_dtype, "sync_batch_norm": sync_batch_norm}
        super().__init__(template, devices, options)
        self._parallel_warnings: set[str] = set()
        self._parallel_run_on(engines.current().data_runner(template, devices, **options))

    @classmethod
    def _parallel_runner_class(cls) -> type[engines.DataRunner]:
        return engines.current().data_runner

    @classmethod
    def _parallel_check(cls, options: Mapping[str, Any]) -> None:
        check_choice("wire_dtype", options.get("wire_dtype"), None, "bfloat16", "float16")
        check_flag("sync_batch_norm", options.get("sync_batch_norm", True))

    def _parallel_call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runner, call = self._parallel_runner, (args, kwargs)
        plan = runner.plan(call, compiled=self.jit_compile)
        if plan.is_whole:
            (result,) = runner.run([call], [None], plan)
            self._parallel_warn_of(plan)  # after the call: its error comes first
            return result.outputs
        slices = _slice(call, len(self.devices))
        results = runner.run(slices.calls, slices.sizes, plan)
        self._parallel_warn_of(plan)
        self._parallel_assign_updates(results, slices.shares, plan)
        self._parallel_add_losses(results, slices, plan)
        return plan.finish(_merge_outputs(results, slices))

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with given values of its variables, as Keras does."""
        return self._parallel_runner.stateless_call(super().stateless_call, args, kwargs)

    def _parallel_warn_of(self, plan: engines.Plan) -> None:
        """Warns once if the model can't use its devices, or if its results may differ."""
        if len(self.devices) == 1:
            return
        if plan.obstacle:
            text = (
                f"{self.name!r} runs on {self.devices[0]!r} alone, and not on "
                f"{len(self.devices)} devices: {plan.obstacle}. The numbers are those of one "
                "device."
            )
        elif plan.doubt:
            text = (
                f"{self.name!r} could not be tried on made-up rows ({plan.doubt}). We assume that "
                "its rows are independent, and that the losses and states that its layers add or "
                "assign are means over the rows. Otherwise the numbers differ from one device's."
            )
        else:
            return
        if text not in self._parallel_warnings:
            self._parallel_warnings.add(text)
            warnings.warn(text, stacklevel=2)

    def _parallel_assign_updates(
        self, results: Sequence[engines.Result], shares: Sequence[Any], plan: engines.Plan
    ) -> None:
        """Assigns the states that the replicas computed, merged by the plan's rules."""
        for column in zip(*(result.updates for result in results)):
            variable = column[0][0]
            is_float = keras.backend.is_float_dtype(variable.dtype)
            rule = plan.updates.get(id(variable), engines.MEAN if is_float else engines.SAME)
            before = keras.ops.convert_to_tensor(variable)
            variable.assign(engines.combine(rule, [value for _, value in column], shares, before))

    def _parallel_add_losses(
        self, results: Sequence[engines.Result], slices: _Slices, plan: engines.Plan
    ) -> None:
        """Adds the losses of the whole batch, merged from the slices' losses."""
        for rule, losses in zip(plan.losses, zip(*(result.losses for result in results))):
            if rule == engines.ROWS:
                loss = BatchMerge(name="merge_loss")(losses, whole=slices.whole)
            else:
                loss = engines.combine(rule, losses, slices.shares)
            # Not `self.add_loss`: a functional model has it for symbolic losses only.
            keras.Layer.add_loss(self, loss)


@dataclasses.dataclass(frozen=True)
class _Slices:
    """A call cut along the rows of its batch.

    Attributes:
        calls: the arguments of each replica.
        sizes: the rows that belong to each; 0 if a replica only has a copy of the last row.
        shares: each size as a part of the batch.
        whole: the tensors of the whole call.
    """

    calls: list[Any]
    sizes: list[Any]
    shares: list[Any]
    whole: list[Any]


def _slice(call: Any, count: int) -> _Slices:
    """Cuts a call into `count` slices, on the host, so that each device receives only its slice."""
    tensors, restore = split_tensors(call, keras.ops.is_tensor)
    with engines.current().on_device("cpu:0"):
        parts = BatchSlice(count, name="slice")(tensors)
    rows = batch_rows(tensors)
    sizes = [slice_bounds(rows, index, count)[1] for index in range(count)]
    total = keras.ops.cast(keras.ops.maximum(rows, 1), "float64")
    shares = [keras.ops.cast(size, "float64") / total for size in sizes]
    # For a batch without rows, the first replica's results equal those of one device.
    shares[0] = keras.ops.where(keras.ops.equal(rows, 0), keras.ops.ones_like(total), shares[0])
    return _Slices([restore(part) for part in parts], sizes, shares, tensors)


def _merge_outputs(results: Sequence[engines.Result], slices: _Slices) -> Any:
    taken = [engines.take_apart(result.outputs) for result in results]
    restore = taken[0][1]
    return restore(BatchMerge(name="merge")([parts for parts, _ in taken], whole=slices.whole))
