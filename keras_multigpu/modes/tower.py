"""Tower mode: every device runs a replica on the whole batch, and a layer mixes the outputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import as_integer, check_choice, number_of, positive_integer
from keras_multigpu.graphs.costs import row_bytes
from keras_multigpu.graphs.graph import fresh_input, symbolic_ends
from keras_multigpu.layers.mixing import get_mix, is_average
from keras_multigpu.layers.outputs import hand_on_logits
from keras_multigpu.modes.base import add_losses
from keras_multigpu.modes.members import Members
from keras_multigpu.modes.mixed import call_mix, features_of
from keras_multigpu.modes.one_model import lent


@keras.saving.register_keras_serializable(package="keras_multigpu")
class TowerParallel(Members):
    """Replicas that see the whole batch, mixed into one prediction.

    `make_parallel` has the options. With `loss_of="replicas"`, independent replicas are trained as
    separate models: each with the gradients of its own loss, clipped separately. The logs' `loss`
    is the mean of their losses, and `mix_loss` the loss of the mix.

    Attributes:
        clones: the replicas after the first, if they are independent.
    """

    mode = "tower"
    _parallel_names = ("replicas", "clones", "mix", "loss_of", "predict_replicas", "disagreement")
    _parallel_hidden = Members._parallel_hidden | {"replicas"}
    _parallel_is_told = False  # that the replicas are equal
    _parallel_runner: engines.TowerRunner

    def __init__(
        self,
        template: keras.Model,
        devices: Sequence[str],
        *,
        replicas: str = "shared",
        mix: Any = "mean",
        num_replicas: int | None = None,
        loss_of: str | None = None,
    ):
        count = int(num_replicas or len(devices))
        if count < len(devices):
            warnings.warn(
                f"{len(devices) - count} of {len(devices)} devices would do nothing: in mode "
                f"'tower' each computes whole replicas. Received: num_replicas={num_replicas!r}. "
                f"Give `n_gpus={count}`, or {len(devices)} replicas.",
                stacklevel=4,
            )
        options = {"replicas": replicas, "num_replicas": count, "loss_of": loss_of}
        self._parallel_unmixed_functions = {}
        super().__init__(template, devices, options)
        homes = [self.devices[number % len(self.devices)] for number in range(count)]
        self._parallel_homes = tuple(homes)
        if replicas == "independent":
            self._parallel_make_clones()
        self._parallel_mix_metric = keras.metrics.Mean(name="mix_loss")
        self._parallel_has_train_step = "train_step" in engines.own_steps(template)
        self._parallel_run_on(engines.current().tower_runner(self.replicas, homes))
        self.mix = mix

    @classmethod
    def _parallel_on_fewer(cls, options: Mapping[str, Any]) -> str:
        return "It computes the same, with several replicas on a device."

    @classmethod
    def _parallel_check(cls, options: Mapping[str, Any]) -> None:
        replicas = options.get("replicas", "shared")
        if as_integer(replicas) is not None:
            raise ValueError(
                '`replicas` must be "shared" or "independent". Received: '
                f"replicas={replicas}. For a number of replicas write `num_replicas={replicas}`."
            )
        check_choice("replicas", replicas, "shared", "independent")
        check_choice("loss_of", options.get("loss_of"), None, "mix", "replicas")
        if options.get("num_replicas") is not None:
            positive_integer(
                "num_replicas", options["num_replicas"], expected=", or None for one per device"
            )
        get_mix(options.get("mix", "mean"))

    def _parallel_least_bytes(self, rows: int) -> int | None:
        """As in all modes; with independent replicas only outputs and their gradients cross."""
        if self._parallel_options["replicas"] == "shared":
            return super()._parallel_least_bytes(rows)
        outputs = keras.tree.flatten(getattr(self.template, "outputs", None))
        if None in outputs:
            return None
        away = sum(home != self._parallel_homes[0] for home in self._parallel_homes)
        return 2 * away * rows * sum(map(row_bytes, outputs))

    def _parallel_describe(self) -> str:
        options = self._parallel_options
        replicas = number_of(options["num_replicas"], f"{options['replicas']} replica")
        mix = self._parallel_mix
        mix = getattr(mix, "function", type(mix)).__name__  # a `Lambda` has one
        return f"{super()._parallel_describe()}: {replicas}, mixed by {mix}"

    @property
    def built(self) -> bool:
        """Whether the variables of all replicas and of the mix exist."""
        parts = (self.template, *self._parallel_clones, self._parallel_mix)
        return all(part is not None and engines.is_built(part) for part in parts)

    @built.setter
    def built(self, value: bool) -> None:
        pass  # Keras sets this; the parts know it.

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Builds the replicas, with the template's arguments."""
        for model, home in zip((self.template, *self._parallel_clones), self._parallel_homes):
            with engines.current().on_device(home):
                model.build(*args, **kwargs)
        self._parallel_set_apart()

    def _parallel_build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        models = [self.template, *self._parallel_clones, self._parallel_mix]
        with lent(self, self._parallel_clones):
            engines.current().build(self._parallel_call_one_by_one, (args, kwargs), models)
        self._parallel_set_apart()

    def _parallel_call_one_by_one(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the replicas as an ordinary model, for building and export.

        Gradients are not placed on devices.
        """
        outputs = []
        for model, home in zip(self.replicas, self._parallel_homes):
            with engines.current().on_device(home):
                outputs.append(model(*args, **kwargs))
        return call_mix(self._parallel_mix, outputs, features_of(args, kwargs))

    def _parallel_call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._parallel_follow()
        if engines.active_scope() and not self._parallel_loops:
            self._parallel_runner.lend()
        is_training = kwargs.get("training") or engines.is_training()
        if is_training:
            self._parallel_check_overwritten()
        if self._parallel_unmixed:
            kwargs = {**kwargs, "training": True}
        with lent(self, self._parallel_clones):  # their `call` may read how the model is compiled
            results = self._parallel_runner.run((args, kwargs))
        if is_training and self._parallel_are_equal(results):
            self._parallel_warn_of_repeating()
        self._parallel_assign_updates(results)
        by_loss = zip(*(result.losses for result in results))
        add_losses(self, [sum(losses) / len(results) for losses in by_loss])
        outputs = [result.outputs for result in results]
        if self._parallel_unmixed is not None:
            return outputs
        mixed = call_mix(self._parallel_mix, outputs, features_of(args, kwargs))
        if is_average(self._parallel_mix) and self._parallel_are_equal(results):
            hand_on_logits(outputs, mixed)
        if self.loss_of == "replicas":
            self._parallel_mixed, self._parallel_results = mixed, results
        return mixed

    def _parallel_are_equal(self, results: Sequence[engines.Result]) -> bool:
        """Whether all replicas' outputs are equal: the same weights, and no random numbers."""
        if len(results) == 1:
            return True
        return not self._parallel_clones and not any(result.is_random for result in results)

    def _parallel_warn_of_repeating(self) -> None:
        """Warns once, if several devices train one replica, again and again."""
        if self._parallel_is_told or len(set(self._parallel_homes)) == 1:
            return
        self._parallel_is_told = True
        warnings.warn(
            f"Each of {len(set(self._parallel_homes))} devices trains {self.name!r} on the whole "
            "batch, with the same numbers: shared replicas that draw no random numbers are equal. "
            "This takes as long as on one device. Received: mode='tower', replicas='shared', and a "
            "model without random layers such as `Dropout`. Use `mode='data'` to divide the batch, "
            "or `replicas='independent'` for a committee.",
            stacklevel=2,
        )

    def _parallel_assign_updates(self, results: Sequence[engines.Result]) -> None:
        """Sets shared state to the mean over the replicas; counters and seeds to the first one's.

        If single replicas are predicted, only counters and seeds change.
        """
        updates: dict[int, tuple[keras.Variable, list[Any]]] = {}
        for result in results:
            for variable, value in result.updates:
                updates.setdefault(id(variable), (variable, []))[1].append(value)
        for variable, values in updates.values():
            if not keras.backend.is_float_dtype(variable.dtype):
                variable.assign(values[0])
            elif self._parallel_unmixed is None:
                variable.assign(values[0] if len(values) == 1 else sum(values) / len(values))

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Exports the replicas and their mix for serving, without device names in the graph.

        Raises:
            ValueError: if the template has no symbolic inputs.
        """
        if not getattr(self.template, "inputs", None):
            raise ValueError(
                "A tower model is exported by the symbolic inputs of its template. Received: "
                f"the template {self.template!r}, which has none. Export the replicas one by "
                "one: `parallel.replicas[0].export(...)`."
            )
        inputs = keras.tree.map_structure(fresh_input, symbolic_ends(self.template)[0])
        whole = keras.Model(inputs, self._parallel_call_one_by_one(inputs))
        whole(inputs)  # to ONNX Keras exports only what was called
        return whole.export(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """As in the other modes, and the mix; `loss_of` as it is, whatever the default is."""
        return {
            **super().get_config(),
            "loss_of": self.loss_of,
            "mix": keras.saving.serialize_keras_object(self._parallel_mix),
        }

    @classmethod
    def _parallel_adapt(cls, request: engines.Request) -> engines.Request:
        # A file that doesn't say it was written when the mix was always trained.
        return dataclasses.replace(request, options={"loss_of": "mix", **request.options})

    def _parallel_check_overwritten(self) -> None:
        """Refuses to train values that are replaced by their gradient, which replicas would add."""
        overwritten = [v for v in self.template.trainable_variables if v.overwrite_with_gradient]
        if overwritten and not self._parallel_clones and len(self.replicas) > 1:
            raise ValueError(
                "Shared replicas can't train values that their gradient replaces, such as the "
                f"scales of float8 layers. Received: {overwritten[0].path!r} and "
                f'{len(self.replicas)} replicas. Use `mode="data"`.'
            )
