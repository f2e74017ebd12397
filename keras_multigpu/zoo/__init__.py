"""Reference models, with readers for their data.

`autorec` (ratings), `deepconn` (reviews) and `wide` (hashed columns) are ordinary Keras models,
compiled with what was good on real data. Use them with `make_parallel` like any other model.
"""

from keras_multigpu.zoo.artificial import make_clicks, make_ratings, make_reviews
from keras_multigpu.zoo.autorec import RatingBiases, autorec, historic_autorec
from keras_multigpu.zoo.batches import RatingBatches
from keras_multigpu.zoo.deepconn import FactorizationMachine, deepconn
from keras_multigpu.zoo.rating_errors import ObservedError, RatingMAE, RatingRMSE
from keras_multigpu.zoo.rating_lines import read_ratings
from keras_multigpu.zoo.rating_scores import RatingScore, evaluate_ratings
from keras_multigpu.zoo.ratings import Ratings
from keras_multigpu.zoo.recommending import recommend
from keras_multigpu.zoo.review_lines import read_reviews
from keras_multigpu.zoo.reviews import ReviewPairs, Reviews
from keras_multigpu.zoo.wide import WideModel, wide

__all__ = [
    "FactorizationMachine",
    "ObservedError",
    "RatingBatches",
    "RatingBiases",
    "RatingMAE",
    "RatingRMSE",
    "RatingScore",
    "Ratings",
    "ReviewPairs",
    "Reviews",
    "WideModel",
    "autorec",
    "deepconn",
    "evaluate_ratings",
    "historic_autorec",
    "make_clicks",
    "make_ratings",
    "make_reviews",
    "read_ratings",
    "read_reviews",
    "recommend",
    "wide",
]


def __dir__() -> list[str]:
    return sorted(__all__)
