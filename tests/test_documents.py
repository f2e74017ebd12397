"""What is written is run: the docstrings' examples, the demo, the command line."""

import doctest
import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import keras
import pytest

import keras_multigpu

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(
        keras_multigpu.__path__, "keras_multigpu.", onerror=lambda name: None
    )
)


OTHER = "engines.jax" if keras.backend.backend() == "tensorflow" else "engines.tensorflow"


@pytest.mark.parametrize(
    "name", [name for name in MODULES if not name.endswith("__main__") and OTHER not in name]
)
def test_examples(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    assert doctest.testmod(module).failed == 0


DOCUMENTS = (
    "README.md",
    "docs/cluster.md",
    "docs/cluster_jax.md",
    "docs/peers.md",
    "docs/design.md",
)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tests_that_are_named_exist(name):
    root = pathlib.Path(__file__).parent.parent
    text = (root / name).read_text()
    for path, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?", text):
        assert f"def {function}" in (root / path).read_text(), (path, function)


def test_tests_of_the_processes_exist():
    root = pathlib.Path(__file__).parent.parent
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "cluster_jax.md").read_text()))
    written = (root / "tests/engines/jax/cluster/test_processes.py").read_text()
    assert len(named) > 8
    assert [name for name in named if f"def {name}(" not in written] == []


def test_launchers_give_arguments_that_there_are():
    folder = pathlib.Path(__file__).parent.parent / "docs" / "launchers"
    known = set(re.findall(r'"(--[a-z]+)"', (folder / "tensorflow_train.py").read_text()))
    for name in ("tensorflow_kubernetes.yaml", "tensorflow_slurm.sh", "tensorflow_ssh.sh"):
        text = (folder / name).read_text()
        _, _, arguments = text.rpartition("tensorflow_train.py")
        given = set(re.findall(r"--[a-z]+", arguments))
        assert "--workers" in given
        assert given <= known, (name, given - known)


def _run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "keras_multigpu", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_demo():
    done = _run("demo")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    header = next(row for row in rows if row[:1] == ["devices"])
    assert header == ["devices", "time", "loss", "accuracy", "largest", "weight", "difference"]
    one, four = (row for row in rows[rows.index(header) :] if row and row[0] in "14")
    assert (one[0], four[0]) == ("1", "4")
    assert float(four[4]) < 1e-4
    assert abs(float(four[2]) - float(one[2])) < 1e-4
    assert float(four[3]) > 0.9
    assert "Epoch 5/5" in done.stdout


def test_devices():
    done = _run("devices")
    assert done.stdout.split()[-1] == "cpu:0"


def test_an_unknown_command():
    done = _run("trian")
    assert done.returncode == 2
    assert "invalid choice: 'trian'" in done.stderr
