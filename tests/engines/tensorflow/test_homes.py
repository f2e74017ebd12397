"""Where `shard` keeps weights and slots, and what crosses between the devices in a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers
from support.parity import difference

from keras_multigpu import make_parallel
from keras_multigpu.engines.tensorflow.weights.divided import parts_of
from keras_multigpu.reports import transfers

N = 4


def _build(*more, width=32):
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(width, activation="tanh", name=f"hidden{i}") for i in range(8)]
    return keras.Sequential([keras.Input((width,)), *hidden, *more, layers.Dense(3)])


def _batch(rows=10, width=32):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, width)).astype("float32"), rng.normal(size=(rows, 3))


def _number(variable):
    return int(variable.device.rpartition(":")[2])


def _bytes(variables):
    found = [0] * N
    for variable in variables:
        for part in parts_of(variable):
            found[_number(part)] += part.numpy().nbytes
    return found


@pytest.mark.parametrize("shard", [pytest.param("optimizer", marks=pytest.mark.slow), "weights"])
def test_each_device_keeps_an_even_part(shard):
    parallel = make_parallel(_build(width=128), N, shard=shard)
    parallel.compile("adam", "mse")
    parallel.fit(*_batch(width=128), verbose=0)
    state = _bytes([*parallel.weights, *parallel.optimizer.variables])
    assert max(state) < 1.05 * sum(state) / N


def test_placement_tells_the_elements_on_each_device():
    parallel = make_parallel(_build(), N, shard="weights")
    for weight in parallel.weights:
        kept = parallel.placement[weight.path]
        assert len(kept) == N
        assert sum(kept) == np.asarray(weight).size
        assert kept == tuple(part.numpy().size for part in parts_of(weight)) + (0,) * (
            N - len(parts_of(weight))
        )
    assert make_parallel(_build(), N).placement == {}


def test_weights_of_layers_built_later_have_homes():
    model = keras.Sequential([layers.Dense(32) for _ in range(8)])
    parallel = make_parallel(model, N, shard="weights")
    assert parallel.placement == {}
    parallel.compile("adam", "mse")
    x, _ = _batch()
    parallel.fit(x, x, verbose=0)
    assert [len(parts_of(weight)) for weight in model.weights] == [N, 1] * 8
    assert parallel.placement.keys() == {weight.path for weight in model.weights}


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: optimizers.AdamW(0.02, global_clipnorm=0.1, use_ema=True),
        pytest.param(
            lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1, gradient_accumulation_steps=2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: optimizers.LossScaleOptimizer(optimizers.Adam(clipvalue=0.1)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_device_sends_or_receives_more_than_its_part(make_optimizer):
    model = _build(width=128)
    parallel = make_parallel(model, N, shard="weights")
    parallel.compile(make_optimizer(), "mse")
    report = transfers(parallel, _batch(width=128))
    trained = sum(np.asarray(weight).nbytes for weight in model.trainable_weights)
    for device in report.devices:
        for end in ("source", "target"):
            crossing = [
                one.bytes
                for one in report.training
                if one.kind != "inputs" and getattr(one, end) == device
            ]
            assert sum(crossing) < 1.05 * 2 * trained * (N - 1) / N


@pytest.mark.slow
def test_wire_dtype_rounds_as_without_shard():
    trained = []
    for shard in (None, "weights"):
        parallel = make_parallel(_build(), N, shard=shard, wire_dtype="bfloat16")
        parallel.compile(optimizers.SGD(0.1), "mse")
        parallel.fit(*_batch(), verbose=0)
        trained.append(parallel.get_weights())
    assert difference(*trained) < 2e-3


def test_slots_made_before_move_to_their_weights():
    template = _build(width=128)
    optimizer = optimizers.Adam(0.02)
    optimizer.build(template.trainable_variables)
    parallel = make_parallel(template, N, shard="weights")
    parallel.compile(optimizer, "mse")
    state = _bytes(optimizer.variables)
    assert max(state) < 1.05 * sum(state) / N


@pytest.mark.slow
def test_optimizers_that_a_function_chooses_keep_their_slots_at_home():
    made = {}

    def choose(variable):
        return made.setdefault("bias" in variable.path, optimizers.Adam(0.02))

    parallel = make_parallel(_build(width=128), N, shard="weights")
    parallel.compile(optimizers.MultiOptimizer(choose), "mse")
    parallel.fit(*_batch(width=128), verbose=0)
    state = _bytes(parallel.optimizer.variables)
    assert max(state) < 1.05 * sum(state) / N


def test_a_weight_with_more_than_its_share_is_divided():
    model = keras.Sequential([keras.Input((600,)), layers.Dense(600), layers.Dense(10)])
    parallel = make_parallel(model, N, shard="weights")
    kernel = model.layers[0].kernel
    assert parallel.placement[kernel.path] == (90_000,) * N
    assert [len(parts_of(weight)) for weight in model.weights] == [N, 1, N, 1]
    parallel.compile("adam", "mse")
    parallel.fit(np.ones((8, 600)), np.ones((8, 10)), verbose=0)
    state = [0] * N
    for variable in [*parallel.weights, *parallel.optimizer.variables]:
        for part in parts_of(variable):
            state[_number(part)] += part.numpy().nbytes
    assert max(state) < 1.05 * sum(state) / N


def test_the_template_compiles_for_xla_where_keras_would():
    template = _build()
    template.compile("adam", "mse", jit_compile=True)
    make_parallel(template, N, shard="weights")
    with pytest.warns(UserWarning, match="a parallel model of it, on 4 devices, was made and nev"):
        template.fit(*_batch(), verbose=0)
    assert np.isfinite(template.predict(_batch()[0], verbose=0)).all()


def test_only_the_template_is_kept_from_xla():
    x, _ = _batch()
    template = keras.Sequential([layers.Dense(32) for _ in range(4)])
    parallel = make_parallel(template, N, shard="weights")
    parallel.compile("adam", "mse", jit_compile=True)
    parallel.fit(x, x, verbose=0)
    assert (parallel.jit_compile, template.jit_compile) == (True, False)


@pytest.mark.parametrize("options", [{"mode": "model"}, {"shard": "weights"}], ids=str)
def test_a_compiled_template_goes_on_alone(options):
    template = _build()
    template.compile("sgd", "mse", jit_compile=True)
    parallel = make_parallel(template, 2, **options)
    parallel.fit(*_batch(), verbose=0)
    template.fit(*_batch(), verbose=0)  # XLA finds no weights on other devices
    assert (parallel.jit_compile, template.jit_compile) == (True, False)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
def test_weights_that_a_model_no_longer_has_have_no_home():
    parallel = make_parallel(_build(), N, shard="weights")
    before = parallel.placement
    parallel.quantize("int8")
    parallel.predict(_batch()[0], verbose=0)
    weights = parallel.template.weights
    assert parallel.placement.keys() == {weight.path for weight in weights} != before.keys()
    assert N in {len(parts_of(weight)) for weight in weights}


def test_whole_weights_are_updated_where_they_are():
    """On none of the devices, here: else the slots would cross, too."""
    model = _build(width=128)
    parallel = make_parallel(model, devices=["cpu:1", "cpu:2"])
    parallel.compile("adam", "mse")
    report = transfers(parallel, _batch(width=128))
    trained = sum(np.asarray(weight).nbytes for weight in model.trainable_weights)
    crossing = sum(one.bytes for one in report.training if one.kind != "inputs")
    assert crossing < 1.05 * 2 * 2 * trained  # the weights to both, and their gradients


def _moved(step_of, rng):
    """What a function computes that was traced before the weights moved, and what is right."""
    template = keras.Sequential([keras.Input((40,)), layers.Dense(40)])
    x = tf.constant(rng.normal(size=(4, 40)), "float32")
    step = step_of(template)
    step(x)
    make_parallel(template, 3, shard="weights")
    template.set_weights([2 * one for one in template.get_weights()])
    return step(x), x.numpy() @ template.get_weights()[0]


@pytest.mark.filterwarnings("ignore:The step calls .* itself")
# A model without `shard` doesn't know the parts that another one has made.
@pytest.mark.filterwarnings("ignore:100% of")
def test_what_was_traced_before_weights_moved_is_traced_again(rng):
    for step_of in (
        lambda template: lambda x: template.predict(x, verbose=0),
        lambda template: make_parallel(template, 2).function(lambda x: template(x)),
        lambda template: make_parallel(template, 2, mode="tower").function(lambda x: template(x)),
    ):
        found, expected = _moved(step_of, rng)
        assert difference(np.asarray(found), expected) < 1e-5


def test_what_nobody_can_trace_again_fails(rng):
    with pytest.raises(tf.errors.InvalidArgumentError):
        _moved(lambda template: tf.function(lambda x: template(x)), rng)
