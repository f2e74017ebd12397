"""Training loops, calls, sparse tensors and settings of the user's own."""

import warnings

import jax
import keras
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse
from keras import layers, ops
from support.models import mlp, wide_perceptron
from support.parity import difference, variables
from support.precision import double_precision
from support.scripts import run_python

from keras_multigpu import make_parallel, reports
from keras_multigpu.layers import BatchMerge, BatchSlice

pytestmark = pytest.mark.thin(3)


def test_a_training_loop_of_ones_own(rng):
    x, y = rng.normal(size=(22, 6)).astype("float32"), rng.normal(size=(22, 2)).astype("float32")
    plain, parallel = mlp(), make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    parallel.predict(x, verbose=0)  # the weights have been on all devices, and are back
    for model in (plain, parallel):
        optimizer = keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)

        def loss(trainable, fixed, a, b, model=model):
            outputs, fixed = model.stateless_call(trainable, fixed, a, training=True)
            return ops.mean((outputs - b) ** 2), fixed

        @jax.jit
        def step(trainable, fixed, slots, a, b, loss=loss, optimizer=optimizer):
            gradients, fixed = jax.grad(loss, has_aux=True)(trainable, fixed, a, b)
            trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
            return trainable, fixed, slots

        parts = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        state = [[variable.value for variable in part] for part in parts]
        for begin, end in [(0, 8), (8, 16), (16, 22)]:
            state = step(*state, x[begin:end], y[begin:end])
        assert len(state[0][0].sharding.device_set) == (1 if model is plain else 4)
        for variable, value in zip(model.trainable_variables, state[0]):
            variable.assign(value)
    assert difference(plain.get_weights(), parallel.get_weights()) < 2e-5


def test_called_eagerly(rng):
    x = rng.normal(size=(7, 6)).astype("float32")
    plain, parallel = mlp(), make_parallel(mlp(), 4)
    assert difference(np.asarray(plain(x)), np.asarray(parallel(x))) < 1e-6
    parallel.predict(x, verbose=0)
    assert difference(np.asarray(plain(x)), np.asarray(parallel(x))) < 1e-6


def _sparse_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((30,), sparse=True), layers.Dense(2)])


@pytest.mark.slow
def test_sparse_tensors(rng):
    dense = rng.normal(size=(32, 30)) * (rng.random((32, 30)) < 0.1)
    y = rng.normal(size=(32, 2))

    def batches():
        for begin, end in [(0, 8), (8, 24), (24, 29), (29, 32)]:
            yield sparse.BCOO.fromdense(dense[begin:end].astype("float32")), y[begin:end]

    plain, parallel = _sparse_model(), make_parallel(_sparse_model(), 4)
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.05), "mse")
        for batch in batches():
            model.train_on_batch(*batch)
        model.fit(scipy.sparse.csr_matrix(dense), y, batch_size=12, shuffle=False, verbose=0)
    assert difference(variables(plain), variables(parallel)) < 2e-5
    for inputs, _ in batches():
        outputs = [model.predict_on_batch(inputs) for model in (plain, parallel)]
        assert difference(*outputs) < 2e-5
        assert difference(*(np.asarray(model(inputs)) for model in (plain, parallel))) < 2e-5


def test_meshes_and_devices_in_place_of_names():
    model, mesh = mlp(), jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    of_keras = keras.distribution.DeviceMesh((2,), ["rows"], jax.devices()[:2])
    for one in (mesh, sharding, of_keras):
        with pytest.raises(TypeError, match=r"Write `devices=\['cpu:0', 'cpu:1'\]`"):
            make_parallel(model, devices=one)
    with pytest.raises(ValueError, match=r"n_gpus=Mesh.*Write `devices=\['cpu:0', 'cpu:1'\]`"):
        make_parallel(model, mesh)
    link = reports.measure_link(*jax.devices()[:2], repeats=1)
    assert link.name == "cpu:0 to cpu:1"


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_slicing_and_merging_sparse_tensors(rows):
    dense = scipy.sparse.random(rows, 5, 0.4, random_state=1, dtype="float32").toarray()
    whole = sparse.BCOO.fromdense(dense)
    slices = BatchSlice(4)(whole)
    assert [part.shape[0] for part in slices] == [
        max(1, len(part)) for part in np.array_split(np.arange(rows), 4)
    ]
    assert difference(BatchMerge()(slices, whole=whole).todense(), dense) == 0


def test_a_distribution_of_the_users_is_refused():
    template = mlp()
    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    with keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]).scope():
        with pytest.raises(ValueError, match=r"Received.*DataParallel.*set_distribution\(None\)"):
            make_parallel(template, 4)
        with pytest.raises(ValueError, match=r"Received.*DataParallel.*set_distribution\(None\)"):
            parallel.fit(np.zeros((8, 6)), np.zeros((8, 2)), verbose=0)
    assert keras.distribution.distribution() is None


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_mesh_of_the_users_is_refused(kind):
    template, parallel = mlp(), make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    set_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh  # before 0.7
    with set_mesh(mesh):
        with pytest.raises(ValueError, match="Received.*set_mesh.*rows.*Leave it out"):
            make_parallel(template, 4)
        with pytest.raises(ValueError, match="Received.*set_mesh.*rows.*Leave it out"):
            parallel.fit(np.zeros((8, 6)), np.zeros((8, 2)), verbose=0)
    parallel.fit(np.zeros((8, 6)), np.zeros((8, 2)), verbose=0)


def test_the_wires_type_is_the_compilers_choice():
    with pytest.raises(ValueError, match="None on the Keras backend 'jax'.*wire_dtype='bfloat16'"):
        make_parallel(mlp(), 4, wire_dtype="bfloat16")
    config = {**make_parallel(mlp(), 4).get_config(), "wire_dtype": "bfloat16"}
    parallel = make_parallel(mlp(), 4)
    with pytest.warns(UserWarning, match=r"saved with wire_dtype='bfloat16'.*'jax'.*own type"):
        loaded = type(parallel).from_config(config)
    assert loaded._parallel_options["wire_dtype"] is None


class Pairs(layers.Layer):
    """Compares the rows of a batch with each other."""

    def call(self, inputs):
        return ops.matmul(inputs, ops.transpose(inputs))


def _fixed():
    inputs = keras.Input(batch_shape=(8, 6))
    return keras.Model(inputs, layers.Dense(2)(inputs))


def _stateful():
    inputs = keras.Input(batch_shape=(8, 2, 3))
    return keras.Model(inputs, layers.Dense(2)(layers.GRU(4, stateful=True)(inputs)))


def _pairs():
    return keras.Sequential([keras.Input((6,)), Pairs()])


@pytest.mark.parametrize("build", [_fixed, _stateful, _pairs])
def test_what_only_slicing_could_not_do(build, rng):
    models = []
    for n in (None, 4):
        keras.utils.set_random_seed(3)
        models.append(make_parallel(build(), n) if n else build())
    x = rng.normal(size=(16, *models[0].input_shape[1:]))
    outputs = []
    for model in models:
        model.compile(keras.optimizers.SGD(0.05), "mse")
        for begin in (0, 8):
            batch = x[begin : begin + 8]
            outputs.append(model.predict(batch, batch_size=8, verbose=0))
        model.fit(x, np.zeros((16, outputs[0].shape[1])), 8, shuffle=False, verbose=0)
        outputs.append(model.predict(x[:8], batch_size=8, verbose=0))
    assert difference(outputs[:3], outputs[3:]) < 2e-5


def test_tensorflow_is_never_imported(tmp_path):
    code = (
        "import sys, keras, numpy as np, keras_multigpu as k\n"
        "k.use_virtual_devices(2)\n"
        "m = k.make_parallel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))\n"
        "m.compile('adam', 'mse')\n"
        "m.fit(np.ones((5, 3)), np.ones((5, 1)), verbose=0)\n"
        f"m.save_weights({str(tmp_path / 'model.weights.h5')!r})\n"
        f"m.load_weights({str(tmp_path / 'model.weights.h5')!r})\n"
        "imported = 'tensorflow' in sys.modules\n"
        "class Hide:\n"  # Keras looks for it when it writes a whole model
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tensorflow':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        f"m.save({str(tmp_path / 'model.keras')!r})\n"
        f"m = keras.saving.load_model({str(tmp_path / 'model.keras')!r})\n"
        "m.predict(np.ones((5, 3)), verbose=0)\n"
        "print(m.devices, imported)\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("('cpu:0', 'cpu:1') False")


def test_devices_are_listed_before_the_runtime_starts():
    code = (
        "import jax, keras_multigpu as k\n"
        "before = k.list_devices()\n"
        "k.use_virtual_devices(3)\n"
        "print(before, k.list_devices())\n"
        "jax.numpy.zeros(1)\n"
        "print(len(jax.devices('cpu')), k.list_devices())\n"
        "k.use_virtual_devices(3)\n"
        "k.use_virtual_devices(2)\n"
    )
    done = run_python("-c", code)
    assert done.stdout.splitlines() == [
        "('cpu:0',) ('cpu:0', 'cpu:1', 'cpu:2')",
        "3 ('cpu:0', 'cpu:1', 'cpu:2')",
    ]
    assert "started with 3 CPU devices. Received: n=2" in done.stderr


def test_an_older_keras():
    code = (
        "import keras\nkeras.__version__ = '3.11.3'\nimport keras_multigpu as k\nk.list_devices()\n"
    )
    done = run_python("-c", code)
    assert "needs Keras 3.12 or later on the Keras backend 'jax'" in done.stderr
    assert "keras.__version__='3.11.3'" in done.stderr


class OwnState(keras.Model):
    """Has a weight and a seed that are made when it is compiled, beside its layers."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.seed = keras.random.SeedGenerator(1)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        noise = keras.random.normal(ops.shape(y_pred), seed=self.seed)
        return ops.mean((self.scale * y_pred - y + 0.1 * noise) ** 2)


def test_state_of_the_parallel_model_itself(rng):
    x, y = rng.normal(size=(22, 6)), rng.normal(size=(22, 2))
    results = []
    for n in (None, 4):
        keras.utils.set_random_seed(3)
        model = OwnState() if n is None else make_parallel(OwnState(), n)
        model.compile(keras.optimizers.SGD(0.1))  # Keras takes no new state once it is built
        model(x[:1])
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        assert float(model.scale.value) != 1
        results.append([history, model.scale, model.seed.state, model.dense.kernel])
    assert difference(*results) < 1e-5


def test_batches_that_are_never_divided_are_told(rng):
    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    x, y = rng.normal(size=(42, 6)), rng.normal(size=(42, 2))
    parallel.fit(x, y, batch_size=8, epochs=11, verbose=0)  # the last of each epoch has 2 rows
    with pytest.warns(
        UserWarning, match=r"The 4 devices do not divide.*10 such batches.*of 6 rows"
    ):
        make_parallel(parallel.template, 4).predict(x[:33].repeat(2, 0), batch_size=6, verbose=0)
    mesh = make_parallel(wide_perceptron(), 4, model_devices=2)
    mesh.compile("sgd", "mse")
    told = "The 2 groups of devices do not divide.*longest of 5 rows.*multiple of 2 rows: 4, for"
    with pytest.warns(UserWarning, match=told):  # the tenth batch has 3 rows
        mesh.fit(np.ones((48, 20)), np.ones((48, 3)), batch_size=5, verbose=0)


def test_single_steps_of_one_row_for_each_processor_are_told(rng):
    """Processors compute single rows whole."""
    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    batch = np.ones((4, 6)), np.ones((4, 2))
    for _ in range(9):
        parallel.test_on_batch(*batch)
    with pytest.warns(
        UserWarning, match="one row for each .*10 batches, the longest of 4 rows. Give 8 rows"
    ):
        parallel.test_on_batch(*batch)
    report = reports.transfers(parallel, batch)
    assert "`fit` on processors computes one row for each device whole" in str(report)
    assert report.bytes("training")["gradients"] > 0


def test_batches_of_which_few_are_divided_are_told(rng):
    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    x, y = rng.normal(size=(22, 6)), rng.normal(size=(22, 2))
    parallel.fit(x[:8], y[:8], batch_size=8, verbose=0)  # divided
    with pytest.warns(UserWarning, match="10 such batches, the longest of 6 rows"):
        parallel.fit(x, y, batch_size=6, epochs=5, verbose=0)  # the last of each epoch is divided


def test_short_passes_that_are_not_divided_are_not_told(rng):
    parallel = make_parallel(mlp(), 4)
    parallel.compile("sgd", "mse")
    x, y = rng.normal(size=(46, 6)), rng.normal(size=(46, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validation = (x[32:], y[32:])  # 14 rows, in one batch
        parallel.fit(x[:32], y[:32], 16, epochs=12, validation_data=validation, verbose=0)
        for _ in range(12):
            parallel.predict(x[:1], verbose=0)
    whole = make_parallel(parallel.template, 4)
    whole.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="of 46 rows. Give batches of a multiple of 4 rows: 44, f"):
        whole.fit(x, y, batch_size=64, epochs=10, verbose=0)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_step_that_returns_text_is_refused_as_by_jax(n):
    """The error names the user's function, whether or not the devices divide the batch."""

    class Telling(keras.Sequential):
        def test_step(self, state, data):
            logs, state = super().test_step(state, data)
            return {**logs, "note": "text"}, state

    said = (
        r"test_step at .*test_users_own_code.py.*<class 'str'> .*\['note'\], which is not a valid"
    )
    parallel = make_parallel(Telling([keras.Input((3,)), keras.layers.Dense(1)]), n)
    parallel.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(TypeError, match=said):
        parallel.evaluate(np.ones((8, 3)), np.ones((8, 1)), verbose=0)
    step = parallel.function(lambda x: (x, "text"))
    with pytest.raises(TypeError, match=r"<lambda> at .*'str'> at output component \[1\], which"):
        step(np.ones((8, 3)))


def test_a_step_takes_tables_and_other_libraries_arrays(rng):
    pandas = pytest.importorskip("pandas")
    step = make_parallel(mlp(), 2).function(lambda x: 2 * x)
    x = rng.normal(size=(4, 6)).astype("float32")
    assert difference(step(pandas.DataFrame(x)), 2 * x) == 0


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    with double_precision():
        yield


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "options",
    [{"mode": "data"}, {"mode": "model"}, {"mode": "tower", "replicas": "independent"}],
    ids=str,
)
def test_weights_are_made_and_placed_in_the_precision_of_the_callers_scope(options):
    """JAX keeps the setting per thread, and these threads are not the caller's."""
    x, y = np.ones((4, 2)), np.ones((4, 4))
    kernels = []
    for wrap in (lambda model: model, lambda model: make_parallel(model, 2, **options)):
        keras.utils.set_random_seed(1)
        model = wrap(keras.Sequential([layers.Dense(4)]))
        model.compile(keras.optimizers.SGD(1e-12), "mse")
        model.fit(x, y, verbose=0)
        kernels.append(model.get_weights()[0])
    assert kernels[1].dtype == "float64"
    assert np.abs(kernels[0] - kernels[1]).max() < 1e-11


TAKEN = {
    "text": (lambda kind, x: x.sum(), ("fast",), r"Received: kind, the text 'fast'\. Bind.*kind="),
    "bool": (lambda k, x: x.sum() if k else 0.0, (True,), r"`if`.*Received: k, and .*, k="),
    "int": (lambda n, x: x[:n], (2,), r"slice.*Received: n, and .*static.*, n="),
    "iterator": (lambda it, x: x.sum(), (iter([1.0]),), r"Received: it, of.*`next\(iterator\)`"),
    "texts": (
        lambda batch, x: x.sum(),
        ({"words": np.array(["a", "b", "c", "d"])},),
        r"Received: batch\['words'\], of type ndarray of <U1\. Encode",
    ),
}


@pytest.mark.parametrize("options", [{}, {"mode": "model"}])
@pytest.mark.parametrize("name", TAKEN)
def test_arguments_that_a_step_cannot_read_are_named(name, options):
    step, args, told = TAKEN[name]
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    function = make_parallel(model, 2, **options).function(step, rows=("x",))
    with pytest.raises(TypeError, match=told):
        function(*args, np.ones((4, 4)))


def test_errors_name_the_users_step():
    def of_mine(x, scale):
        return float(x.sum()) * scale

    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    function = make_parallel(model, 2).function(of_mine, rows=("x",))
    with pytest.raises(TypeError, match=r"of_mine at .*test_users_own_code.*the argument x\."):
        function(np.ones((4, 4)), 2)


def test_members_have_no_parts_that_a_step_could_call():
    class Parts(keras.Model):
        def __init__(self):
            super().__init__()
            self.part = keras.layers.Dense(2)

        def call(self, x):
            return self.part(x)

        def train_step(self, state, data):
            outputs, _ = self.part.stateless_call(state[0], [], data[0])
            return {"loss": keras.ops.mean(outputs)}, state

    model = Parts()
    model(np.ones((2, 6)))
    with pytest.raises(ValueError, match=r"`self\.part\(\.\.\.\)` in `train_step`, of Parts"):
        make_parallel(model, 2, mode="tower", replicas="independent")
    with pytest.warns(UserWarning, match=r"calls layers directly: `self\.part\(\.\.\.\)`"):
        make_parallel(model, 2, mode="tower")
