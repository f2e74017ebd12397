"""What all parallel models share: the template, calls of it, and how they describe themselves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import short
from keras_multigpu.graphs.costs import variables_bytes
from keras_multigpu.modes.forgotten import note_use, warn_of_cloning, warn_of_template
from keras_multigpu.modes.one_model import calling, computing
from keras_multigpu.modes.stepped import SteppedModel
from keras_multigpu.modes.symbolic import CalledOutputs, is_read_by_keras

_OF_TOWERS = ("predict_replicas", "disagreement", "replicas", "clones", "mix", "loss_of")
_NOT_OF_TOWERS = {
    "explain": "tells what one device computes alone in mode 'data'",
    "placement": "tells which devices have which weights in the modes 'data' and 'model'",
}

_CHOSEN = ("devices", "template", "placement", "stages", "replicas", "clones")
_OPTIONS = {
    "data": ("wire_dtype", "shard", "model_devices"),
    "tower": ("replicas", "mix", "num_replicas", "loss_of"),
    "model": ("placement",),
}


class ParallelModel(SteppedModel):
    """A model that calls replicas of another one, its template.

    It is also an instance of the template's class, and has the template's attributes (see
    `OneModel` for the rule). Methods that the class defines or that are set on the instance
    (`train_step`, `compute_loss`, ...) act on the parallel model. Its weights are the template's
    variables themselves, and its files are the template's.

    Args:
        template: the model to make parallel.
        devices: the devices to use, as `keras_multigpu.list_devices` names them.
        options: the mode's options, all of them.

    Attributes:
        template: the model that was made parallel.
        devices: the names of the devices in use.
        mode: the name of the mode.

    The mode's options are attributes, too (`parallel.shard`), unless the template has attributes of
    these names.
    """

    _parallel_names: tuple[str, ...] = ()  # the mode's public attributes beside those of all modes
    # Those that an attribute of a template may replace.
    _parallel_methods: tuple[str, ...] = ("function",)

    def __init__(self, template: keras.Model, devices: Sequence[str], options: dict[str, Any]):
        super().__init__(template, devices)
        self._parallel_options = dict(options)
        self._parallel_called = CalledOutputs()

    @classmethod
    def _parallel_runner_class(cls) -> type[engines.Runner]:
        """The backend's runner for this mode: implemented by each mode."""
        raise NotImplementedError

    @classmethod
    def _parallel_check(cls, options: Mapping[str, Any]) -> None:
        """Refuses invalid values of the mode's options: implemented by each mode."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        fixed = getattr(type(self), name, None) if name in _CHOSEN else None
        if name == "mode" or (isinstance(fixed, property) and fixed.fset is None):
            raise AttributeError(
                f"`{name}` can't be set: it is chosen when a model is made parallel. Received: "
                f"{name}={short(value)}, set on {self.name!r}. Make the template parallel again: "
                "`make_parallel(model.template, devices=..., mode=...)`."
            )
        mode = next((mode for mode, names in _OPTIONS.items() if name in names), None)
        mode = self.mode if name == "n_gpus" else mode
        # A user's own class may have an attribute of that name.
        is_kerass = mode and type(self.template).__module__.partition(".")[0] == "keras"
        if is_kerass and not hasattr(type(self), name) and name not in vars(self):
            raise AttributeError(
                f"`{name}` is chosen when a model is made parallel. Received: {name}={value!r}, "
                f"set on {self.name!r}. Write `make_parallel(model.template, mode={mode!r}, "
                f"{name}=...)`."
            )
        super().__setattr__(name, value)

    def _parallel_call_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The mode's forward pass: implemented by each mode."""
        raise NotImplementedError

    def _parallel_in_step(self) -> contextlib.AbstractContextManager[None]:
        """The mode's scope around `train_step`, `test_step` and `predict_step`."""
        return contextlib.nullcontext()

    def _parallel_place(self) -> None:
        """Moves the weights back to this model's devices (modes that place weights only)."""

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
        note_use(self)
        if not engines.is_built(self):
            with computing(self):
                self._parallel_build(args, kwargs)
        with calling(self), engines.current().remote.explained():
            # Not `super()`: the replicas call the `__call__` of the template's own class.
            return keras.Model.__call__(self, *args, **kwargs)

    def stateless_call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with given values of its variables, as Keras does."""
        own = self._parallel_inherited("stateless_call")
        return self._parallel_runner.stateless_call(own, args, kwargs)

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

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Builds the template, with the same arguments."""
        self.template.build(*args, **kwargs)

    @property
    def output(self) -> Any:
        """The symbolic outputs, of a call of this model on its symbolic inputs."""
        if is_read_by_keras("output"):
            return super().output
        return self._parallel_called.of(self, self._parallel_described_outputs())

    @property
    def outputs(self) -> Any:
        """The symbolic outputs as a list, of a call of this model on its symbolic inputs."""
        described = self._parallel_described_outputs()
        if is_read_by_keras("outputs"):
            return described
        made = self._parallel_called.of(self, described)
        return made if made is described else keras.tree.flatten(made)

    @outputs.setter
    def outputs(self, value: Any) -> None:
        self.template.outputs = value  # of a user's class, which may have such an attribute

    @property
    def layers(self) -> list[keras.Layer]:
        """The template's layers."""
        warn_of_cloning(self)
        return self.template.layers

    def _parallel_described_outputs(self) -> Any:
        """The list of symbolic outputs by which Keras describes the model."""
        return self.template.outputs

    def _run_through_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Copies the template's graph for `keras.models.clone_model`."""
        warn_of_cloning(self)
        return self.template._run_through_graph(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The template's symbolic outputs."""
        return self.template.compute_output_spec(*args, **kwargs)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The template's output shapes."""
        return self.template.compute_output_shape(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        inherited = getattr(super(), "__getattr__", None)  # of the template's class
        if inherited is not None:
            return inherited(name)
        if name in _OPTIONS[self.mode] and not hasattr(type(self), name):
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

    @property
    def metrics(self) -> list[keras.Metric]:
        """The metrics; those of layers in the template's order, by which equal names are told."""
        places = {id(metric): place for place, metric in enumerate(self.template.metrics)}
        found = super().metrics
        shared = sorted((one for one in found if id(one) in places), key=lambda m: places[id(m)])
        ordered = iter(shared)
        return [next(ordered) if id(one) in places else one for one in found]

    def _parallel_check_change(self, method: str) -> None:
        """Refuses a change of the template's layers that the mode can't follow."""

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the template's summary, the mode, the devices, and what the replicas add up to."""
        more = [layer for layer in self._parallel_layers() if layer.variables]
        # Keras's totals would count replicas and a mix that its rows don't show.
        (self.template.summary if more else super().summary)(*args, **kwargs)
        show = kwargs.get("print_fn") or (args[2] if len(args) > 2 else None) or print
        show(f" Parallel: {self._parallel_describe()}")
        if more:
            parts = [f"{layer.count_params():,} of {layer.name!r}" for layer in more]
            own = f"{self.template.count_params():,} of {self.template.name!r}"
            show(f" Parameters: {own} + {' + '.join(parts)} = {self.count_params():,}")

    def _parallel_describe(self) -> str:
        """The mode and the devices in a few words."""
        return f"mode {self.mode!r} on {', '.join(self.devices)}"

    def __repr__(self) -> str:
        built = f"name={self.name}, built={self.built}"
        return f"<{type(self).__name__} {built}, {self._parallel_describe()}>"
