"""The pages under `docs`, and the README's commands: nothing in them is out of date."""

import ast
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "benchmarks/README.md"])


def load(path):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_errors_that_are_quoted_are_those_of_the_code():
    found = quotes((ROOT / "docs/troubleshooting.md").read_text())
    assert len(found) > 30
    assert [quote for quote in found if not is_in_the_source(quote)] == []
    assert not is_in_the_source("`n_gpus` must not exceed the number of cats.")


def test_the_reference_is_made_from_these_docstrings():
    script = load(ROOT / "docs/make_api.py")
    assert script.make_page() == script.PAGE.read_text(encoding="utf-8"), (
        "Run `python docs/make_api.py`."
    )


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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert anchor in anchors, target
