"""Every page is true: its Python runs, and its links, names and errors exist.

The `python` blocks of a page run as they stand, from top to bottom, in one scope and an empty
folder. A `text` block after a `python` block is what that block prints. A comment before a block
says on which backend it runs, or why it can't run here:

    <!-- TensorFlow only -->
    <!-- not run: it needs two machines -->
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import json
import pkgutil
import re

import keras
import numpy as np
import pytest
from support.pages import PAGES, ROOT

from keras_multigpu import make_parallel

BLOCK = re.compile(
    r"^(?:<!-- (?P<when>[^>]+) -->\n)?"
    r"```python\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    flags=re.DOTALL | re.MULTILINE,
)
# These need other processes: the notebook `06_cluster` and the tests of clusters have their calls.
OF_SEVERAL_MACHINES = {"cluster.md", "cluster_jax.md"}
# The others run in `make test-all`.
QUICK = {"README.md", "model_mode.md", "quickstart.md", "saving.md"}


def blocks(path):
    """The blocks of a page: whether they run on this backend, their code, what they print."""
    here = {"tensorflow": "TensorFlow only", "jax": "JAX only"}[keras.backend.backend()]
    for found in BLOCK.finditer(path.read_text()):
        when, code, output = found.groups()
        assert when is None or re.match(r"(TensorFlow|JAX) only$|not run: .", when), when
        yield when in (None, here), code, output


RUN = [
    pytest.param(path, id=path.name, marks=[] if path.name in QUICK else pytest.mark.slow)
    for path in PAGES
    if path.name not in OF_SEVERAL_MACHINES and "```python" in path.read_text()
]


@pytest.mark.parametrize("path", RUN)
def test_the_python_of_a_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for is_here, code, output in blocks(path):
        compile(code, path.name, "exec")  # also where it does not run
        if not is_here:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, path.name, "exec"), scope)
        assert output is None or output in printed.getvalue()
    CHECKS.get(path.name, lambda scope: None)(scope)


def _check_readme(scope):
    """The file that the README writes is the model's own."""
    plain = keras.Sequential([keras.Input((20,)), *scope["model"].layers])
    plain = keras.models.clone_model(plain)
    plain.load_weights("model.weights.h5")
    one, other = (model.predict(scope["x"], verbose=0) for model in (plain, scope["parallel"]))
    assert np.allclose(one, other, atol=1e-6)
    assert len(scope["parallel"].devices) == 4


def _check_custom_train_step(scope):
    """Steps log their loss; a parallel GAN trains to the weights of a plain one."""
    parallel = make_parallel(scope["Regression"](), 2)
    parallel.compile("sgd")
    logs = parallel.fit(scope["x"], scope["x"], batch_size=50, verbose=0).history
    assert logs["loss"][0] > 0
    if "Gan" not in scope:
        return
    parts = scope["generator"], scope["critic"]
    start, ends = [part.get_weights() for part in parts], []
    for wrap in (lambda gan: make_parallel(gan, 4), lambda gan: gan):
        for part, weights in zip(parts, start):
            part.set_weights(weights)
        gan = scope["Gan"](*parts)
        gan.compile(lambda: keras.optimizers.SGD(0.1))
        keras.utils.set_random_seed(1)  # the same order of the rows
        wrap(gan).fit(scope["x"], batch_size=30, epochs=2, verbose=0)
        ends.append([weight for part in parts for weight in part.get_weights()])
    assert np.abs(start[0][0] - ends[0][0]).max() > 1e-2  # it has learned something
    for one, other in zip(*ends):
        assert np.allclose(one, other, atol=1e-5)


def _check_saving(scope):
    plain = scope["plain"].predict(scope["x"], verbose=0)
    last = keras.saving.load_model("epoch_2.keras").predict(scope["x"], verbose=0)
    assert np.allclose(last, scope["model"].predict(scope["x"], verbose=0), atol=1e-6)
    assert not np.allclose(last, plain, atol=1e-6)


def _check_sparse(scope):
    assert scope["served"].encoder.ones == 6


def _check_zoo(scope):
    assert scope["ratings"].users.tolist()[195] == 196
    assert len(scope["top"][196]) == 10


CHECKS = {
    "README.md": _check_readme,
    "custom_train_step.md": _check_custom_train_step,
    "saving.md": _check_saving,
    "sparse.md": _check_sparse,
    "zoo.md": _check_zoo,
}


@pytest.mark.backend_free
def test_blocks_that_do_not_run_say_why():
    pages = {path: [found["when"] for found in BLOCK.finditer(path.read_text())] for path in PAGES}
    fences = {path: len(re.findall(r"^```python$", path.read_text(), flags=re.M)) for path in PAGES}
    assert {path: len(found) for path, found in pages.items()} == fences
    assert sum(when is None for found in pages.values() for when in found) > 30


def test_what_a_page_prints_is_compared(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- JAX only -->\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\n2\n```\n"
    )
    is_jax = keras.backend.backend() == "jax"
    assert list(blocks(page)) == [(is_jax, "print(1)\n", "1\n"), (True, "2\n", None)]


@pytest.mark.backend_free
def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) < 700


@pytest.mark.backend_free
def test_pages_import_the_library_before_keras():
    """Keras alone does not say which backend is missing."""
    codes = [(path.name, code) for path in PAGES for _, code, _ in blocks(path)]
    codes += [(path.name, path.read_text()) for path in (ROOT / "docs/launchers").glob("*.py")]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        codes += [(path.name, "".join(one["source"])) for one in cells]
    late = []
    for name, code in codes:
        imported = re.findall(r"^(?:import|from) (keras\w*)", code, flags=re.MULTILINE)
        if "keras_multigpu" in imported[1:] and imported[0] == "keras":
            late.append(name)
    assert late == []


@pytest.mark.backend_free
def test_pages_for_maintainers_are_short():
    assert len((ROOT / "docs/design.md").read_text().split()) < 3000
    for path in ROOT.glob("docs/decisions/2*.md"):
        assert len(path.read_text().split()) < 300, path.name


def figures(page, title):
    """The rows of figures below a title of docs/overhead.md: the first number of each cell."""
    table = page.partition(title)[2].partition("\n\n|")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    header, _, *rows = rows
    return header, [[float(re.match(r"[\d.]+|", cell)[0] or "nan") for cell in row] for row in rows]


@pytest.mark.backend_free
def test_the_ranges_of_speeds_are_those_of_the_tables():
    overhead = (ROOT / "docs/overhead.md").read_text()
    found = []
    for title, columns in (("## TensorFlow", (1, 2)), ("## JAX", (1, 3))):
        header, rows = figures(overhead, title)
        for column in columns:
            devices = re.match(r"\d", header[column])[0]
            values = [row[column] for row in rows]
            low, high = f"{min(values):.2f}", f"{max(values):.2f}"
            found.append(f"| {devices} | {low} to {high} | {len(rows)} |")
    speed = (ROOT / "docs/speed.md").read_text()
    assert re.findall(r"\| \d \| .* \|$", speed, flags=re.MULTILINE) == found
    assert len(speed.split()) < 600


@functools.cache
def texts():
    """All texts in the package's source, with an ellipsis for each value that is put in."""
    found = []
    for path in ROOT.glob("keras_multigpu/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quotes(page):
    return re.findall(r"^> (.+)$", page, flags=re.MULTILINE)


def is_in_the_source(quote):
    return any(quote in text for text in texts())


@pytest.mark.backend_free
def test_the_errors_that_are_quoted_are_those_of_the_code():
    found = quotes((ROOT / "docs/troubleshooting.md").read_text())
    assert len(found) > 30
    assert [quote for quote in found if not is_in_the_source(quote)] == []
    assert not is_in_the_source("`n_gpus` must not exceed the number of cats.")


@pytest.mark.backend_free
def test_each_error_has_an_anchor():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    parts = re.split(r"^### ", page, flags=re.MULTILINE)[1:]
    assert not quotes(page.partition("### ")[0])
    assert [part for part in parts if len(quotes(part.partition("\n## ")[0])) != 1] == []
    assert len(set(anchors(page))) == len(anchors(page))


NAMES = [
    (module, name)
    for module in ("", ".cluster", ".layers", ".reports", ".sparse", ".zoo")
    for name in importlib.import_module("keras_multigpu" + module).__all__
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_public_names_have_examples(module, name):
    value = getattr(importlib.import_module(f"keras_multigpu{module}"), name)
    if callable(value):  # no module, table or version
        assert ">>> " in inspect.getdoc(value), "`help()` has no example"
        assert value.__module__.startswith("keras_multigpu.")  # where `test_examples` runs it


@pytest.mark.backend_free
def test_the_reference_describes_every_public_name():
    described = []
    for path in ROOT.glob("docs/api/*.md"):
        text = path.read_text()
        for file, name in re.findall(r"^\[Source\]\(../../(.+)\)\n\n::: (.+)$", text, flags=re.M):
            value = pkgutil.resolve_name(name)
            described.append(value)
            assert not callable(value) or inspect.getsourcefile(value).endswith(file), name
        in_tables = re.findall(r"^\| \[`(\w+)`\]\(#", text, flags=re.M)
        assert re.findall(r"^## (\w+)$", text, flags=re.M) == in_tables, path.name
    for module, name in NAMES:
        value = getattr(importlib.import_module(f"keras_multigpu{module}"), name)
        if not inspect.ismodule(value) and not name.startswith("__"):
            assert any(one is value for one in described), (module, name)


def anchors(page):
    """What a code host calls the headings of a page."""
    outside = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", outside, flags=re.MULTILINE)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


@pytest.mark.backend_free
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there.read_text()), target


@pytest.mark.backend_free
def test_every_page_is_in_the_contents():
    """In the docs' own; decisions are in a list of theirs."""
    for path in ROOT.glob("docs/**/*.md"):
        is_decision = path.parent.name == "decisions" and path.name != "README.md"
        folder = path.parent if is_decision else ROOT / "docs"
        name = path.relative_to(folder).as_posix()
        assert name == "README.md" or f"]({name})" in (folder / "README.md").read_text(), name
