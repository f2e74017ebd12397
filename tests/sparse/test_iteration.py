"""Every row once in every epoch, in the promised order, however Keras iterates."""

import copy
import pickle

import keras
import numpy as np
import pytest
from support.scripts import run_python

from keras_multigpu.sparse import HashedDataset, HashEncoder

ROWS, BATCH = 200, 32
BATCHES = -(-ROWS // BATCH)
ENCODER = HashEncoder({"name": 1000}, layout="published")
# The size of a batch, and whether Keras shuffles.
SETTINGS = [(BATCH, False), (BATCH, True), (150, False), (ROWS, True)]


@pytest.fixture(params=["csv", "parquet"])
def path(request, tmp_path):
    """A file whose label is the number of the row, in many chunks or row groups."""
    return write(tmp_path, request.param)


def write(folder, suffix="csv", rows=ROWS):
    numbers = np.arange(rows)
    path = folder / f"rows.{suffix}"
    if suffix == "csv":
        path.write_text("name,row\n" + "".join(f"value {n},{n}\n" for n in numbers))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"name": [f"value {n}" for n in numbers], "row": numbers})
        pq.write_table(table, path, row_group_size=40)
    return str(path)


def dataset(path, **options):
    options = {"label": "row", "batch_size": BATCH, "chunk_rows": 15, **options}
    return HashedDataset(path, ENCODER, **options)


def codes(rows):
    return ENCODER.transform({"name": [f"value {n}" for n in rows]})


class Counting(keras.Model):
    """Counts how often it is trained on each row: SGD moves a row's weight down by 1 each time."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.counts = self.add_weight(shape=(ROWS,), initializer="zeros", name="counts")
        self.compile(keras.optimizers.SGD(1.0))

    def call(self, inputs):
        return self.layer(keras.ops.cast(inputs, "float32"))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        rows = keras.ops.cast(y[:, 0], "int32")
        return keras.ops.sum(keras.ops.take(self.counts, rows)) + 0 * keras.ops.sum(y_pred)


class Epochs(keras.callbacks.Callback):
    """How often each row was trained on, epoch by epoch."""

    def __init__(self):
        super().__init__()
        self.counts = []
        self._before = np.zeros(ROWS)

    def on_epoch_end(self, epoch, logs=None):
        now = -np.array(self.model.counts)
        self.counts.append((now - self._before).round().astype(int))
        self._before = now


def train(data, is_built=True, **options):
    """How often each row was trained on, of shape `(epochs, rows)`."""
    model, epochs = Counting(), Epochs()
    if is_built:
        model(np.zeros((1, 4), "int32"))
    model.fit(data, verbose=0, callbacks=[epochs], **options)
    return np.array(epochs.counts)


def rows_from(path, epoch, batch, count, **options):
    """The rows of some batches, each asked for alone: what training has to see."""
    data, found = dataset(path, **options), []
    for number in range(count):
        data.resume(*divmod(epoch * BATCHES + batch + number, BATCHES))
        found.append(data[0][1][:, 0].astype(int))
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("suffix", "workers", "is_built", "settings"),
    [
        ("csv", 1, True, SETTINGS[2:3]),
        ("parquet", 4, False, SETTINGS[1:2]),
        ("csv", 4, False, SETTINGS[3:]),
        *(
            pytest.param(suffix, workers, is_built, SETTINGS, marks=pytest.mark.slow)
            for suffix, workers in (("csv", 1), ("csv", 4), ("parquet", 4))
            for is_built in (True, False)
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The batches of a HashedDataset are asked for in disorder")
def test_each_row_once_in_every_epoch(tmp_path, suffix, workers, is_built, settings):
    path = write(tmp_path, suffix)
    for batch_size, shuffle in settings:
        data = dataset(path, workers=workers, batch_size=batch_size)
        counts = train(data, is_built, epochs=3, shuffle=shuffle)
        assert counts.tolist() == [[1] * ROWS] * 3
        assert data.epoch == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_built", [True, False])
def test_each_row_once_with_processes(tmp_path, is_built):
    path = write(tmp_path)
    data = dataset(path, workers=2, use_multiprocessing=True)
    assert train(data, is_built, epochs=2, shuffle=False).tolist() == [[1] * ROWS] * 2
    data.workers = data.use_multiprocessing = 0  # the same rows in the same order
    plain = dataset(path)
    for each in (data, plain):
        each.resume(1, 2)
    for number in range(BATCHES):
        np.testing.assert_array_equal(data[number][0], plain[number][0])


@pytest.mark.parametrize(
    ("workers", "batch", "is_built"),
    [(1, 5, True), (3, 5, False), pytest.param(3, 0, True, marks=pytest.mark.slow)],
)
def test_resumed(tmp_path, workers, is_built, batch):
    path = write(tmp_path)
    data = dataset(path, workers=workers)
    data.resume(2, batch)
    counts = train(data, is_built, epochs=2, shuffle=False)
    expected = [rows_from(path, 2 + epoch, batch, BATCHES) for epoch in range(2)]
    assert counts.tolist() == [np.bincount(one, minlength=ROWS).tolist() for one in expected]


@pytest.mark.parametrize("is_built", [True, False])
def test_resumed_where_an_epoch_is_one_batch(tmp_path, is_built):
    """What Keras reads ahead to build the model is the whole epoch."""
    path = write(tmp_path)
    data = dataset(path, batch_size=ROWS)
    data.resume(4)
    train(data, is_built, epochs=2, shuffle=False)
    assert data.epoch == 5


@pytest.mark.parametrize(("is_built", "shuffle"), [(True, False), (False, True)])
@pytest.mark.filterwarnings("ignore:The batches of a HashedDataset are asked for in disorder")
def test_epochs_of_keras_that_are_parts(tmp_path, is_built, shuffle):
    data = dataset(write(tmp_path), batch_size=25)  # 8 batches
    counts = train(data, is_built, epochs=6, steps_per_epoch=4, shuffle=shuffle)
    assert counts.reshape(3, 2, ROWS).sum(axis=1).tolist() == [[1] * ROWS] * 3


def test_one_fit_after_the_other(tmp_path):
    data, model = dataset(write(tmp_path)), Counting()
    orders = []
    for number in range(3):
        model.fit(data, verbose=0, shuffle=False)
        assert data.epoch == number
        orders.append(data[0][1].tolist())
    assert (np.array(model.counts) == -3).all()
    assert orders[0] != orders[1] != orders[2]


def test_validation_on_the_same_dataset(tmp_path):
    data, model, epochs = dataset(write(tmp_path)), Counting(), Epochs()
    model.fit(data, validation_data=data, epochs=3, verbose=0, callbacks=[epochs], shuffle=False)
    assert np.array(epochs.counts).tolist() == [[1] * ROWS] * 3
    assert data.epoch == 2  # evaluation is no epoch of training


class Stop(keras.callbacks.Callback):
    """Ends training after three batches."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2


def test_an_epoch_that_was_broken_off_begins_anew(tmp_path):
    data = dataset(write(tmp_path))
    Counting().fit(data, verbose=0, callbacks=[Stop()])
    counts = train(data, epochs=2, shuffle=False)
    assert counts.tolist() == [[1] * ROWS] * 2


class Nested(keras.callbacks.Callback):
    """Reads a dataset in the middle of an epoch."""

    def __init__(self, loop, data):
        super().__init__()
        self.loop, self.data = loop, data

    def on_train_batch_end(self, batch, logs=None):
        getattr(self.model, self.loop)(self.data, verbose=0)


@pytest.mark.parametrize("loop", ["evaluate", "predict"])
def test_a_second_loop_in_the_middle_of_an_epoch(tmp_path, loop):
    data = dataset(write(tmp_path))
    model = Counting()
    with pytest.raises(ValueError, match=f"Received: `{loop}` of the same dataset.*deepcopy"):
        model.fit(data, verbose=0, callbacks=[Nested(loop, data)], shuffle=False)
    counts = np.array(model.counts)
    own = Nested(loop, copy.deepcopy(data))
    model.fit(data, verbose=0, callbacks=[own], shuffle=False)
    assert (np.array(model.counts) == counts - 1).all()


@pytest.mark.parametrize(("label", "workers"), [("row", 3), (None, 1)])
def test_predictions_are_in_the_order_of_the_files(path, label, workers):
    data = dataset(path, label=label, workers=workers)
    model = keras.Sequential([keras.layers.Lambda(lambda x: x * 1.0)])  # not built
    for _ in range(2):
        np.testing.assert_array_equal(model.predict(data, verbose=0), codes(range(ROWS)))
    if label:
        data.resume(3, 2)
        np.testing.assert_array_equal(model.predict(data, verbose=0), codes(range(ROWS)))
        assert (data.epoch, data[0][1][0, 0]) == (3, rows_from(path, 3, 2, 1)[0])
        assert train(data, epochs=1, shuffle=False).sum() == ROWS


@pytest.mark.parametrize("hooks", [("begin",), ("end",), ("begin", "end")])
def test_loops_of_ones_own(tmp_path, hooks):
    path = write(tmp_path)
    data, epochs = dataset(path), []
    for _ in range(3):
        if "begin" in hooks:
            data.on_epoch_begin()
        epochs.append(np.concatenate([labels[:, 0] for _, labels in data]).astype(int))
        if "end" in hooks:
            data.on_epoch_end()
    for number, rows in enumerate(epochs):
        assert rows.tolist() == rows_from(path, number, 0, BATCHES).tolist()


def test_without_labels_nothing_is_shuffled(path):
    data = dataset(path, label=None)
    rows = np.concatenate([data[number][0] for number in range(BATCHES)])
    np.testing.assert_array_equal(rows, codes(range(ROWS)))
    with pytest.warns(UserWarning, match="Received: shuffle=True, label=None. Leave `shuffle` out"):
        shuffled = dataset(path, label=None, shuffle=True)
    rows = np.concatenate([shuffled[number][0] for number in range(BATCHES)])
    assert (rows != codes(range(ROWS))).any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.filterwarnings("ignore:The batches of a HashedDataset are asked for in disorder")
def test_a_copy_has_its_own_files(tmp_path, copied, suffix):
    data = dataset(write(tmp_path, suffix), workers=2)
    data.resume(1, 3)
    data[0]
    other = copied(data)
    assert other.epoch == 1
    for number in (0, 1, 5, 2, 6, 3, 4):  # in turns
        for ours, theirs in zip(data[number], other[number]):
            np.testing.assert_array_equal(ours, theirs)


FORKED = """
import os, sys
import numpy as np
from keras_multigpu.sparse import HashedDataset, HashEncoder
data = HashedDataset(sys.argv[1], HashEncoder({"name": 1000}), label="row", batch_size=32,
                     chunk_rows=15, shuffle=False, workers=int(sys.argv[2]))
data[0]
data._lock.acquire()  # as another thread would hold it
children = []
for child in range(3):
    read, write = os.pipe()
    if os.fork() == 0:
        rows = np.concatenate([data[number][1][:, 0] for _ in range(5) for number in range(7)])
        os.write(write, b"1" if (rows == np.tile(np.arange(200), 5)).all() else b"0")
        os._exit(0)
    children.append(read)
print([os.read(read, 1) for read in children])
"""


@pytest.mark.parametrize(
    ("suffix", "workers"),
    [
        ("csv", 2),
        pytest.param("csv", 1, marks=pytest.mark.slow),
        pytest.param("parquet", 1, marks=pytest.mark.slow),
        pytest.param("parquet", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.backend_free
def test_forked_processes_share_no_open_file(tmp_path, suffix, workers):
    done = run_python("-c", FORKED, write(tmp_path, suffix), workers, KERAS_BACKEND="numpy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([b"1"] * 3), done.stderr


@pytest.mark.backend_free
def test_the_rows_and_the_errors_of_a_worker_process(tmp_path):
    path = write(tmp_path)
    data, plain = dataset(path, workers=1, use_multiprocessing=True), dataset(path)
    for number in range(BATCHES):
        for ours, theirs in zip(data[number], plain[number]):
            np.testing.assert_array_equal(ours, theirs)
    (loader,) = data._reader._loaders
    assert loader._process.poll() is None
    data.resume(1)
    check_that_a_change_is_told(data, tmp_path / "rows.csv")
    for ahead in data._reader._pending.values():
        ahead.exception()  # waits until the process has nothing to do
    loader._process.kill()
    with pytest.raises(RuntimeError, match="must stay alive. Received: one that ended with .*-9"):
        loader.load(0)


def test_an_error_in_a_thread_is_the_readers(tmp_path):
    check_that_a_change_is_told(dataset(write(tmp_path), workers=2), tmp_path / "rows.csv")


def check_that_a_change_is_told(data, path):
    path.write_text(path.read_text().replace("value 60,60", "value 60,xx"))
    with pytest.raises(ValueError, match="rows.csv.*(must stay as it was|line 62)"):
        [data[number] for number in range(BATCHES)]
