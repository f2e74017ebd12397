"""AutoRec: its formula, its training on several devices, what it recommends."""

import keras
import numpy as np
import pytest
import scipy.sparse
from support.parity import difference, variables

from keras_multigpu import make_parallel
from keras_multigpu.zoo import (
    ObservedError,
    RatingBiases,
    RatingMAE,
    RatingRMSE,
    Ratings,
    autorec,
    evaluate_ratings,
    historic_autorec,
    make_ratings,
    read_ratings,
    recommend,
)


@pytest.fixture
def ratings(tmp_path):
    return read_ratings(make_ratings(tmp_path / "u.data", users=70, items=30), verbose=0)


def expected_outputs(model, rows):
    """The formula of a model with one hidden layer, row by row."""
    columns, kernel, bias, out, out_bias = model.get_weights()
    spread = model.get_layer("biases").spread
    found = []
    for row in rows:
        rated = row > 0
        weight = rated.sum() + 5
        base = columns + (row - columns)[rated].sum() / weight
        rest = np.where(rated, row - base, 0) * 3 / spread / np.sqrt(weight)
        found.append(base + spread * (np.tanh(rest @ kernel + bias) @ out + out_bias))
    return np.stack(found)


@pytest.mark.parametrize("by", ["item", "user"])
def test_autorec_as_described(ratings, by, tmp_path):
    model = autorec(ratings, by=by, hidden=(7,), l2=0)
    rows = ratings.rows(by).toarray()
    assert model.output_shape == (None, 70 if by == "item" else 30)
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert isinstance(model.loss, ObservedError)
    assert difference(model.predict(rows, verbose=0), expected_outputs(model, rows)) < 1e-5
    model.fit(rows, rows, verbose=0)
    model.save(tmp_path / "autorec.keras")
    loaded = keras.saving.load_model(tmp_path / "autorec.keras")
    results = [one.evaluate(rows, rows, verbose=0) for one in (loaded, model)]
    assert difference(*results) < 1e-5


@pytest.mark.backend_free
def test_the_first_biases_are_the_best_ones(ratings):
    """They minimize the squared errors with the penalty that shrinking stands for."""
    model = autorec(ratings, by="user")
    rows = ratings.rows("user").toarray()
    rated = rows > 0
    columns = np.array(model.get_layer("biases").columns)
    left = np.where(rated, rows - columns, 0).sum(axis=1) / (rated.sum(axis=1) + 5)
    mean = rows[rated].mean()
    best = np.where(rated, rows - mean - left[:, None], 0).sum(axis=0) / (rated.sum(axis=0) + 5)
    assert difference(columns, mean + best) < 1e-4


def test_a_row_without_ratings_gets_the_biases(ratings):
    baseline, rest = RatingBiases()(np.zeros((2, 30), "float32"))
    assert not np.array(baseline).any()
    assert not np.array(rest).any()
    model = autorec(ratings, by="user")
    outputs = model.predict(np.zeros((1, 30)), verbose=0)
    assert difference(outputs[0], model.get_layer("biases").columns) < 1e-6


def test_the_historic_model():
    model = historic_autorec(items=30)
    assert [layer.units for layer in model.layers] == [10, 5, 10, 30]
    assert isinstance(model.optimizer, keras.optimizers.RMSprop)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.03)
    assert model.loss == "mse"
    rows = np.random.default_rng(0).uniform(size=(3, 30))
    expected, found = rows, model.get_weights()
    for kernel, bias in zip(found[::2], found[1::2]):
        expected = 1 / (1 + np.exp(-(expected @ kernel + bias)))
    assert difference(model.predict(rows, verbose=0), expected) < 1e-5


def test_the_loss_of_what_is_rated(rng):
    targets, outputs = rng.uniform(size=(4, 6)), rng.uniform(size=(4, 6)).astype("float32")
    targets[targets < 0.5] = 0
    expected = np.where(targets > 0, (targets - outputs) ** 2, 0).sum(axis=1).mean()
    assert float(ObservedError()(targets, outputs)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("metric", "power"), [(RatingRMSE, 2), (RatingMAE, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_in_stars(rng, metric, power, weighted):
    targets, outputs = rng.uniform(size=(5, 6)), rng.uniform(-0.5, 1.5, size=(5, 6))
    targets[targets < 0.4] = 0
    weights = rng.uniform(size=5) if weighted else np.ones(5)
    errors = np.abs(np.clip(4 * outputs, 0.5, 4) - 4 * targets) ** power
    rated = (targets > 0) * weights[:, None]
    expected = ((errors * rated).sum() / rated.sum()) ** (1 / power)
    found = metric(highest=4, lowest=0.5)
    found = metric.from_config(found.get_config())
    assert float(found.result()) == 0
    for rows in (slice(0, 3), slice(3, 5)):  # batches of different sizes
        found.update_state(targets[rows], outputs[rows], weights[rows] if weighted else None)
    assert float(found.result()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("by", ["item", pytest.param("user", marks=pytest.mark.slow)])
def test_autorec_on_several_devices(ratings, by):
    train, test = ratings.split(0.2)
    alone, template = (autorec(train, by=by, hidden=(9,)) for _ in range(2))
    template.set_weights(alone.get_weights())
    parallel = make_parallel(template, n_gpus=4)
    logs = [
        model.fit(
            train.batches(batch_size=16, by=by),
            validation_data=train.batches(by=by, targets=test),
            epochs=3,
            shuffle=False,
            verbose=0,
        ).history
        for model in (alone, parallel)
    ]
    for name in ("loss", "val_rmse", "val_mae"):
        assert difference(logs[0][name], logs[1][name]) < 1e-4
    assert difference(variables(alone), variables(parallel)) < 1e-4
    scores = [evaluate_ratings(model, train, test, by=by) for model in (alone, parallel)]
    assert scores[0].rmse == pytest.approx(scores[1].rmse, abs=1e-4)
    assert scores[0].rmse == pytest.approx(logs[0]["val_rmse"][-1], abs=1e-4)
    assert scores[0].mae == pytest.approx(logs[0]["val_mae"][-1], abs=1e-4)


@pytest.mark.parametrize("by", ["item", "user"])
def test_recommendations_are_the_best_of_what_was_not_seen(ratings, by, capsys):
    model = autorec(ratings, by=by, hidden=(9,))
    outputs = model.predict(ratings.rows(by).toarray(), verbose=0)
    outputs = outputs.T if by == "item" else outputs
    found = recommend(model, ratings, by=by, batch_size=20)
    assert list(found) == ratings.users.tolist()
    for row, top in enumerate(found.values()):
        seen = set(ratings.items[ratings.matrix[row].indices])
        ranked = sorted(zip(-outputs[row], ratings.items), key=lambda pair: pair[0])
        expected = [(item, -score) for score, item in ranked if item not in seen][:10]
        assert [item for item, _ in top] == [item for item, _ in expected]
        stars = np.clip([5 * score for _, score in expected], 1, 5)
        np.testing.assert_allclose([rating for _, rating in top], stars, atol=1e-5)
    two = recommend(model, ratings, [7, 3], by=by, batch_size=20)
    names = {user: [item for item, _ in top] for user, top in two.items()}
    assert names == {user: [item for item, _ in found[user]] for user in (7, 3)}
    recommend(model, ratings, by=by, verbose=1)
    assert ("70/70" if by == "user" else "30/30") in capsys.readouterr().out


def test_it_learns_what_users_like(tmp_path):
    """Made-up users like one genre of five, and rate it two stars higher."""
    keras.utils.set_random_seed(0)
    ratings = read_ratings(make_ratings(tmp_path / "u.data", users=400, items=100), verbose=0)
    train, test = ratings.split(0.1)
    model = autorec(train, hidden=(50,), l2=0.6)
    before = evaluate_ratings(model, train, test)
    model.fit(train.batches(batch_size=10), epochs=20, verbose=0)
    after = evaluate_ratings(model, train, test)
    assert after.rmse < 1.13 < 1.25 < before.rmse
    assert after.recall > 2 * before.recall
    found = recommend(model, train)
    liked = [item % 5 == user % 5 for user, top in found.items() for item, _ in top]
    assert np.mean(liked) > 0.6  # by chance it is about 0.13


@pytest.mark.backend_free
def test_who_has_seen_all_but_one():
    matrix = scipy.sparse.csr_matrix(np.array([[1, 1, 0], [1, 1, 1]], "float32"))
    ratings = Ratings(matrix, np.array(["ann", "bob"]), np.array([5, 6, 7]), 5.0)
    with pytest.raises(ValueError, match=r"`users` must be a list.*users=7. Give `\[7\]`"):
        recommend(autorec(ratings), ratings, 7)
    with pytest.raises(ValueError, match="`model` must be a Keras 3 model"):
        recommend(ratings, autorec(ratings))
    found = recommend(autorec(ratings), ratings)
    assert [item for item, _ in found["ann"]] == [7]
    assert found["bob"] == []


@pytest.mark.backend_free
def test_wrong_arguments(ratings):
    model = autorec(ratings)
    with pytest.raises(ValueError, match=r"`users` must be among the 70 .* Received: 999"):
        recommend(model, ratings, users=[1, 999])
    with pytest.raises(ValueError, match=r"`count` must be .* Received: count=0"):
        recommend(model, ratings, count=0)
    with pytest.raises(ValueError, match=r"`batch_size` must be .* Received: batch_size=0"):
        recommend(model, ratings, batch_size=0)
    with pytest.raises(ValueError, match=r"`by='user'` the model's rows must have 30 numbers"):
        recommend(model, ratings, by="user")
    with pytest.raises(ValueError, match=r"`by` must be .* Received: by='film'"):
        recommend(model, ratings, by="film")
    with pytest.raises(ValueError, match=r"`by` must be .* Received: by='film'"):
        autorec(ratings, by="film")
    with pytest.raises(TypeError, match=r"`ratings` must be .* Received: 30.*historic_autorec"):
        autorec(30)
    with pytest.raises(ValueError, match=r"`hidden` must be .* Received: hidden='10'"):
        autorec(ratings, hidden="10")
    empty = Ratings(scipy.sparse.csr_matrix((2, 3)), np.arange(2), np.arange(3), 5.0)
    with pytest.raises(ValueError, match="`ratings` must have at least one rating"):
        autorec(empty)
    with pytest.raises(ValueError, match=r"`items` must be .* Received: items=0"):
        historic_autorec(0)
    with pytest.raises(ValueError, match=r"`highest` must be .* Received: highest=0"):
        RatingRMSE(highest=0)
    with pytest.raises(ValueError, match=r"`spread` must be .* Received: spread=-1"):
        RatingBiases(spread=-1)
