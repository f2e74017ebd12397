"""Reference models, with readers for their data.

`autorec` (users' ratings), `deepconn` (reviews) and `wide` (hashed columns) are ordinary Keras
models, compiled as they were published. Use them with `make_parallel` like any other model.
"""

from keras_multigpu.zoo.artificial import make_clicks, make_ratings, make_reviews
from keras_multigpu.zoo.autorec import ObservedError, autorec, recommend
from keras_multigpu.zoo.batches import ReviewPairs
from keras_multigpu.zoo.deepconn import FactorizationMachine, deepconn
from keras_multigpu.zoo.ratings import RatingBatches, Ratings, read_ratings
from keras_multigpu.zoo.reviews import Reviews, read_reviews
from keras_multigpu.zoo.wide import WideModel, wide

__all__ = [
    "FactorizationMachine",
    "ObservedError",
    "RatingBatches",
    "Ratings",
    "ReviewPairs",
    "Reviews",
    "WideModel",
    "autorec",
    "deepconn",
    "make_clicks",
    "make_ratings",
    "make_reviews",
    "read_ratings",
    "read_reviews",
    "recommend",
    "wide",
]
