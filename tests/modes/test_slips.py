"""Slips that leave a device without work, or that change nothing: each is told."""

import warnings

import keras
import numpy as np
import pytest
from support.models import mlp

from keras_multigpu import engines, make_parallel, reports
from keras_multigpu.devices import choose_devices

ON_JAX = keras.backend.backend() == "jax"


def _fit(parallel, rows, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel.fit(np.ones((rows, 6)), np.ones((rows, 2)), verbose=0, **options)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("replicas", ["shared", "independent"])
def test_fewer_replicas_than_devices(replicas):
    options = {"mode": "tower", "num_replicas": 2, "replicas": replicas}
    with pytest.warns(UserWarning, match="2 of 4 devices would do nothing.*Give `n_gpus=2`"):
        make_parallel(mlp(), 4, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_parallel(mlp(), 2, **options)


@pytest.mark.skipif(not ON_JAX, reason="TensorFlow has replicas on devices in turn")
def test_on_jax_devices_that_do_not_divide_the_replicas():
    with pytest.warns(UserWarning, match="1 of 2 devices would do nothing.*3 replicas on 2"):
        make_parallel(mlp(), 2, "tower", replicas="independent", num_replicas=3)


@pytest.mark.skipif(ON_JAX, reason="JAX takes no numbers of devices")
def test_a_placement_that_leaves_out_a_device():
    with pytest.warns(
        UserWarning, match="All layers are on one of 2 devices. Received: placement="
    ):
        make_parallel(mlp(), 2, "model", placement={".*": 0})


@pytest.mark.skipif(ON_JAX, reason="JAX spreads layers over all devices")
def test_fewer_stages_than_devices():
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(2, name="last")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    told = "2 of 4 devices get no layer.*make 2 stages. Give `n_gpus=2`, or `mode=.data.`; or"
    with pytest.warns(UserWarning, match=told):
        make_parallel(model, 4, "model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_parallel(model, 2, "model")
        make_parallel(model, 2, "model", placement={"first": 0, "last": 1})
    with pytest.warns(UserWarning, match="on 2 of 4 devices. .*another number, or `n_gpus=2`"):
        make_parallel(model, 4, "model", placement={"first": 0, "last": 1})


@pytest.mark.skipif(ON_JAX, reason="JAX tells what the devices do not divide")
def test_batches_of_fewer_rows_than_devices():
    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    assert not _fit(parallel, 9, batch_size=4)  # the last batch has one row
    (text,) = _fit(parallel, 6, batch_size=2)
    assert text == "Batches of 2 rows leave 2 of 4 devices without work. Give at least 4 rows."
    assert not _fit(parallel, 6, batch_size=2)  # once
    parallel = make_parallel(mlp(), 4)
    with pytest.warns(UserWarning, match="Batches of 1 row leave 3 of 4 devices"):
        parallel.predict(np.ones((3, 6)), batch_size=1, verbose=0)
    parallel.predict(np.ones((3, 6)), verbose=0)
    import tensorflow as tf

    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((6, 6)), np.ones((6, 2))))
    with pytest.warns(UserWarning, match="Batches of 1 row leave 3 of 4 devices"):
        parallel.fit(data.batch(1), shuffle=False, verbose=0)
    parallel = make_parallel(mlp(), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # a row alone can't be spread
            parallel.predict(np.ones((1, 6)), verbose=0)


@pytest.mark.skipif(ON_JAX, reason="JAX tells what the devices do not divide")
def test_a_long_training_on_few_rows_is_told_soon():
    parallel, told = make_parallel(mlp(), 4), []
    parallel.compile("sgd", "mse")

    def rows():
        while True:
            told.append(len(caught))
            yield np.ones((3, 6)), np.ones((3, 2))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel.fit(rows(), steps_per_epoch=40, verbose=0)
    assert [str(one.message) for one in caught if "Batches of 3 rows" in str(one.message)]
    assert told[8] < told[-1]


@pytest.mark.skipif(ON_JAX, reason="XLA does not say what it copies")
def test_a_batch_of_one_row_is_explained():
    parallel = make_parallel(mlp(), 2)
    parallel.compile("sgd", "mse")
    assert not _fit(parallel, 8, batch_size=4)
    assert "train_step: 100.0% of the work on rows is spread" in parallel.explain()
    parallel.train_on_batch(np.ones((1, 6)), np.ones((1, 2)))
    assert "train_step: 0.0% of the work on rows is spread" in parallel.explain()
    assert "too few rows" in parallel.explain()


@pytest.mark.parametrize("is_stopped", [True, False])
def test_callbacks_that_control_the_template(is_stopped):
    model = mlp()
    model.compile("sgd", "mse")
    parallel = make_parallel(model, 2)

    def control(epoch, logs):
        if is_stopped:
            model.stop_training = True
        else:
            model.optimizer.learning_rate.assign(0.5)

    callback = keras.callbacks.LambdaCallback(on_epoch_end=control)
    (text,) = _fit(parallel, 8, epochs=2, callbacks=[callback])
    told = "learning rate of the template's optimizer was set after"
    assert ("`stop_training` of the template" if is_stopped else told) in text
    assert len(parallel.history.epoch) == 2
    inner = mlp()
    trained = make_parallel(inner, 2)
    for one in (inner, trained):
        one.compile("sgd", "mse")
    stops = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)

    def train(epoch, logs):
        inner.fit(np.ones((8, 6)), np.ones((8, 2)), epochs=3, callbacks=[stops], verbose=0)

    callback = keras.callbacks.LambdaCallback(on_epoch_end=train)
    assert not _fit(trained, 8, epochs=1, callbacks=[callback])
    assert inner.stop_training


class Mixup(keras.Sequential):
    """Its class has an attribute by the name of an option."""

    def compile(self, *args, mix=0.2, **options):
        super().compile(*args, **options)
        self.mix = mix


@pytest.mark.parametrize("name", ["mix", "loss_of", "wire_dtype", "shard", "num_replicas"])
def test_options_are_chosen_when_a_model_is_made_parallel(name):
    parallel = make_parallel(mlp(), 2)
    with pytest.raises(AttributeError, match=f"`{name}` is chosen when .* Received: {name}='some'"):
        setattr(parallel, name, "some")
    with pytest.raises(AttributeError, match=r"`n_gpus` is chosen when .*mode='data', n_gpus="):
        parallel.n_gpus = 4
    for fixed in ("mode", "devices", "template", "placement"):
        with pytest.raises(AttributeError, match=f"`{fixed}` can't be set.*Make the template para"):
            setattr(parallel, fixed, "model")
    parallel = make_parallel(Mixup(mlp().layers), 2)
    parallel.compile("adam", "mse")
    assert parallel.mix == 0.2
    model = mlp()
    model.mix = "the model's own"
    parallel = make_parallel(model, 2)
    parallel.mix = "another"
    assert model.mix == "another"


@pytest.mark.skipif(ON_JAX, reason="JAX tells what the devices do not divide")
def test_single_steps_of_fewer_rows_than_devices():
    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    for _ in range(9):
        parallel.train_on_batch(np.ones((2, 6)), np.ones((2, 2)))
    with pytest.warns(UserWarning, match="Batches of 2 rows leave 2 of 4 devices without work"):
        parallel.train_on_batch(np.ones((1, 6)), np.ones((1, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel = make_parallel(mlp(), 4)
        parallel.compile("sgd", "mse")
        for rows in [8, *[1] * 10]:
            parallel.train_on_batch(np.ones((rows, 6)), np.ones((rows, 2)))


@pytest.mark.skipif(ON_JAX, reason="JAX tells what the devices do not divide")
@pytest.mark.parametrize("rows", [1, 2])
def test_functions_of_fewer_rows_than_devices(rows):
    parallel = make_parallel(mlp(), 4)
    infer = parallel.function(lambda x: parallel(x))
    for _ in range(9):
        infer(np.ones((rows, 6), "float32"))
    with pytest.warns(UserWarning, match=f"Batches of {rows} rows? leave {4 - rows} of 4 devices"):
        infer(np.ones((1, 6), "float32"))


@pytest.mark.skipif(not ON_JAX, reason="XLA computes such rows wrongly")
def test_one_row_for_each_device():
    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    with pytest.warns(
        UserWarning, match=r"one row for each device are .*of 4 rows. Give 8 rows, say"
    ):
        parallel.fit(np.ones((48, 6)), np.ones((48, 2)), batch_size=4, verbose=0)


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_a_model_of_which_nothing_is_spread_is_told(shard):
    model = keras.Sequential([keras.Input((30,)), *[keras.layers.Dense(30) for _ in range(9)]])
    with pytest.warns(UserWarning, match=f"`shard='{shard}'` spreads nothing of 'sequential"):
        make_parallel(model, 2, shard=shard)
    small = keras.Sequential([keras.Input((3,)), keras.layers.Dense(40)])
    with pytest.warns(UserWarning, match="at least 1,024 numbers, and the largest has 120. Leave"):
        make_parallel(small, 2, shard=shard)


def _wide():
    return keras.Sequential([keras.Input((6,)), *map(keras.layers.Dense, (512, 2))])


@pytest.mark.skipif(ON_JAX, reason="on JAX a step takes the slots, and returns them")
def test_slots_that_are_not_in_parts_are_told():
    """An optimizer that the model does not know keeps them whole."""
    keras.utils.set_random_seed(1)
    parallel, optimizer = make_parallel(_wide(), 2, shard="weights"), keras.optimizers.Adam()
    x, y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")

    def stepping(optimizer):
        import tensorflow as tf

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((parallel(x) - y) ** 2)
            weights = parallel.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss

        return parallel.function(step)

    with pytest.warns(UserWarning, match=r"4 variables that one .*: \w+momentum, .* and others\."):
        stepping(optimizer)(x, y)
    assert "One device does what has no rows" in parallel.explain()
    known = keras.optimizers.Adam()
    known.build(parallel.trainable_variables)
    parallel.compile(known)
    stepping(known)(x, y)
    _, _, again = parallel.explain().partition("step (2)")
    assert "One device does what has no rows" not in again


@pytest.mark.skipif(ON_JAX, reason="on JAX a step takes the weights, and returns them")
@pytest.mark.parametrize(
    "options", [{"shard": "weights"}, {"mode": "model", "placement": "spread"}], ids=str
)
def test_weights_of_another_model_that_are_not_in_parts_are_told(options, recwarn):
    parallel = make_parallel(_wide(), 2, **options)
    other = _wide()

    def follow(x):
        for mine, its in zip(other.variables, parallel.variables):
            mine.assign(0.5 * mine + 0.5 * its)
        return parallel(x) - other(x)

    text = r"of weights in parts: \w+/dense_\d/kernel, .* call `make_parallel` for that model"
    with pytest.warns(UserWarning, match=text):
        parallel.function(follow)(np.ones((8, 6), "float32"))
    recwarn.clear()
    other = make_parallel(other, 2, **options)
    parallel.function(follow)(np.ones((8, 6), "float32"))
    assert not recwarn


@pytest.mark.parametrize(("option", "value"), [("mix", "weighted"), ("loss_of", "mix")])
def test_what_is_compiled_no_more_is_told(option, value):
    committee = make_parallel(mlp(), 2, mode="tower", replicas="independent")
    committee.compile("sgd", "mse")
    setattr(committee, option, value)
    with pytest.raises(ValueError, match=f"compiled again after its `{option}` was set"):
        committee.fit(np.ones((4, 6)), np.ones((4, 2)))
    committee.compile("sgd", "mse")
    committee.fit(np.ones((4, 6)), np.ones((4, 2)), verbose=0)


def test_what_was_meant_is_said():
    for call, cure in (
        (lambda: make_parallel(2, mlp()), r"The model comes first: `make_parallel\(model, 2\)`"),
        (lambda: make_parallel(mlp(), 2, shard=True), "Write `shard='weights'`"),
        (lambda: make_parallel(mlp(), 2, mode="tower", replicas=4), "write `num_replicas=4`"),
        (lambda: reports.Link(10, 5), "`name` must be a text. Received: name=10"),
        (lambda: reports.transfers((np.ones((3, 6)),), mlp()), r"tuple of an array of shape"),
    ):
        with pytest.raises(ValueError, match=cure):
            call()
    with pytest.raises(ValueError, match="Received: shard='some'.$"):
        make_parallel(mlp(), 2, shard="some")  # what was meant is not known


@pytest.mark.parametrize("is_random", [False, True])
def test_equal_replicas_are_told(is_random):
    noise = [keras.layers.Dropout(0.5)] if is_random else []
    model = keras.Sequential([keras.Input((6,)), *noise, keras.layers.Dense(2)])
    tower = make_parallel(model, 2, mode="tower")
    tower.compile("sgd", "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tower.fit(np.ones((4, 6)), np.ones((4, 2)), verbose=0)
    told = ["trains 'sequential" in str(one.message) for one in caught]
    assert any(told) == (not is_random)


def test_a_template_that_could_not_be_copied_is_not_told_to_be_compiled_first():
    class Plain(keras.optimizers.SGD):
        def get_config(self):
            raise NotImplementedError("it has none")

    model = mlp()
    model.compile(Plain(), "mse")
    with pytest.warns(UserWarning, match="can't be copied"):
        parallel = make_parallel(model, 2)
    with pytest.raises(ValueError, match="compiled could not be copied"):
        parallel.fit(np.ones((4, 6)), np.ones((4, 2)))


def test_the_arguments_with_rows_are_proposed():
    step = make_parallel(mlp(), 2).function(lambda x, scale, *, y: x)
    with pytest.raises(ValueError, match=r"rows=\(0, 'y'\)\)`, say"):
        step(np.ones((70, 6)), np.ones(3), y=np.ones((70, 2)))


def test_a_text_is_no_choice_of_a_compiler():
    with pytest.raises(ValueError, match="`jit_compile` must be True, False, or None"):
        make_parallel(mlp(), 2).function(lambda x: x, jit_compile="no")


def test_why_there_is_no_gpu_is_told():
    for name in ("gpu:7", "/gpu:7", "cuda:7"):
        with pytest.raises(ValueError, match=rf"'{name}'\] are unknown. No GPU is here: "):
            make_parallel(mlp(), devices=[name])


def test_what_keras_calls_a_gpu_is_told(monkeypatch):
    engine = engines.current()
    found = {"gpu": ("gpu:0", "gpu:1"), "cpu": ("cpu:0",)}
    monkeypatch.setattr(type(engine), "list_devices", lambda self, kind: found[kind])
    if keras.backend.backend() == "jax":  # which has this name, too
        assert choose_devices(None, ["cuda:0", "cuda:1"]) == ("gpu:0", "gpu:1")
        return
    with pytest.raises(ValueError, match=r"are unknown. Keras names a GPU \"gpu:0\"."):
        make_parallel(mlp(), devices=["cuda:0", "cuda:1"])
