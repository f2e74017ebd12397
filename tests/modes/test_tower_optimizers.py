"""Committees with every optimizer: trained apart as by themselves, and together as one model."""

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from support.parity import difference, variables

from keras_multigpu import make_parallel
from keras_multigpu.layers import GaussianMix, GaussianNLL, WeightedMix, mean_mix

pytestmark = pytest.mark.thin(15)

if keras.backend.backend() == "tensorflow":
    DTYPE, TOLERANCE = "float64", 1e-12
else:
    DTYPE, TOLERANCE = "float32", 2e-6
ROWS = 20  # two batches: another batch's size is traced or compiled anew

OPTIMIZERS = {
    **{name: {} for name in ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl")},
    **{name: {} for name in ("Lion", "AdamW", "Lamb", "Adafactor", "Muon", "ScheduleFreeAdamW")},
}
SETTINGS = [
    {"clipnorm": 0.1},
    {"clipvalue": 0.05},
    {"global_clipnorm": 0.1},
    {"weight_decay": 0.1},
    {"use_ema": True, "ema_overwrite_frequency": 2},
    {"use_ema": True, "ema_momentum": 0.5},
    {"loss_scale_factor": 8.0},
    {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1},
    {"gradient_accumulation_steps": 2, "use_ema": True, "clipnorm": 0.1},
]
CASES = [
    *OPTIMIZERS.items(),
    *[("Adam", options) for options in SETTINGS],
    ("Lamb", {"global_clipnorm": 0.1, "weight_decay": 0.1}),
    ("Adafactor", {"clipnorm": 0.1, "gradient_accumulation_steps": 2}),
    ("Muon", {"exclude_layers": ["last"], "global_clipnorm": 0.1}),
]
WITHOUT_EPSILON = ("SGD", "Ftrl", "Lion", "Adafactor")


@pytest.fixture(autouse=True)
def _precise():
    keras.config.set_floatx(DTYPE)
    keras.config.set_dtype_policy(DTYPE)


def _optimizer(name, options):
    epsilon = {} if name in WITHOUT_EPSILON else {"epsilon": 1e-10}
    return getattr(optimizers, name)(0.02, **epsilon, **options)


def _template(name="member", regularizer=None):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, "tanh", kernel_regularizer=regularizer),
            layers.BatchNormalization(),
            layers.Dense(2, kernel_constraint=keras.constraints.MaxNorm(1.0), name="last"),
        ],
        name=name,
    )


def _fit(model, optimizer, loss="mse", columns=2):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(ROWS, 6)).astype(DTYPE), rng.normal(size=(ROWS, columns)).astype(DTYPE)
    model.compile(optimizer, loss)
    return model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history["loss"]


def _check_apart(make_optimizer, mix="mean", own_mix=None, loss="mse", columns=2):
    """Compares a committee with its members trained each as a plain model of its own."""
    options = {"replicas": "independent", "mix": mix}
    committee = make_parallel(_template(regularizer="l2"), 2, mode="tower", **options)
    before = [replica.get_weights() for replica in committee.replicas]
    reported = _fit(committee, make_optimizer(), loss, columns)
    histories = []
    for replica, weights in zip(committee.replicas, before):
        plain = alone = _template(regularizer="l2")
        if own_mix is not None:
            alone = keras.Model(plain.inputs, own_mix([plain.outputs[0]]))
        plain.set_weights(weights)
        histories.append(_fit(alone, make_optimizer(), loss, columns))
        assert difference(plain.get_weights(), replica.get_weights()) < TOLERANCE
        assert difference(weights, replica.get_weights()) > 1e-5
    assert difference(list(np.mean(histories, axis=0)), reported) < TOLERANCE


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_members_trained_apart(name, options):
    _check_apart(lambda: _optimizer(name, options))


def _sum(outputs):
    return sum(outputs[1:], outputs[0])


def _half_of_first_and_last(outputs):
    return (outputs[0] - outputs[1]) / 2


@pytest.mark.parametrize("mix", [_sum, _half_of_first_and_last])
def test_own_losses_of_a_mix_that_is_no_mean(mix):
    _check_apart(lambda: _optimizer("Adam", {"global_clipnorm": 0.1}), mix)


@pytest.mark.thin(2)
@pytest.mark.parametrize("own_variance", [False, True])
def test_own_losses_of_gaussians(own_variance):
    """With variances of their own the mix has the shape of its parts, and is not one of them."""

    def make():
        return _optimizer("Adam", {"clipnorm": 0.1})

    mixes = [GaussianMix(own_variance=own_variance) for _ in range(2)]
    _check_apart(make, *mixes, GaussianNLL(), columns=1 if own_variance else 2)


@pytest.mark.slow_on_jax
def test_one_optimizer_for_some_weights_and_one_for_others():
    def make():
        default = _optimizer("Lamb", {"global_clipnorm": 0.1})
        return optimizers.MultiOptimizer(
            optimizers.OptimizerMap(default, {".*last.*": _optimizer("Adam", {"clipnorm": 0.1})})
        )

    _check_apart(make)


@pytest.mark.slow_on_jax
def test_a_loss_scale_is_one_for_all_members():
    def make():
        inner = _optimizer("Adam", {"global_clipnorm": 0.1})
        return optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)

    with pytest.warns(UserWarning, match="skips the step for all. Received: optimizer=.loss_scale"):
        _check_apart(make)


@pytest.mark.filterwarnings("ignore:Where gradients overflow")
def test_keras_wraps_an_optimizer_in_half_precision():
    """`compile` sets the optimizer first, and then the `LossScaleOptimizer` that it makes."""
    keras.config.set_dtype_policy("mixed_float16")
    wrapped = optimizers.LossScaleOptimizer(optimizers.Adam(0.01))
    committees = [make_parallel(_template(), 2, mode="tower", replicas="independent") for _ in "ab"]
    committees[1].set_weights(committees[0].get_weights())
    found = [_fit(one, by) for one, by in zip(committees, (optimizers.Adam(0.01), wrapped))]
    assert difference(*found) < TOLERANCE
    assert difference(*[committee.get_weights() for committee in committees]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "options", "mix"),
    [
        ("Adam", {"clipnorm": 0.1}, "mean"),
        ("Adam", {"clipnorm": 0.1}, "weighted"),
        ("Adam", {"global_clipnorm": 0.1}, "weighted"),
        ("Lamb", {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1}, "mean"),
        ("Adafactor", {}, "weighted"),
        ("Muon", {}, "mean"),
    ],
    ids=str,
)
@pytest.mark.slow_on_jax
def test_members_trained_together(name, options, mix):
    together = {"replicas": "independent", "mix": mix, "loss_of": "mix"}
    committee = make_parallel(_template(), 2, mode="tower", **together)
    own_mix, inputs = (mean_mix if mix == "mean" else WeightedMix)(), keras.Input((6,))
    members = [_template(name) for name in ("first", "second")]
    reference = keras.Model(inputs, own_mix([member(inputs) for member in members]))
    for member, replica in zip(members, committee.replicas):
        member.set_weights(replica.get_weights())
    histories = [_fit(model, _optimizer(name, options)) for model in (reference, committee)]
    assert difference(*histories) < TOLERANCE
    for member, replica in zip(members, committee.replicas):
        assert difference(member.get_weights(), replica.get_weights()) < TOLERANCE
    assert difference(own_mix.get_weights(), committee.mix.get_weights()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: _optimizer("Adafactor", {}),
        lambda: _optimizer("Muon", {"use_ema": True, "gradient_accumulation_steps": 2}),
        lambda: optimizers.LossScaleOptimizer(_optimizer("Adam", {}), initial_scale=8.0),
        lambda: optimizers.MultiOptimizer(
            optimizers.OptimizerMap(_optimizer("Lamb", {}), {".*last.*": _optimizer("Adam", {})})
        ),
    ],
    ids=["Adafactor", "Muon", "LossScale", "Multi"],
)
def test_slots_are_written_replica_by_replica(make, tmp_path):
    keras.utils.set_random_seed(1)
    models = [
        make_parallel(_template(), 2, mode="tower", replicas="independent", mix="gated")
        for _ in range(2)
    ]
    for model in models:
        _fit(model, make())
    path = tmp_path / "committee.keras"
    models[0].save_weights(tmp_path / "committee.weights.h5")
    models[1].load_weights(tmp_path / "committee.weights.h5")
    assert difference(*map(variables, models)) == 0
    # As many as an optimizer has of the weights one by one.
    plain = make()
    plain.build(
        [v for part in (*models[0].replicas, models[0].mix) for v in part.trainable_variables]
    )
    models[0].save(path)
    store = {}
    models[0].optimizer.save_own_variables(store)
    assert [np.shape(v) for v in store.values()] == [tuple(v.shape) for v in plain.variables]


def test_an_optimizer_clips_the_replicas_of_one_model(rng):
    x, y = rng.normal(size=(4, 6)), rng.normal(size=(4, 2))
    optimizer = optimizers.SGD(1.0, clipnorm=1e-6)
    options = {"mode": "tower", "replicas": "independent", "loss_of": "replicas"}
    first, second = (make_parallel(_template(), 2, **options) for _ in range(2))
    first.compile(optimizer, "mse")
    first.compile(optimizer, "mse")
    with pytest.raises(ValueError, match="already. Give each model a new optimizer"):
        second.compile(optimizer, "mse")
    if keras.backend.backend() == "tensorflow":
        plain = _template()
        before = plain.get_weights()
        plain.compile(optimizer, "mse")
        plain.fit(x, y, verbose=0)
        moved = difference(before[:2], plain.get_weights()[:2])
        assert 0 < moved < 1e-5
