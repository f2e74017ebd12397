"""The wide model: formulas, training on devices, files with their encoder, what is refused."""

import keras
import numpy as np
import pandas as pd
import pytest
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from support.parity import difference, variables
from support.sparse_tables import CARDINALITIES

from keras_multigpu import make_parallel
from keras_multigpu.sparse import HashedDataset, HashEncoder
from keras_multigpu.zoo import make_clicks
from keras_multigpu.zoo.wide import WideModel, wide


def encoder(**settings):
    return HashEncoder(CARDINALITIES, **{"layout": "published", **settings})


@pytest.fixture
def data(rng):
    """A table of 70 rows, and a label that depends on both columns."""
    city, age = rng.integers(40, size=70), rng.integers(50, size=70)
    table = {"city": [f"city {number}" for number in city], "age": age}
    return table, ((city % 3 == 0) ^ (age > 30)).astype("float32")[:, None]


@pytest.mark.parametrize("kind", [dict, pd.DataFrame])
def test_tables_are_no_indices(kind, data):
    table, labels = data
    for call in (wide(encoder()).fit, wide(encoder()).evaluate):
        with pytest.raises(
            ValueError, match=f"a table .{kind.__name__}.. Hash its rows: `model.enc"
        ):
            call(kind(table), labels)
    with pytest.raises(ValueError, match="to predict, use `model.predict_table"):
        wide(encoder()).predict(kind(table))


def weights(model):
    draw = np.random.default_rng(3)
    model.set_weights([draw.normal(size=w.shape) for w in model.get_weights()])
    return model.get_weights()


@pytest.mark.parametrize("shape", ["linear", "middle", "deep"])
def test_formulas(data, shape):
    table, _ = data
    options = {"linear": {}, "middle": {"middle": 2}, "deep": {"deep": [5, 4]}}[shape]
    model = wide(encoder(), units=2, **options)
    rows = encoder().transform(table, output="dense")
    found = weights(model)
    relu = lambda x: np.maximum(x, 0)  # noqa: E731
    if shape == "linear":
        kernel, bias = found
        expected = rows @ kernel + bias
    elif shape == "middle":
        reduced = round(encoder().width ** 0.3)
        assert [w.shape for w in found[::2]] == [(104, reduced), (reduced, reduced), (reduced, 2)]
        hidden = relu(relu(rows @ found[0] + found[1]) @ found[2] + found[3])
        expected = hidden @ found[4] + found[5]
    else:
        named = {w.path: np.array(w) for w in model.weights}
        deep = relu(rows @ named["deep_0/kernel"] + named["deep_0/bias"])
        deep = relu(deep @ named["deep_1/kernel"] + named["deep_1/bias"])
        linear = rows @ named["wide_0/kernel"] + named["wide_0/bias"]
        expected = linear + deep @ named["deep_2/kernel"]
    assert difference(model.predict_table(table, verbose=0), expected) < 1e-4


def test_as_published():
    model = wide(encoder(), loss="mse", optimizer="ftrl")
    config = model.optimizer.get_config()
    names = ("learning_rate", "l1_regularization_strength", "l2_regularization_strength")
    assert [config[name] for name in names] == pytest.approx([0.2, 1.0, 1.0])
    assert model.loss == "mse"
    assert model.jit_compile
    adam = wide(encoder(), optimizer="adam", loss="logistic", sparse_gradient=True).optimizer
    assert isinstance(adam, keras.optimizers.Adam)
    assert float(adam.learning_rate) == pytest.approx(0.002)
    other = wide(encoder(), optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.Huber())
    assert isinstance(other.optimizer, keras.optimizers.SGD)
    assert isinstance(other.loss, keras.losses.Huber)


def plain(rows, y, optimizer, loss):
    """The linear model as Keras has it, on dense rows and one device."""
    model = keras.Sequential([keras.Input(rows.shape[1:]), keras.layers.Dense(1)])
    model.set_weights([np.zeros(w.shape) for w in model.get_weights()])
    model.compile(optimizer, loss)
    return model.fit(rows, y, batch_size=32, epochs=4, shuffle=False, verbose=0), model


@pytest.mark.parametrize(
    ("optimizer", "loss", "devices"),
    [
        ("ftrl", "mse", 4),
        ("adam", "logistic", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("ftrl", "mse", 1),
                ("ftrl", "mse", 2),
                ("adam", "logistic", 1),
                ("adam", "logistic", 4),
            ]
        ),
    ],
)
def test_data_mode_equals_dense_rows_on_one_device(data, optimizer, loss, devices):
    table, y = data
    model = wide(
        encoder(), optimizer=optimizer, loss=loss, jit_compile=(optimizer, devices) == ("adam", 4)
    )
    model.set_weights([np.zeros(w.shape) for w in model.get_weights()])
    parallel = make_parallel(model, devices)
    x = encoder().transform(table)
    history = parallel.fit(x, y, batch_size=32, epochs=4, shuffle=False, verbose=0)
    rows = encoder().transform(table, output="dense")
    same = type(model.optimizer).from_config(model.optimizer.get_config())
    expected, reference = plain(rows, y, same, model.loss)
    assert difference(history.history["loss"], expected.history["loss"]) < 2e-5
    assert difference(variables(parallel), variables(reference)) < 2e-5
    predicted = parallel.predict_table(table, verbose=0)
    assert difference(predicted, reference.predict(rows, verbose=0)) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["shared", "independent"])
def test_tower_mode(data, replicas):
    table, y = data
    model = wide(encoder(), middle=1, optimizer="adam", loss="logistic", jit_compile=False)
    tower = make_parallel(model, 2, mode="tower", replicas=replicas)
    x = encoder().transform(table)
    losses = tower.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    members = np.stack(tower.predict_replicas(x, verbose=0))
    assert difference(members.mean(axis=0), tower.predict_table(table, verbose=0)) < 1e-5
    assert (difference(members[0], members[1]) > 1e-3) is (replicas == "independent")


@pytest.mark.parametrize(
    "mode", ["data", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("alone", "tower"))]
)
def test_saved_with_its_encoder(data, tmp_path, mode):
    table, y = data
    own = encoder(missing="?", splits=2)
    model = wide(own, deep=[4], optimizer="adam", jit_compile=False)
    if mode != "alone":
        model = make_parallel(model, 2, mode=mode)
    model.fit(model.encoder.transform(table), y, verbose=0)
    model.save(tmp_path / "wide.keras")
    loaded = keras.saving.load_model(tmp_path / "wide.keras")
    assert loaded.encoder.fingerprint == model.encoder.fingerprint
    both = [one.predict_table(table, verbose=0) for one in (loaded, model)]
    assert difference(*both) == 0
    model.save_weights(tmp_path / "wide.weights.h5")
    template = WideModel.from_config(getattr(model, "template", model).get_config())
    template.load_weights(tmp_path / "wide.weights.h5")
    assert difference(template.predict_table(table, verbose=0), both[1]) < 1e-6


def test_an_encoder_that_does_not_fit(data, tmp_path):
    model = wide(encoder())
    # As wide, and in another order.
    other = HashEncoder({"age": 50, "city": 300}, layout="published")
    assert other.width == encoder().width
    model.check_encoder(encoder(num_threads=2))
    message = f"whose fingerprint is '{encoder().fingerprint}'. Received: .*='{other.fingerprint}'"
    with pytest.raises(ValueError, match=message):
        model.check_encoder(other)
    wide(other).save_weights(tmp_path / "other.weights.h5")
    with pytest.raises(ValueError, match=message):
        model.load_weights(tmp_path / "other.weights.h5")
    data_of_other = np.ones((2, 8), "int32").view(_Marked)
    data_of_other.encoder = other
    for use in (model.fit, model.evaluate, model.predict, make_parallel(model, 2).fit):
        with pytest.raises(ValueError, match=message):
            use(data_of_other)
    with pytest.raises(ValueError, match=message):
        model.fit(np.ones((2, 8), "int32"), np.ones(2), validation_data=data_of_other)


def test_a_model_answers_alike_about_a_file_and_a_table(tmp_path):
    """The model of a CSV file with empty texts, which is what the label depends on."""
    city = ["Rome", "", "Paris", ""] * 50
    table = {"city": city, "clicked": [float(one == "") for one in city]}
    lines = [f'"{one}",{label}\n' for one, label in zip(*table.values())]
    (tmp_path / "a.csv").write_text("city,clicked\n" + "".join(lines))
    own = HashEncoder({"city": 50})
    model = wide(own)
    data = HashedDataset(tmp_path / "a.csv", own, label="clicked", batch_size=20)
    model.fit(data, epochs=5, verbose=0)
    from_file = model.predict(HashedDataset(tmp_path / "a.csv", own, batch_size=20), verbose=0)
    from_table = model.predict_table({"city": city}, verbose=0)
    assert difference(from_file, from_table) < 1e-6
    assert from_table[1] > 0 > from_table[0]
    earlier = model.get_config()
    earlier["encoder"] = OLD_FILE
    loaded = WideModel.from_config(earlier)
    assert loaded.encoder.transform({"city": ["", None]}).tolist() == [[63, 273], [113, 231]]
    message = f'={loaded.encoder.fingerprint!r}.*`missing_values="empty fields"`'
    with pytest.raises(ValueError, match=message):
        model.check_encoder(loaded.encoder)


# Written before an encoder was told which texts are missing.
OLD_FILE = """{
 "format": 2, "columns": {"city": 50}, "splits": 2, "collision_probability": null,
 "missing": "nan", "output": "indices", "others": "error", "num_threads": 1, "layout": "wide",
 "buckets": 8, "fingerprint": "5ca9bfcba085ac1d"
}"""


def test_indices_that_no_encoder_gives(data):
    table, y = data
    indices = encoder().transform(table)
    model = wide(encoder(), loss="mse")
    for wrong, message in ((-1, "from -1 to"), (model.encoder.width, "to 104. Use")):
        indices[3, 2] = wrong
        with pytest.raises(ValueError, match=f"must be from 0 to 103. Received: .*{message}"):
            make_parallel(model, 2).fit(indices, y)
        with pytest.raises(ValueError, match=f"must be from 0 to 103. Received: .*{message}"):
            model.fit(indices[:2] % 104, y[:2], validation_data=(indices, y))


def test_labels_that_are_no_chances(data, tmp_path):
    table, y = data
    x = encoder().transform(table)
    model = wide(encoder(), jit_compile=False)
    message = "The labels of a logistic model must be from 0 to 1. Received: labels from {}. Use 0"
    for wrong, text in ((y * 5, "0 to 5"), (2 * y - 1, "-1 to 1"), (y * np.nan, "nan to nan")):
        uses = [
            lambda wrong=wrong: model.fit(x, wrong),
            lambda wrong=wrong: make_parallel(model, 2).fit(x, y=wrong),
            lambda wrong=wrong: model.fit(x, y, validation_data=(x, wrong)),
            lambda wrong=wrong: model.evaluate(x, wrong),
        ]
        for use in uses:
            with pytest.raises(ValueError, match=message.format(text)):
                use()
    wide(encoder(), loss="mse", jit_compile=False).fit(x, y * 5, verbose=0)
    path = tmp_path / "table.csv"
    rows = zip(table["city"], table["age"], 1 + 4 * y[:, 0])
    path.write_text("city,age,stars\n" + "".join(f"{c},{a},{label}\n" for c, a, label in rows))
    stars = HashedDataset(str(path), encoder(), label="stars")
    assert stars.label_range == (1, 5)
    streams = [stars]
    if keras.backend.backend() == "tensorflow":
        streams.append(stars.to_tf_data())
    for stream in streams:
        with pytest.raises(ValueError, match=message.format("1 to 5")):
            model.fit(stream)
        with pytest.raises(ValueError, match=message.format("1 to 5")):
            model.fit(x, y, validation_data=stream)


def test_the_defaults():
    model = wide(HashEncoder(CARDINALITIES))
    assert isinstance(model.optimizer, keras.optimizers.Adagrad)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.15)
    assert isinstance(model.loss, keras.losses.BinaryCrossentropy)
    assert model.loss.get_config()["from_logits"]
    assert all((weight == 0).all() for weight in model.get_weights())
    assert float(wide(encoder()).optimizer.learning_rate) == pytest.approx(0.3 / 4)
    for options in ({"deep": [4]}, {"middle": 1}):
        optimizer = wide(HashEncoder(CARDINALITIES), **options).optimizer
        assert isinstance(optimizer, keras.optimizers.Adam)


def test_the_encoder_is_the_models_own(tmp_path):
    """What becomes of the one that it was made with is no matter."""
    rng = np.random.default_rng(0)
    tables = [{"a": [f"v{i}" for i in rng.integers(count, size=500)]} for count in (400, 90)]
    given = HashEncoder(["a"]).fit(tables[0])
    model = wide(given, optimizer="adam", jit_compile=False)
    model.fit(given.transform(tables[0]), rng.random((500, 1)), batch_size=250, verbose=0)
    before = model.predict_table(tables[0], verbose=0), model.encoder.fingerprint
    path = str(tmp_path / "table.csv")
    with open(path, "w") as file:
        file.write("a\n" + "\n".join(tables[0]["a"]) + "\n")
    stream = HashedDataset(path, given)
    given.fit(tables[1])
    assert given.fingerprint != before[1]
    given.set_params(splits=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        assert one.encoder.fingerprint == before[1]
        assert difference(one.predict_table(tables[0], verbose=0), before[0]) < 1e-6
        assert difference(one.predict(stream, verbose=0), before[0]) < 1e-6


def batches_of(table, y):
    return encoder().transform(table), y


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="tf.data is TensorFlow's")
def test_streams_of_tensorflow(data, tmp_path):
    import tensorflow as tf

    table, y = data
    path = tmp_path / "table.csv"
    rows = zip(table["city"], table["age"], y[:, 0])
    path.write_text("city,age,y\n" + "".join(f"{c},{a},{label}\n" for c, a, label in rows))
    files = HashedDataset(str(path), encoder(), label="y", batch_size=32, shuffle=False)
    plain = tf.data.Dataset.from_tensor_slices(batches_of(table, y)).batch(32)
    model = wide(encoder(), optimizer="adam", loss="logistic", jit_compile=False)
    parallel = make_parallel(wide(encoder(), optimizer="adam", jit_compile=False), 2)
    for stream in (files.to_tf_data(), plain.map(lambda x, y: (x, y)).prefetch(2)):
        model.fit(stream, validation_data=stream, shuffle=False, verbose=0)
        expected = model.evaluate(*batches_of(table, y), batch_size=32, verbose=0)
        assert model.evaluate(stream, verbose=0) == pytest.approx(expected, rel=1e-5)
        expected = model.predict_table(table, verbose=0)
        assert difference(model.predict(stream, verbose=0), expected) < 1e-5
        parallel.fit(stream, shuffle=False, verbose=0)
    model.fit(files.to_tf_data(), verbose=0)  # without a warning of Keras's
    other = HashEncoder({"city": 100, "age": 10}, layout="published")
    wrong = HashedDataset(str(path), other, label="y").to_tf_data()
    with pytest.raises(ValueError, match=f"Received: fingerprint='{other.fingerprint}'"):
        model.fit(wrong)


class _Marked(np.ndarray):
    """Indices that know their encoder."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoder": None}, "`encoder` must be a .*HashEncoder`. Received: encoder=None"),
        ({"units": 0}, "`units` must be a positive integer. Received: units=0"),
        ({"middle": -1}, "`middle` must be a positive integer, or 0. Received: middle=-1"),
        ({"middle": True}, "middle=True"),
        ({"deep": 3}, "`deep` must be a list of positive integers.*deep=3"),
        ({"deep": [4, 0]}, r"deep=\[4, 0\]"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        wide(**{"encoder": encoder(), **arguments})


def clicks(folder, rows, seed):
    path = make_clicks(folder / f"clicks_{seed}.parquet", rows=rows, seed=seed)
    frame = pd.read_parquet(path)
    return frame.drop(columns="clicked"), frame["clicked"].to_numpy("float32")


@pytest.mark.slow
def test_as_good_as_logistic_regression_on_feature_hasher(tmp_path):
    """By default, and alike on four devices."""
    (table, y), (other, expected) = clicks(tmp_path, 10_000, 0), clicks(tmp_path, 10_000, 9)
    encoder = HashEncoder({"site": 20_000, "city": 2000, "device": 50, "hour": 24})
    x, found = encoder.transform(table), []
    for devices in (1, 4):
        model = make_parallel(wide(encoder, jit_compile=False), devices)
        model.fit(x, y[:, None], batch_size=1024, epochs=4, shuffle=False, verbose=0)
        scores = model.predict_table(other, batch_size=5000, verbose=0)[:, 0]
        found.append(roc_auc_score(expected, scores))
    hasher = FeatureHasher(2**18, input_type="string")
    rows = [
        hasher.transform([f"{name}={value}" for name, value in row.items()] for row in records)
        for records in (table.to_dict("records"), other.to_dict("records"))
    ]
    peer = LogisticRegression(max_iter=200).fit(rows[0], y)
    best = roc_auc_score(expected, peer.decision_function(rows[1]))
    assert found[0] > best - 0.005
    assert found[1] == pytest.approx(found[0], abs=0.001)


def test_data_without_labels_are_for_predictions(tmp_path):
    path = make_clicks(tmp_path / "clicks.csv", rows=40)
    hashed = HashEncoder(["site", "city"], others="ignore").fit(pd.read_csv(path, dtype=str))
    model, unlabelled = wide(hashed), HashedDataset(path, hashed, batch_size=16)
    told = "trained and evaluated on labels. Received: data without labels. Name their column"
    for loop in model.fit, make_parallel(model, 2).fit, model.evaluate:
        with pytest.raises(ValueError, match=told):
            loop(unlabelled, verbose=0)
    assert model.predict(unlabelled, verbose=0).shape == (40, 1)


def test_texts_are_no_indices():
    with pytest.raises(
        ValueError, match="Indices must be integers. Received: an array of dtype <U1"
    ):
        wide(encoder()).fit(np.array([["x"]]), np.array([1.0]), verbose=0)
