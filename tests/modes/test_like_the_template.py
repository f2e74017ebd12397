"""A parallel model feels like its template."""

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference

from keras_multigpu import make_parallel
from keras_multigpu.modes import ParallelModel


def _functional():
    inputs = keras.Input((6,), name="in")
    x = layers.Dense(4, name="hidden")(inputs)
    return keras.Model(inputs, [layers.Dense(2, name="a")(x), layers.Dense(1, name="b")(x)])


class Subclassed(keras.Model):
    """Has attributes and methods of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.temperature = 3.0

    def call(self, inputs):
        return self.dense(inputs)

    def sharpen(self, inputs):
        return self(inputs) * self.temperature


def test_structure():
    template = _functional()
    parallel = make_parallel(template, 4)
    assert isinstance(parallel, ParallelModel)
    assert isinstance(parallel, type(template))
    assert parallel.name == template.name
    assert parallel.layers == template.layers
    assert parallel.get_layer("hidden") is template.get_layer("hidden")
    assert parallel.inputs == template.inputs
    assert [one.shape for one in parallel.outputs] == [one.shape for one in template.outputs]
    assert parallel.output_names == template.output_names == ["a", "b"]
    assert (parallel.input_shape, parallel.output_shape) == ((None, 6), [(None, 2), (None, 1)])
    assert parallel.count_params() == template.count_params()
    assert [v.path for v in parallel.variables] == [v.path for v in template.variables]
    for name in ("weights", "trainable_variables", "non_trainable_variables"):
        pairs = zip(getattr(parallel, name), getattr(template, name))
        assert all(one is other for one, other in pairs)
    extractor = keras.Model(parallel.inputs, parallel.get_layer("hidden").output)
    assert extractor.predict(np.ones((3, 6)), verbose=0).shape == (3, 4)


@pytest.mark.parametrize("mode", ["data", "tower", "model"])
@pytest.mark.parametrize("is_sequential", [False, True])
def test_models_built_on_the_outputs_call_the_parallel_model(mode, is_sequential):
    """Looking at the outputs says nothing, and changes no name."""
    template = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    if not is_sequential:
        template = keras.Model(template.inputs[0], template.outputs[0])
    parallel = make_parallel(template, 2, mode=mode)
    assert len(parallel.outputs) == 1
    assert parallel.output is parallel.outputs[0]
    inputs = keras.Input((6,))
    for outer in (
        keras.Model(parallel.inputs, keras.layers.Dense(1)(parallel.output)),
        keras.Model(parallel.inputs, [keras.layers.Dense(1)(one) for one in parallel.outputs]),
        keras.Model(inputs, keras.layers.Dense(1)(parallel(inputs))),
    ):
        assert parallel in outer.layers
        outer.summary(print_fn=lambda line: None)
        outer.compile("sgd", "mse")
        outer.fit(np.ones((3, 6)), np.ones((3, 1)), verbose=0)
    parallel.summary(print_fn=lambda line: None)
    assert len(template.outputs) == 1
    assert template.outputs[0] is not parallel.output


def test_outputs_follow_a_change_of_the_layers():
    parallel = make_parallel(keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]), 2)
    assert parallel.outputs[0].shape == (None, 2)
    parallel.add(keras.layers.Dense(3))
    assert parallel.outputs[0].shape == (None, 3)
    with pytest.raises(AttributeError, match="has no defined outputs yet"):
        _ = make_parallel(keras.Sequential([keras.layers.Dense(2)]), 2).outputs


def test_weights_in_and_out():
    parallel = make_parallel(_functional(), 4)
    doubled = [2 * weight for weight in parallel.get_weights()]
    parallel.set_weights(doubled)
    assert difference(parallel.template.get_weights(), doubled) == 0


def test_summary():
    parallel = make_parallel(_functional(), 2)
    lines: list[list[str]] = [[], []]
    for model, into in zip((parallel.template, parallel), lines):
        model.summary(print_fn=lambda line, into=into, **kwargs: into.append(line))
    assert lines[1] == [*lines[0], " Parallel: mode 'data' on cpu:0, cpu:1: 2 replicas"]
    assert repr(parallel).endswith("built=True, mode 'data' on cpu:0, cpu:1: 2 replicas>")


def test_a_class_of_the_users_own():
    template = Subclassed()
    parallel = make_parallel(template, 4)
    x = np.ones((5, 3), "float32")
    assert isinstance(parallel, Subclassed)
    assert difference(np.asarray(parallel.sharpen(x)), 3 * np.asarray(template(x))) < 1e-6
    parallel.temperature = 5.0
    assert template.temperature == 5.0
    parallel.colour = "red"
    assert template.colour == "red"
    assert parallel.dense is template.dense
    with pytest.raises(AttributeError, match="no attribute 'sharpness'"):
        _ = parallel.sharpness
    with pytest.raises(AttributeError, match="no attribute 'optimizer'"):
        _ = parallel.optimizer
    assert type(make_parallel(Subclassed(), 2)) is type(parallel)


def test_built_when_its_template_is():
    template = keras.Sequential([layers.Dense(2)])
    parallel = make_parallel(template, 4)
    assert not parallel.built
    parallel.build((None, 3))
    assert template.built
    assert parallel.built
    assert len(parallel.weights) == 2


def test_drawn():
    pytest.importorskip("pydot")
    parallel = make_parallel(_functional(), 4)
    drawn = keras.utils.model_to_dot(parallel)
    assert "hidden" in drawn.to_string()


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
def test_quantized(rng):
    x = rng.normal(size=(9, 6)).astype("float32")
    plain, template = _functional(), _functional()
    template.set_weights(plain.get_weights())
    parallel = make_parallel(template, 4)
    for model in (plain, parallel):
        before = model.predict(x, verbose=0)
        model.quantize("int8")
        assert 0 < difference(before, model.predict(x, verbose=0)) < 0.2
    assert difference(plain.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-5


class OwnCall(keras.Model):
    """Prepares its inputs in `__call__`, and builds a layer in training only."""

    def __init__(self):
        super().__init__()
        self.dense, self.late = layers.Dense(2), layers.Dense(2)

    def build(self, shape):
        self.dense.build(shape)
        if keras.backend.backend() == "jax":  # whose steps are given all variables
            self.late.build(shape)

    def __call__(self, inputs, *args, **kwargs):
        return super().__call__(2.0 * inputs + 1.0, *args, **kwargs)

    def call(self, inputs, training=False):
        return self.dense(inputs) + (self.late(inputs) if training else 0.0)


def test_a_call_of_its_own_and_layers_built_late(rng):
    x, y = rng.normal(size=(19, 6)).astype("float32"), rng.normal(size=(19, 2))
    models = []
    for n in (None, 4):
        keras.utils.set_random_seed(3)
        model = OwnCall()
        models.append(make_parallel(model, n) if n else model)
    for model in models:
        model(x)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert len(models[1].weights) == 4
    assert difference(*(model.get_weights() for model in models)) < 2e-5


def test_layers_added_and_taken_away():
    parallel = make_parallel(keras.Sequential([keras.Input((6,)), layers.Dense(2)]), 4)
    x = np.ones((5, 6), "float32")
    parallel.add(layers.Dense(3))
    assert parallel(x).shape == (5, 3)
    parallel.pop()
    assert parallel(x).shape == (5, 2)


def test_names_that_clash():
    class Named(keras.Model):
        def __init__(self):
            super().__init__()
            self.mode = "vae"

    with pytest.raises(ValueError, match="attributes of the same names: mode. Rename.*Named"):
        make_parallel(Named(), 2)


def test_a_parallel_model_within_another():
    inner = make_parallel(keras.Sequential([keras.Input((6,)), layers.Dense(6)], name="in_it"), 2)
    inputs = keras.Input((6,))
    outer = keras.Model(inputs, layers.Dense(2)(inner(inputs)))
    with pytest.raises(ValueError, match="with the parallel model 'in_it' in it"):
        make_parallel(outer, 2)


class Inner(layers.Layer):
    """Makes its sublayer when it is built."""

    def build(self, shape):
        self.dense = layers.Dense(2)
        self.dense.build(shape)

    def call(self, inputs):
        return self.dense(inputs)


def test_layers_that_are_made_late_have_the_names_of_one_device():
    paths = []
    for n in (None, 2):
        keras.utils.clear_session()
        layers.Dense(1)
        model = keras.Sequential([Inner(), Inner()])
        (model if n is None else make_parallel(model, n))(np.ones((4, 3)))
        layers.Dense(1)
        paths.append([variable.path for variable in model.variables] + [layers.Dense(1).name])
    assert paths[0] == paths[1]
