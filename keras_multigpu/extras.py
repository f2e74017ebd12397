"""How to install an extra. Imports nothing: what is missing may be Keras itself."""


def how_to_install(extra: str) -> str:
    """The commands that install the package, which is on no package index, with an extra."""
    return (
        f"`pip install '.[{extra}]'` in a clone of keras_multigpu, or "
        f"`pip install 'FILE.whl[{extra}]'` with its wheel"
    )
