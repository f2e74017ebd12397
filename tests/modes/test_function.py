"""A user's own training step on all devices."""

import gc
import inspect
import re

import keras
import numpy as np
import pytest
from support.models import mlp

from keras_multigpu import make_parallel
from keras_multigpu.engines.functions import have_rows

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"


def _data(rng, rows):
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 2)).astype(
        "float32"
    )


def _sgd_on_tensorflow(model):
    import tensorflow as tf

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        weights = [one.value for one in model.trainable_variables]
        for one, gradient in zip(weights, tape.gradient(loss, weights)):
            one.assign_sub(0.1 * gradient)
        return loss

    return step, step


def _sgd_on_jax(model):
    import jax

    def step(weights, x, y):
        def loss(weights):
            return ((model.stateless_call(weights, [], x)[0] - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return value, [one - 0.1 * gradient for one, gradient in zip(weights, gradients)]

    def run(compiled):
        def one(x, y):
            weights = [variable.value for variable in model.trainable_variables]
            value, weights = compiled(weights, x, y)
            for variable, new in zip(model.trainable_variables, weights):
                variable.assign(new)
            return value

        return one

    return step, run


def _losses(compile_step, batches):
    model = mlp()
    step, run = (_sgd_on_tensorflow if IS_TENSORFLOW else _sgd_on_jax)(model)
    compiled = compile_step(model, step)
    train = compiled if IS_TENSORFLOW else run(compiled)
    losses = [float(train(*batch)) for batch in batches]
    return losses, model.get_weights()


def test_a_step_has_the_numbers_of_one_device(rng):
    batches = [_data(rng, rows) for rows in (8, 5, 8, 3, 1)]
    rows = {} if IS_TENSORFLOW else {"rows": ("x", "y")}
    plain = _losses(lambda model, step: step, batches)
    parallel = _losses(lambda model, step: make_parallel(model, 4).function(step, **rows), batches)
    np.testing.assert_allclose(parallel[0], plain[0], rtol=1e-6)
    for one, other in zip(parallel[1], plain[1]):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_arguments_without_rows_are_named(rng):
    model = make_parallel(mlp(), 2)
    step = model.function(lambda x, table: keras.ops.matmul(x, table), rows=("x",))
    x, table = rng.normal(size=(5, 6)), rng.normal(size=(6, 3))
    np.testing.assert_allclose(step(x, table), x @ table, atol=1e-5)


def _product(*args, **kwargs):
    """Of two matrices, in any way in which a function gets them."""
    x, table = [*args, *(kwargs[name] for name in ("x", "table") if name in kwargs)]
    return {"product": keras.ops.matmul(x, table), "mean": keras.ops.mean(x)}


WAYS = {
    "keyword": (lambda **more: _product(**more), ("x",), (), ("x", "table")),
    "all keywords": (lambda table, **more: _product(**more, table=table), ("more",), (1,), ("x",)),
    "number": (lambda *both: _product(*both), (0,), (0, 1), ()),
    "all positions": (lambda table, *more: _product(*more, table), ("more",), (1, 0), ()),
    "a parameter by number": (lambda x, **more: _product(x, **more), (0,), (), ("x", "table")),
    "a keyword only": (lambda *, x, **more: _product(x, **more), ("x",), (), ("x", "table")),
}


@pytest.mark.parametrize("way", WAYS)
def test_arguments_of_any_kind_are_named(way, rng):
    function, rows, positions, names = WAYS[way]
    given = {"x": rng.normal(size=(8, 6)), "table": rng.normal(size=(6, 3))}

    def step(*args, **kwargs):
        return function(*args, **kwargs)

    step.__signature__ = inspect.signature(function)
    args = [list(given.values())[place] for place in positions]
    result = make_parallel(mlp(), 2).function(step, rows=rows)(
        *args, **{name: given[name] for name in names}
    )
    np.testing.assert_allclose(result["product"], given["x"] @ given["table"], atol=1e-5)
    np.testing.assert_allclose(result["mean"], given["x"].mean(), atol=1e-6)
    marks = have_rows(step, rows, tuple(args), {name: given[name] for name in names})
    chosen = {len(value) for value, is_one in _pairs(args, names, given, marks) if is_one}
    assert chosen == {8}


def _pairs(args, names, given, marks):
    return [*zip(args, marks[0]), *((given[name], marks[1][name]) for name in names)]


def test_a_keyword_that_does_not_come_is_refused(rng):
    def step(x, *more, **named):
        return x

    run = make_parallel(mlp(), 2).function(step, rows=("x", "mask"))
    x = rng.normal(size=(8, 6))
    np.testing.assert_allclose(run(x, mask=x), x, atol=1e-6)
    text = (
        r"rows=\('x', 'mask'\), for a step of \(x, \*more, \*\*named\), and a call with 1 .* and y"
    )
    with pytest.raises(ValueError, match=text):
        run(x, y=x)
    run = make_parallel(mlp(), 2).function(step, rows=(0, 2))
    with pytest.raises(ValueError, match=r"rows=\(0, 2\), .* a call with 2 positional"):
        run(x, x)


@pytest.mark.skipif(IS_TENSORFLOW, reason="there a step assigns what it likes")
@pytest.mark.parametrize("options", [{}, {"mode": "tower"}, {"mode": "model"}], ids=str)
def test_on_jax_a_step_assigns_nothing(options, rng):
    model, optimizer = mlp(), keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    parallel = make_parallel(model, 2, **options)

    def step(x):
        optimizer.iterations.assign_add(1)
        model.trainable_variables[0].assign(0 * model.trainable_variables[0])
        return x

    before = model.get_weights()
    with pytest.raises(ValueError, match="pure function: .*Received: a step that assigns .*kernel"):
        parallel.function(step)(rng.normal(size=(4, 6)))
    assert int(optimizer.iterations) == 0
    for one, other in zip(model.get_weights(), before):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("step", [None, "train"])
def test_what_is_no_function_is_refused(step):
    with pytest.raises(ValueError, match=f"Received: step={step!r}"):
        make_parallel(mlp(), 2).function(step)


def test_it_is_a_decorator_with_options(rng):
    parallel, x = make_parallel(mlp(), 2), rng.normal(size=(5, 6)).astype("float32")

    @parallel.function(rows=("x",))
    def predict(x, scale):
        return scale * parallel(x, training=False)

    expected = 2 * parallel.template.predict(x, verbose=0)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(predict(x, 2.0)), expected, rtol=1e-5)


@pytest.mark.parametrize("rows", [0, "x"])
def test_rows_are_a_tuple(rows):
    with pytest.raises(ValueError, match=rf"Write `rows=\({rows!r},\)`"):
        make_parallel(mlp(), 2).function(lambda x: x, rows=rows)


def test_different_first_axes_are_refused(rng):
    step = make_parallel(mlp(), 2).function(lambda x, y: x)
    with pytest.raises(ValueError, match=r"Received: first axes of 3, 5\..*rows=\(0,\)"):
        step(np.zeros((5, 2)), np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        (([6, 64], 40, 40), (1, 2)),  # weights, and a batch
        ((64, 40, 40), (1, 2)),
        (([40, 40], [64, 6]), (0,)),
        (([6, 64], [40, 64]), None),
    ],
    ids=str,
)
def test_rows_that_are_proposed_are_accepted(lengths, rows):
    args = keras.tree.map_structure(lambda length: np.zeros((length, 2)), lengths)
    cure = f"function(step, rows={rows})`, say" if rows else "as separate arguments. Name the"
    with pytest.raises(ValueError, match=re.escape(cure)):
        have_rows(lambda *args: args, None, args, {})
    if rows:
        have_rows(lambda a, b, c=None: a, rows, args, {})


def test_rows_that_name_no_argument_are_refused(rng):
    step = make_parallel(mlp(), 2).function(lambda x, y: x, rows=("z",))
    with pytest.raises(ValueError, match=r"rows=\('z',\), for a step of \(x, y\)"):
        step(np.zeros((5, 2)), np.zeros((5, 2)))


def test_named_rows_are_as_many(rng):
    step = make_parallel(mlp(), 2).function(lambda x, y, z: x, rows=("x", "y"))
    with pytest.raises(
        ValueError, match=r"rows=\('x', 'y'\) names .* Received: first axes of 3, 5"
    ):
        step(np.zeros((5, 2)), np.zeros((3, 2)), np.zeros((7, 2)))
    step(np.zeros((5, 2)), np.zeros((5, 2)), np.zeros((7, 2)))
    with pytest.raises(
        ValueError, match=r"`rows` must name or number arguments.* Received: rows=\(\)"
    ):
        make_parallel(mlp(), 2).function(lambda x: x, rows=())(np.zeros((5, 2)))


@pytest.mark.skipif(IS_TENSORFLOW, reason="variables are captured, and rows are divided unevenly")
def test_on_jax_a_step_takes_arrays_and_says_if_rows_are_not_divided(rng):
    parallel = make_parallel(mlp(), 2)
    step = parallel.function(lambda weights, x: x, rows=("x",))
    with pytest.raises(ValueError, match="Received: the variable .*kernel'. Give its value"):
        step(parallel.trainable_variables, np.zeros((4, 6)))
    step = parallel.function(lambda x: x)
    for _ in range(9):
        step(np.zeros((5, 6)))
    with pytest.warns(UserWarning, match="The 2 devices do not divide the batches.*of 5 rows"):
        step(np.zeros((5, 6)))


@pytest.mark.parametrize("options", [{}, {"shard": "weights"}], ids=str)
def test_one_device_is_the_backends_own_function(options, rng):
    step = make_parallel(mlp(), 1, **options).function(lambda x: 2 * x)
    np.testing.assert_allclose(step(np.ones((3, 2))), 2 * np.ones((3, 2)))


def test_what_runs_whole_is_explained():
    text = make_parallel(mlp(), 2).explain()
    start = "No step has run as a graph yet" if IS_TENSORFLOW else "XLA partitions every step"
    assert start in text
    if IS_TENSORFLOW:
        assert "one device: it computes all" in make_parallel(mlp(), 1).explain()
        parallel = make_parallel(mlp(), 2)  # as a layer of a plain model
        keras.Sequential([keras.Input((6,)), parallel]).predict(np.ones((8, 6)), verbose=0)
        assert parallel.explain() == "call: 100.0% of the work on rows is spread over the devices."


@pytest.mark.skipif(not IS_TENSORFLOW, reason="what one device computes is not known")
@pytest.mark.parametrize("shard", [None, "weights"])
def test_shard_is_recommended_where_it_is_not_used(shard, rng):
    parallel = make_parallel(mlp(), 2, shard=shard)
    parallel.compile("adam", "mse")
    parallel.train_on_batch(*_data(rng, 8))
    text = parallel.explain()
    assert "One device does what has no rows, such as an optimizer's update" in text
    assert ("`shard` spreads" in text) == (shard is None)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="what one device computes is not known")
def test_functions_of_one_name_are_explained_one_by_one():
    parallel = make_parallel(mlp(), 2)

    def make(power):
        def step(x):
            return parallel(x) ** power

        return parallel.function(step)

    first, second = make(1), make(2)
    for function in (second, first, second):
        function(np.ones((8, 6)))
    steps = [line.partition(":")[0] for line in parallel.explain().split("\n") if line]
    assert steps == ["step", "step (2)"]
    del first, second, function
    gc.collect()
    make(3)(np.ones((8, 6)))
    assert "step (3)" not in parallel.explain()  # functions that are no more need no names


def test_an_attribute_of_the_same_name_stays_the_models(rng):
    model = mlp()
    model.function = "mine"
    assert make_parallel(model, 2).function == "mine"


def test_a_class_with_a_method_of_the_same_name_is_refused():
    class Named(keras.Sequential):
        def function(self):
            return "mine"

    with pytest.raises(ValueError, match="of the same names: function. Rename them in Named"):
        make_parallel(Named([keras.Input((6,)), keras.layers.Dense(2)]), 2)


@pytest.mark.skipif(IS_TENSORFLOW, reason="functions of JAX's")
def test_a_step_within_another_function_is_spread(rng):
    import jax

    parallel, seen = make_parallel(mlp(), 4), []

    @parallel.function
    def step(x):
        outputs = parallel(x)
        jax.debug.inspect_array_sharding(outputs, callback=seen.append)
        return outputs.sum()

    x, _ = _data(rng, 8)
    values = [
        step(x),
        jax.jit(step)(x),
        jax.jit(lambda x: jax.value_and_grad(step)(x)[0])(x),
        jax.jit(lambda x: jax.lax.fori_loop(0, 1, lambda _, total: total + step(x), 0.0))(x),
    ]
    assert np.allclose(values, np.asarray(parallel.template(x)).sum(), rtol=1e-5)
    assert len(seen) == len(values)
    assert all(one.shard_shape((8, 2)) == (2, 2) for one in seen)


@pytest.mark.parametrize("mode", ["tower", "model"])
def test_a_step_that_calls_the_template(mode, rng):
    """Only calls of the parallel model are spread in these modes."""
    template = mlp()
    parallel = make_parallel(template, 2, mode=mode)
    if parallel._parallel_runner.spreads_steps:  # large layers are in parts, whoever calls them
        parallel.function(lambda x: template(x))
        return
    with pytest.warns(UserWarning, match=r"Call what `make_parallel` returned: `parallel\(x\)`"):
        parallel.function(lambda x: template(x))
    parallel.function(lambda x: parallel(x) + template.count_params())
