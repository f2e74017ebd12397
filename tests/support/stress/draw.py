"""Draws a training: a model, a mode with its options, a number of devices, batch sizes."""

from __future__ import annotations

import random

import keras

from tests.support.fuzz import draw, optimizers
from tests.support.fuzz.case import Case, Head, Make, Part, Source

_ON_JAX = keras.backend.backend() == "jax"
_OPTIONS = {
    "data": [(), (), (("shard", "'weights'"),)],
    "tower": [(), (("replicas", "'independent'"),), (("mix", "'weighted'"),)],
    "model": [()],
}
_SETTINGS = [(), (), (), (("steps_per_execution", "3"),), (("run_eagerly", "True"),)]


def draw_training(seed: int, index: int, devices: int) -> tuple[Case, dict[str, int]]:
    """The training of a seed, an index and a number of devices.

    Returns:
        The case, with the largest number of rows in `rows`; and a batch size for each loop.

    Raises:
        UndrawableError: if the fuzzer found no model.
    """
    rng = random.Random(f"{seed} {index} {devices}")
    mode = rng.choice(list(_OPTIONS))
    case = _wide(rng, mode) if rng.random() < 0.5 else draw.draw_case(seed, index, (mode,))
    n = rng.choice([2, devices, rng.randint(2, devices)])
    settings = rng.choice(_SETTINGS)
    if rng.random() < 0.2 and (n <= 4 or _ON_JAX):  # TensorFlow's XLA compiles each replica
        settings = (("jit_compile", "True"),)
    batches = [rng.choice([n, 2 * n, 32, rng.randint(1, 40)]) for _ in range(3)]
    case = case.having(
        name=f"{seed}-{index} on {n} of {devices} devices",
        n=n,
        rows=rng.choice([3, 5]) * batches[0] + rng.randint(0, n),
        batch=batches[0],
        floatx=rng.choice(["float32", "float32", "float64"]),
        options=rng.choice(_OPTIONS[mode]),
        settings=settings,
        fit=tuple(pair for pair in case.fit if pair[0] != "epochs"),
    )
    return case, dict(zip(("fit", "evaluate", "predict"), batches))


def _wide(rng: random.Random, mode: str) -> Case:
    """A model of layers up to 512 wide."""

    def layer(name: str, *arguments: object, **options: object) -> Part:
        pairs = [("", repr(value)) for value in arguments]
        pairs += [(key, repr(value)) for key, value in options.items()]
        return Part((Make(f"layers.{name}", tuple(pairs)),))

    shape, make, end = rng.choice(
        [
            ((64,), lambda: layer("Dense", rng.choice([32, 128, 512]), activation="tanh"), None),
            ((12, 12, 3), lambda: layer("Conv2D", rng.choice([8, 32]), 3, padding="same"), 2),
            ((10, 8), lambda: layer("LSTM", rng.choice([16, 64]), return_sequences=True), 1),
        ]
    )
    trunk = []
    for _ in range(rng.randint(1, 4)):
        trunk.append(make())
        trunk += [layer("BatchNormalization")] if rng.random() < 0.4 else []
        trunk += [layer("Dropout", 0.2)] if rng.random() < 0.3 else []
    trunk += [layer(f"GlobalAveragePooling{end}D")] if end else []
    size = ", ".join(map(str, ("rows", *shape)))
    source = Source(f"keras.Input({shape})", f"rng.normal(size=({size}))")
    head = Head((layer("Dense", 4),), "rng.normal(size=(rows, 4))")
    optimizer = optimizers.draw_optimizer(rng, False)
    wiring = rng.choice(["functional", "sequential", "subclassed"])
    return Case(
        "", (source,), "i", tuple(trunk), (head,), wiring=wiring, optimizer=optimizer, mode=mode
    )
