"""Every method of the contract: what an engine has, how it is called, and that modes call it."""

import ast
import functools
import inspect
import pathlib
import typing

import keras
import numpy as np
import pytest

import keras_multigpu
from keras_multigpu import engines, list_devices, make_parallel
from keras_multigpu.engines import base
from keras_multigpu.engines.cluster.remote import Address

ENGINE = engines.current()
CONTRACT = {
    base.Engine: type(ENGINE),
    base.DataRunner: ENGINE.data_runner,
    base.TowerRunner: ENGINE.tower_runner,
    base.ModelRunner: ENGINE.model_runner,
    base.Steps: typing.get_type_hints(ENGINE.steps)["return"],
}


def _parameters(function):
    return [(one.name, one.kind, one.default) for one in _signature(function).parameters.values()]


def _signature(function):
    function = getattr(function, "__func__", function)  # of a class method
    return inspect.signature(getattr(function, "fget", None) or function)


def test_signatures_are_the_contracts():
    for abstract, concrete in CONTRACT.items():
        assert abstract.__abstractmethods__, abstract
        assert not concrete.__abstractmethods__, concrete
        for name in abstract.__abstractmethods__:
            asked = inspect.getattr_static(abstract, name)
            given = inspect.getattr_static(concrete, name)
            assert type(given) is type(asked), (concrete, name)
            assert _parameters(given) == _parameters(asked), (concrete, name)


def test_an_engine_has_nothing_that_the_contract_lacks():
    public = {name for name in dir(ENGINE) if not name.startswith("_")}
    named = {name for name in dir(base.Engine) if not name.startswith("_")}
    assert public == named | set(base.Engine.__annotations__)


def test_no_mode_asks_which_backend_it_is_on():
    for package in ("modes", "layers", "graphs"):
        paths = list(pathlib.Path(keras_multigpu.__file__).parent.glob(f"{package}/*.py"))
        assert paths, package
        for path in paths:
            text = path.read_text()
            assert package == "layers" or "backend.backend(" not in text, path
            for node in ast.walk(ast.parse(text)):
                if getattr(node, "attr", None) in ("name", "title", "partitions"):
                    owner = ast.unparse(node.value).rpartition(".")[2]
                    assert owner not in ("current()", "engine", "_engine"), path


@pytest.fixture
def called(monkeypatch):
    """The methods of the contract that were called, as pairs of a class and a name."""
    seen = set()

    def noted(function, key):
        @functools.wraps(function)
        def call(*args, **kwargs):
            seen.add(key)
            return function(*args, **kwargs)

        return call

    for abstract, concrete in CONTRACT.items():
        for name in abstract.__abstractmethods__:
            key = (abstract.__name__, name)
            for owner in concrete.__mro__[: concrete.__mro__.index(abstract)]:
                kept = vars(owner).get(name)
                if isinstance(kept, property):
                    monkeypatch.setattr(owner, name, property(noted(kept.fget, key)))
                elif isinstance(kept, classmethod):
                    monkeypatch.setattr(owner, name, classmethod(noted(kept.__func__, key)))
                elif kept is not None:
                    monkeypatch.setattr(owner, name, noted(kept, key))
    return seen


class Judged(keras.Model):
    """Its loss calls a part of it."""

    def __init__(self):
        super().__init__()
        self.dense, self.judge = keras.layers.Dense(4), keras.layers.Dense(1)
        self.judge.build((None, 4))

    def get_config(self):
        return {}

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.abs(self.judge(y_pred)))


class Weighed(Judged):
    """Its loss reads weights."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        weights = [keras.ops.sum(one.value) for one in self.judge.weights]
        return keras.ops.mean(y_pred) * sum(weights)


def test_every_method_is_called(called, tmp_path):
    _ask_for_devices()
    _use_tensors()
    for mode, options in (("data", {}), ("tower", {"replicas": "independent"}), ("model", {})):
        template = keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, (64, 64, 4))])
        parallel = make_parallel(template, 2, mode=mode, **options)
        parallel.compile("sgd", "mse")
        x, y = np.ones((8, 4), "float32"), np.ones((8, 4), "float32")
        parallel.fit(x, y, batch_size=4, verbose=0)
        parallel.train_on_batch(x, y)
        parallel.set_weights(parallel.get_weights())
        parallel.function(lambda one: one)(x)
        parallel.save(tmp_path / "model.keras")
        keras.saving.load_model(tmp_path / "model.keras")
        with ENGINE.weights_whole(parallel.template), ENGINE.places_kept(parallel):
            ENGINE.count_transfers(parallel, (x, y, None), True)
            ENGINE.find_memory(parallel, (x, y, None), True)
        if mode == "model":
            assert parallel.placement
            assert parallel.stages is None or parallel.stages.graph
            parallel._parallel_least_bytes(4)
        if mode == "data":
            assert parallel.placement == {}
            assert parallel.explain()
            ENGINE.data_runner.fullest(template, 4, "weights")
            values = [[v.value for v in parallel.trainable_variables], []]
            parallel.stateless_call(*values, keras.ops.convert_to_tensor(x))
    judged = make_parallel(Judged(), 2, shard="optimizer")
    weighed = make_parallel(Weighed(), 2, mode="tower", replicas="independent")
    for parallel in (judged, weighed):
        parallel.compile("sgd")
        parallel.fit(x, y, verbose=0)
    fresh = make_parallel(keras.Sequential([keras.layers.Dense(2)]), 2)
    fresh(np.ones((4, 3), "float32"))
    everything = {(one.__name__, name) for one in CONTRACT for name in one.__abstractmethods__}
    assert called == everything


def _ask_for_devices():
    engine, names = ENGINE, list_devices()
    engine.use_virtual_devices(4)
    assert engine.find_device(names[-1]) == names[-1]
    assert engine.find_device("toaster:0") is None
    assert engine.name_of("cpu:0") is None
    assert engine.describe_device(names[-1])
    assert engine.host_of(names[-1]) == ""
    assert engine.num_processes == 1
    assert isinstance(engine.no_gpu_support, str)
    with engine.on_host():
        assert float(keras.ops.ones(())) == 1.0
    with engine.on_device("cpu:1"):
        tensor = keras.ops.ones((2, 3))
    assert np.array_equal(engine.copy(tensor, "cpu:2"), np.ones((2, 3)))
    assert np.array_equal(engine.relay(["cpu:2", "cpu:1"])(tensor), np.ones((2, 3)))
    with pytest.raises(RuntimeError, match="join"):
        engine.join(Address("127.0.0.1:1", "127.0.0.1", 1), 1, 0, 1.0, "same")


def _use_tensors():
    engine, table = ENGINE, keras.ops.reshape(keras.ops.arange(6.0), (3, 2))
    rows = engine.join_rows([engine.take_rows(table, 2, 1), engine.take_rows(table, 0, 1)])
    assert np.array_equal(rows, [[4, 5], [0, 1]])
    indices = keras.ops.convert_to_tensor([[0, 2]])
    assert np.array_equal(engine.sum_rows(table, indices, None, None, False), [[4, 6]])
    assert int(engine.check_equal([3, 3])) == 3
    with pytest.raises(Exception, match="same number of rows"):
        engine.check_equal([3, 4])
    batches = [(np.ones((2, 3), "float32"),)] * 2
    if ENGINE.name == "jax":
        with pytest.raises(RuntimeError, match="tensorflow"):
            engine.stream_batches(lambda: iter(batches), batches[0], 2)
    else:
        assert len(list(engine.stream_batches(lambda: iter(batches), batches[0], 2))) == 2
