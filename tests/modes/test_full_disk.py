"""A disk that is full while a file is written: the one that was there stays."""

import contextlib
import resource

import keras
import numpy as np
import pytest
from support.parity import difference

from keras_multigpu import make_parallel

ROOM = 20_000  # bytes a file may have; the model's has more


@contextlib.contextmanager
def _full_disk():
    """The system then refuses to write files that are longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _trained(**options):
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(400), keras.layers.Dense(2)])
    parallel = make_parallel(model, 2)
    parallel.compile("adam", "mse")
    parallel.fit(np.ones((8, 20)), np.ones((8, 2)), verbose=0, **options)
    return parallel


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_the_file_that_was_there(tmp_path, name):
    parallel = _trained()
    save = parallel.save if name == "model.keras" else parallel.save_weights
    path = tmp_path / name
    with _full_disk(), pytest.raises(OSError, match=f"{name}. could not be written on the host"):
        save(path)
    assert list(tmp_path.iterdir()) == []
    save(path)
    before, weights = path.read_bytes(), parallel.get_weights()
    parallel.fit(np.ones((8, 20)), np.ones((8, 2)), verbose=0)
    with _full_disk(), pytest.raises(OSError, match="previous file is unchanged. Free disk"):
        save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    parallel.load_weights(path)
    assert difference(parallel.get_weights(), weights) == 0
    save(str(path))  # and there is room again
    assert list(tmp_path.iterdir()) == [path]


def test_a_backup(tmp_path):
    """The training stops, and goes on from the last backup that was written."""
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    with contextlib.ExitStack() as disk:
        fill = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: epoch == 2 and disk.enter_context(_full_disk())
        )
        with pytest.raises(OSError, match=r"latest.weights.h5. could not be written"):
            _trained(epochs=5, callbacks=[fill, backup])
    epochs = []
    count = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    _trained(epochs=5, callbacks=[count, backup])
    assert epochs == [2, 3, 4]


def test_a_link_stays_one(tmp_path):
    parallel = _trained()
    (tmp_path / "there.weights.h5").touch()
    (tmp_path / "link.weights.h5").symlink_to(tmp_path / "there.weights.h5")
    parallel.save_weights(tmp_path / "link.weights.h5")
    assert (tmp_path / "link.weights.h5").is_symlink()
    assert (tmp_path / "there.weights.h5").stat().st_size > ROOM


def test_another_error_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="directory: '.*nowhere/model.weights.h5'"):
        _trained().save_weights(tmp_path / "nowhere" / "model.weights.h5")
