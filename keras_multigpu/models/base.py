"""What all parallel models share: the template, its weights, its look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.models.costs import variables_bytes
from keras_multigpu.models.saving import SavedModel

# What a model has of its own once it is compiled: never looked up in the template.
_COMPILED = frozenset({"optimizer", "_compile_config", "_compiled_trainable_state"})


class ParallelModel(SavedModel):
    """A model that calls replicas of another one, its template.

    It is an instance of the template's own class as well: methods that the class defines
    (`train_step`, `compute_loss`, `metrics`, ...) act on the parallel model, and attributes that
    it has not got itself are the template's. Its weights are the template's variables
    themselves, and files are written as the template would write them.

    Args:
        template: the model to make parallel.
        devices: the devices to use, as `keras_multigpu.list_devices` names them.
        options: the mode's options, all of them.

    Attributes:
        template: the model that was made parallel.
        devices: the names of the devices in use.
        mode: the name of the mode.
        options: the mode's options.
    """

    mode: str
    # Kept from Keras's walk over a model's parts, whose paths name the weights in a file.
    _hidden = frozenset({"template", "_template"})
    _spreads_weights = False  # over the devices; else it spreads the rows, or whole replicas
    _is_left_to_keras = False  # on one device, the one where Keras computes by itself
    _replicas: engines.Replicas | None = None

    def __init__(self, template: keras.Model, devices: Sequence[str], options: dict[str, Any]):
        # The template casts its inputs itself, each to the type that it declares.
        keras.Model.__init__(self, name=template.name, dtype=template.dtype_policy, autocast=False)
        self._template = template
        self.devices = tuple(devices)
        self.options = dict(options)
        for name, value in vars(template).items():
            if isinstance(value, keras.Metric) and not name.startswith("_"):
                setattr(self, name, value)

    @classmethod
    def _check(cls, template: keras.Model, devices: Sequence[str], options: dict[str, Any]) -> None:
        """Refuses, with a clear error, what the mode can't do: implemented by each mode."""
        raise NotImplementedError

    def _call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The mode's forward pass: implemented by each mode."""
        raise NotImplementedError

    def place(self) -> None:
        """Puts the weights where this model has them: in modes that move the template's.

        Another parallel model of the same template may have moved them since.
        """

    def _keeps_outputs(self) -> bool:
        """Whether what the template was compiled with suits the parallel model's outputs."""
        return True

    def least_bytes(self, rows: int) -> int | None:
        """The bytes that devices must send each other in a training step, all together.

        They are a bound for weights, gradients and activations in this mode, however it is done.
        A mean over n devices of the gradients of weights of P bytes, known to all of them,
        needs 2 x P x (n - 1) (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
        clusters of workstations", 2009).

        Args:
            rows: the rows of the batch.

        Returns:
            The bytes, or `None` where no bound is known.
        """
        return 2 * variables_bytes(self.trainable_variables) * (len(self.devices) - 1)

    @property
    def template(self) -> keras.Model:
        """The model that was made parallel. It shares its weights with this one."""
        return self._template

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _COMPILED or "_template" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._template, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A plain setting that the template's `call` reads is the template's; what Keras and the
        # mode keep, and objects with a state of their own, are this model's.
        template = vars(self).get("_template")
        is_setting = isinstance(value, (bool, int, float, str)) and not name.startswith("_")
        if is_setting and name in vars(template or self) and name not in vars(self):
            setattr(template, name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._template)} - self._hidden)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model, after building its template where that is still to be done."""
        if not self.built:
            self._build(args, kwargs)
        # Not `super()`: a `__call__` of the template's own class is the replicas' affair.
        return keras.Model.__call__(self, *args, **kwargs)

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Creates the variables that a call with these arguments needs."""
        engines.current().build(self._template, (args, kwargs))

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Builds the template: its arguments are the template's."""
        self._template.build(*args, **kwargs)

    @property
    def built(self) -> bool:
        """Whether the template's variables exist."""
        return "_template" in vars(self) and self._template.built

    @built.setter
    def built(self, value: bool) -> None:
        pass  # Keras notes here what the template knows.

    @property
    def trainable(self) -> bool:
        """Whether the template is trainable."""
        return self._template.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._template.trainable = value

    @property
    def layers(self) -> list[keras.Layer]:
        """The template's layers."""
        return self._template.layers

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The template's symbolic outputs."""
        return self._template.compute_output_spec(*args, **kwargs)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The template's output shapes."""
        return self._template.compute_output_shape(*args, **kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        """Makes the function of a training step, as Keras does."""
        return self._make_step(super().make_train_function, self.train_function, force)

    def make_test_function(self, force: bool = False) -> Any:
        """Makes the function of an evaluation step, as Keras does."""
        return self._make_step(super().make_test_function, self.test_function, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes the function of a prediction step, as Keras does."""
        return self._make_step(super().make_predict_function, self.predict_function, force)

    def _make_step(self, make: Any, made: Any, force: bool) -> Any:
        if made is None or force:
            self._retrace()
        with engines.current().step_scope(self, self._is_left_to_keras):
            return make(force)

    def _retrace(self) -> None:
        """Has the replicas traced anew: the template may have changed."""
        if self._replicas is not None:
            self._replicas.retrace()

    def _check_change(self, method: str) -> None:
        """Refuses a change of the template's layers where the mode can't follow it."""

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the template's summary, and a line on the mode and the devices."""
        super().summary(*args, **kwargs)
        line = f" Parallel: mode {self.mode!r} on {', '.join(self.devices)}"
        kwargs.get("print_fn", print)(line)
