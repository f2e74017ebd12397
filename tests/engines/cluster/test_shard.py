"""`shard` over several processes: each keeps its devices' parts, and the numbers of one device."""

import pathlib
import shutil

import keras
import numpy as np
import pytest
from support import process_script as script
from support import spread_script
from support.precision import all_in_double_precision
from support.process_runs import running

from keras_multigpu import make_parallel

# Keras computes the statistics of BatchNormalization in float32 on JAX, also of a float64 model.
LIMIT = 1e-6 if spread_script.ON_JAX else 1e-12
SHARDS, BATCH = spread_script.SHARDS, spread_script.BATCH
PATH = pathlib.Path(spread_script.__file__)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=SHARDS)
def together(request, tmp_path_factory):
    """What is spread, what two processes found and printed, and their folder."""
    folder = tmp_path_factory.mktemp(request.param)
    with running(f"train_{request.param}", folder, path=PATH) as run:
        ended = run.end()
    for number in (0, 1):
        assert (folder / f"found {number}.npz").exists(), ended[number][1]
    founds = [dict(np.load(folder / f"found {number}.npz")) for number in (0, 1)]
    return request.param, founds, ended, folder


@pytest.fixture
def _double():
    with all_in_double_precision():
        yield


def _flat(weights):
    return np.concatenate([np.ravel(one) for one in weights])


@pytest.mark.usefixtures("_double")
def test_one_devices_numbers(together):
    """Incomplete batches, `BatchNormalization`, dropout, Adam with `clipnorm`, tables."""
    shard, founds, _, folder = together
    template = spread_script.build()
    alone = spread_script.train(template, spread_script.wide())
    has_template = shard == "optimizer" and spread_script.ON_JAX  # which works by itself
    if has_template:
        alone["template"] = template.predict(spread_script.data()[0][: BATCH + 1], verbose=0)
    for number, found in enumerate(founds):
        if has_template:
            found["template"] = np.load(folder / f"template {number}.npy")
        for key, value in alone.items():
            np.testing.assert_allclose(found[key], value, rtol=LIMIT, atol=LIMIT, err_msg=key)


def test_each_device_keeps_its_part(together):
    shard, founds, _, _ = together
    for found in founds:
        whole = found["sizes"]
        kept = np.where(whole % 4, whole, whole // 4)  # all but a bias of 3 elements
        if not spread_script.ON_JAX:  # the longest axis
            longest = found["longest"]
            kept = np.where(longest < 4, whole, whole // longest * (longest // 4))
        elif shard == "optimizer":
            trained = len(spread_script.build().trainable_variables)
            kept[:trained] = whole[:trained]
        np.testing.assert_array_equal(found["parts"], kept)


@pytest.mark.usefixtures("_double")
def test_process_0_writes_whole_files(together):
    _, founds, _, folder = together
    written = sorted(path.name for path in folder.glob("? ?.weights.h5"))
    assert written == ["0 1.weights.h5", "0 2.weights.h5"]
    model = spread_script.build()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / "saved.weights.h5")
    weights = _flat(model.get_weights())
    for found in founds:
        for key in ("loaded", "read"):
            np.testing.assert_array_equal(found[key], weights)
    alone = spread_script.build()
    spread_script.train(alone, spread_script.wide())
    slots, expected = (_flat(one.optimizer.variables) for one in (model, alone))
    np.testing.assert_allclose(slots, expected, rtol=LIMIT, atol=LIMIT)
    model.load_weights(folder / "0 2.weights.h5")  # before the last step
    assert np.abs(_flat(model.get_weights()) - weights).max() > 1e-3


def test_no_process_reads_a_spread_value_alone(together):
    shard, founds, _, folder = together
    for number, found in enumerate(founds):
        texts = dict(np.load(folder / f"uses {number}.npz")) if shard == "weights" else {}
        if spread_script.ON_JAX:
            assert "spread over the devices of several processes" in str(found["shown"])
            texts["slot"] = found["slot"]
            assert len(texts) == (4 if shard == "weights" else 1)
        for text in map(str, texts.values()):
            assert " over several processes " in text
            assert "of shape (6, 8), " in text
            assert "outside of the parallel model's own " in text
            assert "`new.set_weights(parallel.get_weights())`" in text


def test_other_values_in_one_process(together):
    shard, _, ended, _ = together
    for status, output in ended.values() if shard == "weights" else ():
        assert status == 1, output
        assert "(process 1, pid " in output
        assert "Its weights and those of process 0 differ at step" in output
        assert "an assignment" not in output


def test_an_assignment_in_one_process(together):
    shard, _, ended, _ = together
    for status, output in (
        ended.values() if shard == "optimizer" and not spread_script.ON_JAX else ()
    ):
        assert status == 1, output
        assert "(process 1, pid " in output
        text = "its is 'an assignment of weights', and that of process 0 is 'another call'"
        assert text in " ".join(output.split())


@pytest.mark.usefixtures("_double")
def test_files_are_of_before_the_weights_change(tmp_path):
    """While process 0 writes, process 1 is where averages, or the best weights, replace them."""
    with running("train_changing", tmp_path, path=PATH) as run:
        for status, output in run.end().values():
            assert status == 0, output
    alone = spread_script.changing(spread_script.build(), tmp_path / "alone")
    for number in (0, 1):
        found = np.load(tmp_path / f"changed {number}.npz").values()
        for one, expected in zip(found, alone, strict=True):
            np.testing.assert_allclose(one, expected, rtol=LIMIT, atol=LIMIT)
    built = spread_script.build()
    model = keras.Model(built.inputs, built.outputs)  # not compiled: it reads no slots
    for kind in ("averaged", "stopped"):
        files = []
        for which in ("joined", "alone"):
            model.load_weights(tmp_path / f"{which}_{kind}.weights.h5", skip_mismatch=True)
            files.append(_flat(model.get_weights()))
        np.testing.assert_allclose(*files, rtol=LIMIT, atol=LIMIT)


@pytest.mark.filterwarnings("ignore:The 3 devices do not divide the batches")  # if many are left
def test_a_killed_process_and_a_backup_for_any_number(tmp_path, monkeypatch):
    with running("train_backed_up", tmp_path, path=PATH) as run:
        run.await_line(0, "epoch 2")
        run.processes[1].kill()
        status, output = run.end(0)[0]
    assert status == 1, output
    assert f"(process 1, pid {run.processes[1].pid}): It has ended without a word" in output
    assert (tmp_path / "backup").exists()
    shutil.copytree(tmp_path / "backup", tmp_path / "copy")
    with running("train_backed_up", tmp_path, path=PATH) as run:
        for status, output in run.end().values():
            assert status == 0, output
            assert "epoch 19" in output
            assert "epoch 1\n" not in output
    monkeypatch.setattr(*spread_script.LEAST, 3)
    keras.utils.set_random_seed(7)
    undisturbed = script.build(dropout=0.0)
    script.train_in_order(undisturbed)
    found = [list(np.load(tmp_path / f"trained{number}.npz").values()) for number in (0, 1)]
    keras.utils.set_random_seed(7)
    resumed = make_parallel(script.build(dropout=0.0), 3, shard="weights")
    backup = keras.callbacks.BackupAndRestore(tmp_path / "copy")
    script.train_in_order(resumed, [backup])
    for weights in [*found, resumed.get_weights()]:
        for weight, expected in zip(weights, undisturbed.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=2e-5, atol=2e-5)
