"""DeepCoNN: its formulas, on several devices, its files."""

import keras
import numpy as np
import pytest
from support.parity import difference, variables

from keras_multigpu import make_parallel
from keras_multigpu.zoo import FactorizationMachine, deepconn, make_reviews, read_reviews


@pytest.fixture
def reviews(tmp_path):
    return read_reviews(make_reviews(tmp_path / "r.json.gz", reviews=70, users=9), verbose=0)


def test_wrong_arguments():
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


@pytest.mark.filterwarnings("ignore:The steps of .* are not compiled")
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
