"""The README's Python is run as it stands there, one block after the other, on small models.

Put in its place is what a block is given: `ResNet50` and `deepconn` are small models, files are
made-up ones, links are measured between virtual devices, and two epochs stand for a hundred.
`make demo`, `make test` and the commands of `pip` are what continuous integration runs;
benchmarks take minutes to hours, so only their names and options are looked up. The block on
other machines needs a process in which TensorFlow has not started: the notebook `06_cluster` and
`test_cluster.py` have the same calls.
"""

import contextlib
import functools
import io
import pathlib
import re

import keras
import numpy as np
import pytest

from keras_multigpu import make_parallel, zoo
from keras_multigpu.zoo import make_clicks, make_ratings, make_reviews

ROOT = pathlib.Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def classifier(**kwargs):
    """A small model in place of a large one."""
    layers = [keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")]
    return keras.Sequential([keras.Input((4, 4, 3)), *layers])


def two_branches():
    inputs = {side: keras.Input((6,), name=side) for side in ("user", "item")}
    ends = [keras.layers.Dense(4, name=f"{side}_dense")(x) for side, x in inputs.items()]
    return keras.Model(inputs, keras.layers.Dot(1, name="match")(ends))


@pytest.fixture
def scope(rng, tmp_path, monkeypatch):
    """What the README's reader has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(keras.applications, "ResNet50", classifier)
    small = functools.partial(zoo.deepconn, embedding=3, filters=2, units=2)
    monkeypatch.setattr(zoo, "deepconn", small)
    (tmp_path / "clicks").mkdir()
    make_clicks("clicks/0.parquet", rows=500)
    (tmp_path / "ml-100k").mkdir()
    make_ratings("ml-100k/u.data", users=200, items=20)
    make_reviews("Musical_Instruments.json.gz", reviews=30)
    x = rng.normal(size=(300, 4, 4, 3)).astype("float32")
    return {"x": x, "y": rng.integers(10, size=300)}


def run(block, scope):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "README.md", "exec"), scope)
    return printed.getvalue()


def test_the_readmes_python(scope):
    """All blocks, in their order."""
    wrap, committee, placement, virtual, machines, joined, wide, models, reports, figures = BLOCKS
    run(wrap, scope)
    plain = classifier()
    plain.load_weights("resnet.weights.h5")
    assert np.allclose(plain.predict(scope["x"], verbose=0), scope["parallel"].predict(scope["x"]))
    model = scope["model"]

    run(committee, scope)
    assert len(scope["committee"].replicas) == 4

    run(placement, scope | {"model": two_branches()})
    assert "('cpu:0', 'cpu:1', 'cpu:2', 'cpu:3')" in run(virtual, scope)

    assert "cluster.connect(" in machines
    assert "cluster.join(" in joined

    run(wide, scope)
    assert keras.saving.load_model("clicks.keras").encoder.ones == 12

    run(models.replace("epochs=100", "epochs=2"), scope)
    assert scope["ratings"].users.tolist()[195] == 196

    placed = make_parallel(two_branches(), 2, "model")
    model.compile("adam", "sparse_categorical_crossentropy")
    given = scope | {"model": model, "parallel": make_parallel(model, 2), "placed": placed}
    run(reports.replace("gpu:", "cpu:"), given)

    table = re.search(r"^devices  time \(s\).*?```", README, flags=re.DOTALL | re.MULTILINE)
    assert table[0].removesuffix("```").strip() in run(figures, given)


def test_the_extras_that_are_named_exist():
    extras = re.search(r"\[project.optional-dependencies\](.*?)\n\[", TOML, flags=re.DOTALL)[1]
    known = set(re.findall(r"^([\w-]+) = \[", extras, flags=re.MULTILINE))
    named = re.findall(r"'(?:\.|keras-multigpu)\[([\w,-]+)\]'", README)
    assert len(named) > 5
    assert {one for group in named for one in group.split(",")} <= known


TOML = (ROOT / "pyproject.toml").read_text()
COMMANDS = [
    (page, *command)
    for page in ("README.md", "benchmarks/README.md", "docs/design.md")
    for command in re.findall(
        r"python -m (benchmarks\.\w+)((?: --?[\w-]+(?: [\w.]+)*)*)", (ROOT / page).read_text()
    )
]


def test_the_benchmarks_that_are_named_exist():
    assert len(COMMANDS) > 10
    for page, module, options in COMMANDS:
        path = ROOT / f"{module.replace('.', '/')}.py"
        assert path.exists(), (page, module)
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in path.read_text(), (page, module, option)
