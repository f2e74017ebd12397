"""The Keras layers that the modes use; each also works by itself."""

from keras_multigpu.layers.batch import BatchMerge, BatchSlice
from keras_multigpu.layers.gated import GatedMix
from keras_multigpu.layers.gaussian import GaussianMix, GaussianNLL, GaussianRMSE
from keras_multigpu.layers.mixing import WeightedMix, mean_mix
from keras_multigpu.layers.multi_hot import MultiHotDense

__all__ = [
    "BatchMerge",
    "BatchSlice",
    "GatedMix",
    "GaussianMix",
    "GaussianNLL",
    "GaussianRMSE",
    "MultiHotDense",
    "WeightedMix",
    "mean_mix",
]


def __dir__() -> list[str]:
    return sorted(__all__)
