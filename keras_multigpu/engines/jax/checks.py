"""Settings under which a model's steps can't be made."""

from __future__ import annotations

from typing import Any

import jax
import keras


def check_is_compiled(model: Any) -> None:
    """Raises a `ValueError` for steps that JAX does not compile."""
    for option, value in (("run_eagerly", True), ("jit_compile", False)):
        if getattr(model, option, not value) is value:
            raise ValueError(
                "With `shard` or `model_devices` over several processes JAX must compile the "
                "steps: outside of them no process can use a weight by itself. Received: "
                f"{option}={value}. Leave it out, or make the model without these."
            )


def check_no_distribution() -> None:
    """Refuses a distribution set in Keras, and a mesh set in JAX.

    Raises:
        ValueError: if there is one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names:
        raise ValueError(
            "A parallel model makes meshes of its devices itself, and a mesh that is set in JAX "
            "holds for all that JAX computes. Received: `jax.set_mesh` with the axes "
            f"{mesh.axis_names}. Leave it out where the model is made and computes."
        )
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ValueError(
            "A parallel model puts its weights and batches on the devices itself, and a "
            f"distribution of Keras's would do so too. Received: keras.distribution."
            f"distribution()={distribution!r}. Call `keras.distribution.set_distribution(None)` "
            "before the model is built, or train the template with the distribution."
        )
