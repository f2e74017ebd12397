"""Keras's callbacks, and a run that is interrupted and resumed."""

import keras
import numpy as np
import pytest
from support.models import mlp
from support.parity import difference, variables

from keras_multigpu import make_parallel

pytestmark = pytest.mark.thin(2)


def _pair(optimizer=lambda: keras.optimizers.Adam(0.02)):
    models = mlp(), make_parallel(mlp(), 4)
    for model in models:
        model.compile(optimizer(), "mse", metrics=["mae"])
    return models


@pytest.fixture
def data(rng):
    return rng.normal(size=(50, 6)), rng.normal(size=(50, 2))


def _fit(model, data, callbacks, epochs=4):
    return model.fit(
        *data, 16, epochs, verbose=0, shuffle=False, callbacks=callbacks, validation_split=0.3
    ).history


def test_checkpoints_are_the_plain_models_files(data, tmp_path):
    plain, parallel = _pair()
    for name, model in [("plain", plain), ("parallel", parallel)]:
        checkpoints = [
            keras.callbacks.ModelCheckpoint(
                tmp_path / f"{name}.weights.h5", save_weights_only=True, save_best_only=True
            ),
            keras.callbacks.ModelCheckpoint(tmp_path / f"{name}.keras"),
        ]
        _fit(model, data, checkpoints)
    plain.load_weights(tmp_path / "parallel.weights.h5")
    parallel.load_weights(tmp_path / "plain.weights.h5")
    assert difference(variables(plain), variables(parallel)) < 2e-5
    loaded = keras.saving.load_model(tmp_path / "parallel.keras")
    assert loaded.devices == parallel.devices
    whole = keras.saving.load_model(tmp_path / "plain.keras")
    assert difference(variables(loaded), variables(whole)) < 2e-5


def test_callbacks_that_change_the_training(data, tmp_path):
    def callbacks():
        return [
            keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True, min_delta=0.02),
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=0.5),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.TerminateOnNaN(),
        ]

    plain, parallel = _pair()
    histories = [_fit(model, data, callbacks(), epochs=12) for model in (plain, parallel)]
    assert len(histories[0]["loss"]) < 12
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5


def _tensorboard(folder):
    """Keras writes for TensorBoard with TensorFlow's help only."""
    if keras.backend.backend() != "tensorflow":
        return []
    return [keras.callbacks.TensorBoard(folder, write_graph=True, histogram_freq=1)]


@pytest.mark.slow
def test_callbacks_that_write(data, tmp_path):
    plain, parallel = _pair()
    epochs = []
    for name, model in [("plain", plain), ("parallel", parallel)]:
        _fit(
            model,
            data,
            [
                keras.callbacks.CSVLogger(tmp_path / f"{name}.csv"),
                *_tensorboard(tmp_path / name),
                keras.callbacks.LambdaCallback(on_epoch_end=lambda e, _: epochs.append(e)),
            ],
        )
    assert epochs == [0, 1, 2, 3] * 2
    header, *rows = (tmp_path / "parallel.csv").read_text().split()
    assert header == (tmp_path / "plain.csv").read_text().split()[0]
    assert len(rows) == 4
    if _tensorboard(tmp_path):
        assert list((tmp_path / "parallel").rglob("events.out*"))


@pytest.mark.slow
def test_swapped_averages(data):
    histories = []
    for model in _pair(lambda: keras.optimizers.SGD(0.05, use_ema=True)):
        histories.append(_fit(model, data, [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]))
    assert difference(*histories) < 2e-5


class _Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("resume_on", [4, 2])
def test_an_interrupted_run_is_resumed_to_the_same_weights(data, tmp_path, resume_on):
    _, undisturbed = _pair()
    _fit(undisturbed, data, [])
    _, interrupted = _pair()
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        _fit(interrupted, data, [backup, _Interrupt()])
    resumed = make_parallel(mlp(), resume_on)
    resumed.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    history = _fit(resumed, data, [keras.callbacks.BackupAndRestore(tmp_path)])
    assert len(history["loss"]) == 2
    assert difference(variables(undisturbed), variables(resumed)) < 1e-6
    assert np.isfinite(history["loss"]).all()
