"""What is written is run: the docstrings' examples, the demo, the command line."""

import doctest
import functools
import importlib
import pathlib
import pkgutil
import re

import keras
import pytest
from support.scripts import run_python

import keras_multigpu
from keras_multigpu import bench, check, devices
from keras_multigpu.__main__ import main

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


ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "tests/support/fuzz.md"])


@functools.cache
def written():
    """The names of all tests, and the text of the tables of cases."""
    texts = [path.read_text() for path in ROOT.glob("tests/**/*.py")]
    names = {name for text in texts for name in re.findall(r"def (test_\w+)\(", text)}
    return names, "".join(texts)


@pytest.mark.backend_free
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(path):
    names, text = written()
    page, _, _ = path.read_text().partition("## Keras's own tests")  # which are not ours
    named = re.findall(r"`(?:tests/[\w/]+\.py::)?(test_\w+)`", page)
    named = [name for name in named if not hasattr(keras.Model, name)]
    assert [name for name in named if name not in names] == []
    for cases in re.findall(r"\(cases? ([^)]+)\)", page):
        for case in re.findall(r"`(\w+)`", cases):
            assert re.search(rf"\b{case}\b", text), case
    assert {"peers.md": 100, "cluster_jax.md": 9}.get(path.name, 0) < len(named) + 1


@pytest.mark.backend_free
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_page_for_users_names_a_file_within_the_package(path):
    if path.name != "design.md" and path.parent.name not in ("api", "decisions"):
        assert re.findall(r"keras_multigpu/\w+/\w+\.py", path.read_text()) == []


@pytest.mark.backend_free
def test_private_names_are_explained():
    """Those of other packages, which ruff lets pass, and the private modules."""
    settings = (ROOT / "pyproject.toml").read_text()
    passed = re.search(r"extend-ignore-names = \[(.*?)\]", settings, flags=re.DOTALL)[1]
    names = [name for name in re.findall(r'"(_\w+)"', passed) if not name.startswith("_parallel_")]
    sources = "".join(path.read_text() for path in ROOT.glob("keras_multigpu/**/*.py"))
    modules = re.findall(r"from \S+ import (\w+)  # noqa: TID251", sources)
    assert len(names) > 10
    assert len(modules) > 3
    _, _, explained = (ROOT / "docs/design.md").read_text().partition("## Exceptions")
    assert [name for name in (*names, *modules) if name not in explained] == []


@pytest.mark.backend_free
def test_launchers_give_arguments_that_there_are():
    folder = ROOT / "docs" / "launchers"
    known = set(re.findall(r'"(--[a-z]+)"', (folder / "tensorflow_train.py").read_text()))
    for name in ("tensorflow_kubernetes.yaml", "tensorflow_slurm.sh", "tensorflow_ssh.sh"):
        text = (folder / name).read_text()
        _, _, arguments = text.rpartition("tensorflow_train.py")
        given = set(re.findall(r"--[a-z]+", arguments))
        assert "--workers" in given
        assert given <= known, (name, given - known)


def _rows_of_demo(printed):
    """The rows of one device and of four, in the table that the demo ends with."""
    rows = [line.split() for line in printed.splitlines()]
    header = next(row for row in rows if row[:1] == ["devices"])
    assert header == ["devices", "time", "loss", "accuracy", "largest", "weight", "difference"]
    one, four = (row for row in rows[rows.index(header) :] if row and row[0] in "14")
    assert (one[0], four[0]) == ("1", "4")
    assert float(four[4]) < 1e-4
    assert abs(float(four[2]) - float(one[2])) < 1e-4
    return one, four


def test_an_epoch_of_the_demo(capsys):
    main(["demo", "--epochs", "1"])
    _rows_of_demo(capsys.readouterr().out)


@pytest.mark.slow
def test_demo():
    done = run_python("-m", "keras_multigpu", "demo")
    assert done.returncode == 0, done.stderr
    _, four = _rows_of_demo(done.stdout)
    assert float(four[3]) > 0.9
    assert "Epoch 5/5" in done.stdout


def test_check(capsys):
    main(["check"])
    shown = capsys.readouterr().out
    for told in (f"Keras {keras.__version__}", "devices: 4 x CPU", "Virtual devices are in use"):
        assert told in shown
    difference = float(re.search(r"largest difference is (\S+); they agree", shown)[1])
    assert difference < 1e-5
    assert re.search(r"on 1 device and .+ on 4, \d+\.\d\d times as long", shown)
    assert "Next:" in shown
    assert "No GPU was found. Possible reason: " in shown


@pytest.mark.slow_on_jax
def test_a_check_with_one_gpu(capsys, monkeypatch):
    """The GPU, for which a CPU device stands in, trains the model too."""
    monkeypatch.setattr(check, "find_only_gpu", lambda: "cpu:3")
    monkeypatch.setattr(check, "_time", lambda count: "not measured")
    trained = []
    monkeypatch.setattr(check, "make_parallel", lambda model, devices: (
        trained.append(tuple(devices)) or keras_multigpu.make_parallel(model, devices=devices)
    ))  # fmt: skip
    main(["check"])
    several = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert trained == [("cpu:0",), several, ("cpu:3",), ("cpu:0",), ("cpu:3",)]
    _, _, shown = capsys.readouterr().out.partition("trained on cpu:3 and on cpu:0:\n- weights: ")
    assert float(re.search(r"difference is (\S+); they agree", shown)[1]) < 1e-5
    assert re.search(r"- time: a step takes \d\S* ms on cpu:3\n", shown)


@pytest.mark.backend_free
def test_what_to_do_next_with_one_gpu():
    lines = "\n".join(check._advise(True, ("gpu:0",), ("cpu:0", "cpu:1")))
    for told in ("trains on gpu:0, as Keras does", "keras_multigpu bench`", "`reports.advise("):
        assert told in lines
    assert "No GPU was found" not in lines
    assert "report the difference" not in lines


def test_a_check_that_fails(capsys, monkeypatch):
    monkeypatch.setattr(check, "_compare", lambda some, others: 0.5)
    monkeypatch.setattr(check, "_time", lambda count: "not measured")
    monkeypatch.setitem(check._EXTRAS, "toast", ("no_such_module",))
    with pytest.raises(SystemExit) as ended:
        main(["check"])
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "5.0e-01; THEY DISAGREE" in shown
    assert "- Please report the difference" in shown
    assert "missing are toast (no_such_module). To add one: `pip install '.[EXTRA]'`" in shown


def test_bench(capsys):
    numbers = ["--batch-size", "8", "--devices", "1", "2", "2", "--steps", "2", "--repeats", "1"]
    main(["bench", "--model", "mlp", *numbers])
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table] == ["devices", "---:", "1", "2"]
    assert "**mlp, 8 rows of shape (1024,) in a batch**" in shown
    for setting in ("- model: mlp", "- batch size: 8", "- steps of an epoch: 2"):
        assert setting in shown
    assert "paste" not in shown  # of virtual devices


def test_a_bench_with_one_gpu(capsys, monkeypatch):
    """The GPU, for which a CPU device stands in, is timed alone."""
    asked = []
    found = ("cpu:0",), "GPUs in use: gpu:0 (of 1)."
    monkeypatch.setattr(bench, "take_several", lambda *given, **more: asked.append(more) or found)
    monkeypatch.setattr(bench, "find_only_gpu", lambda: "cpu:0")
    main(["bench", "--model", "mlp", "--batch-size", "8", "--steps", "2", "--repeats", "1"])
    assert asked == [{"enough": 1}]
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in table] == ["devices", "---:", "1"]
    assert "This is the time on one GPU" in shown


@pytest.mark.parametrize(
    ("gpus", "cpus", "count", "chosen", "told"),
    [
        (8, 1, None, [f"gpu:{number}" for number in range(8)], "gpu:7 (of 8)."),
        (4, 1, 2, ["gpu:0", "gpu:1"], "GPUs in use: gpu:0, gpu:1 (of 4)."),
        (2, 1, 4, ["gpu:0", "gpu:1"], "gpu:1 (of 2)"),
        (1, 1, 1, ["gpu:0"], "GPUs in use: gpu:0 (of 1)."),
        (1, 1, None, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"], "only one GPU here, so 4 virtual CPU"),
        (1, 1, 2, ["cpu:0", "cpu:1"], "only one GPU here, so 2 virtual CPU devices stand in"),
        (0, 1, 2, ["cpu:0", "cpu:1"], "There is no GPU here, so 2 virtual CPU devices stand in"),
        (2, 3, None, ["cpu:0", "cpu:1", "cpu:2"], "Virtual devices are in use: cpu:0, cpu:1,"),
    ],
)
@pytest.mark.backend_free
def test_gpus_first(gpus, cpus, count, chosen, told, monkeypatch):
    """Of a host with so many GPUs, and processors or virtual devices."""
    there = {"gpu": gpus, "cpu": cpus}

    class Host:
        num_processes = 1

        def list_devices(self, kind):
            return tuple(f"{kind}:{number}" for number in range(there[kind]))

        def use_virtual_devices(self, count):
            there["cpu"] = count

    monkeypatch.setattr(devices.engines, "current", Host)
    assert devices.find_only_gpu() == ("gpu:0" if gpus == 1 else None)
    found, text = devices.take_several(count)
    assert list(found) == chosen
    assert told in text
    there["cpu"] = cpus
    found, text = devices.take_several(count, enough=1)
    assert list(found) == (["gpu:0"] if (gpus, count) == (1, None) else chosen)


def test_devices(capsys):
    main(["devices"])
    assert capsys.readouterr().out.split() == list(keras_multigpu.list_devices())


def test_an_unknown_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err
