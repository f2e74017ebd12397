"""AutoRec and DeepCoNN: their formulas, on several devices, what they recommend, their files."""

import keras
import numpy as np
import pytest
import scipy.sparse
from support.parity import difference, variables

from keras_multigpu import make_parallel
from keras_multigpu.zoo import (
    FactorizationMachine,
    ObservedError,
    Ratings,
    autorec,
    deepconn,
    make_ratings,
    make_reviews,
    read_ratings,
    read_reviews,
    recommend,
)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.fixture
def ratings(tmp_path):
    return read_ratings(make_ratings(tmp_path / "u.data", users=70, items=30), verbose=0)


@pytest.fixture
def reviews(tmp_path):
    return read_reviews(make_reviews(tmp_path / "r.json.gz", reviews=70, users=9), verbose=0)


def test_autorec_as_described(ratings):
    model = autorec(items=30)
    assert [layer.units for layer in model.layers] == [10, 5, 10, 30]
    assert isinstance(model.optimizer, keras.optimizers.RMSprop)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.03)
    assert isinstance(model.loss, ObservedError)
    assert autorec(items=30, loss="mse").loss == "mse"
    rows = ratings.matrix[:3].toarray()
    expected, found = rows, model.get_weights()
    for kernel, bias in zip(found[::2], found[1::2]):
        expected = sigmoid(expected @ kernel + bias)
    assert difference(model.predict(rows, verbose=0), expected) < 1e-5


def test_the_loss_of_what_is_rated(rng):
    targets, outputs = rng.uniform(size=(4, 6)), rng.uniform(size=(4, 6)).astype("float32")
    targets[targets < 0.5] = 0
    expected = np.where(targets > 0, (targets - outputs) ** 2, 0).sum(axis=1).mean()
    assert float(ObservedError()(targets, outputs)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [pytest.param("mse", marks=pytest.mark.slow), "observed"])
def test_autorec_on_several_devices(ratings, loss):
    alone, template = (autorec(items=30, loss=loss, l2=1e-3) for _ in range(2))
    template.set_weights(alone.get_weights())
    parallel = make_parallel(template, n_gpus=4)
    histories = [
        model.fit(ratings.batches(batch_size=32), epochs=2, shuffle=False, verbose=0).history
        for model in (alone, parallel)
    ]
    assert difference(histories[0]["loss"], histories[1]["loss"]) < 2e-5
    assert difference(variables(alone), variables(parallel)) < 2e-5
    tops = [recommend(model, ratings, count=3, batch_size=32) for model in (alone, parallel)]
    assert difference(*([s for top in one.values() for _, s in top] for one in tops)) < 1e-5


def test_recommendations_are_the_best_of_what_was_not_seen(ratings, capsys):
    model = autorec(items=30)
    outputs = model.predict(ratings.matrix.toarray(), verbose=0)
    for row, (user, top) in enumerate(recommend(model, ratings, batch_size=20).items()):
        assert user == ratings.users[row]
        seen = set(ratings.items[ratings.matrix[row].indices])
        ranked = sorted(zip(-outputs[row], ratings.items), key=lambda pair: pair[0])
        expected = [item for _, item in ranked if item not in seen][:10]
        assert [item for item, _ in top] == expected
    recommend(model, ratings, verbose=1)
    assert "70/70" in capsys.readouterr().out


@pytest.mark.slow
def test_the_default_recommends_what_users_like(tmp_path):
    """Made-up users like one genre of five."""
    keras.utils.set_random_seed(0)
    ratings = read_ratings(make_ratings(tmp_path / "u.data", users=400, items=100), verbose=0)
    model = autorec(items=len(ratings.items))
    model.fit(ratings.batches(batch_size=100), epochs=150, shuffle=False, verbose=0)
    found = recommend(model, ratings)
    liked = [item % 5 == user % 5 for user, top in found.items() for item, _ in top]
    assert np.mean(liked) > 0.6  # by chance it is about 0.13


def test_who_has_seen_all_but_one():
    matrix = scipy.sparse.csr_matrix(np.array([[1, 1, 0], [1, 1, 1]], "float32"))
    ratings = Ratings(matrix, np.array(["ann", "bob"]), np.array([5, 6, 7]), 5.0)
    found = recommend(autorec(items=3), ratings)
    assert [item for item, _ in found["ann"]] == [7]
    assert found["bob"] == []


def test_wrong_arguments(ratings):
    model = autorec(items=30)
    with pytest.raises(ValueError, match=r"`users` must be among the 70 .* Received: 999"):
        recommend(model, ratings, users=[1, 999])
    with pytest.raises(ValueError, match=r"`count` must be .* Received: count=0"):
        recommend(model, ratings, count=0)
    with pytest.raises(ValueError, match=r"`batch_size` must be .* Received: batch_size=0"):
        recommend(model, ratings, batch_size=0)
    with pytest.raises(ValueError, match=r"`items` must be .* Received: items=0"):
        autorec(items=0)
    with pytest.raises(ValueError, match=r"`hidden` must be .* Received: hidden='10'"):
        autorec(items=3, hidden="10")
    with pytest.raises(ValueError, match=r"`vocabulary` must be .* Received: vocabulary=0"):
        deepconn(0)
    with pytest.raises(ValueError, match=r"`head` must be .* Received: head='sum'"):
        deepconn(9, head="sum")
    with pytest.raises(ValueError, match=r"`width` must not be above `length`. Received: width=3"):
        deepconn(9, length=2)
    with pytest.raises(ValueError, match=r"`factors` must be .* Received: factors=0"):
        FactorizationMachine(0)


def test_a_factorization_machine(rng):
    layer = FactorizationMachine(factors=3)
    x = rng.normal(size=(5, 4)).astype("float32")
    layer.build(x.shape)
    bias, kernel, pairs = (rng.normal(size=w.shape) for w in layer.get_weights())
    layer.set_weights([bias, kernel, pairs])
    expected = bias + x @ kernel
    for i in range(4):
        for j in range(i + 1, 4):
            expected += (pairs[i] @ pairs[j] * x[:, i] * x[:, j])[:, None]
    assert difference(layer(x), expected) < 1e-4
    again = FactorizationMachine.from_config(layer.get_config())
    assert again.factors == 3
    assert again.compute_output_shape((None, 4)) == (None, 1)


def branch(words, embedding, conv, conv_bias, kernel, bias, relu):
    """One branch of DeepCoNN, text by text."""
    found = []
    for text in words:
        vectors = embedding[text]
        windows = [vectors[i : i + len(conv)] for i in range(len(text) - len(conv) + 1)]
        features = [np.einsum("we,wef->f", window, conv) + conv_bias for window in windows]
        best = np.max([np.maximum(one, 0) if relu else np.tanh(one) for one in features], axis=0)
        end = best @ kernel + bias
        found.append(np.maximum(end, 0) if relu else end)
    return np.stack(found)


@pytest.mark.parametrize("head", ["fm", "dot"])
def test_deepconn_as_described(rng, head):
    options = {} if head == "fm" else {"activation": "tanh", "unit_activation": None}
    model = deepconn(50, 12, embedding=5, filters=4, units=3, head=head, **options)
    words = {side: rng.integers(50, size=(6, 12), dtype="int32") for side in ("user", "item")}
    model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
    named = {w.path: np.array(w) for w in model.weights}
    weights = ("conv/kernel", "conv/bias", "dense/kernel", "dense/bias")
    ends = [
        branch(
            words[side],
            named[f"{side}_embedding/embeddings"],
            *(named[f"{side}_{weight}"] for weight in weights),
            relu=head == "fm",
        )
        for side in ("user", "item")
    ]
    if head == "dot":
        expected = (ends[0] * ends[1]).sum(axis=1, keepdims=True)
    else:
        both = np.concatenate(ends, axis=1)
        pairs = named["match/pairs"]
        square = ((both @ pairs) ** 2 - both**2 @ pairs**2).sum(axis=1, keepdims=True) / 2
        expected = both @ named["match/kernel"] + named["match/bias"] + square
    assert difference(model.predict(words, verbose=0), expected) < 1e-3
    assert isinstance(model.optimizer, keras.optimizers.RMSprop)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data", "model"])
def test_deepconn_on_two_devices(reviews, mode, tmp_path):
    def build():
        model = deepconn(len(reviews.vocabulary), 40, embedding=4, filters=3, units=3)
        model.compile("rmsprop", "mse", jit_compile=False)
        return model

    alone, template = build(), build()
    template.set_weights(alone.get_weights())
    parallel = make_parallel(template, 2, mode)
    pairs = reviews.pairs(length=40, batch_size=16, shuffle=False)
    losses = [
        model.fit(pairs, epochs=2, shuffle=False, verbose=0).history["loss"]
        for model in (alone, parallel)
    ]
    assert difference(losses[0], losses[1]) < 2e-5
    assert difference(variables(alone), variables(parallel)) < 2e-5
    alone.save(tmp_path / "deepconn.keras")
    loaded = keras.saving.load_model(tmp_path / "deepconn.keras")
    texts = pairs[0][0]
    assert difference(loaded.predict(texts, verbose=0), alone.predict(texts, verbose=0)) < 1e-6
