"""What make_parallel and the devices refuse, and what they say."""

import ast
import contextlib
import functools
import importlib.util
import inspect
import pathlib
import re

import keras
import numpy as np
import pytest
from support.parity import difference
from support.scripts import run_python

import keras_multigpu
from keras_multigpu import engines, list_devices, make_parallel, parallel, use_virtual_devices
from keras_multigpu.arguments import check_choice
from keras_multigpu.devices import choose_again, choose_devices, warn_of_apart

pytestmark = pytest.mark.thin(4)


def _model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def test_the_devices_of_this_process():
    assert list_devices() == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    use_virtual_devices(4)  # once more: a notebook's cell is run again


@pytest.mark.parametrize(
    ("request_", "devices"),
    [
        ({}, ("cpu:0", "cpu:1", "cpu:2", "cpu:3")),
        ({"n_gpus": 2}, ("cpu:0", "cpu:1")),
        ({"n_gpus": 1}, ("cpu:0",)),
        ({"devices": ["cpu:2", "/CPU:1"]}, ("cpu:2", "cpu:1")),
        ({"devices": ("/device:CPU:3",), "n_gpus": 1}, ("cpu:3",)),
    ],
)
def test_devices_by_number_and_by_name(request_, devices):
    template = _model()
    parallel = make_parallel(template, **request_)
    assert parallel.devices == devices
    assert parallel.template is template
    assert parallel.mode == "data"


@pytest.mark.parametrize("model", [None, "resnet", keras.layers.Dense(1), keras.Sequential])
def test_not_a_keras_model(model):
    with pytest.raises(ValueError, match="instance of `keras.Model`. Received: model=") as error:
        make_parallel(model, 2)
    assert type(model).__name__ in str(error.value)


def test_one_is_no_plural():
    """As in all messages that count (`number_of`)."""
    one = make_parallel(_model(), 1)
    assert "1 replica>" in repr(one)
    assert ": 1 shared replica, mixed" in repr(make_parallel(_model(), 1, mode="tower"))
    for call, said in [
        (lambda: make_parallel(one, 2), "already, on 1 device. "),
        (lambda: make_parallel(_model(), 3, devices=["cpu:0"]), "n_gpus=3 and 1 device, "),
        (lambda: make_parallel(_model(), 1, model_devices=2), "model_devices=2 and 1 device. "),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            call()
    with pytest.warns(UserWarning, match="in mode 'data' on 1 device. Make the clone"):
        keras.models.clone_model(one)


def test_parallel_already():
    parallel = make_parallel(_model(), 2)
    with pytest.raises(ValueError, match=r"parallel model already, on 2 devices.*model.template"):
        make_parallel(parallel, 4)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, False, "2"])
def test_a_wrong_number_of_devices(n):
    for call, name in [
        (lambda: make_parallel(_model(), n), "n_gpus"),
        (lambda: use_virtual_devices(n), "n"),
    ]:
        with pytest.raises(ValueError, match=f"`{name}` must be a positive integer") as error:
            call()
        assert f"{name}={n!r}" in str(error.value)


def test_numpy_integers_are_numbers_too():
    assert len(make_parallel(_model(), np.int64(3)).devices) == 3
    tower = make_parallel(_model(), np.int32(2), mode="tower", num_replicas=np.int64(4))
    assert len(tower.replicas) == 4
    assert type(tower.get_config()["num_replicas"]) is int
    if keras.backend.backend() == "tensorflow":
        with pytest.warns(UserWarning, match="All layers are on one of 2 devices"):
            model = make_parallel(_model(), 2, mode="model", placement={".*": np.int64(1)})
        assert set(model.placement.values()) == {1}
    for count in (np.int64(0), np.float32(2), np.bool_(True)):
        with pytest.raises(ValueError, match="`num_replicas` must be a positive integer, or None"):
            make_parallel(_model(), 2, mode="tower", num_replicas=count)
        with pytest.raises(
            ValueError, match=f"`n_gpus` must be a pos.*of type {type(count).__name__}"
        ):
            make_parallel(_model(), count)


def test_files_are_checked_as_requests_are():
    for mode, option, message in [
        ("data", {"wire_dtype": "int8"}, "`wire_dtype` must be None.*wire_dtype='int8'"),
        ("data", {"shard": "rows"}, "`shard` must be None.*shard='rows'"),
        ("tower", {"loss_of": "both"}, "`loss_of` must be.*loss_of='both'"),
        ("tower", {"num_replicas": 0}, "`num_replicas` must be a positive.*num_replicas=0"),
    ]:
        parallel = make_parallel(_model(), 2, mode=mode)
        with pytest.raises(ValueError, match=message):
            type(parallel).from_config({**parallel.get_config(), **option})


def test_more_gpus_than_there_are(monkeypatch):
    engine = keras_multigpu.engines.current()
    found = {"gpu": ("gpu:0", "gpu:1"), "cpu": ("cpu:0",)}
    monkeypatch.setattr(type(engine), "list_devices", lambda self, kind: found[kind])
    with pytest.raises(ValueError, match="has 2 GPUs. Leave `n_gpus` out .*write `n_gpus=2`"):
        make_parallel(keras.Sequential([keras.Input((2,))]), 4)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="n_gpus=5, and this host has 0 GPUs") as error:
        make_parallel(_model(), 5)
    assert "virtual devices are in use: 4" in str(error.value)
    assert "use_virtual_devices(5)" in str(error.value)


def test_unknown_modes_and_options():
    with pytest.raises(
        ValueError,
        match="one of 'data', 'tower', 'model'. Received: mode='dta'. Did you mean 'data'",
    ):
        make_parallel(_model(), 2, "dta")
    names = {"committee": "mode='tower', replicas", "Spread": "mode='model', placement='spread'"}
    for name, cure in names.items():
        with pytest.raises(ValueError, match=f"Give `{cure}"):
            make_parallel(_model(), 2, name)
    with pytest.raises(
        TypeError, match="options wire_dtype, shard, model_devices. Received: wire='bf"
    ):
        make_parallel(_model(), 2, wire="bfloat16")
    with pytest.raises(ValueError, match="`wire_dtype` must be None.*wire_dtype='int8'"):
        make_parallel(_model(), 2, wire_dtype="int8")
    with pytest.raises(ValueError, match="wire_dtype=<class 'numpy.float16'>"):
        make_parallel(_model(), 2, wire_dtype=np.float16)


def test_what_other_libraries_call_a_choice_is_understood():
    for name, given, here in [
        ("model_devices", "2", 2),
        ("model_devices", 2.0, 2),
        ("shard", "zero3", "weights"),
        ("shard", "all", "weights"),
        ("shard", "zero1", "optimizer"),
        ("shard", True, "weights"),
    ]:
        with pytest.raises(ValueError, match=f"Write `{name}={here!r}`"):
            make_parallel(_model(), 4, **{name: given})
    for given, here in [("bf16", "bfloat16"), ("half", "float16"), (np.float16, "float16")]:
        with pytest.raises(ValueError, match=f"Write `wire_dtype='{here}'`"):
            check_choice("wire_dtype", given, None, "bfloat16", "float16")
    for given in (8, ["bfloat16"], None):
        with pytest.raises(ValueError, match=r"Received: wire_dtype=[^.]*\.$"):
            check_choice("wire_dtype", given, "bfloat16", "float16")


def test_a_function_that_returns_no_model():
    with pytest.raises(ValueError, match="does it `return` it"):
        make_parallel(None)


def test_what_a_plan_says_is_best_comes_by_name():
    with pytest.raises(ValueError, match=r"Write `make_parallel\(model, \*\*plan.best\)`"):
        make_parallel(_model(), {"n_gpus": 2, "mode": "data"})


def test_options_that_are_nearly_right():
    for mode, option, cure in [
        ("data", {"gpus": 2}, "Received: gpus=2. Write `n_gpus=2`."),
        ("data", {"num_devices": 2}, "Write `n_gpus=2`."),
        ("data", {"gpus": ["gpu:0"]}, "Write `devices=['gpu:0']`."),
        ("data", {"placement": {}}, "It is an option of mode='model'."),
        ("model", {"loss_of": "mix"}, "It is an option of mode='tower'."),
        ("tower", {"mixx": "mean"}, "Did you mean `mix`?"),
        ("data", {"toast": 1}, "Received: toast=1."),
        ("data", {"dtype": "bfloat16"}, "Received: dtype='bfloat16'."),
        ("data", {"gpus": "all"}, "Leave `gpus` out to use all."),
        ("data", {"strategy": "tower"}, "Write `mode='tower'`."),
        ("tower", {"strategy": "mirrored"}, "Give `mode='data'`."),
        ("data", {"batch_size": 32}, "Give it to `fit`."),
        ("data", {"optimizer": "adam"}, "Give it to `compile`."),
    ]:
        with pytest.raises(TypeError) as error:
            make_parallel(_model(), mode=mode, **option)
        assert str(error.value).endswith(cure)


def test_the_overloads_have_each_modes_options():
    """With their defaults, for editors and type checkers."""
    found = []
    for node in ast.parse(pathlib.Path(parallel.__file__).read_text()).body:
        if getattr(node, "decorator_list", None) and node.name == "make_parallel":
            keywords = {one.arg: one for one in [*node.args.args, *node.args.kwonlyargs]}
            mode = ast.literal_eval(keywords["mode"].annotation.slice)
            pairs = zip(node.args.kwonlyargs, node.args.kw_defaults)
            given = {one.arg: ast.literal_eval(value) for one, value in pairs if value}
            assert given.pop("devices") is None
            found.append(mode)
            expected = inspect.signature(parallel.MODES[mode].__init__).parameters.values()
            assert given == {one.name: one.default for one in list(expected)[3:]}, mode
            assert tuple(given) == parallel.options_of(mode)
    assert sorted(found) == ["data", "model", "tower"]


@pytest.mark.parametrize(
    ("mode", "option", "meant"),
    [
        ("data", {"shard": "weight"}, "weights"),
        ("tower", {"replicas": "independant"}, "independent"),
        ("tower", {"replicas": "indep"}, "independent"),
        ("tower", {"loss_of": "replica"}, "replicas"),
    ],
)
def test_values_that_are_nearly_right(mode, option, meant):
    with pytest.raises(ValueError, match=f"Received: .*. Did you mean '{meant}'"):
        make_parallel(_model(), 2, mode, **option)


def test_the_name_says_what_is_spread():
    assert "2 replicas, shard='optimizer'>" in repr(make_parallel(_model(), 2, shard="optimizer"))


def test_options_are_read_and_not_set():
    for options in (
        {"shard": "weights"},
        {"model_devices": 2},
        {"mode": "tower", "num_replicas": 4},
    ):
        template = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        parallel = make_parallel(template, 4, **options)
        for name, value in options.items():
            assert getattr(parallel, name) == value
            with pytest.raises(AttributeError, match=f"`{name}` .* when a model is made parallel"):
                setattr(parallel, name, value)
    template.shard = "its own"
    assert make_parallel(template, 2).shard == "its own"


def test_what_only_data_mode_has():
    with pytest.raises(AttributeError, match="`explain` tells .* in mode 'tower'. Read"):
        make_parallel(_model(), 2, "tower").explain()
    with pytest.raises(AttributeError, match="`placement` tells .* in mode 'tower'. Read"):
        make_parallel(_model(), 2, "tower").placement  # noqa: B018
    with pytest.raises(ValueError, match=r"Write `devices=\['gpu:0'\]`"):
        make_parallel(_model(), "gpu:0")


def test_what_only_towers_have():
    parallel = make_parallel(_model(), 2)
    assert not hasattr(parallel, "mix")
    with pytest.raises(AttributeError, match="`predict_replicas` needs mode 'tower'.*mode 'data'"):
        parallel.predict_replicas(np.ones((2, 3)))
    with pytest.raises(AttributeError, match="no attribute 'toast'"):
        parallel.toast()
    unbuilt = make_parallel(keras.Sequential([keras.layers.Dense(1)]), 2)
    with pytest.raises(AttributeError, match="has no defined inputs yet"):
        unbuilt.inputs()


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ("cpu:0", TypeError, r"list of device names.*devices='cpu:0'. Write `devices=\['cpu:0'\]`"),
        (
            [0, 1],
            TypeError,
            r"names such as \"gpu:0\".*\[0, 1\]. Write `devices=\['cpu:0', 'cpu:1'\]`",
        ),
        (2, TypeError, "devices=2. Write `n_gpus=2`"),
        ("all", TypeError, "Leave `devices` out to use all"),
        ("cpu", TypeError, r"Write `devices=\['cpu:0', 'cpu:1', 'cpu:2', 'cpu:3'\]`.$"),
        (["/CPU"], ValueError, r"unknown. Write `devices=\['cpu:0', 'cpu:1', 'cpu:2', 'cpu:3'"),
        ([0, 7], TypeError, r"devices=\[0, 7\].$"),
        (["cpu:0", None], TypeError, r"devices=\['cpu:0', None\].$"),
        (["cpu:9"], ValueError, r"cpu:0, cpu:1, cpu:2, cpu:3. Received.*\['cpu:9'\] are unknown"),
        (["gpu:0"], ValueError, r"\['gpu:0'\] are unknown"),
        (["/job:worker/task:0/device:CPU:0"], ValueError, "are unknown"),
        (["cpu:0", 1], TypeError, r"Write `devices=\['cpu:0', 'cpu:1'\]`"),
        ([], ValueError, r"at least one. Received: devices=\[\]. Leave `devices` out .*from cpu:0"),
        (["cpu:0", "CPU:0"], ValueError, "each device once"),
    ],
)
def test_wrong_device_names(devices, error, message):
    with pytest.raises(error, match=message):
        make_parallel(_model(), devices=devices)


@pytest.mark.parametrize(
    ("n_gpus", "cure"),
    [
        ([0, 1], "`devices=['cpu:0', 'cpu:1']`"),
        (("cpu:0", "cpu:1"), "`devices=['cpu:0', 'cpu:1']`"),
        ("CPU:1", "`devices=['CPU:1']`"),
        ({"cpu:0"}, "`devices=['cpu:0']`"),
        ("tower", "`mode='tower'`"),
        ("3", "`n_gpus=3`"),
        (2.0, "`n_gpus=2`"),
    ],
)
def test_what_was_meant_by_a_wrong_number_of_devices(n_gpus, cure):
    with pytest.raises(ValueError, match="`n_gpus` must be a positive integer. Rec") as error:
        make_parallel(_model(), n_gpus)
    assert f"n_gpus={n_gpus!r}" in str(error.value)
    assert str(error.value).endswith(f" Write {cure}.")


@pytest.mark.parametrize(
    "given",
    [
        *({name: [0, 1]} for name in ("gpus", "num_gpus", "device_ids", "devices", "n_gpus")),
        *({name: "0, 1"} for name in ("gpus", "devices", "n_gpus")),
        *({name: "2"} for name in ("gpus", "num_gpus", "devices", "n_gpus")),
        *({name: 2} for name in ("gpu", "device_count", "n_devices", "devices")),
        *({name: 2.0} for name in ("gpus", "devices", "n_gpus")),
        *({name: zero} for name in ("gpu", "device", "devices") for zero in (0, "0")),
        {"devices": ["0", "1"]},
        {"devices": "cpu:1"},
    ],
    ids=str,
)
def test_cures_are_accepted(given):
    with pytest.raises((TypeError, ValueError)) as error:
        make_parallel(_model(), **given)
    cure = re.search("Write `(.*)`.$", str(error.value))[1]
    assert eval(f"make_parallel(_model(), {cure})").devices


def test_all_devices_by_a_word():
    with pytest.raises(ValueError, match="n_gpus='all' .*Leave `n_gpus` out to use all"):
        make_parallel(_model(), "all")


@pytest.mark.parametrize("n_gpus", [[], "two", 0, "0", True, None.__class__])
def test_what_can_mean_no_devices(n_gpus):
    with pytest.raises(ValueError, match="Give the number of devices, 1 or more; 1 runs the same"):
        make_parallel(_model(), n_gpus)


def _objects():
    """The backend's own objects for the devices."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.devices()
    import tensorflow as tf

    return tf.config.list_logical_devices("CPU")


def _distributions():
    """Keras's objects, and what says the same here."""
    distribution = keras.distribution
    yield distribution.DataParallel(devices=["cpu:0", "cpu:2"]), ("cpu:0", "cpu:2"), 1
    for shape, width in (((1, 2), 2), ((2, 2), 2), ((2, 1), 1)):
        names = list_devices()[: shape[0] * shape[1]]
        mesh = distribution.DeviceMesh(shape, ["rows", "model"], names)
        yield mesh, names, 1
        layout = distribution.LayoutMap(mesh)
        yield distribution.ModelParallel(layout_map=layout, batch_dim_name="rows"), names, width


@pytest.mark.parametrize("place", ["strategy", "distribution", "mode", "n_gpus", "devices"])
def test_what_stands_in_place_of_a_distribution(place):
    for given, names, width in _distributions():
        with pytest.raises((TypeError, ValueError)) as error:
            make_parallel(_model(), **{place: given})
        cure = re.search("Write `(.*)`.$", str(error.value))[1]
        wide = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        parallel = eval(f"make_parallel(wide, {cure})", {"wide": wide, **globals()})
        assert parallel.devices == names
        assert (parallel.mode == "model" or parallel.model_devices > 1) == (width > 1)


def test_what_stands_in_place_of_a_strategy_of_tensorflows():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("TensorFlow's objects")
    import tensorflow as tf

    cure = r"Write `devices=\['cpu:0', 'cpu:2'\]`.$"
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:2"])
    for options in ({"strategy": strategy}, {"mode": strategy}, {"devices": strategy}):
        with pytest.raises((TypeError, ValueError), match=cure):
            make_parallel(_model(), **options)
    with pytest.raises(
        ValueError, match=f"instance of `keras.Model`.*The model comes first. {cure}"
    ):
        make_parallel(strategy, _model())
    for options in (
        {"strategy": tf.distribute.get_strategy()},
        {"n_gpus": tf.distribute.get_strategy()},
    ):
        with pytest.raises(
            (TypeError, ValueError), match="Leave it out: a parallel model needs no"
        ):
            make_parallel(_model(), **options)


def test_what_stands_for_several_devices():
    """A device that was divided, and a kind without a number."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("TensorFlow's objects")
    import tensorflow as tf

    whole, cpus = tf.config.list_physical_devices("CPU")[0], list(list_devices())
    for one in (whole, tf.DeviceSpec(device_type="CPU")):
        for given in (one, [one], [one, "cpu:1"]):
            for name in ("devices", "n_gpus"):
                with pytest.raises((TypeError, ValueError)) as error:
                    make_parallel(_model(), **{name: given})
                assert str(error.value).endswith(f" Write `devices={cpus}`.")


def test_devices_by_the_backends_own_objects():
    found = _objects()
    for given in (found[1:3], [found[1], "cpu:2"]):
        assert make_parallel(_model(), devices=given).devices == ("cpu:1", "cpu:2")
    with pytest.raises(TypeError, match=r"Write `devices=\['cpu:1'\]`.$"):
        make_parallel(_model(), devices=found[1])
    with pytest.raises(ValueError, match=r"Write `devices=\['cpu:1', 'cpu:2'\]`.$"):
        make_parallel(_model(), found[1:3])
    with pytest.raises(TypeError, match="`devices` must be a list of device names such as"):
        make_parallel(_model(), devices=[object()])


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="objects of TensorFlow's")
def test_devices_by_a_strategy_or_a_specification():
    import tensorflow as tf

    one = tf.DeviceSpec(device_type="CPU", device_index=1)
    assert make_parallel(_model(), devices=[one]).devices == ("cpu:1",)
    with pytest.raises(ValueError, match=r"of which \['cpu:99'\] are unknown"):
        make_parallel(_model(), devices=[one.replace(device_index=99)])
    with pytest.raises(ValueError, match="Write `devices=") as error:
        make_parallel(_model(), tf.distribute.MirroredStrategy(["cpu:0", "cpu:2"]))
    cure = re.search("Write `(.*)`.$", str(error.value))[1]
    assert eval(f"make_parallel(_model(), {cure})").devices == ("cpu:0", "cpu:2")


def test_a_layer_is_no_model():
    with pytest.raises(ValueError, match=r"Make a model of the layer: `keras.Sequential\(\[layer"):
        make_parallel(keras.layers.Dense(1), 2)
    with pytest.raises(ValueError, match=r"of the layers: `keras.Sequential\(layers\)`"):
        make_parallel([keras.layers.Dense(1)], 2)
    with pytest.raises(ValueError, match="Make each model parallel"):
        make_parallel([_model()], 2)


def test_number_and_names_that_disagree():
    with pytest.raises(ValueError, match="n_gpus=3 and 2 devices"):
        make_parallel(_model(), 3, devices=["cpu:0", "cpu:1"])


def test_virtual_devices_too_late():
    keras.ops.zeros(1)
    with pytest.raises(RuntimeError, match=r"started with 4 CPU devices. Received: n=3.*kernel"):
        use_virtual_devices(3)


@pytest.mark.slow
@pytest.mark.slow_on_jax
def test_no_devices_asked_for_means_the_one_processor():
    code = (
        "import keras, keras_multigpu as k\n"
        "m = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "k.make_parallel(m, 1)\n"
        "print('asked for')\n"
        "print(k.make_parallel(m).devices)\n"
        "print(k.make_parallel(m).devices)\n"
        "k.make_parallel(m, 2)\n"
    )
    done = run_python("-c", code, CUDA_VISIBLE_DEVICES="-1")
    assert done.stdout.count("('cpu:0',)") == 2
    assert done.stderr.count("found no GPU, so it uses one CPU device. Received: n_gpus=None") == 1
    assert "<string>:5: UserWarning" in done.stderr
    assert "CUDA_VISIBLE_DEVICES='-1' hides GPUs" in done.stderr
    assert "n_gpus=2, and this host has 0 GPUs" in done.stderr
    assert "use_virtual_devices(2)` at the start of the process" in done.stderr


@pytest.mark.slow
def test_another_backend():
    code = (
        "import sys, types, keras\n"
        "keras.backend.backend = lambda: 'torch'\n"
        "import keras_multigpu as k\n"
        "k.make_parallel(keras.Sequential([keras.layers.Dense(1)]), 2)\n"
    )
    done = run_python("-c", code)
    assert "keras_multigpu works on the Keras backends 'tensorflow' and 'jax'" in done.stderr
    assert "='torch'" in done.stderr
    assert "KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax" in done.stderr


def test_no_backend_at_all():
    backend = keras.backend.backend()
    code = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {backend!r}:\n"
        "            raise ModuleNotFoundError('No module', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "import keras_multigpu\n"
    )
    done = run_python("-c", code)
    assert "ImportError: keras_multigpu needs Keras 3 with a backend" in done.stderr
    assert f"`{backend}` is not installed" in done.stderr
    assert "pip install '.[tensorflow]'` in a clone of keras_multigpu" in done.stderr


_HIDE = """
import importlib.machinery, sys
finder, hidden = importlib.machinery.PathFinder, {hidden!r}
find = finder.find_spec
finder.find_spec = lambda name, *more: None if name in hidden else find(name, *more)
"""


_COMMAND = """
import runpy
sys.argv = ['-m', *{arguments!r}]
sys.orig_argv = ['python', '-m', 'keras_multigpu']
runpy.run_module('keras_multigpu', run_name='__main__', alter_sys=True)
"""


@pytest.mark.parametrize(
    ("backend", "hidden", "said"),
    [
        ("tensorflow", ["tensorflow"], "`tensorflow` is not installed. JAX is: set the environ"),
        ("jax", ["jax"], "`jax` is not installed. TensorFlow is: set the environment variable KER"),
        ("jax", ["jax", "tensorflow"], "`jax` is not installed. Install a backend"),
        ("torch", ["torch"], "'jax'. Received: the backend 'torch', which is not installed either"),
        ("tf", [], "'jax'. Received: Unable to import backend"),
    ],
)
def test_which_backend_is_missing(backend, hidden, said):
    """Another one that is here comes first; of a backend that is not supported, that it isn't."""
    if not all(importlib.util.find_spec(one) for one in ("jax", "tensorflow")):
        pytest.skip("both backends have to be here")
    code = _HIDE.format(hidden=hidden) + "import keras_multigpu\n"
    done = run_python("-c", code, KERAS_BACKEND=backend)
    assert said in done.stderr
    assert "before Keras is imported, and restart" in done.stderr or "Install a" in done.stderr
    assert done.returncode == 1
    command = _COMMAND.format(arguments=["devices"])
    done = run_python("-c", _HIDE.format(hidden=hidden) + command, KERAS_BACKEND=backend)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("platforms", ["cuda", "gpu"])
def test_jax_without_the_processor(platforms):
    """JAX's own error is an assertion, or names another platform."""
    pytest.importorskip("jax")
    done = run_python(
        "-m", "keras_multigpu", "devices", KERAS_BACKEND="jax", JAX_PLATFORMS=platforms
    )
    assert f"Received: JAX_PLATFORMS='{platforms}'" in done.stderr
    assert f"Unset JAX_PLATFORMS, or write JAX_PLATFORMS={platforms},cpu" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_the_command_line_reads_its_arguments_before_it_imports_a_backend():
    """A wrong backend is not even met."""
    code = _HIDE.format(hidden=["keras"])
    for arguments, status in ((["--help"], 0), (["chek"], 2), (["bench", "--model", "x"], 2)):
        done = run_python("-c", code + _COMMAND.format(arguments=arguments))
        assert done.returncode == status, done.stderr
        assert "usage: python -m keras_multigpu" in done.stdout + done.stderr
    done = run_python("-m", "keras_multigpu", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    done = run_python("-c", f"{code}import keras_multigpu\n")
    assert "needs Keras 3 with a backend, and `keras` is not installed" in done.stderr


@pytest.mark.parametrize(
    ("backend", "command", "said"),
    [
        ("numpy", "check", "works on the Keras backends 'tensorflow' and 'jax'. Received: "),
        ("foo", "devices", "Unable to import backend"),
        ("jax", "serve", "`serve` needs the Keras backend 'tensorflow'"),
    ],
)
def test_the_command_line_says_in_a_line_what_a_backend_has_not(backend, command, said):
    if backend == "jax":
        pytest.importorskip("jax")
    done = run_python("-m", "keras_multigpu", command, KERAS_BACKEND=backend)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 1


def test_modules_with_extras_are_there_when_they_are_used():
    code = (
        "import sys, keras_multigpu as k\n"
        "print({'keras_multigpu.zoo', 'keras_multigpu.sparse'} & set(sys.modules))\n"
        "print(k.zoo.wide.__name__, k.sparse.HashEncoder.__name__)\n"
        "print(sorted(set(dir(k)) - set(k.__all__)))\n"
        "rooms = k.cluster, k.layers, k.reports, k.sparse, k.zoo\n"
        "print([sorted(one.__all__) == dir(one) for one in rooms])\n"
        "try:\n    k.multi_gpu_model\nexcept AttributeError as error:\n    print(error)\n"
        "k.toast\n"
    )
    done = run_python("-c", code)
    lines = done.stdout.split("\n")
    assert lines[:4] == ["set()", "wide HashEncoder", "['sparse', 'zoo']", str([True] * 5)]
    assert lines[4].endswith("'multi_gpu_model'. Keras 2's is `make_parallel` here")
    assert "AttributeError: module 'keras_multigpu' has no attribute 'toast'" in done.stderr
    code = _HIDE.format(hidden=["xxhash"]) + (
        "import keras_multigpu as k, pydoc\n"
        "print(hasattr(k, 'zoo'), len(pydoc.render_doc(k)) > 100)\n"
        "k.sparse\n"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["False", "True"]
    assert "AttributeError: keras_multigpu.sparse needs the library `xxhash`" in done.stderr


def test_nothing_of_keras_is_settled_by_the_import():
    code = (
        "import keras_multigpu as k, keras\n"
        "k.sparse, k.zoo, k.reports, k.cluster, k.layers\n"
        "keras.config.set_floatx('float64')\n"
        "print(keras.config.dtype_policy().name, keras.layers.Dense(1).name, keras.Model().name)\n"
    )
    done = run_python("-c", code)
    assert done.stdout.split() == ["float64", "dense", "model"], done.stderr


def test_the_public_names():
    assert keras_multigpu.__all__ == [
        "__version__",
        "cluster",
        "layers",
        "list_devices",
        "make_parallel",
        "reports",
        "use_virtual_devices",
    ]
    assert keras_multigpu.cluster.__all__ == [
        "ClusterError",
        "connect",
        "disconnect",
        "join",
        "serve",
    ]
    assert keras_multigpu.layers.__all__ == [
        "BatchMerge",
        "BatchSlice",
        "GatedMix",
        "GaussianMix",
        "GaussianNLL",
        "GaussianRMSE",
        "MultiHotDense",
        "WeightedMix",
        "mean_mix",
    ]


def test_numbers_of_numpy_are_numbers():
    template = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    two = np.int64(2)
    assert len(make_parallel(template, two).devices) == 2
    committee = make_parallel(template, two, mode="tower", num_replicas=np.int64(4))
    assert len(committee.replicas) == 4
    assert keras_multigpu.layers.BatchSlice(two).num_slices == 2
    assert keras_multigpu.layers.GaussianMix(variance=np.float32(2)).variance == 2
    assert keras_multigpu.layers.MultiHotDense(2, 3, padding=two).padding == 2
    assert keras_multigpu.layers.GatedMix(balance=np.float64(0.5)).balance == 0.5
    with pytest.raises(ValueError, match=r"`num_replicas` must be a positive .*num_replicas=True"):
        make_parallel(template, 2, mode="tower", num_replicas=True)
    with pytest.raises(ValueError, match=r"`num_slices` must be a positive .*num_slices=2.0"):
        keras_multigpu.layers.BatchSlice(2.0)


@pytest.mark.parametrize("way", [{}, {"mode": "tower"}, {"mode": "model"}], ids=str)
@pytest.mark.parametrize("by_a_call", [True, False])
def test_constants_that_build_makes_outlive_it(way, by_a_call, rng):
    """The layers are built by a trace, whose own tensors end with it."""

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
            self.factors = 1 + keras.ops.arange(shape[-1], dtype="float32")

        def call(self, inputs):
            return inputs * self.scale * self.factors

    x, y = rng.normal(size=(6, 3)).astype("float32"), rng.normal(size=(6, 2)).astype("float32")
    results = []
    for is_parallel in (False, True):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([Scale(), keras.layers.Dense(2)])
        model = make_parallel(model, 2, **way) if is_parallel else model
        if by_a_call or not is_parallel:  # else Keras itself can't train it
            model(x[:1])
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)
        results.append(model.get_weights())
    assert difference(*results) < 2e-5


@pytest.mark.parametrize("options", [{}, {"mode": "model"}, {"shard": "weights"}], ids=str)
def test_weights_that_are_moved_are_made_in_the_hosts_memory(options, tmp_path, monkeypatch):
    on_host, is_inside, noted = engines.current().on_host, [False], []

    @contextlib.contextmanager
    def noting():
        is_inside[0] = True
        with on_host():
            yield
        is_inside[0] = False

    class Noted(keras.layers.Dense):
        def build(self, shape):
            noted.append(is_inside[0])
            super().build(shape)

    def make():
        return keras.Sequential([keras.Input((3,)), Noted(4), Noted(1)])

    monkeypatch.setattr(engines.current(), "on_host", noting)
    parallel = make_parallel(make, 2, **options)
    parallel.save(tmp_path / "some.keras")
    loaded = keras.saving.load_model(tmp_path / "some.keras", custom_objects={"Noted": Noted})
    assert difference(parallel.get_weights(), loaded.get_weights()) == 0
    assert noted == [bool(options)] * 4


@pytest.mark.parametrize("options", [{}, {"mode": "tower"}, {"shard": "weights"}], ids=str)
def test_a_function_that_makes_the_model(options):
    parallel = make_parallel(_model, 2, **options)
    parallel.compile("sgd", "mse")
    parallel.fit(np.ones((5, 3)), np.ones((5, 1)), verbose=0)
    assert difference(parallel.get_weights(), parallel.template.get_weights()) == 0
    layers = [keras.Input((3,)), keras.layers.Dense(1)]
    parallel = make_parallel(functools.partial(keras.Sequential, layers), 2, **options)
    assert parallel.template.layers == layers[1:]
    if "shard" in options:
        with pytest.raises(ValueError, match="must return a built model.* 'lazy', which is not"):
            make_parallel(lambda: keras.Sequential(name="lazy"), 2, **options)
    with pytest.raises(ValueError, match="must return it. Received: '<lambda>', which returns 4"):
        make_parallel(lambda: 4, 2)
    with pytest.raises(ValueError, match="without arguments.*which needs units. Give `lambda"):
        make_parallel(lambda units, *more, wide=False, **options: _model(), 2)
    with pytest.raises(ValueError, match=r"Load it first: `keras.saving.load_model\(path\)`"):
        make_parallel("some.keras", 2)


@pytest.mark.parametrize("own", [0, 1])
def test_joined_processes_give_devices_alike(own, monkeypatch):
    """Whoever asks: each process must choose the same ones."""
    engine = type(keras_multigpu.engines.current())
    pool = tuple(f"cpu:{k}" for k in range(5))  # three of process 0, two of process 1
    hosts = [f"host (process {k})" * (k != own) for k in (0, 0, 0, 1, 1)]
    monkeypatch.setattr(engine, "num_processes", 2)
    monkeypatch.setattr(engine, "list_devices", lambda self, kind: pool if kind == "cpu" else ())
    monkeypatch.setattr(engine, "host_of", lambda self, name: hosts[pool.index(name)])
    assert choose_devices(2, None) == ("cpu:0", "cpu:3")
    assert choose_devices(3, None) == ("cpu:0", "cpu:1", "cpu:3")
    assert choose_devices(1, None) == (("cpu:0",), ("cpu:3",))[own]
    assert choose_devices(5, None) == choose_devices(None, None) == pool
    # Of a file that was written on one device, and on more than there are.
    assert choose_again("data", 1) == ("cpu:0", "cpu:3")
    assert choose_again("data", 8) == pool
    assert choose_again("tower", 2) == (("cpu:0", "cpu:1"), ("cpu:3", "cpu:4"))[own]
    warn_of_apart.cache_clear()
    with pytest.warns(UserWarning, match="one device of this process, in each of 2 processes"):
        make_parallel(_model(), 1)
    warn_of_apart.cache_clear()
    make_parallel(_model(), devices=choose_devices(1, None))  # a name says that it is meant
    monkeypatch.setattr(engine, "num_processes", 3)
    with pytest.raises(ValueError, match="Received: n_gpus=2, in 3 processes. Leave `n_gpus` out"):
        choose_devices(2, None)
