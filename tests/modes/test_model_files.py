"""Whole-model files, copies, exports: a parallel model survives them as a parallel model."""

import copy
import pathlib
import pickle
import tempfile
import zipfile

import keras
import numpy as np
import pytest
from keras import layers
from support.parity import difference, variables
from support.scripts import run_python

from keras_multigpu import make_parallel
from keras_multigpu.modes import ParallelModel

pytestmark = pytest.mark.thin(4)


@keras.saving.register_keras_serializable(package="tests")
class Configured(keras.Model):
    """A subclassed model that can be saved whole."""

    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = layers.Dense(units)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs):
        return self.dense(inputs) * self.scale

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def _configured():
    return Configured(2)


def _functional():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,), name="in")
    return keras.Model(inputs, {"out": layers.Dense(2, name="out")(inputs)}, name="small")


def _sequential():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(2)])


@keras.saving.register_keras_serializable(package="tests")
class Pickled(keras.Sequential):
    """Has another way to be pickled."""

    def __reduce__(self):
        return type(self), ()


def _pickled():
    keras.utils.set_random_seed(3)
    return Pickled([keras.Input((6,)), layers.Dense(2)])


def _trained(build, rng, n=4, **options):
    parallel = make_parallel(build(), n, **options)
    parallel.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = rng.normal(size=(20, 6)), rng.normal(size=(20, 2))
    y = {"out": y} if build is _functional else y
    parallel.fit(x, y, verbose=0)
    return parallel, x, y


# An option that JAX does not have.
WIRE = "bfloat16" if keras.backend.backend() == "tensorflow" else None

every_build = pytest.mark.parametrize("build", [_sequential, _functional, _configured])


@every_build
def test_saved_and_loaded_in_safe_mode(build, rng, tmp_path):
    parallel, x, y = _trained(build, rng, n=4, wire_dtype=WIRE)
    parallel.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)
    assert isinstance(loaded, ParallelModel)
    assert isinstance(loaded, type(parallel.template))
    assert (loaded.devices, loaded.mode, loaded._parallel_options) == (
        parallel.devices,
        "data",
        {"wire_dtype": WIRE, "shard": None, "model_devices": 1},
    )
    assert difference(variables(parallel), variables(loaded)) == 0
    for model in (parallel, loaded):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert difference(variables(parallel), variables(loaded)) < 1e-6


@every_build
def test_the_plain_model_reads_the_weights_in_it(build, rng, tmp_path):
    parallel, *_ = _trained(build, rng)
    parallel.save(tmp_path / "model.keras")
    plain = build()
    plain(np.zeros((1, 6), "float32"))
    plain.load_weights(tmp_path / "model.keras")
    assert difference(plain.get_weights(), parallel.get_weights()) == 0


@pytest.mark.slow
def test_on_fewer_devices(rng, tmp_path):
    parallel, x, _ = _trained(_sequential, rng)
    parallel.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", parallel.predict(x, verbose=0))
    code = (
        "import sys, warnings, keras, numpy as np, keras_multigpu\n"
        "if int(sys.argv[2]) > 1: keras_multigpu.use_virtual_devices(int(sys.argv[2]))\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    model = keras.saving.load_model(sys.argv[1] + '/model.keras')\n"
        "told = [str(w.message) for w in caught if 'saved on' in str(w.message)]\n"
        "gap = model.predict(np.load(sys.argv[1] + '/x.npy'), verbose=0)\n"
        "gap = abs(gap - np.load(sys.argv[1] + '/y.npy')).max()\n"
        "print(model.devices, len(told), told[:1], gap < 1e-6)\n"
    )
    for count, devices, text in [
        (1, "('cpu:0',)", "saved on 4 devices, and 1 is here: cpu:0"),
        (2, "('cpu:0', 'cpu:1')", "saved on 4 devices, and 2 are here: cpu:0, cpu:1"),
    ]:
        done = run_python("-c", code, tmp_path, count)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{devices} 1 ")
        assert text in done.stdout
        assert done.stdout.strip().endswith("True")


def test_the_devices_that_were_asked_for(tmp_path):
    """Names, or all; a number takes the first."""
    for given, devices in (
        ({"devices": ["cpu:2", "cpu:3"]}, ("cpu:2", "cpu:3")),
        ({"n_gpus": 2}, ("cpu:0", "cpu:1")),
        ({}, ("cpu:0", "cpu:1", "cpu:2", "cpu:3")),
    ):
        parallel = make_parallel(_sequential(), **given)
        parallel.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert loaded.devices == copy.deepcopy(loaded).devices == devices


@pytest.mark.parametrize(("mode", "count"), [("data", 4), ("tower", 2)])
def test_all_devices_are_all_of_those_here(mode, count):
    """But each of a tower's has a replica, whose number is the file's."""
    parallel = make_parallel(_sequential(), mode=mode)
    config = {**parallel.get_config(), "num_devices": 2}
    if mode == "tower":
        config["num_replicas"] = 2
    assert len(type(parallel).from_config(config).devices) == count


def test_what_differs_on_fewer_devices_is_told(monkeypatch):
    wide = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(8)])
    config = make_parallel(wide, 4, model_devices=4).get_config()
    few = ("cpu:0", "cpu:1", "cpu:2")
    monkeypatch.setattr("keras_multigpu.modes.saving.choose_again", lambda *_: few)
    with pytest.warns(UserWarning, match=r"has model_devices=3 now, in place of 4\."):
        loaded = type(make_parallel(wide, 2)).from_config(config)
    assert loaded.devices == few
    config["model_devices"] = 2
    with pytest.warns(UserWarning, match=r"of which 2 can be used\. It computes the same on them"):
        loaded = type(loaded).from_config(config)
    assert loaded.get_config()["model_devices"] == 2


def test_sharded_weights(rng, tmp_path):
    def large():
        return keras.Sequential([keras.Input((6,)), *(layers.Dense(60) for _ in range(4))])

    parallel = make_parallel(large(), 4)
    path = tmp_path / "model.weights.json"
    parallel.save_weights(path, max_shard_size=2e-5)
    assert len(list(tmp_path.glob("*.weights.h5"))) > 1
    plain = large()
    plain.load_weights(path)
    assert difference(plain.get_weights(), parallel.get_weights()) == 0


def _unpack(content):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        path.write_bytes(content)
        return keras.models.load_model(path)


def _pack(model):
    """Pickles a model, in place of Keras's way, as SciKeras does."""
    kind = type(model)
    keras.saving.register_keras_serializable("", kind.__qualname__)(kind)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        model.save(path)
        return _unpack, (path.read_bytes(),)


def _deepcopy(model, memo):
    rebuild, state = _pack(model)
    return rebuild(*state)


@pytest.fixture(params=["keras", "replaced", "replaced_deepcopy"])
def pickling(request, monkeypatch):
    """Keras's way to pickle models, or one that replaces it."""
    if request.param != "keras":
        monkeypatch.setattr(keras.Model, "__reduce__", _pack)
    if request.param == "replaced_deepcopy":
        monkeypatch.setattr(keras.Model, "__deepcopy__", _deepcopy, raising=False)


@pytest.mark.thin(3)
@pytest.mark.parametrize("build", [_sequential, _functional, _configured, _pickled])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(build, copied, rng, pickling):
    parallel, x, y = _trained(build, rng)
    other = copied(parallel)
    assert isinstance(other, ParallelModel)
    assert other.devices == parallel.devices
    assert difference(variables(parallel), variables(other)) == 0
    other.fit(x, y, verbose=0)
    assert difference(other.get_weights(), parallel.get_weights()) > 1e-5


@every_build
def test_configuration(build, rng):
    parallel, x, _ = _trained(build, rng)
    config = parallel.get_config()
    kept = copy.deepcopy(config)
    other = type(parallel).from_config(config)
    assert config == kept
    assert other.devices == parallel.devices
    assert other.predict(x, verbose=0) is not None
    cloned = keras.models.clone_model(parallel.template)
    cloned(np.zeros((1, 6), "float32"))
    cloned.set_weights(parallel.get_weights())
    assert difference(cloned.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-6


def test_as_a_part_of_another_model(rng, tmp_path):
    parallel, x, _ = _trained(_sequential, rng)
    inputs = keras.Input((6,))
    whole = keras.Model(inputs, layers.Dense(3)(parallel(inputs)))
    whole.compile("sgd", "mse")
    before = parallel.template.get_weights()
    whole.fit(x, np.zeros((20, 3)), verbose=0)
    assert difference(before, parallel.template.get_weights()) > 0
    whole.save(tmp_path / "whole.keras")
    loaded = keras.saving.load_model(tmp_path / "whole.keras")
    assert difference(loaded.predict(x, verbose=0), whole.predict(x, verbose=0)) < 1e-6


@pytest.mark.parametrize(
    "loss",
    ["mse", keras.losses.Huber(), lambda y, p: (y - p) ** 2],
    ids=["name", "object", "lambda"],
)
def test_a_compiled_and_trained_template_goes_on_where_it_stood(loss, rng):
    x, y = rng.normal(size=(40, 6)), rng.normal(size=(40, 2))
    plain, template = _sequential(), _sequential()
    for model in (plain, template):
        metrics = ["mae", keras.metrics.MeanSquaredError(name="square")]
        model.compile(keras.optimizers.Adam(0.05, clipnorm=1.0), loss, metrics=metrics)
        model.fit(x, y, shuffle=False, verbose=0)
    state = variables(template)
    parallel = make_parallel(template, 4)
    assert parallel.compiled
    assert parallel.optimizer is not template.optimizer
    histories = [model.fit(x, y, shuffle=False, verbose=0).history for model in (plain, parallel)]
    assert difference(*histories) < 2e-5
    assert difference(variables(plain), variables(parallel)) < 2e-5
    slots = len(template.weights)
    assert difference(variables(template)[slots:], state[slots:]) == 0  # its own optimizer rests
    template.fit(x, y, verbose=0)


class OwnCompile(keras.Model):
    """Has arguments of its own in `compile`, two optimizers, and a loss set afterwards."""

    def compile(self, special, second, **kwargs):
        super().compile("adam", **kwargs)
        self.special, self.second = special, second
        self.loss = "set afterwards"


def _own_compile():
    inputs = keras.Input((6,))
    return OwnCompile(inputs, layers.Dense(2)(inputs))


def test_a_template_with_a_compile_of_its_own():
    template = _own_compile()
    template.compile([3], second=keras.optimizers.SGD(), loss="mse", metrics=["mae"])
    parallel = make_parallel(template, 2)
    assert parallel.compiled
    assert parallel.special == [3]
    assert parallel.second is template.second  # set by `compile`, as other attributes are
    assert template.loss == parallel.loss == "set afterwards"
    assert type(parallel.optimizer) is keras.optimizers.Adam
    assert parallel.optimizer is not template.optimizer
    assert set(parallel.fit(np.zeros((4, 6)), np.zeros((4, 2)), verbose=0).history) == {
        "loss",
        "mae",
    }
    parallel.compile([4], second=None, loss="mae")
    assert template.special == parallel.special == [4]


def test_a_template_compiled_without_keras():
    """Nothing says what its parallel model would be compiled with."""

    class Unusual(keras.Model):
        def compile(self, rate):
            self.rate, self.compiled = rate, True

    inputs = keras.Input((6,))
    template = Unusual(inputs, layers.Dense(2)(inputs))
    template.compile(0.1)
    with pytest.warns(UserWarning, match=r"`compile` of Unusual.*Call `parallel.compile") as told:
        parallel = make_parallel(template, 2)
    assert not parallel.compiled
    assert told[0].filename == __file__


def test_a_template_compiled_with_what_cannot_be_copied():
    class Odd(keras.metrics.MeanSquaredError):
        def __init__(self):
            super().__init__(name="odd")

    template = _sequential()
    template.compile("sgd", "mse", metrics=[Odd()])
    with pytest.warns(UserWarning, match=r"can't be copied.*TypeError.*not compiled") as told:
        parallel = make_parallel(template, 2)
    assert not parallel.compiled
    assert told[0].filename == __file__


@keras.saving.register_keras_serializable("tests")
class OwnConfig(keras.Sequential):
    """Has a `compile` of its own, and says how it was compiled."""

    def compile(self, aside=None, **kwargs):
        super().compile(**kwargs)
        self.aside = aside

    def get_compile_config(self):
        serialize = keras.saving.serialize_keras_object
        return {"aside": serialize(self.aside), "optimizer": serialize(self.optimizer)}

    def compile_from_config(self, config):
        given = {key: keras.saving.deserialize_keras_object(one) for key, one in config.items()}
        self.compile(**given, loss="mse")
        self.optimizer.build(self.trainable_variables)


def test_a_compile_that_says_how_the_model_was_compiled(rng, tmp_path):
    template = OwnConfig([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    parallel = make_parallel(template, 2)
    parallel.compile(optimizer="adam", loss="mse", aside=keras.optimizers.SGD(0.25))
    x, y = rng.normal(size=(5, 3)), rng.normal(size=(5, 1))
    parallel.fit(x, y, verbose=0)
    parallel.save(tmp_path / "own.keras")
    loaded = keras.saving.load_model(tmp_path / "own.keras")
    assert float(loaded.aside.learning_rate) == 0.25
    for model in (parallel, loaded):
        model.fit(x, y, verbose=0)
    assert difference(variables(parallel), variables(loaded)) < 1e-6
    assert not template.compiled
    with pytest.raises(AttributeError, match="'optimizer'"):
        template.get_compile_config()  # the user's again


class Unregistered(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize("mode", ["data", "tower"])
def test_what_keras_cannot_make_is_said_first(mode, tmp_path):
    """Before the configuration of the whole model, which Keras's errors hold."""
    parallel = make_parallel(Unregistered(), 2, mode=mode)
    parallel(np.zeros((2, 6)))
    parallel.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="^Could not locate class 'Unregistered'. Make sure"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_the_legacy_format_is_refused(tmp_path):
    parallel = make_parallel(_functional(), 2)
    with pytest.raises(ValueError, match=r"legacy HDF5 format.*model.h5.*model.template.save"):
        parallel.save(tmp_path / "model.h5")
    inputs = keras.Input((6,))
    for model in (parallel, keras.Model(inputs, parallel(inputs), name="around")):
        with pytest.raises(ValueError, match=r"legacy HDF5 format.*'small'.*model.template.save"):
            keras.models.save_model(model, tmp_path / "model.h5")
        model.get_config()  # of no file, or of a newer one


def test_a_compiled_templates_exclusions_from_weight_decay(rng):
    template = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.01, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    template.compile(optimizer, "mse")
    parallel = make_parallel(template, 2)
    x = rng.normal(size=(8, 6)).astype("float32")
    before = template.get_weights()[0]
    parallel.fit(x, parallel.predict(x, verbose=0), verbose=0)  # the gradient is zero
    assert difference(template.get_weights()[0], before) < 1e-5


def _rewrite(folder, text, older):
    """Writes `old.keras`: `new.keras` with another text in its configuration."""
    with (
        zipfile.ZipFile(folder / "new.keras") as new,
        zipfile.ZipFile(folder / "old.keras", "w") as old,
    ):
        for name in new.namelist():
            content = new.read(name)
            if name == "config.json":
                assert text in content
                content = content.replace(text, older)
            old.writestr(name, content)


@pytest.mark.parametrize("mode", ["data", "tower", "model"])
def test_a_file_that_names_modules_of_an_earlier_version(mode, rng, tmp_path):
    """Classes are found by the name under which they are registered."""
    parallel = make_parallel(_sequential(), 2, mode)
    parallel.save(tmp_path / "new.keras")
    _rewrite(tmp_path, b"keras_multigpu.modes.", b"keras_multigpu.models.")
    again = keras.saving.load_model(tmp_path / "old.keras")
    assert again.mode == mode
    x = rng.normal(size=(5, 6)).astype("float32")
    assert difference(again.predict(x, verbose=0), parallel.predict(x, verbose=0)) < 1e-6


def test_files_with_an_option_for_the_statistics_of_slices(rng, tmp_path):
    """Which data mode had in earlier versions."""
    layer = layers.BatchNormalization()
    parallel = make_parallel(keras.Sequential([keras.Input((6,)), layer]), 2)
    parallel.save(tmp_path / "new.keras")
    _rewrite(tmp_path, b'"wire_dtype": ', b'"sync_batch_norm": true, "wire_dtype": ')
    keras.saving.load_model(tmp_path / "old.keras")  # warnings are errors here
    _rewrite(tmp_path, b'"wire_dtype": ', b'"sync_batch_norm": false, "wire_dtype": ')
    told = "saved with sync_batch_norm=False. Every `BatchNormalization` sees the whole batch"
    with pytest.warns(UserWarning, match=told) as warned:
        again = keras.saving.load_model(tmp_path / "old.keras")
    assert len(warned) == 1
    assert again._parallel_options == {"wire_dtype": None, "shard": None, "model_devices": 1}
    again.compile("sgd", "mse")
    x = rng.normal(size=(7, 6)).astype("float32")
    again.train_on_batch(x, x)
    norm = again.template.layers[0]
    expected = (1 - norm.momentum) * x.mean(axis=0)
    assert difference(np.asarray(norm.moving_mean), expected) < 1e-6
