"""Where a committee's weights are on JAX, and what is left of a model when a step fails."""

import jax
import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(4)


def _template():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(2)])


def _devices(array):
    return {device.id for device in array.devices()}


def test_each_replicas_weights_and_slots_are_on_its_device(rng):
    x, y = rng.normal(size=(70, 6)), rng.normal(size=(70, 2))
    parallel = make_parallel(_template(), 4, mode="tower", replicas="independent")
    parallel.compile("adam", "mse")
    parallel.fit(x, y, verbose=0)
    for number, model in enumerate(parallel.replicas):
        assert [_devices(v.value) for v in model.variables] == 4 * [{number}]
    for variable in parallel.trainable_variables + parallel.optimizer.variables[2:]:
        shards = sorted(variable.value.addressable_shards, key=lambda shard: shard.index[0].start)
        assert [shard.device.id for shard in shards] == [0, 1, 2, 3]
        assert {shard.data.shape[0] for shard in shards} == {1}


def test_no_weight_and_no_gradient_crosses(rng):
    parallel = make_parallel(_template(), 4, mode="tower", replicas="independent")
    parallel.compile("adam", "mse")
    x, y = rng.normal(size=(32, 6)).astype("float32"), rng.normal(size=(32, 2)).astype("float32")
    parallel.fit(x, y, verbose=0)
    state = tuple(
        [variable.value for variable in variables]
        for variables in (
            parallel.trainable_variables,
            parallel.non_trainable_variables,
            parallel.optimizer.variables,
            parallel.metrics_variables,
        )
    )
    lowered = jax.jit(parallel.train_step).lower(state, (x, y))
    text = lowered.compile().as_text()
    crossing = [line.strip() for line in text.splitlines() if _is_collective(line)]
    assert crossing, "the outputs must cross"
    # Outputs of 32 rows and 2 columns, and scalars; weights have 48, 8, 16 and 2 elements.
    for line in crossing:
        assert "6,8]" not in line, line
        assert "8,2]" not in line, line


def test_gradients_of_inputs_come_home(rng):
    parallel = make_parallel(_template(), 2, mode="tower")
    x = rng.normal(size=(5, 6)).astype("float32")
    gradient = jax.grad(lambda x: parallel(x).sum())
    np.testing.assert_allclose(gradient(x), jax.jit(gradient)(x), rtol=1e-5)


def _is_collective(line):
    names = ("all-reduce(", "all-gather(", "all-to-all(", "collective-permute(")
    return any(name in line for name in names)


def test_a_replica_is_a_model_by_itself(rng):
    x, y = rng.normal(size=(20, 6)), rng.normal(size=(20, 2))
    parallel = make_parallel(_template(), 4, mode="tower", replicas="independent")
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    third = parallel.replicas[2]
    third.compile("sgd", "mse")
    third.fit(x, y, verbose=0)
    assert (
        difference(parallel.predict_replicas(x, verbose=0)[2], third.predict(x, verbose=0)) < 1e-6
    )
    third.set_weights([0 * weight for weight in third.get_weights()])
    assert np.abs(parallel.predict_replicas(x, verbose=0)[2]).max() == 0
    parallel.fit(x, y, verbose=0)
    assert np.abs(third.get_weights()[-1]).max() > 0


@pytest.mark.parametrize("mode", ["data", "tower"])
def test_a_failing_step_loses_no_weights(mode, rng):
    def failing(y_true, y_pred):
        raise ZeroDivisionError("a loss that fails")

    parallel = make_parallel(_template(), 4, mode=mode)
    before = parallel.get_weights()
    parallel.compile("sgd", failing)
    with pytest.raises(ZeroDivisionError, match="a loss that fails"):
        parallel.fit(rng.normal(size=(8, 6)), rng.normal(size=(8, 2)), verbose=0)
    assert difference(parallel.get_weights(), before) == 0


@pytest.mark.parametrize("mode", ["data", "tower", "independent"])
@pytest.mark.parametrize("moment", ["on_train_batch_begin", "on_train_batch_end"])
def test_an_interruption_loses_no_weights(mode, moment, rng):
    class Interrupt(keras.callbacks.Callback):
        def interrupt(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    setattr(Interrupt, moment, Interrupt.interrupt)
    options = {"mode": "tower", "replicas": mode} if mode == "independent" else {"mode": mode}
    parallel = make_parallel(_template(), 4, **options)
    before = parallel.get_weights()
    parallel.compile("adam", "mse")
    x, y = rng.normal(size=(40, 6)), rng.normal(size=(40, 2))
    with pytest.raises(KeyboardInterrupt):
        parallel.fit(x, y, 8, verbose=0, callbacks=[Interrupt()])
    assert difference(parallel.get_weights(), before) > 1e-4
    assert int(parallel.optimizer.iterations) == (2 if moment == "on_train_batch_begin" else 3)
    parallel.fit(x, y, 8, verbose=0)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this version of Keras has none"
)
def test_optimizers_that_are_made_while_building_are_refused(rng):
    optimizers = {}
    multi = keras.optimizers.MultiOptimizer(
        lambda variable: optimizers.setdefault("first", keras.optimizers.SGD(name="first"))
    )
    parallel = make_parallel(_template(), 2, mode="tower", replicas="independent")
    parallel.compile(multi, "mse")
    with pytest.raises(ValueError, match="whose function made 'first'.*Use a .*OptimizerMap"):
        parallel.fit(rng.normal(size=(4, 6)), rng.normal(size=(4, 2)), verbose=0)


def test_what_a_callback_has_set_is_kept_when_it_raises(rng):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.set_weights([0 * weight for weight in self.model.get_weights()])
            raise KeyboardInterrupt

    parallel = make_parallel(_template(), 4, mode="tower", replicas="independent")
    parallel.compile("sgd", "mse")
    x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 2))
    with pytest.raises(KeyboardInterrupt):
        parallel.fit(x, y, verbose=0, callbacks=[Stop()])
    assert all(not weight.any() for weight in parallel.get_weights())


class Scaled(layers.Layer):
    """Reads values in Python where nothing is traced; traced only to build the model."""

    def call(self, x):
        return x if isinstance(x, jax.core.Tracer) else x / float(keras.ops.max(x))


def _images(rng, rows=6):
    return rng.uniform(size=(rows, 6, 6, 3)), rng.uniform(size=(rows, 2))


def _read_as_values(first):
    keras.utils.set_random_seed(1)
    rest = [layers.GlobalAveragePooling2D(), layers.BatchNormalization(), layers.Dense(2)]
    return keras.Sequential([keras.Input((6, 6, 3)), first(), *rest])


@pytest.mark.parametrize(
    ("first", "options"),
    [
        (Scaled, {"n_gpus": 4}),
        (Scaled, {"n_gpus": 2, "num_replicas": 4}),
        # One replica draws the template's random numbers.
        (lambda: layers.RandomCrop(4, 4, seed=1), {"n_gpus": 2, "num_replicas": 1}),
    ],
    ids=["layer", "two on a device", "RandomCrop"],
)
def test_layers_that_read_values_where_nothing_is_compiled(first, options, rng):
    x, y = _images(rng)
    numbers = []
    for is_parallel in (False, True):
        model = _read_as_values(first)
        model = make_parallel(model, mode="tower", **options) if is_parallel else model
        model.compile("adam", "mse", run_eagerly=True)
        history = model.fit(x, y, batch_size=3, shuffle=False, verbose=0).history
        numbers.append([history["loss"], *model.get_weights()])
    assert difference(*numbers) < 1e-5


def test_committees_learn_the_same_compiled_and_not(rng):
    x, y = _images(rng)
    numbers = []
    for is_eager in (False, True):
        model = _read_as_values(lambda: layers.Rescaling(0.5))
        model = make_parallel(model, 2, mode="tower", replicas="independent", num_replicas=4)
        model.compile("adam", "mse", run_eagerly=is_eager)
        history = model.fit(x, y, batch_size=3, shuffle=False, verbose=0).history
        members = model.predict_replicas(x, verbose=0)
        numbers.append([history["loss"], members, *model.get_weights()])
    assert difference(*numbers) < 1e-5
    assert difference(members[0], members[3]) > 1e-3


def test_replicas_crop_differently(rng):
    x, _ = _images(rng)
    model = keras.Sequential([keras.Input((6, 6, 3)), layers.RandomCrop(4, 4, seed=1)])
    parts = make_parallel(model, 4, mode="tower").predict_replicas(x, training=True, verbose=0)
    assert {part.shape for part in parts} == {(6, 4, 4, 3)}
    assert len({part.tobytes() for part in parts}) > 1


class _Guide(keras.Model):
    """The loop of Keras's guide for JAX: its loss is computed without the metrics' values."""

    def train_step(self, state, data):
        trained, others, slots, metrics = state
        x, y = data

        def loss(trained, others):
            y_pred, others = self.stateless_call(trained, others, x, training=True)
            return self.compute_loss(x, y, y_pred), others

        (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(trained, others)
        trained, slots = self.optimizer.stateless_apply(slots, gradients, trained)
        return {"loss": value}, (trained, others, slots, metrics)


def test_a_step_without_values_of_metrics(rng):
    x, y = rng.normal(size=(32, 6)).astype("float32"), rng.normal(size=(32, 2)).astype("float32")
    inputs = keras.Input((6,))
    model = _Guide(inputs, layers.Dense(2)(layers.Dense(8, "tanh")(inputs)))
    options = {"mode": "tower", "replicas": "independent", "loss_of": "replicas"}
    committee = make_parallel(model, 4, **options)
    alone = []
    for member in committee.replicas:
        one = _template()
        one.set_weights(member.get_weights())
        one.compile("sgd", "mse")
        one.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        alone.append(one)
    committee.compile("sgd", "mse")
    committee.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    for member, one in zip(committee.replicas, alone):
        for weight, wanted in zip(member.get_weights(), one.get_weights()):
            np.testing.assert_allclose(weight, wanted, atol=1e-6)
