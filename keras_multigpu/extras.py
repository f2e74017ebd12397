"""What is missing, and how to install it. Imports nothing: what is missing may be Keras itself."""

import importlib.util

_TITLES = {"tensorflow": "TensorFlow", "jax": "JAX"}
SUPPORTED = (
    "keras_multigpu works on the Keras backends 'tensorflow' and 'jax'. Received: {received}. Set "
    "the environment variable KERAS_BACKEND=tensorflow or KERAS_BACKEND=jax before Keras is "
    "imported, and restart the process or kernel."
)


def how_to_install(extra: str) -> str:
    """The commands that install the package, which is on no package index, with an extra."""
    return (
        f"`pip install '.[{extra}]'` in a clone of keras_multigpu, or "
        f"`pip install 'FILE.whl[{extra}]'` with its wheel"
    )


def explain_missing(name: str) -> str:
    """What to do if Keras, or the backend that it was told to take, is not installed."""
    if name not in ("keras", *_TITLES):
        return SUPPORTED.format(received=f"the backend {name!r}, which is not installed either")
    others = [one for one in _TITLES if one != name and importlib.util.find_spec(one)]
    there = ""
    if name != "keras" and others:
        there = (
            f"{_TITLES[others[0]]} is: set the environment variable KERAS_BACKEND={others[0]} "
            "before Keras is imported, and restart the process or kernel. "
        )
    return (
        f"keras_multigpu needs Keras 3 with a backend, and `{name}` is not installed. {there}"
        "Install a backend with the extra `tensorflow` or `jax-cuda` (NVIDIA GPUs), or "
        f"`tensorflow-cpu` or `jax` (no GPU): {how_to_install('tensorflow')}. With JAX, set the "
        "environment variable KERAS_BACKEND=jax: Keras takes TensorFlow otherwise."
    )
