"""What all parallel models share: the options, calls of the template, where the weights are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_flag, short
from keras_multigpu.engines.shared import unchanged
from keras_multigpu.graphs.costs import variables_bytes
from keras_multigpu.modes.described import DescribedModel
from keras_multigpu.modes.forgotten import note_use, warn_of_template
from keras_multigpu.modes.one_model import computing, own

_OF_TOWERS = ("predict_replicas", "disagreement", "replicas", "clones", "mix", "loss_of")
_NOT_OF_TOWERS = {
    "explain": "tells what one device computes alone in mode 'data'",
    "placement": "tells which devices have which weights in the modes 'data' and 'model'",
}

_CHOSEN = ("devices", "template", "placement", "stages", "replicas", "clones")
OPTIONS = {
    "data": ("wire_dtype", "shard", "model_devices"),
    "tower": ("replicas", "mix", "num_replicas", "loss_of"),
    "model": ("placement",),
}
"""The options of each mode."""


def mode_with(option: str) -> str | None:
    """The mode that has an option."""
    return next((mode for mode, names in OPTIONS.items() if option in names), None)


class ParallelModel(DescribedModel):
    """A model that calls replicas of another one, its template.

    It is also an instance of the template's class, and has the template's attributes (see
    `OneModel` for the rule). Methods that the class defines or that are set on the instance
    (`train_step`, `compute_loss`, ...) act on the parallel model. Its weights are the template's
    variables themselves, and its files are the template's.

    Attributes:
        template: the model that was made parallel.
        devices: the names of the devices in use.
        mode: the name of the mode.

    The mode's options (see `make_parallel`) are attributes, too (`parallel.shard`), unless the
    template has attributes of these names.
    """

    _parallel_names: tuple[str, ...] = ()  # the mode's public attributes beside those of all modes
    # Those that an attribute of a template may replace.
    _parallel_methods: tuple[str, ...] = ("function",)

    def __init__(self, template: keras.Model, devices: Sequence[str], options: dict[str, Any]):
        super().__init__(template, devices)
        self._parallel_options = dict(options)

    @classmethod
    def _parallel_runner_class(cls) -> type[engines.Runner]:
        """The backend's runner for this mode."""
        return getattr(engines.current(), f"{cls.mode}_runner")

    @classmethod
    def _parallel_check(cls, options: Mapping[str, Any]) -> None:
        """Refuses invalid values of the mode's options; its runner those that don't fit a model."""

    def __setattr__(self, name: str, value: Any) -> None:
        fixed = getattr(type(self), name, None) if name in _CHOSEN else None
        if name == "mode" or (isinstance(fixed, property) and fixed.fset is None):
            raise AttributeError(
                f"`{name}` can't be set: it is chosen when a model is made parallel. Received: "
                f"{name}={short(value)}, set on {self.name!r}. Make the template parallel again: "
                "`make_parallel(model.template, devices=..., mode=...)`."
            )
        mode = self.mode if name == "n_gpus" else mode_with(name)
        # A user's own class may have an attribute of that name.
        is_kerass = mode and type(self.template).__module__.partition(".")[0] == "keras"
        if is_kerass and not hasattr(type(self), name) and name not in vars(self):
            raise AttributeError(
                f"`{name}` is chosen when a model is made parallel. Received: {name}={value!r}, "
                f"set on {self.name!r}. Write `make_parallel(model.template, mode={mode!r}, "
                f"{name}=...)`."
            )
        # Not in `compile`: Keras compiles a loaded model only if it does not override `compile`.
        if name in ("loss", "optimizer"):
            self._parallel_on_compiling(name, value)
        super().__setattr__(name, value)
        if name == "optimizer" and value is not None:
            self._parallel_place_updates(value)

    def _parallel_on_compiling(self, name: str, value: Any) -> None:
        """Called before a loss or an optimizer is set; refuses what the mode can't train with."""

    def _parallel_place_updates(self, optimizer: Any) -> None:
        """Has an optimizer update each weight where it is."""
        self._parallel_runner.place_updates(optimizer)

    def _parallel_call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The mode's forward pass."""
        result = self._parallel_runner.run((args, kwargs))
        add_losses(self, result.losses)
        return result.outputs

    def _parallel_run_on(self, runner: engines.Runner) -> None:
        """Sets the runner: called once, when the mode's parts are made."""
        self._parallel_runner = runner
        self._parallel_steps = engines.current().steps(self, runner)
        if engines.is_built(self.template):
            self._parallel_lay_out()
            self._parallel_place()

    def _parallel_lay_out(self) -> None:
        """Puts the weights in their places, once they are built."""
        self._parallel_runner.lay_out()

    def _parallel_keeps_outputs(self) -> bool:
        """Whether the template's losses and metrics fit the parallel model's outputs."""
        return True

    def _parallel_least_bytes(self, rows: int) -> int | None:
        """The bytes that devices must send each other in a training step, in total.

        A lower bound for this mode, whatever the implementation. Averaging the gradients of weights
        of P bytes over n devices, with the mean on all devices, takes 2 x P x (n - 1) bytes
        (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
        workstations", 2009).

        Returns:
            The bytes; `None` if no bound is known.
        """
        return 2 * variables_bytes(self.trainable_variables) * (len(self.devices) - 1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; builds the template first if it is not built."""
        if kwargs.get("training") is True:  # others build the model, or look at its outputs
            note_use(self)
        if not engines.is_built(self):
            with computing(self):
                self._parallel_build(args, kwargs)
        # The template does what Keras's `__call__` would do after its own.
        in_call = unchanged(own(self), "in_call", True)
        with in_call, engines.current().remote.explained():
            # Not `super()`: the replicas call the `__call__` of the template's own class.
            return keras.Model.__call__(self, *args, **kwargs)

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with given values of its variables, as Keras does."""
        inherited = self._parallel_inherited("stateless_call")
        return self._parallel_runner.stateless_call(inherited, args, kwargs)

    def function(
        self,
        step: Callable[..., Any] | None = None,
        *,
        jit_compile: bool | None = None,
        rows: Collection[int | str] | None = None,
    ) -> Callable[..., Any]:
        """Makes a training step of your own run on all devices, with the numbers of one.

        The step may call any number of models, use tapes or `jax.grad`, and apply optimizers. On
        TensorFlow it is traced as a `tf.function` is, and again if the model's weights have moved;
        on JAX it is compiled as by `jax.jit`.

        Args:
            step: a function of structures of tensors. On TensorFlow of iterators and datasets,
                too: all devices compute the batch of `next(iterator)`, one device what is in a loop
                over a dataset. Without it, but with an option, the result is a decorator:
                `@parallel.function(rows=("x",))`.
            jit_compile: whether XLA compiles it, on TensorFlow.
            rows: the arguments whose first axis is the batch, by number or name. What comes through
                `*args` or `**kwargs` too, or all of it by their names (`rows=("kwargs",)`). By
                default all tensors that it takes, which must then have equally many rows. Only data
                mode splits rows.

        Returns:
            A function of the same arguments. It has no `get_concrete_function`; on TensorFlow
            `tf.function(result)` has.

        Raises:
            ValueError: if `step` is no function, or `rows` no tuple; and when it is called, if
                tensors have different numbers of rows and `rows` is not given, if `rows` names no
                argument of the call, or if on JAX the step assigns variables: there it takes them
                and returns their new values; and for a model over joined processes.

        Example:
            >>> import keras
            >>> from keras_multigpu import make_parallel
            >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            >>> parallel = make_parallel(model, 1)
            >>> predict = parallel.function(lambda x: parallel(x, training=False))
            >>> predict(keras.ops.ones((3, 4))).shape[0]
            3
        """
        if step is None and (jit_compile, rows) != (None, None):
            return functools.partial(self.function, jit_compile=jit_compile, rows=rows)
        if not callable(step):
            raise ValueError(
                "`step` must be a function of structures of tensors. Received: "
                f"step={step!r}. Write `parallel.function(step)`, and call the result; or, without "
                "options, `@parallel.function` above the step, without brackets."
            )
        check_flag("jit_compile", jit_compile, "as TensorFlow does")
        if rows is not None and (isinstance(rows, str) or not isinstance(rows, Collection)):
            raise ValueError(
                f"`rows` must be a tuple of arguments' numbers or names. Received: rows={rows!r}. "
                f"Write `rows=({0 if isinstance(rows, bool) else repr(rows)},)`."
            )
        if not self._parallel_runner.spreads_steps:
            warn_of_template(self, step)
        return self._parallel_runner.function(step, jit_compile, rows)

    def _parallel_build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Creates the variables that a call with these arguments needs."""
        engines.current().build(self.template, (args, kwargs), [self.template])
        # Keep the step functions: the step that builds the template has used no variable before.
        names = ("train_function", "test_function", "predict_function")
        functions = {name: getattr(self, name) for name in names}
        self._parallel_lay_out()
        for name, function in functions.items():
            setattr(self, name, function)

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Builds the template, with the same arguments, and places its weights."""
        self.template.build(*args, **kwargs)
        self._parallel_lay_out()
        self._parallel_place()

    def __getattr__(self, name: str) -> Any:
        inherited = getattr(super(), "__getattr__", None)  # of the template's class
        if inherited is not None:
            return inherited(name)
        if name in OPTIONS[self.mode] and not hasattr(type(self), name):
            return self._parallel_options[name]
        if name in _OF_TOWERS:
            raise AttributeError(
                f"`{name}` needs mode 'tower': replicas that see the whole batch. Received: "
                f"{self.name!r}, in mode {self.mode!r}. Make a committee: `make_parallel(model, "
                "mode='tower', replicas='independent')`."
            )
        if name in _NOT_OF_TOWERS:
            raise AttributeError(
                f"`{name}` {_NOT_OF_TOWERS[name]}. Received: {self.name!r}, in mode "
                f"{self.mode!r}. Read `summary()`."
            )
        return super().__getattribute__(name)  # raises the error of this attribute, again

    def _parallel_check_change(self, method: str) -> None:
        """Refuses a change of the template's layers that the mode can't follow."""


def add_losses(layer: keras.Layer, losses: Iterable[Any]) -> None:
    """Adds losses of the whole batch to a model, in place of those that its replicas computed."""
    for loss in losses:
        # Not `layer.add_loss`: a functional model has it for symbolic losses only.
        keras.Layer.add_loss(layer, loss)
    # Keras identifies a loss by its `id`. A replica's loss, freed by now, may have had the same
    # `id`; then the loss would also count as that of an inner layer, and so twice.
    for inner in layer._flatten_layers(include_self=False):
        inner._loss_ids.difference_update(layer._loss_ids)
