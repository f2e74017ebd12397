"""What a committee trains: the loss of its mix, or the own loss of each replica."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_multigpu import engines
from keras_multigpu.arguments import check_choice, number_of
from keras_multigpu.layers.outputs import are_alike
from keras_multigpu.modes.disagreement import UnmixedModel
from keras_multigpu.modes.mixed import call_mix

_CURE = "Set `parallel.loss_of = 'mix'` and compile the model again."


class OwnLosses(UnmixedModel):
    """A mixed model that can train each replica by its own loss."""

    _parallel_has_train_step = False  # the template's own, which may go round `compute_loss`
    _parallel_mixed: Any = None  # the outputs of the latest call
    _parallel_results: Sequence[engines.Result] = ()  # the replicas', which were mixed
    _parallel_is_in_step = False  # of Keras's
    _parallel_mix_metric: keras.Metric  # the mix's loss, where the replicas' own are reported

    @property
    def loss_of(self) -> str:
        """What is trained: `"mix"` or `"replicas"`. Compile the model again after you set it."""
        given: str | None = self._parallel_options["loss_of"]
        if given is not None:
            return given
        is_committee = self._parallel_options["replicas"] == "independent"
        is_mix = self._parallel_mix_has_weights or self._parallel_has_train_step
        return "replicas" if is_committee and not is_mix else "mix"

    @loss_of.setter
    def loss_of(self, value: str | None) -> None:
        check_choice("loss_of", value, None, "mix", "replicas")
        self._parallel_options["loss_of"] = value
        if self.compiled:
            self.compiled, self._parallel_undone = False, "loss_of"

    @property
    def _parallel_trained_apart(self) -> bool:
        """Whether several models are trained, each with its own loss."""
        return self.loss_of == "replicas" and bool(self._parallel_clones)

    def _parallel_on_compiling(self, name: str, value: Any) -> None:
        super()._parallel_on_compiling(name, value)
        if name == "optimizer" and value is not None and self.loss_of == "replicas":
            self._parallel_check_mix()
            if self._parallel_clones:
                self._parallel_check_step()

    def _parallel_place_updates(self, optimizer: Any) -> None:
        apart = self._parallel_trained_apart
        self._parallel_runner.place_updates(optimizer, apart=apart)
        if apart:
            _check_loss_scale(optimizer)

    def _parallel_check_step(self) -> None:
        """Refuses a step of the template's that reads what each replica has of its own."""
        names = engines.state_read(self.template, "train_step")
        if names:
            raise ValueError(
                "With `loss_of='replicas'` each replica is trained by its own loss, and one "
                "`train_step` trains all of them. Received: the `train_step` of "
                f"{type(self.template).__name__}, which reads "
                f"{', '.join(f'`self.{name}`' for name in names)}: the template's, not each "
                "replica's. Read it in `compute_loss` or in `call`, which run for each replica, or "
                "set `parallel.loss_of = 'mix'` and compile the model again."
            )

    def _parallel_check_mix(self) -> None:
        """Refuses a mix whose weights would not be trained."""
        count = len(self._parallel_mix.trainable_variables)
        if count:
            raise ValueError(
                "With `loss_of='replicas'` every replica is trained by its own loss, which needs a "
                f"mix without weights. Received: mix={self._parallel_mix!r} with "
                f"{number_of(count, 'weight')}. {_CURE}"
            )

    @contextlib.contextmanager
    def _parallel_in_step(self) -> Iterator[None]:
        self._parallel_is_in_step = True
        try:
            yield
        finally:  # the outputs would keep the step's graph
            self._parallel_is_in_step, self._parallel_mixed, self._parallel_results = (
                False,
                None,
                (),
            )

    @property
    def _parallel_shows_mix_loss(self) -> bool:
        # A step that is set on an instance may be the template's, which has no such metric.
        is_set = not {"train_step", "test_step"}.isdisjoint(vars(self.template))
        return self.compiled and self.loss_of == "replicas" and not is_set

    @property
    def metrics(self) -> list[keras.Metric]:
        """The metrics; where the replicas' own losses are reported, the mix's loss is beside them.

        Keras's metrics see the mix.
        """
        metrics = super().metrics
        if not self._parallel_shows_mix_loss:
            return metrics
        return [*metrics[:1], self._parallel_mix_metric, *metrics[1:]]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:  # type: ignore[no-untyped-def]
        """The loss of the mix, or the mean of the replicas' own losses.

        In the second case the logs have the loss of the mix under the name `mix_loss`.

        Raises:
            ValueError: if the replicas' own losses can't be computed.
        """
        is_of_step = training or self._parallel_is_in_step  # Keras also calls it to build the loss
        given = {"sample_weight": sample_weight, "training": training}
        if not is_of_step:
            return self._parallel_inherited("compute_loss")(x, y, y_pred, **given)
        if self.loss_of == "mix":
            with self._parallel_runner.acting_for_all():
                return self._parallel_inherited("compute_loss")(x, y, y_pred, **given)
        self._parallel_check_mix()
        if y_pred is not self._parallel_mixed:
            raise ValueError(
                "With `loss_of='replicas'` the loss is the mean of the replicas' own losses, which "
                "needs `compute_loss` to be given the model's outputs as they are. Received: "
                f"y_pred={y_pred}. {_CURE}"
            )
        outputs = [self._parallel_own_outputs(one.outputs, x) for one in self._parallel_results]
        losses = self._parallel_losses(x, y, outputs, given)
        # A step of your own on JAX may have no values of metrics: then it reports none.
        if self._parallel_shows_mix_loss and engines.are_given(self.metrics_variables):
            mix_loss = self._parallel_mix_loss(x, y, y_pred, given)
            rows = engines.count_rows(_first((x, y_pred)))
            self._parallel_mix_metric.update_state(mix_loss, rows)
        return _mean_apart(*losses) if self._parallel_trained_apart else sum(losses) / len(losses)

    @property
    def _parallel_acts(self) -> bool:
        """Whether a `compute_loss` of the template's may read what each replica has of its own."""
        return bool(self._parallel_clones) and "compute_loss" in engines.own_steps(self.template)

    def _parallel_losses(
        self, x: Any, y: Any, outputs: Sequence[Any], given: dict[str, Any], keep: bool = True
    ) -> list[Any]:
        """The losses of the outputs of each replica; without `keep` nothing is assigned."""
        if not self._parallel_acts:
            own_loss = self._parallel_inherited("compute_loss")
            return [own_loss(x, y, one, **given) for one in outputs]
        losses = []
        for number, one in enumerate(outputs):
            own = self._parallel_results[number].losses
            with self._parallel_runner.acting(number, own, keep=keep):
                losses.append(self.template.compute_loss(x, y, one, **given))
        return losses

    def _parallel_mix_loss(self, x: Any, y: Any, mixed: Any, given: dict[str, Any]) -> Any:
        """The loss of the mix: if it reads what each replica has of its own, the mean of theirs."""
        count = len(self._parallel_results) if self._parallel_acts else 1
        with _kept(self.metrics_variables):
            losses = self._parallel_losses(x, y, [mixed] * count, given, keep=False)
        return sum(losses) / count

    def _parallel_own_outputs(self, outputs: Any, features: Any) -> Any:
        """The outputs from which one replica's own loss is computed.

        If the mix is a function that keeps their shapes, they are the replica's outputs. A layer,
        or a mix with a different shape (means and variances, say), decides what is compared with
        the targets: it then mixes copies of these outputs, one for each replica.
        """
        is_function = isinstance(self._parallel_mix, keras.layers.Lambda)
        if is_function and are_alike(outputs, self._parallel_mixed):
            return outputs
        return call_mix(self._parallel_mix, [outputs] * len(self._parallel_results), features)


@keras.ops.custom_gradient
def _mean_apart(*losses: Any) -> Any:
    """The mean of losses, with the gradient of their sum: each loss is minimized separately."""

    def backward(*args: Any, upstream: Any = None) -> tuple[Any, ...]:
        (upstream,) = args if upstream is None else (upstream,)  # by the backend
        return (upstream,) * len(losses)

    return sum(losses) / len(losses), backward


def _check_loss_scale(optimizer: keras.Optimizer) -> None:
    """Warns of an optimizer that skips steps, because it skips them for all members."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        warnings.warn(
            "Where gradients overflow, a `LossScaleOptimizer` skips the step. With "
            "`loss_of='replicas'` the replicas are trained apart but share one optimizer, so "
            "an overflow in one of them skips the step for all. Received: "
            f"optimizer={optimizer.name!r}. Use the policy 'mixed_bfloat16', which needs no loss "
            "scale.",
            stacklevel=4,
        )


@contextlib.contextmanager
def _kept(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Scope after which variables have the values of before: a loss may update metrics."""
    values = [keras.ops.copy(variable) for variable in variables]
    yield
    for variable, value in zip(variables, values):
        variable.assign(value)


def _first(structure: Any) -> Any:
    return next(one for one in keras.tree.flatten(structure) if one is not None)
