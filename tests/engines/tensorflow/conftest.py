"""A model and its parallel model, used alike."""

import re
import warnings

import keras
import pytest
from support.precision import all_in_double_precision

from keras_multigpu import make_parallel


@pytest.fixture
def in_float64():
    """Models and losses are in float64, where only what is computed otherwise differs."""
    with all_in_double_precision():
        yield


@pytest.fixture
def both():
    """Uses a model and its parallel model; checks whether it is told what one device does alone."""

    def both(build, use, match=None, n=4):
        """What `use` gives for a model and for its parallel model; `match` is in the warning."""
        keras.utils.set_random_seed(3)
        plain = use(build())
        keras.utils.set_random_seed(3)
        model = make_parallel(build(), n)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            parallel = use(model)
        texts = [str(one.message) for one in told]
        alone = [one for one in texts if re.search("alone|one device,", one)]
        assert bool(alone) == bool(match), alone
        assert all(match in one for one in alone)
        return plain, parallel

    return both
