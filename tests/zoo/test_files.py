"""Files of ratings and of reviews: their forms, their bad lines, and made-up ones alike."""

import gzip
import json

import keras
import numpy as np
import pytest

from keras_multigpu import zoo
from keras_multigpu.progress import ReadingBar
from keras_multigpu.sparse.lines import read_lines
from keras_multigpu.sparse.sources import BadDataError
from keras_multigpu.zoo import make_clicks, make_ratings, make_reviews, read_ratings, read_reviews

pytestmark = pytest.mark.backend_free

LINES = [(196, 242, 3), (186, 302, 4), (196, 302, 1), (22, 242, 5)]
HEADER = ("userId", "movieId", "rating", "timestamp")
FORMS = {
    "u.data": ("\t", None),
    "ratings.dat": ("::", None),
    "ratings.csv": (",", HEADER),
    "rated.dat": ("\t", ("userID", "movieID", "rating", "date_day")),
    "ratings.tsv": ("\t", HEADER),
    "ratings_Books.csv": (",", None),
    "reviews.csv": (",", ("user_id", "parent_asin", "rating", "timestamp")),
    "ml-100k.inter": ("\t", ("user_id:token", "item_id:token", "rating:float", "timestamp:float")),
}


def write(folder, name, lines=LINES, end="\n", before=""):
    """A file of ratings in one of the forms."""
    delimiter, header = FORMS[name]
    rows = [delimiter.join(header)] if header else []
    rows += [
        line if isinstance(line, str) else delimiter.join(map(str, (*line, 881250949)))
        for line in lines
    ]
    path = folder / name
    path.write_bytes((before + end.join(rows)).encode())
    return path


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_form_of_ratings(tmp_path, name, end):
    ratings = read_ratings(write(tmp_path, name, end=end), verbose=0)
    assert ratings.users.tolist() == [22, 186, 196]
    assert ratings.items.tolist() == [242, 302]
    expected = np.array([[5, 0], [0, 4], [3, 1]]) / 5
    assert np.abs(ratings.matrix.toarray() - expected).max() < 1e-6
    assert ratings.matrix.dtype == np.float32
    assert (ratings.highest, ratings.skipped, ratings.repeated) == (5, {}, 0)


def test_gzipped_with_a_mark_and_blank_lines(tmp_path):
    path = write(tmp_path, "ratings.csv", ["", *LINES, "", ""], before="\ufeff")
    packed = tmp_path / "ratings.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    late = write(tmp_path, "ratings.tsv", before="\n \n")
    for one in (path, packed, late):
        assert read_ratings(str(one), verbose=0).matrix.nnz == 4
    with pytest.raises(ValueError, match="line 5: a rating must be a number"):
        read_ratings(
            write(tmp_path, "ratings.tsv", [LINES[0], (1, 2, "x")], before="\n\n"), verbose=0
        )


def test_names_that_are_no_numbers_and_the_scale(tmp_path):
    path = write(tmp_path, "u.data", [("ann", "07", 1), ("bob", "7", 2.5)])
    ratings = read_ratings(path, highest=10, verbose=0)
    assert ratings.users.tolist() == ["ann", "bob"]
    assert ratings.items.tolist() == ["07", "7"]  # not the same item
    assert ratings.matrix.toarray().tolist() == [[np.float32(0.1), 0], [0, 0.25]]


def test_the_last_of_equal_pairs_counts(tmp_path):
    path = write(tmp_path, "u.data", [(1, 2, 5), (1, 3, 4), (1, 2, 1)])
    ratings = read_ratings(path, highest=5, verbose=0)
    assert ratings.repeated == 1
    assert np.abs(ratings.matrix.toarray() - [[0.2, 0.8]]).max() < 1e-6
    assert "2 ratings of 2 items by 1 users, up to 5; 0 skipped, 1 repeated" in str(ratings)


BAD = {
    "too few": ("196", "a line must have 4 fields, as the first line has. Received: b'196'"),
    "too many": ([1, 2, 3, 4], "a line must have 4 fields"),
    "no rating": ((1, 2, ""), "a rating must be a number above 0. Received: ''"),
    "a word": ((1, 2, "five"), "a rating must be a number above 0. Received: 'five'"),
    "zero": ((1, 2, 0), "a rating must be a number above 0. Received: '0'"),
    "not finite": ((1, 2, "inf"), "a rating must be a number above 0. Received: 'inf'"),
    "no user": (("", 2, 3), "must not be empty. Received: user='', item='2'"),
    "no item": ((1, "", 3), "must not be empty. Received: user='1', item=''"),
}


@pytest.mark.parametrize("name", ["u.data", "ratings.dat", "ratings.csv"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_named_or_counted(tmp_path, name, bad):
    line, text = BAD[bad]
    path = write(tmp_path, name, [LINES[0], "", line, *LINES[1:]])
    place = 4 if FORMS[name][1] else 3
    with pytest.raises(BadDataError) as caught:
        read_ratings(path, verbose=0)
    assert f"{path}, line {place}: " in str(caught.value)
    assert text in str(caught.value)
    assert 'leave such lines out: errors="skip"' in str(caught.value)
    ratings = read_ratings(path, errors="skip", verbose=0)
    assert ratings.matrix.nnz == 4
    reason = "another number of fields" if bad.startswith("too") else "no user, item or rating"
    assert ratings.skipped == {reason: 1}


def test_a_rating_above_the_highest_is_a_bad_line(tmp_path):
    path = write(tmp_path, "u.data", [*LINES, (1, 2, 6)])
    with pytest.raises(ValueError, match=r"line 5: a rating must be .* above 0 and not above 5. "):
        read_ratings(path, highest=5, verbose=0)
    assert read_ratings(path, highest=5, errors="skip", verbose=0).matrix.nnz == 4


def test_a_bad_first_line(tmp_path):
    path = write(tmp_path, "u.data", ["what is this", *LINES])
    with pytest.raises(ValueError, match=r"line 1: a file of ratings must have .*what is this"):
        read_ratings(path, verbose=0)
    assert sum(read_ratings(path, errors="skip", verbose=0).skipped.values()) == 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('"7,8,3,1', "line 3: a line must not have a quotation mark that is not closed"),
        ('7,8,3,"', "line 3: a line must not have a quotation mark that is not closed"),
        ('"7","8",3', "line 3: a line must have 4 fields"),
    ],
)
def test_a_quotation_mark_that_is_not_closed(tmp_path, line, text):
    path = write(tmp_path, "ratings.csv", [LINES[0], line, *LINES[1:]])
    with pytest.raises(BadDataError, match=text):
        read_ratings(path, verbose=0)
    ratings = read_ratings(path, errors="skip", verbose=0)
    assert ratings.skipped == {"another number of fields": 1}
    assert ratings.matrix.nnz == 4


def test_quoted_fields(tmp_path):
    path = write(tmp_path, "ratings.csv", ['"a, b","7","3.5","1"', *LINES])
    ratings = read_ratings(path, verbose=0)
    assert ratings.users.tolist() == ["186", "196", "22", "a, b"]


def test_blocks_are_cut_where_lines_end(tmp_path, monkeypatch):
    many = [(user, item, 1 + (user + item) % 5) for user in range(1, 90) for item in range(1, 30)]
    path = write(tmp_path, "ratings.dat", many)
    whole = read_ratings(path, verbose=0)
    monkeypatch.setattr(read_lines, "__defaults__", (0, 1000))
    pieces = read_ratings(path, verbose=0)
    assert (whole.matrix != pieces.matrix).nnz == 0
    assert whole.users.tolist() == pieces.users.tolist()
    path = write(tmp_path, "ratings.dat", [*many, "1::2::x::4"])
    with pytest.raises(ValueError, match=f"line {len(many) + 1}: a rating"):
        read_ratings(path, verbose=0)


def test_no_ratings_no_file_and_wrong_arguments(tmp_path):
    path = write(tmp_path, "ratings.csv", [])
    with pytest.raises(ValueError, match="must have at least one rating"):
        read_ratings(path, verbose=0)
    with pytest.raises(ValueError, match="must be a readable file. Received: FileNotFoundError"):
        read_ratings(tmp_path / "none.csv", verbose=0)
    packed = tmp_path / "cut.csv.gz"
    packed.write_bytes(gzip.compress(b"1,2,3\n" * 9)[:-9])
    with pytest.raises(ValueError, match="must be a readable file. Received: EOFError"):
        read_ratings(packed, verbose=0)
    path = write(tmp_path, "u.data")
    with pytest.raises(ValueError, match=r"`errors` must be .* Received: errors='ignore'"):
        read_ratings(path, errors="ignore")
    with pytest.raises(ValueError, match=r"`highest` must be .* Received: highest=-1"):
        read_ratings(path, highest=-1)
    with pytest.raises(TypeError, match="`path` must be the path of one file"):
        read_ratings([path])
    with pytest.raises(ValueError, match=r"`verbose` must be 0 or 1. Received: verbose=2"):
        read_ratings(path, verbose=2)
    with pytest.raises(ValueError, match=r"`batch_size` must be .* Received: batch_size=0"):
        read_ratings(path, verbose=0).batches(batch_size=0)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([b"1", b"2", b"-3"], "i"),
        ([b"034", b"007"], "U"),
        ([b"1_0", b"10"], "U"),
        ([b"+1", b"2"], "U"),
        ([b" 1", b"2"], "U"),
        ([b"9223372036854775808", b"1"], "U"),
        ([b"Ren\xe9", b"Ren\xe8", b"Ren"], "U"),
        (["٣".encode(), b"3"], "U"),
        ([b"a\0", b"a"], "O"),
    ],
)
def test_names_stay_as_they_are_written(tmp_path, names, kind):
    path = tmp_path / "u.data"
    path.write_bytes(b"".join(b"%s\t%d\t5\n" % (name, row) for row, name in enumerate(names, 1)))
    ratings = read_ratings(path, verbose=0)
    assert ratings.users.dtype.kind == kind
    users = [str(user).encode("utf-8", "surrogateescape") for user in ratings.users]
    rated = {user: ratings.matrix[row].indices[0] for row, user in enumerate(users)}
    assert {user: ratings.items[item] for user, item in rated.items()} == {
        name: number for number, name in enumerate(names, 1)
    }
    assert len(zoo.recommend(zoo.autorec(ratings, hidden=(2,)), ratings)) == len(names)


def test_batches_have_every_user_once_an_epoch(tmp_path):
    ratings = read_ratings(make_ratings(tmp_path / "u.data", users=30, items=20), verbose=0)
    batches = ratings.batches(batch_size=8, by="user", hide=0)
    epochs = []
    for _ in range(2):
        inputs = [batches[number][0] for number in range(len(batches))]
        assert [len(one) for one in inputs] == [8, 8, 8, 6]
        epochs.append(np.concatenate(inputs))
        batches.on_epoch_end()
    dense = ratings.matrix.toarray()
    for epoch in epochs:
        assert sorted(map(tuple, epoch)) == sorted(map(tuple, dense))
    assert (epochs[0] != epochs[1]).any()


def test_progress_is_shown(tmp_path, capsys):
    path = make_ratings(tmp_path / "u.data", users=20, items=20)
    read_ratings(path)
    assert "1/1" in capsys.readouterr().out
    bar = ReadingBar([path, str(tmp_path / "none")], verbose=1)
    bar.show(1, 0)
    bar.finish()
    assert capsys.readouterr().out.count("\n") == 1


REVIEWS = [
    {"reviewerID": "A1", "asin": "B1", "reviewText": "It's good, good!", "overall": 5.0},
    {"reviewerID": "A2", "asin": "B1", "overall": 2},  # some have no text
    {"user_id": "A1", "parent_asin": "B2", "text": "Bad. Étude", "rating": 1},
]


def write_reviews(path, lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    is_packed = path.name.endswith(".gz")
    path.write_bytes(gzip.compress(text.encode()) if is_packed else text.encode())
    return path


@pytest.mark.parametrize("name", ["reviews.json", "reviews.json.gz"])
def test_reviews(tmp_path, name):
    reviews = read_reviews(write_reviews(tmp_path / name, REVIEWS), verbose=0)
    assert (reviews.users, reviews.items) == (["A1", "A2"], ["B1", "B2"])
    assert reviews.user_rows.tolist() == [0, 1, 0]
    assert reviews.item_rows.tolist() == [0, 0, 1]
    assert reviews.ratings.tolist() == [5, 2, 1]
    texts = [[reviews.vocabulary[word] for word in reviews.words_of(n)] for n in range(3)]
    assert texts == [["it's", "good", "good"], [], ["bad", "étude"]]
    assert reviews.vocabulary[:3] == ["", "?", "good"]


def test_the_most_frequent_and_the_first_words_are_kept(tmp_path):
    path = write_reviews(tmp_path / "reviews.json", REVIEWS)
    reviews = read_reviews(path, vocabulary=1, max_words=2, verbose=0)
    assert reviews.vocabulary == ["", "?", "it's"]
    assert [reviews.words_of(n).tolist() for n in range(3)] == [[2, 1], [], [1, 1]]


BAD_REVIEWS = {
    "cut": ('{"reviewerID": "A1", "as', "a line must be a JSON object. Received: b'{\"rev"),
    "no object": ("[1, 2]", "a line must be a JSON object"),
    "no user": ({"asin": "B1", "overall": 5}, "its user as a text named 'reviewerID' or 'user_id'"),
    "no item": ({"user_id": "A1", "rating": 5}, "its item as a text named 'asin'"),
    "no rating": ({"user_id": "A1", "asin": "B1"}, "its rating as a finite number"),
    "a word": ({"user_id": "A1", "asin": "B1", "rating": "5"}, "Received: '5'"),
    "nan": ('{"user_id": "A1", "asin": "B1", "rating": NaN}', "Received: nan"),
}


@pytest.mark.parametrize("bad", BAD_REVIEWS)
def test_a_bad_review_is_named_or_counted(tmp_path, bad):
    line, text = BAD_REVIEWS[bad]
    path = write_reviews(tmp_path / "reviews.json", [REVIEWS[0], "", line, *REVIEWS[1:]])
    with pytest.raises(BadDataError) as caught:
        read_reviews(path, verbose=0)
    assert f"{path}, line 3: " in str(caught.value)
    assert text in str(caught.value)
    reviews = read_reviews(path, errors="skip", verbose=0)
    assert len(reviews.ratings) == 3
    assert reviews.skipped == {"no review": 1}


def test_reviews_wrong_arguments(tmp_path):
    empty = write_reviews(tmp_path / "reviews.json", [""])
    with pytest.raises(ValueError, match="must have at least one review"):
        read_reviews(empty, verbose=0)
    with pytest.raises(ValueError, match=r"`vocabulary` must be .* Received: vocabulary=0"):
        read_reviews(empty, vocabulary=0)
    reviews = read_reviews(write_reviews(tmp_path / "reviews.json", REVIEWS), verbose=0)
    with pytest.raises(ValueError, match=r"`share` must be .* Received: share=1"):
        reviews.split(1)
    with pytest.raises(ValueError, match=r"`length` must be .* Received: length=0"):
        reviews.pairs(length=0)
    with pytest.raises(ValueError, match=r"`rows` must name at least one review"):
        reviews.pairs(rows=np.array([], int))
    with pytest.raises(ValueError, match=r"`known` must name at least one review"):
        reviews.pairs(known=[])
    for name in ("rows", "known"):
        for wrong, message in {
            "negative": ([0, -1], "from 0 to 2. Received: -1"),
            "too large": ([0, 3], "from 0 to 2. Received: 3"),
            "a mask": (np.array([True, False, True]), "np.flatnonzero"),
            "numbers": ([0.0, 1.0], r"Received: .*=\[0.0, 1.0\]"),
            "a table": ([[0], [1]], "of one axis"),
        }.values():
            with pytest.raises(ValueError, match=f"`{name}` must be the numbers.*{message}"):
                reviews.pairs(**{name: wrong})
    with pytest.raises(
        ValueError, match="`seed` must be a positive integer, or 0. Received: seed=-1"
    ):
        reviews.pairs(seed=-1)


@pytest.mark.parametrize(
    ("make", "name", "wrong"),
    [
        (make_ratings, "r.csv", {"users": -1}),
        (make_ratings, "r.csv", {"items": 0}),
        (make_reviews, "r.json", {"reviews": 0}),
        (make_clicks, "c.csv", {"rows": 0}),
    ],
)
def test_made_up_files_have_rows(tmp_path, make, name, wrong):
    ((argument, value),) = wrong.items()
    said = f"`{argument}` must be a positive integer. Received: {argument}={value}"
    with pytest.raises(ValueError, match=said):
        make(tmp_path / name, **wrong)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(("share", "count"), [(0.01, 30), (0.99, 30), (0.5, 1)])
def test_a_share_that_leaves_nothing(tmp_path, share, count):
    reviews = read_reviews(make_reviews(tmp_path / "r.json", reviews=count), verbose=0)
    with pytest.raises(ValueError, match=f"Received: share={share} of {count} reviews, which is"):
        reviews.split(share)


def test_pairs_leave_out_the_review_that_is_to_be_found(tmp_path):
    reviews = read_reviews(write_reviews(tmp_path / "reviews.json", REVIEWS), verbose=0)
    ((texts, ratings),) = list_of(reviews.pairs(length=4, shuffle=False))
    words = {side: [said(reviews, row) for row in rows] for side, rows in texts.items()}
    # A1's other review, none of A2, A1's first; of B1 A2's empty one, A1's, nothing of B2.
    assert words["user"] == [["bad", "étude"], [], ["it's", "good", "good"]]
    assert words["item"] == [[], ["it's", "good", "good"], []]
    assert ratings.tolist() == [[5], [2], [1]]
    assert texts["user"].dtype == np.int32


def test_copies_of_a_review_are_left_out_too(tmp_path):
    def line(user, item, text):
        return {"reviewerID": user, "asin": item, "reviewText": text, "overall": 5}

    lines = [
        line("A", "X", "one"),
        line("A", "X", "one more"),  # the same item once more
        line("A", "Y", "one"),  # the same words about another item
        line("A", "Z", "other"),
        line("B", "X", "one"),  # another user's words
    ]
    reviews = read_reviews(write_reviews(tmp_path / "reviews.json", lines), verbose=0)
    ((texts, _),) = list_of(reviews.pairs([0], np.arange(5), length=5))
    assert said(reviews, texts["user"][0]) == ["other"]
    assert said(reviews, texts["item"][0]) == ["one"]
    ((texts, _),) = list_of(reviews.pairs([3], np.arange(5), length=5))
    assert said(reviews, texts["user"][0]) == ["one", "one", "more", "one"]


def test_pairs_of_other_reviews_than_the_known_ones(tmp_path):
    reviews = read_reviews(make_reviews(tmp_path / "r.json", reviews=80, users=9), verbose=0)
    train, test = reviews.split(0.25)
    assert len(test) == 20
    assert not set(train) & set(test)
    pairs = reviews.pairs(test, train, length=2000, batch_size=7, shuffle=False)
    assert [len(one) for _, one in list_of(pairs)] == [7, 7, 6]
    texts, _ = pairs[0]
    owner = reviews.user_rows[test[0]]
    own = [number for number in train if reviews.user_rows[number] == owner]
    expected = np.concatenate([reviews.words_of(number) for number in own])
    assert texts["user"][0][: len(expected)].tolist() == expected.tolist()
    assert not texts["user"][0][len(expected) :].any()


@pytest.mark.parametrize("workers", [1, 4])
def test_predictions_keep_the_order_and_training_has_every_row(tmp_path, workers):
    reviews = read_reviews(make_reviews(tmp_path / "r.json", reviews=50), verbose=0)
    model = zoo.deepconn(len(reviews.vocabulary), length=8, embedding=2, filters=2, units=2)
    pairs = reviews.pairs(length=8, batch_size=16, workers=workers)
    plain = reviews.pairs(length=8, batch_size=16, shuffle=False)
    expected = model.predict(plain, verbose=0)
    for _ in range(2):
        np.testing.assert_allclose(model.predict(pairs, verbose=0), expected, rtol=1e-5)
    model.compile(keras.optimizers.SGD(0.0), "mse")  # learns nothing
    losses = model.fit(pairs, epochs=3, verbose=0).history["loss"]
    mean = np.mean((expected[:, 0] - reviews.ratings) ** 2)
    np.testing.assert_allclose(losses, [mean] * 3, rtol=1e-4)
    assert pairs.epoch == 2


def list_of(pairs):
    return [pairs[number] for number in range(len(pairs))]


def said(reviews, row):
    return [reviews.vocabulary[word] for word in row if word]


@pytest.mark.parametrize("name", ["u.data", "ratings.dat", "ratings.csv", "ratings.tsv"])
def test_made_up_ratings(tmp_path, name):
    ratings = read_ratings(make_ratings(tmp_path / name, users=60, items=50), verbose=0)
    assert ratings.highest == 5
    assert len(ratings.users) == 60
    rated = ratings.matrix.tocoo()
    is_liked = ratings.items[rated.col] % 5 == ratings.users[rated.row] % 5
    assert rated.data[is_liked].mean() > rated.data[~is_liked].mean() + 0.2


def test_made_up_files_are_equal_for_equal_seeds(tmp_path):
    sizes = {make_ratings: {"users": 9}, make_reviews: {"reviews": 9}, make_clicks: {"rows": 9}}
    for make, name in ((make_ratings, "u.data"), (make_reviews, "r.jsonl"), (make_clicks, "c.csv")):
        one, same, other = (tmp_path / f"{part}{name}" for part in "abc")
        make(one, seed=1, **sizes[make])
        make(same, seed=1, **sizes[make])
        make(other, seed=2, **sizes[make])
        assert one.read_bytes() == same.read_bytes() != other.read_bytes()
        with pytest.raises(ValueError, match=r"`path` must end in one of .*The suffix"):
            make(tmp_path / "data.xml")
