"""Wide sparse data: categorical columns, hashed and streamed, and stored as indices."""

from keras_multigpu.extras import how_to_install

try:
    import pyarrow
    import xxhash
except ModuleNotFoundError as error:
    raise ImportError(
        f"keras_multigpu.sparse needs the library `{error.name}`, which is not installed. "
        f"Install the extra `sparse`: {how_to_install('sparse')}."
    ) from error

from keras_multigpu.layers import MultiHotDense
from keras_multigpu.sparse.code import collision_probability, expected_collisions
from keras_multigpu.sparse.dataset import HashedDataset
from keras_multigpu.sparse.encoder import HashEncoder

__all__ = [
    "HashEncoder",
    "HashedDataset",
    "MultiHotDense",
    "collision_probability",
    "expected_collisions",
]


def __dir__() -> list[str]:
    return sorted(__all__)
