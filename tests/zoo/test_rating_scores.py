"""Ratings held out of the training: how they are drawn, predicted and ranked."""

import keras
import numpy as np
import pytest
import scipy.sparse

from keras_multigpu.zoo import Ratings, evaluate_ratings, make_ratings, read_ratings, recommend

pytestmark = pytest.mark.backend_free


def made(table, users=None, items=None, highest=5.0):
    matrix = scipy.sparse.csr_matrix(np.asarray(table, "float32") / highest)
    users = np.arange(matrix.shape[0]) if users is None else np.array(users)
    items = np.arange(matrix.shape[1]) if items is None else np.array(items)
    return Ratings(matrix, users, items, highest)


def constant(table):
    """A model whose outputs are the rows of a table, whatever its inputs."""
    table = np.asarray(table, "float32") / 5
    inputs = keras.Input((table.shape[1],))
    rows = keras.layers.Lambda(lambda x: 0 * x + table)(inputs)
    return keras.Model(inputs, rows)


@pytest.fixture
def ratings(tmp_path):
    return read_ratings(make_ratings(tmp_path / "u.data", users=40, items=20), verbose=0)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_share_is_held_out(ratings, share):
    train, test = ratings.split(share, seed=3)
    assert test.matrix.nnz == round(share * ratings.matrix.nnz)
    assert np.abs(train.matrix + test.matrix - ratings.matrix).max() == 0
    assert train.matrix.nnz + test.matrix.nnz == ratings.matrix.nnz
    again, other = ratings.split(share, seed=3), ratings.split(share, seed=4)
    assert (test.matrix != again[1].matrix).nnz == 0
    assert (test.matrix != other[1].matrix).nnz > 0
    assert train.users is ratings.users
    assert (train.items is ratings.items, train.highest) == (True, 5)


def test_every_rating_is_held_out_by_one_fold(ratings):
    pairs = ratings.split(folds=3)
    assert len(pairs) == 3
    assert np.abs(sum(test.matrix for _, test in pairs) - ratings.matrix).max() == 0
    sizes = [test.matrix.nnz for _, test in pairs]
    assert sum(sizes) == ratings.matrix.nnz
    assert max(sizes) - min(sizes) <= 1
    for train, test in pairs:
        assert np.abs(train.matrix + test.matrix - ratings.matrix).max() == 0


def test_wrong_splits(ratings):
    with pytest.raises(ValueError, match=r"`share` must be between 0 and 1. Received: share=1"):
        ratings.split(1)
    with pytest.raises(ValueError, match=r"`share` must leave .* Received: share=1e-05 of"):
        ratings.split(1e-5)
    with pytest.raises(ValueError, match=r"`folds` must be from 2 to .* Received: folds=1"):
        ratings.split(folds=1)
    with pytest.raises(ValueError, match=r"takes a share or folds. Received: share=0.1, folds=5"):
        ratings.split(0.1, folds=5)
    with pytest.raises(ValueError, match=r"`seed` must be .* Received: seed=-1"):
        ratings.split(0.1, -1)


@pytest.mark.parametrize("by", ["item", "user"])
def test_batches_hide_inputs_in_training_only(ratings, by):
    batches = ratings.batches(8, seed=1, by=by, hide=0.5)
    whole = ratings.rows(by).toarray()
    epochs = []
    for _ in range(2):
        pairs = [batches[number] for number in range(len(batches))]
        inputs, targets = (np.concatenate(side) for side in zip(*pairs))
        assert sorted(map(tuple, targets)) == sorted(map(tuple, whole))
        assert (inputs[inputs > 0] == targets[inputs > 0]).all()
        assert 0.4 < (inputs > 0).sum() / (targets > 0).sum() < 0.6
        epochs.append(inputs)
        batches.on_epoch_end()
    assert (epochs[0] > 0).sum() != (epochs[1] > 0).sum()
    model = constant(np.zeros((1, whole.shape[1])))
    model.compile(loss=lambda y_true, y_pred: keras.ops.sum(y_true - y_pred, -1))
    seen = []
    model.predict_step = lambda data: seen.append(np.array(data[0])) or model(data[0])
    model.run_eagerly = True
    model.predict(batches, verbose=0)
    assert (np.concatenate(seen)[-len(whole) :] == whole).all()


def test_targets_of_other_ratings(ratings):
    train, test = ratings.split(0.2)
    inputs, targets = train.batches(100, shuffle=False, hide=0, targets=test)[0]
    assert (inputs == train.rows("item").toarray()).all()
    assert (targets == test.rows("item").toarray()).all()
    scaled = Ratings(test.matrix / 2, test.users, test.items, 10.0)
    _, same = train.batches(100, shuffle=False, targets=scaled)[0]
    assert np.abs(same - targets).max() < 1e-6
    other = Ratings(test.matrix, test.users + 1, test.items, 5.0)
    with pytest.raises(ValueError, match=r"`targets` must have the same users, in the same order"):
        train.batches(targets=other)
    with pytest.raises(ValueError, match=r"`hide` must be .* Received: hide=1"):
        train.batches(hide=1)


def test_errors_and_ranks_by_hand():
    known = made([[5, 0, 0, 0], [0, 1, 0, 0]])
    test = made([[0, 4, 5, 0], [2, 0, 0, 4]])
    predicted = [[0, 4, 1, 2], [9, 0, 5, 0]]
    score = evaluate_ratings(constant(predicted), known, test, by="user", k=2, batch_size=2)
    # Items 2 and 3 have no known rating: the users' means. 9 and 0 are clipped to 5 and 1.
    errors = np.array([0, 5 - 5, 5 - 2, 1 - 4])
    assert score.rmse == pytest.approx(np.sqrt(np.mean(errors**2)))
    assert score.mae == pytest.approx(1.5)
    assert (score.ratings, score.unknown, score.users, score.k) == (4, 2, 2, 2)
    # User 0 gets items 1 and 3, of the relevant 1 and 2; user 1 gets 0 and 2, relevant is 3.
    assert score.recall == pytest.approx((1 / 2 + 0) / 2)
    assert score.ndcg == pytest.approx(1 / (1 + 1 / np.log2(3)) / 2)
    assert "RMSE 2.1213, MAE 1.5000 of 4 ratings, 2 by a mean; recall@2 0.250" in str(score)
    low = evaluate_ratings(constant(predicted), known, test, by="user", k=2, relevant=2)
    assert low.recall == pytest.approx((1 / 2 + 1 / 2) / 2)
    none = evaluate_ratings(constant(predicted), known, test, by="user", relevant=6)
    assert (none.users, np.isnan(none.recall), np.isnan(none.ndcg)) == (0, True, True)


def test_by_item_and_by_user_are_one_score(ratings):
    train, test = ratings.split(0.3)
    table = np.random.default_rng(0).uniform(1, 5, size=ratings.matrix.shape)
    scores = [
        evaluate_ratings(constant(one), train, test, by=by, k=4, batch_size=40)
        for by, one in (("user", table), ("item", table.T))
    ]
    assert scores[0] == scores[1]


def test_what_are_no_ratings():
    with pytest.raises(TypeError, match="`ratings` must be `Ratings`.*Received: 3"):
        recommend(constant([[5, 5], [5, 1]]), 3)


def test_unknown_names_of_another_file():
    known = made([[4, 2], [3, 0]], users=["034", "ann"], items=[7, 8])
    test = made(
        [[5, 0, 1], [0, 0, 2], [0, 5, 4]], users=["ann", "034", "34"], items=["8", "07", "9"]
    )
    score = evaluate_ratings(constant([[5, 5], [5, 1]]), known, test, by="user")
    # ann's 8 is known: 1, clipped to 2. ann's 9: ann's mean, 3. 034's 9: the mean of 4 and 2.
    # 34 is not 034, 07 is not 7: the mean of all, 3.
    errors = np.array([2 - 5, 3 - 1, 3 - 2, 3 - 5, 3 - 4])
    assert score.unknown == 4
    assert score.rmse == pytest.approx(np.sqrt(np.mean(errors**2)))
    assert score.users == 1  # of ann, who rated 8 high, and it is recommended
    assert score.recall == 1


@pytest.mark.parametrize("by", ["item", "user"])
def test_a_user_with_few_items_left(by):
    """Places of the best ten that no item takes are no hits."""
    known, test = made([[0, 4]]), made([[5, 0]])
    table = np.array([[3.0, 3.0]])
    score = evaluate_ratings(constant(table if by == "user" else table.T), known, test, by=by, k=10)
    assert (score.recall, score.ndcg) == (1, 1)


@pytest.mark.parametrize(
    ("highest", "relevant"), [(5.0, 3.5), (5.0, 4.5), (10.0, 7.0), (10.0, 9.0)]
)
def test_a_rating_equal_to_the_limit_is_relevant(highest, relevant):
    known, test = made([[0, 1]], highest=highest), made([[relevant, 0]], highest=highest)
    score = evaluate_ratings(constant([[3.0, 3.0]]), known, test, by="user", relevant=relevant)
    assert score.users == 1


def test_what_was_seen_is_not_held_out(ratings):
    train, test = ratings.split(0.2)
    model = constant(np.zeros(train.matrix.shape))
    with pytest.raises(ValueError, match=r"`held_out` must not have .* Received: \d+ such"):
        evaluate_ratings(model, ratings, test, by="user")
    empty = made(np.zeros(train.matrix.shape), train.users, train.items)
    with pytest.raises(ValueError, match="`held_out` must have at least one rating"):
        evaluate_ratings(model, train, empty, by="user")
    with pytest.raises(TypeError, match="`held_out` must be `Ratings`.* Received: None"):
        evaluate_ratings(model, train, None)
    with pytest.raises(ValueError, match=r"`k` must be .* Received: k=0"):
        evaluate_ratings(model, train, test, by="user", k=0)
    with pytest.raises(ValueError, match=r"`relevant` must be .* Received: relevant=0"):
        evaluate_ratings(model, train, test, by="user", relevant=0)
