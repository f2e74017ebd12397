"""Scripts of the repository as modules, and Python in new processes."""

import importlib.util
import os
import subprocess
import sys
import tempfile


def load(path):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(*arguments, timeout=300, **environment):
    """Runs Python in an empty folder: in the checkout it would not import the installed package.

    Variables of the environment that are given as `None` are left out.
    """
    variables = {**os.environ, **environment}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env={name: value for name, value in variables.items() if value is not None},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
