"""Tower mode: the losses in the logs."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.parity import difference

from keras_multigpu import make_parallel


class Counting(keras.Model):
    """Two outputs, and a loss that counts in a metric how often it is computed."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(1), layers.Dense(2)
        self.absolute = keras.metrics.Mean(name="absolute")

    def call(self, inputs):
        return {"first": self.first(inputs), "second": self.second(inputs)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.absolute.update_state(ops.abs(y["first"] - y_pred["first"]))
        return super().compute_loss(x, y, y_pred, sample_weight, training)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("replicas", ["shared", "independent"])
@pytest.mark.parametrize("settings", [{}, {"run_eagerly": True}], ids=str)
def test_training_and_evaluation_report_the_same(replicas, settings, rng):
    """`loss` is the mean of the replicas' losses in both, and `mix_loss` the loss of the mix."""
    x = rng.normal(size=(36, 6))
    y = {"first": rng.normal(size=(36, 1)), "second": rng.normal(size=(36, 2))}
    weights = {"first": rng.uniform(size=36), "second": np.ones(36)}
    template = Counting()
    template(x)
    options = {"replicas": replicas, "num_replicas": 3, "loss_of": "replicas"}
    parallel = make_parallel(template, 3, mode="tower", **options)
    metrics = {"first": ["mae"], "second": ["mae"]}
    parallel.compile(keras.optimizers.SGD(0.0), "mse", metrics=metrics, **settings)
    kept = {"sample_weight": weights, "verbose": 0, "batch_size": 12}
    logs = {k: v[0] for k, v in parallel.fit(x, y, **kept).history.items()}
    again = parallel.evaluate(x, y, return_dict=True, **kept)
    assert logs.keys() == again.keys()
    assert difference(logs, again) < 1e-5
    outputs = parallel.predict_replicas(x, verbose=0)
    mix = parallel.predict(x, verbose=0)

    def loss(output, name):
        return np.mean(np.mean((output[name] - y[name]) ** 2, axis=1) * weights[name])

    for name in ("first", "second"):
        assert logs[f"{name}_loss"] == pytest.approx(
            np.mean([loss(o, name) for o in outputs]), 1e-4
        )
        assert logs[f"{name}_mae"] == pytest.approx(np.mean(np.abs(mix[name] - y[name])), 1e-4)
    assert logs["loss"] == pytest.approx(logs["first_loss"] + logs["second_loss"], 1e-4)
    assert logs["mix_loss"] == pytest.approx(loss(mix, "first") + loss(mix, "second"), 1e-4)
    means = [np.mean(np.abs(o["first"] - y["first"])) for o in outputs]
    assert logs["absolute"] == pytest.approx(np.mean(means), 1e-4)
    assert parallel.metrics_names[:2] == ["loss", "mix_loss"]


class OwnEvaluation(keras.Sequential):
    """Computes a loss of other values than the model's outputs, in evaluations only."""

    if keras.backend.backend() == "jax":

        def test_step(self, state, data):
            loss, _ = self.stateless_compute_loss(*state, *data[:2], data[1] / 2, training=False)
            return {"half": loss}, state

    else:

        def test_step(self, data):
            return {"half": self.compute_loss(*data[:2], data[1] / 2, training=False)}


def test_an_evaluation_of_other_values_is_refused(rng):
    x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 2))
    parallel = make_parallel(
        OwnEvaluation([keras.Input((6,)), layers.Dense(2)]), 2, mode="tower", replicas="independent"
    )
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    with pytest.raises(ValueError, match="(?s)outputs as they are. Received: y_pred=.*'mix'"):
        parallel.evaluate(x, y, verbose=0)
    parallel.loss_of = "mix"
    parallel.compile("sgd", "mse")
    logs = parallel.evaluate(x, y, verbose=0, return_dict=True)
    assert logs["half"] == pytest.approx(np.mean((y / 2) ** 2), 1e-4)


def test_an_early_stop_by_what_is_trained(rng):
    """`val_loss`, which callbacks look at by default, is what the members are trained by."""
    x, y = rng.normal(size=(32, 6)), rng.normal(size=(32, 2))
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    parallel = make_parallel(model, 2, mode="tower", replicas="independent")
    parallel.compile("sgd", "mse")
    history = parallel.fit(x, y, validation_data=(x, y), epochs=2, verbose=0).history
    assert list(history) == ["loss", "mix_loss", "val_loss", "val_mix_loss"]
    assert history["val_loss"][0] > history["val_mix_loss"][0]
    logs = parallel.evaluate(x, y, verbose=0)
    assert difference(logs, [history["val_loss"][-1], history["val_mix_loss"][-1]]) < 1e-5
    members = [np.mean((one - y) ** 2) for one in parallel.predict_replicas(x, verbose=0)]
    assert logs[0] == pytest.approx(np.mean(members), 1e-4)


def test_the_mix_is_trained_by_its_own_loss_alone(rng):
    x, y = rng.normal(size=(32, 6)), rng.normal(size=(32, 2))
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    options = {"mode": "tower", "replicas": "independent", "loss_of": "mix"}
    parallel = make_parallel(model, 2, **options)
    parallel.compile("sgd", "mse")
    assert list(parallel.fit(x, y, verbose=0).history) == ["loss"]
