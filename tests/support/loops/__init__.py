"""Published training loops, rebuilt small: most are those of the Keras documentation's examples.

Each calls parts of the model directly. `phases` has each loss with the parts that it trains.
"""

from support.loops.adversarial import (
    ConditionalGan,
    CycleGan,
    DeepConvolutionalGan,
    PixToPix,
    WassersteinGan,
)
from support.loops.contrastive import (
    BarlowTwins,
    Byol,
    DualEncoder,
    MetricLearning,
    NearestNeighbours,
    Siamese,
    SimClr,
    SimSiam,
)
from support.loops.generative import (
    Diffusion,
    ImplicitDiffusion,
    MaskedAutoencoder,
    PixelCnn,
    RadianceField,
    RealNvp,
    VariationalAutoencoder,
    VectorQuantized,
)
from support.loops.others import (
    ActorCritic,
    AdaMatch,
    DeepQ,
    DeterministicPolicy,
    Distillation,
    LowLight,
    StyleTransfer,
)

LOOPS = [
    WassersteinGan,
    VariationalAutoencoder,
    DeepConvolutionalGan,
    ConditionalGan,
    CycleGan,
    PixToPix,
    ImplicitDiffusion,
    Diffusion,
    VectorQuantized,
    SimClr,
    SimSiam,
    Byol,
    NearestNeighbours,
    BarlowTwins,
    Distillation,
    Siamese,
    MaskedAutoencoder,
    MetricLearning,
    PixelCnn,
    DeepQ,
    DeterministicPolicy,
    ActorCritic,
    RealNvp,
    StyleTransfer,
    LowLight,
    DualEncoder,
    RadianceField,
    AdaMatch,
]
