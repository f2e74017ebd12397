"""Data in every form that Keras takes, whole and in order."""

import keras
import numpy as np
import pandas as pd
import pytest
from keras import layers
from support.models import arrays, pair
from support.parity import difference, variables

from keras_multigpu import make_parallel

ROWS, BATCH = 70, 16


def _batches():
    x, y = arrays(ROWS)
    for begin in range(0, ROWS, BATCH):
        yield x[begin : begin + BATCH], y[begin : begin + BATCH]


class _Batches(keras.utils.PyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.batches = list(_batches())

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


FORMS = {
    "arrays": lambda: (arrays(ROWS), {"batch_size": BATCH}),
    "pandas": lambda: ([pd.DataFrame(part) for part in arrays(ROWS)], {"batch_size": BATCH}),
    "tensors": lambda: (map(keras.ops.convert_to_tensor, arrays(ROWS)), {"batch_size": BATCH}),
    "generator": lambda: ([_batches()], {"steps_per_epoch": 5}),
    "py_dataset": lambda: ([_Batches()], {}),
    "py_dataset_with_workers": lambda: ([_Batches(workers=2)], {}),
}


def _form(name):
    data, options = FORMS[name]()
    return list(data), options


@pytest.mark.thin(4)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data(form):
    plain, parallel = pair()
    histories = []
    for model in (plain, parallel):
        data, options = _form(form)
        epochs = 1 if form == "generator" else 2
        history = model.fit(*data, shuffle=False, epochs=epochs, verbose=0, **options)
        histories.append(history.history)
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5
    logs, outputs = [], []
    for model in (plain, parallel):
        data, options = _form(form)
        options = {"steps" if "steps" in name else name: v for name, v in options.items()}
        logs.append(model.evaluate(*data, verbose=0, **options))
        data, _ = _form(form)
        outputs.append(model.predict(data[0], verbose=0, **options))
    assert difference(*logs) < 2e-5
    assert difference(*outputs) < 2e-5
    assert len(outputs[0]) == ROWS


def _aligned(values):
    """A copy of an array where TensorFlow takes its memory as that of a tensor."""
    memory = np.empty(values.nbytes + 64, "uint8")
    begin = -memory.ctypes.data % 64
    copied = memory[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copied[:] = values
    return copied


@pytest.mark.filterwarnings("ignore:.*are not compiled, and so each device computes all")
@pytest.mark.parametrize("mode", ["data", "tower", "model"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_arrays_of_a_generator_are_left_as_they_are(mode, dtype):
    """A first operation could compute in the memory of its slice."""
    x = _aligned(np.arange(8 * 32).reshape(8, 32).astype(dtype))
    before = x.copy()

    def batches():
        while True:
            yield x, np.zeros((8, 1))

    inputs = keras.Input((32,), dtype=dtype)
    changed = layers.Lambda(lambda one: one + 1, output_shape=(32,))(inputs)
    outputs = layers.Dense(1)(layers.Rescaling(1e-3)(changed))
    model = make_parallel(keras.Model(inputs, outputs), 2, mode=mode)
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(batches(), steps_per_epoch=4, shuffle=False, verbose=0)
    model.evaluate(batches(), steps=4, verbose=0)
    model.predict(batches(), steps=4, verbose=0)
    np.testing.assert_array_equal(x, before)


def test_no_batch_is_drawn_and_dropped():
    drawn = []

    def counted():
        for number, batch in enumerate(_batches()):
            drawn.append(number)
            yield batch

    _, parallel = pair()
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    parallel.fit(counted(), steps_per_epoch=5, shuffle=False, verbose=0, callbacks=[Watch()])
    assert drawn == seen == [0, 1, 2, 3, 4]


def test_validation_and_epochs():
    x, y = arrays(ROWS)
    plain, parallel = pair(metrics=["mae"])
    options = [
        {"validation_split": 0.3},
        {"validation_data": (x[:5], y[:5], np.linspace(0, 1, 5)), "validation_batch_size": 3},
        {"validation_data": _Batches(), "validation_steps": 2},
        {"initial_epoch": 2, "epochs": 4, "validation_data": (x, y), "validation_freq": 2},
        {"sample_weight": np.linspace(0, 2, ROWS)},
        {"class_weight": {0: 1.0, 1: 3.0}},
    ]
    for option in options:
        histories = []
        targets = np.eye(2)[(y[:, 0] > 0).astype(int)] if "class_weight" in option else y
        for model in (plain, parallel):
            history = model.fit(x, targets, BATCH, shuffle=False, verbose=0, **option)
            histories.append(history.history)
        assert difference(*histories) < 2e-5, option
    assert difference(variables(plain), variables(parallel)) < 2e-5


@pytest.mark.slow_on_jax
def test_batches_of_any_length():
    def build():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((None, 3))
        return keras.Model(inputs, layers.Dense(2)(layers.GRU(4)(inputs)))

    def batches():
        rng = np.random.default_rng(5)
        for rows, length in [(8, 3), (8, 7), (5, 4), (1, 2)]:
            yield rng.normal(size=(rows, length, 3)), rng.normal(size=(rows, 2))

    plain, parallel = pair(build)
    for model in (plain, parallel):
        model.fit(batches(), steps_per_epoch=4, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5


def test_single_batches():
    x, y = arrays(ROWS)
    plain, parallel = pair(metrics=["mae"])
    for rows in (1, 5, 32):
        batch = x[:rows], y[:rows], np.linspace(1, 2, rows)
        for method in ("train_on_batch", "test_on_batch"):
            logs = [getattr(m, method)(*batch, return_dict=True) for m in (plain, parallel)]
            assert difference(*logs) < 2e-5
        outputs = [model.predict_on_batch(x[:rows]) for model in (plain, parallel)]
        assert difference(*outputs) < 2e-5
        assert len(outputs[1]) == rows


@pytest.mark.filterwarnings("ignore:The steps of .* are not compiled")
@pytest.mark.slow_on_jax
@pytest.mark.thin(3)
@pytest.mark.parametrize("mode", ["data", "tower", "model"])
def test_single_outputs_losses_weigh_batches_by_their_rows(mode):
    """Keras weighs them by the rows that it knows when it traces: all outputs must tell them."""

    def logs(parallel):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4, 3))
        x = keras.layers.LSTM(3)(inputs)
        model = keras.Model(inputs, [keras.layers.Dense(2, name=name)(x) for name in "ab"])
        model = make_parallel(model, 2, mode=mode) if parallel else model
        model.compile("sgd", {"a": "mse", "b": "mae"}, jit_compile=False)
        rng = np.random.default_rng(0)
        for rows in (8, 3):
            x, y = rng.normal(size=(rows, 4, 3)) * rows, rng.normal(size=(rows, 2))
            found = model.train_on_batch(x, {"a": y, "b": y}, return_dict=True)
        return found

    assert difference(logs(False), logs(True)) < 2e-5
