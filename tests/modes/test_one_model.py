"""The parallel model and its template are one model: what is set on one, the other has."""

import ast
import inspect
import textwrap
import threading
import types

import keras
import numpy as np
import pytest
from keras import layers, ops
from support.parity import difference, variables

from keras_multigpu import make_parallel
from keras_multigpu.modes.one_model import PER_COMPILED, PER_LAYER, own

pytestmark = pytest.mark.thin(4)

MODES = [("data", {}), ("tower", {}), ("tower", {"replicas": "independent"})]
every_mode = pytest.mark.parametrize(("mode", "options"), MODES, ids=str)

# The methods and properties of a model that a parallel model does in its own way, by their class.
OURS = {
    "OneModel": {"__init__", "__getattribute__", "__setattr__", "__dir__"}
    | {"_layers", "activity_regularizer", "trainable"}
    | ({"_trackable_children"} & {*dir(keras.Model)}),  # TensorFlow's
    "SavedModel": {"get_weights", "set_weights", "load_weights"}
    | {"save", "save_weights", "export", "get_config", "from_config", "__reduce__"}
    | {"save_own_variables", "load_own_variables"},
    "SteppedModel": {"__init__", "reset_metrics"}
    | {"make_train_function", "make_test_function", "make_predict_function"}
    | {"trainable_variables", "non_trainable_variables", "trainable_weights"}
    | {"fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"},
    "DescribedModel": {"layers", "output", "summary", "__repr__"}
    | {"compute_output_spec", "compute_output_shape", "metrics"},
    "ParallelModel": {"__init__", "__call__", "build", "stateless_call", "__setattr__"},
    "DataParallel": {"__init__", "stateless_call"},
}
# What a model tells of that it was compiled, or of where it was called.
APART = {"metrics", "metrics_names", "metrics_variables", "jit_compile", "run_eagerly"}
APART |= {
    "_default_save_signature",
    "compiled_metrics",
    "losses",
    "_object_identifier",
    "activity_regularizer",
    "output",  # warns
}
# Set by Keras's trainers, and nevertheless the template's.
SHARED = {"_lock", "jit_compile", "run_eagerly"}  # the last two are properties


class Net(keras.Model):
    """Reads settings of all kinds in its `call`."""

    beta = 1.0

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self._gamma, self.delta, self.act = 1.0, np.float32(1), ops.tanh
        self.rates, self.table = [1.0], {"rate": 1.0}

    def call(self, inputs):
        factor = self.beta * self._gamma * self.delta * self.rates[0] * self.table["rate"]
        return self.act(self.dense(inputs)) * factor

    @property
    def gamma(self):
        return self._gamma

    @gamma.setter
    def gamma(self, value):
        self._gamma = value

    def set_gamma(self, value):
        self._gamma = value

    def set_in_dict(self, value):
        vars(self)["delta"] = value

    def set_unseen(self, value):
        object.__setattr__(self, "delta", value)


SETTINGS = {
    "class attribute": lambda m: setattr(m, "beta", 2.0),
    "private": lambda m: setattr(m, "_gamma", 2.0),
    "property": lambda m: setattr(m, "gamma", 2.0),
    "method": lambda m: m.set_gamma(2.0),
    "numpy": lambda m: setattr(m, "delta", np.float32(2)),
    "function": lambda m: setattr(m, "act", ops.sin),
    "list": lambda m: setattr(m, "rates", [2.0]),
    "in a list": lambda m: m.rates.__setitem__(0, 2.0),
    "in a dict": lambda m: m.table.update({"rate": 2.0}),
    "dict of attributes": lambda m: m.set_in_dict(2.0),
    "around Keras": lambda m: m.set_unseen(2.0),
    "layer": lambda m: setattr(m, "dense", layers.Dense(2, kernel_initializer="ones")),
    "deleted": lambda m: (setattr(m, "beta", 3.0), delattr(m, "beta")),
    "call": lambda m: setattr(m, "call", lambda x, m=m: 5.0 * Net.call(m, x)),
}


def _pair(build, n=4, mode="data", **options):
    """A plain model and an equal one made parallel."""
    keras.utils.set_random_seed(3)
    plain = build()
    keras.utils.set_random_seed(3)
    return plain, make_parallel(build(), n, mode=mode, **options)


def _data(rng, rows=24):
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2))


# A layer that another one replaces before it is built is still tracked: Keras says so of any model.
@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called on layer")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("by", ["parallel", "template"])
def test_settings(name, by, rng):
    x, _ = _data(rng)
    plain, parallel = _pair(Net)
    for model in (plain, parallel if by == "parallel" else parallel.template):
        if name != "layer":
            model(x)
        keras.utils.set_random_seed(4)
        SETTINGS[name](model)
    outputs = [np.asarray(model(x)) for model in (plain, parallel, parallel.template)]
    assert difference(outputs[0], outputs[1]) < 1e-6
    assert difference(outputs[0], outputs[2]) < 1e-6
    assert vars(parallel) is vars(parallel.template)


@pytest.mark.parametrize("n", [1, 4])
def test_settings_between_two_trainings(n, rng):
    x, y = _data(rng)
    plain, parallel = _pair(Net, n)
    for model in (plain, parallel):
        for gamma in (1.0, 3.0):
            model.set_gamma(gamma)
            model.compile(keras.optimizers.SGD(0.05), "mse")
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert difference(plain.get_weights(), parallel.get_weights()) < 2e-5


class Metrics(keras.Model):
    """Has metrics in all places, and updates some of them in the loss, some in `call`."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self._size = keras.metrics.Mean("size")
        self.listed = [keras.metrics.Sum("listed")]
        self.more = {"top": keras.metrics.Mean("top")}

    def build(self, shape):
        self.dense.build(shape)
        self.late = keras.metrics.Sum("late")

    def call(self, inputs):
        return self.dense(inputs)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self._size.update_state(ops.abs(y_pred))
        self.listed[0].update_state(ops.ones_like(y_pred))
        self.more["top"].update_state(ops.max(y_pred))
        self.late.update_state(ops.ones_like(y_pred))
        return super().compute_metrics(x, y, y_pred, sample_weight)


@every_mode
def test_metrics_wherever_they_are(mode, options, rng):
    x, y = _data(rng)
    plain, parallel = _pair(Metrics, 2, mode, **options)
    results = []
    for model in (plain, parallel):
        model.build((None, 6))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        results.append((history, model.evaluate(x, y, verbose=0, return_dict=True)))
    added = {"mix_loss"} if options.get("replicas") == "independent" else set()
    assert results[1][0].keys() == {"late", "listed", "loss", "size", "top"} | added
    assert results[1][0]["late"] == results[1][0]["listed"] == [48.0, 48.0]
    if options.get("replicas") != "independent":
        assert difference(*results) < 2e-5
    assert {one.name for one in parallel.metrics} == {one.name for one in plain.metrics} | added


def _loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
    return self.weighting * ops.mean(ops.abs(y - y_pred))


def _metrics(self, x, y, y_pred, sample_weight=None):
    return {**keras.Model.compute_metrics(self, x, y, y_pred, sample_weight), "mine": ops.mean(y)}


def _train_step(self, *args):
    assert self.optimizer.iterations is not None
    return keras.Model.train_step(self, *args)


def _test_step(self, *args):
    assert self.compiled
    return keras.Model.test_step(self, *args)


def _predict_step(self, *args):
    result = keras.Model.predict_step(self, *args)
    double = keras.tree.map_structure
    if keras.backend.backend() == "jax":
        return double(lambda part: 2.0 * part, result[0]), result[1]
    return double(lambda part: 2.0 * part, result)


OVERRIDES = {
    "compute_loss": _loss,
    "compute_metrics": _metrics,
    "train_step": _train_step,
    "test_step": _test_step,
    "predict_step": _predict_step,
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["bound", "closure"])
@pytest.mark.parametrize(
    ("mode", "options"), [MODES[0], ("tower", {"loss_of": "replicas"})], ids=str
)
def test_overrides_on_the_instance(name, when, kind, mode, options, rng):
    x, y = _data(rng)
    runs = []

    def override(model):
        def run(*args, **kwargs):
            runs.append(name)
            return OVERRIDES[name](model, *args, **kwargs)

        def run_bound(self, *args, **kwargs):
            runs.append(name)
            return OVERRIDES[name](self, *args, **kwargs)

        setattr(model, name, types.MethodType(run_bound, model) if kind == "bound" else run)

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        model.weighting = 100.0
        if when == "before":
            override(model)
        return model

    plain, parallel = _pair(build, 2, mode, **options)
    results = []
    for model in (plain, parallel):
        if when == "after":
            override(model)
        model.compile(keras.optimizers.SGD(0.001), "mse")
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        logs = model.evaluate(x, y, verbose=0, return_dict=True)
        for one in (history, logs):
            one.pop("mix_loss", None)  # beside the loss of `loss_of="replicas"`
        results.append((history, logs, model.predict(x, verbose=0), variables(model)))
        assert runs.count(name) > 0
        runs.clear()
    assert difference(*results) < 1e-4
    assert not hasattr(parallel.template, "optimizer")


class Reader(keras.Model):
    """Reads in `call` what belongs to the compiled model, and stops its training."""

    stops = False

    def __init__(self):
        super().__init__()
        self.dense, self.seen = layers.Dense(2), []

    def call(self, inputs, training=None):
        if training:
            self.seen.append((self.optimizer.name, self.compiled, self.loss, len(self.metrics)))
            self.stop_training = self.stops
            return self.dense(inputs) * float(self.optimizer.get_config()["learning_rate"])
        return self.dense(inputs)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@every_mode
@pytest.mark.parametrize("eager", [False, True])
def test_what_is_compiled_as_call_sees_it(mode, options, eager, rng):
    x, y = _data(rng)
    plain, parallel = _pair(Reader, 2, mode, **options)
    for model in (plain, parallel):
        model.compile(_Named(0.5, name="mine"), "mse", run_eagerly=eager)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert set(parallel.seen) == set(plain.seen)
    assert parallel.seen
    if options.get("replicas") != "independent":
        assert difference(plain.get_weights(), parallel.get_weights()) < 2e-5
    template = parallel.template
    assert not hasattr(template, "optimizer")
    assert not template.compiled
    assert parallel.compiled


class _Named(keras.optimizers.SGD):
    """Tells its first learning rate without reading a variable."""

    def __init__(self, learning_rate=0.5, **kwargs):
        super().__init__(learning_rate, **kwargs)
        self.first = learning_rate

    def get_config(self):
        return {"learning_rate": self.first, "name": self.name}


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("n", [1, 4])
def test_a_call_that_stops_the_training(n, rng):
    x, y = _data(rng)
    plain, parallel = _pair(Reader, n)
    lengths = []
    for model in (plain, parallel):
        model.stops = True
        model.compile(_Named(0.1), "mse", run_eagerly=True)
        lengths.append(len(model.fit(x, y, epochs=4, verbose=0).history["loss"]))
    assert lengths == [1, 1]
    assert parallel.stop_training


def test_calls_in_several_threads_leave_the_template_as_it_was(rng):
    x, _ = _data(rng)
    template = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    template.compile("sgd", "mae")
    mine = template.optimizer
    models = [make_parallel(template, n) for n in (2, 4)]
    for model in models:
        model.compile("adam", "mse")
    optimizers = [model.optimizer for model in models]

    def call(model):
        for _ in range(10):
            model(x)

    threads = [threading.Thread(target=call, args=(model,)) for model in models * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert template.optimizer is mine
    assert template.loss == "mae"
    assert [model.optimizer for model in models] == optimizers


def test_slots_of_layers_that_were_frozen_after_training(rng):
    x = rng.normal(size=(24, 6)).astype("float32")

    def build():
        hidden = [layers.Dense(6, activation="tanh", name=f"hidden_{n}") for n in range(3)]
        model = keras.Sequential([keras.Input((6,)), *hidden], name="net")
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(x, x, epochs=3, verbose=0, shuffle=False)
        model.layers[0].trainable = False
        return model

    plain, parallel = _pair(build)
    slots = [
        {slot.path.partition("/")[2]: np.asarray(slot) for slot in model.optimizer.variables}
        for model in (plain, parallel)
    ]
    assert len(slots[0]) == 2 + 3 * 2 * 2
    assert difference(*slots) < 1e-6
    if keras.backend.backend() == "tensorflow":  # on JAX Keras wants to be compiled again
        for model in (plain, parallel):
            model.make_train_function(force=True)
            model.fit(x, x, epochs=2, verbose=0, shuffle=False)
        assert difference(variables(plain), variables(parallel)) < 1e-6


class Lazy(keras.Model):
    """Builds a layer in the first step of training, which stands before the others."""

    def __init__(self):
        super().__init__()
        self.late, self.dense = layers.Dense(2), layers.Dense(2)

    def build(self, shape):
        self.dense.build(shape)
        if keras.backend.backend() == "jax":  # whose steps are given all variables
            self.late.build(shape)

    def call(self, inputs, training=False):
        return self.dense(inputs) + (self.late(inputs) if training else 0.0)


@pytest.mark.parametrize("n", [1, 4])
def test_layers_built_late_in_a_training_with_validation(n, rng):
    x, y = _data(rng)
    plain, parallel = _pair(Lazy, n)
    histories = []
    for model in (plain, parallel):
        model(x)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        run = model.fit(
            x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, validation_data=(x, y)
        )
        histories.append(run.history)
    assert len(histories[1]["val_loss"]) == 3
    if n == 1 or keras.backend.backend() == "jax":
        assert difference(*histories) < 2e-5


NAMES = ["options", "place", "least_bytes", "_build", "_replicas", "_mix", "_now", "_run", "_check"]
NAMES += ["_restore", "_placement", "_retrace", "_homes", "_stages", "_hidden", "_own", "_template"]


@every_mode
def test_a_model_may_use_any_name(mode, options, rng):
    class Names(Net):
        def __init__(self):
            super().__init__()
            for number, name in enumerate(NAMES):
                setattr(self, name, number + 1.0)

        def call(self, inputs):
            return super().call(inputs) * sum(getattr(self, name) for name in NAMES) / 100.0

    x, y = _data(rng)
    plain, parallel = _pair(Names, 2, mode, **options)
    for model in (plain, parallel):
        model(x)
        setattr(model, NAMES[0], 7.0)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert [getattr(parallel, name) for name in NAMES] == [getattr(plain, name) for name in NAMES]
    if options.get("replicas") != "independent":
        assert difference(plain.get_weights(), parallel.get_weights()) < 2e-5


@pytest.mark.parametrize("by", ["argument", "plain attribute"])
def test_an_activity_regularizer_counts_once(by, rng):
    x, y = _data(rng)

    class Regularized(Net):
        def __init__(self):
            super().__init__()
            if by == "argument":
                self.activity_regularizer = keras.regularizers.L2(0.1)

    plain, parallel = _pair(Regularized)
    logs = []
    for model in (plain, parallel):
        model(x)
        if by != "argument":
            model.activity_regularizer = keras.regularizers.L2(0.1)
        assert model.activity_regularizer is not None
        model.compile(keras.optimizers.SGD(0.05), "mse")
        logs.append(model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history)
    assert difference(*logs) < 2e-5


def test_a_part_of_a_model_replaced_by_its_parallel_model(rng):
    """Keras goes on tracking the layer that was there: both are parts of the whole."""
    x, y = _data(rng)

    class Part(Net):
        def call(self, inputs):
            outputs = super().call(inputs)
            self.add_loss(ops.mean(outputs**2))
            return outputs

    class Whole(keras.Model):
        def __init__(self, n):
            super().__init__()
            self.part, self.head = Part(), layers.Dense(2)
            if n:
                self.part = make_parallel(self.part, n)

        def call(self, inputs):
            return self.head(self.part(inputs))

    logs = []
    for n in (None, 4):
        keras.utils.set_random_seed(3)
        model = Whole(n)
        model(x)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        logs.append(model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history)
        assert len(model.weights) == 4
    assert difference(*logs) < 2e-5


class Seeded(keras.Model):
    """Gets state of its own when it is compiled."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)

    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.seed = keras.random.SeedGenerator(1)
        self.factor = self.add_weight(shape=(), initializer="ones", trainable=False, name="factor")


def test_state_given_to_the_parallel_model(rng):
    x, y = _data(rng)
    plain, parallel = _pair(Seeded)
    for model in (plain, parallel):
        model.compile(keras.optimizers.SGD(0.05), "mse")
    for model in (plain, parallel):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert len(plain.variables) == len(parallel.variables) == len(parallel.template.variables) == 4
    assert difference(plain.get_weights(), parallel.get_weights()) < 2e-5


def _functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(2)(inputs))


def _sequential():
    return keras.Sequential([keras.Input((6,)), layers.Dense(2)])


@pytest.mark.parametrize("build", [_sequential, _functional])
@every_mode
def test_clones(build, mode, options):
    template = build()
    for parallel in (make_parallel(template, 2, mode=mode, **options),):
        with pytest.warns(UserWarning, match="the clone is a plain model, and runs on one device"):
            cloned = keras.models.clone_model(parallel)
        assert type(cloned) is type(template)
        assert [one.shape for one in cloned.weights] == [one.shape for one in template.weights]
        assert not {id(one) for one in cloned.weights} & {id(one) for one in template.weights}
        assert cloned.input_shape == template.input_shape


def _assigned(cls):
    """The attributes that a class's methods set on `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in stores
        if isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_where_each_attribute_that_keras_sets_lives(rng):
    """All that Keras's trainers set is the parallel model's; all that a run leaves is known."""
    trainers = [cls for cls in keras.Model.__mro__ if "trainer" in cls.__module__]
    assert len(trainers) >= 2
    for cls in trainers:
        assert _assigned(cls) <= PER_COMPILED | PER_LAYER | SHARED, cls
    x, y = _data(rng)
    template = keras.Sequential([layers.Dense(2), layers.Dropout(0.5)])
    parallel = make_parallel(template, 4)
    fresh = {name: value for name, value in vars(template).items() if name in PER_COMPILED}
    parallel.compile("adam", "mse", metrics=["mae"])
    parallel.fit(x, y, validation_data=(x, y), verbose=0)
    parallel.predict(x, verbose=0)
    parallel.train_on_batch(x, y)
    assert set(own(parallel).keras) <= PER_COMPILED | PER_LAYER
    assert all(name.startswith("_parallel_") for name in own(parallel).mode)
    assert {"optimizer", "train_function", "compiled", "history"} <= own(parallel).keras.keys()
    # The template is as it was, but for what both have in common.
    assert {name: value for name, value in vars(template).items() if name in PER_COMPILED} == fresh
    assert not any(name.startswith("_parallel_") for name in vars(template))
    plain = keras.Sequential([layers.Dense(2), layers.Dropout(0.5)])
    plain.build((None, 6))
    assert vars(plain).keys() - PER_COMPILED == vars(template).keys() - PER_COMPILED


def test_where_each_attribute_of_the_class_lives():
    """What a parallel model does in its own way is listed here; all else is the template's."""
    template = _functional()
    parallel = make_parallel(template, 4)
    classes = type(parallel).__mro__[1:]  # the first one is made of them
    for name, cls in {
        cls.__name__: cls for cls in classes if "keras_multi" in cls.__module__
    }.items():
        defined = vars(cls).keys() & {*dir(keras.Model), *vars(template)}
        ignored = {"__module__", "__doc__", "__annotations__", "__slots__", "__static_attributes__"}
        ignored |= {"__firstlineno__", "__abstractmethods__"}
        assert defined - ignored == OURS[name], name
    for name in dir(keras.Model):
        kind = inspect.getattr_static(keras.Model, name)
        if not isinstance(kind, property) or name in APART:
            continue
        found = []
        for model in (template, parallel):
            try:
                found.append(getattr(model, name))
            except Exception as error:
                found.append(type(error))
        same = found[0] == found[1] or repr(found[0]) == repr(found[1])
        assert same, (name, found)


def test_what_the_documents_promise_is_read_only():
    parallel = make_parallel(_sequential(), 2)
    for name in ("template", "devices", "mode"):
        with pytest.raises(AttributeError):
            setattr(parallel, name, None)
    assert (parallel.mode, parallel.devices) == ("data", ("cpu:0", "cpu:1"))
