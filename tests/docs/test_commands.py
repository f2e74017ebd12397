"""The commands that pages name exist, and what they say of the package is in pyproject.toml."""

import functools
import importlib.util
import re

import pytest
from support.pages import PAGES, ROOT

from keras_multigpu.__main__ import make_parser
from keras_multigpu.extras import how_to_install

pytestmark = pytest.mark.backend_free

FENCED = re.compile(r"^ *```.*?^ *```$", flags=re.DOTALL | re.MULTILINE)


def codes(text):
    """The lines of a page's blocks without their comments, and its inline code."""
    for block in FENCED.findall(text):
        yield from (line.partition("#")[0] for line in block.splitlines())
    yield from re.findall(r"`([^`]+)`", FENCED.sub("", text))


@functools.cache
def modules_run():
    """All `python -m MODULE ARGUMENTS` of the pages: the page's name, the module, the arguments."""
    return [
        (path.name, module, *arguments.split())
        for path in PAGES
        for code in codes(path.read_text())
        for module, arguments in re.findall(r"python\s+-m\s+([\w.]+)([^&|;'`]*)", code)
    ]


def test_commands_are_found():
    page = "`make all`\n\n```\npython -m a.b --c 1  # d\n```\n\nRun `python -m\ne f`.\n"
    assert [code.strip() for code in codes(page)] == [
        "```", "python -m a.b --c 1", "```", "make all", "python -m\ne f",
    ]  # fmt: skip


def test_the_commands_of_the_package_are_taken():
    named = [words for words in modules_run() if words[1] == "keras_multigpu"]
    assert {words[2] for words in named if len(words) > 2} == {
        "bench", "check", "demo", "devices", "serve",
    }  # fmt: skip
    for page, _, *arguments in named:
        try:
            make_parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{page}: python -m keras_multigpu {' '.join(arguments)}")


def test_the_number_of_devices_has_the_name_that_make_parallel_has():
    assert make_parser().parse_args(["demo", "--n-gpus", "2"]).n_gpus == 2
    assert make_parser().parse_args(["bench", "--n-gpus", "1", "2"]).devices == [1, 2]


def test_a_wrong_address_is_told_before_a_backend_is_imported(capsys):
    for option, message in (
        ("--bind=2222", "must have the form 'HOST:PORT', with a port from 1 to 65535. Received: '"),
        ("--virtual-devices=0", "must be a positive integer. Received: 0"),
    ):
        with pytest.raises(SystemExit):
            make_parser().parse_args(["serve", option])
        assert f"argument {option.partition('=')[0]}: {message}" in capsys.readouterr().err


def test_the_benchmarks_that_are_named_exist():
    named = [words for words in modules_run() if words[1].startswith("benchmarks.")]
    assert len(named) > 40
    for page, module, *arguments in named:
        script = ROOT / f"{module.replace('.', '/')}.py"
        assert script.exists(), (page, module)
        for option in arguments:
            if option.startswith("--"):
                assert f'"{option}"' in script.read_text(), (page, module, option)


def test_other_modules_that_are_named_can_be_run():
    named = {
        (page, module)
        for page, module, *_ in modules_run()
        if module.partition(".")[0] not in ("benchmarks", "keras_multigpu")
    }
    assert {module for _, module in named} >= {"tests.support.fuzz", "support.cluster_attacks"}
    for page, module in named:
        path = module.replace(".", "/")
        places = [ROOT / folder / path / "__main__.py" for folder in ("", "tests")]
        is_there = any(place.exists() for place in places)
        assert is_there or importlib.util.find_spec(module), (page, module)


def test_each_script_is_in_the_list_of_files():
    _, _, files = (ROOT / "benchmarks/README.md").read_text().partition("## Files")
    scripts = {path.name for path in ROOT.glob("benchmarks/[a-z]*.*")}
    assert set(re.findall(r"`(\w+\.(?:py|sh))`", files)) == scripts


def test_the_commands_of_make_that_are_named_exist():
    known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    pages = "\n".join(path.read_text() for path in PAGES)
    named = {name for code in codes(pages) for name in re.findall(r"^make ([\w-]+) *$", code)}
    assert {"demo", "test", "test-all"} <= named <= set(known)


@functools.cache
def project():
    """The text of pyproject.toml: Python 3.10 has no parser for it."""
    return (ROOT / "pyproject.toml").read_text()


def extras():
    """The requirements of each extra, as text."""
    text = re.search(r"\[project.optional-dependencies\](.*?)\n\[", project(), flags=re.DOTALL)[1]
    return dict(re.findall(r"^([\w-]+) = \[(.*?)\]$", text, flags=re.MULTILINE | re.DOTALL))


def test_the_extras_that_are_named_exist():
    pages = "".join(path.read_text() for path in PAGES)
    named = re.findall(r"""pip install ["'][^"'\[]*\[([\w,-]+)\]["']""", pages)
    assert len(named) > 10
    assert {one for group in named for one in group.split(",")} <= set(extras())


def _least(requirement, text):
    """The lowest version of a requirement; the same wherever the text names it."""
    found = set(re.findall(rf"""["']{re.escape(requirement)}>=([\d.]+)""", text))
    assert len(found) == 1, (requirement, found)
    return found.pop()


def test_the_badges_of_the_readme_are_true():
    packages = extras()
    python = sorted(map(int, re.findall(r"Python :: 3\.(\d+)", project())))
    assert f'requires-python = ">=3.{python[0]}"' in project()
    assert python == list(range(python[0], python[-1] + 1))
    keras = _least("keras", re.search(r"^dependencies = (.*)$", project(), flags=re.MULTILINE)[1])
    jax_keras = _least("keras", packages["jax"] + packages["jax-cuda"])
    tensorflow = {
        _least("tensorflow[and-cuda]", packages["tensorflow"]),
        _least("tensorflow", packages["tensorflow"] + packages["tensorflow-cpu"]),
        _least("tensorflow-cpu", packages["tensorflow-cpu"]),
    }
    jax = {_least("jax", packages["jax"]), _least("jax[cuda12]", packages["jax-cuda"])}
    license_name = re.search(r'license = { text = "(.*)" }', project())[1]
    pythons = f"Python 3.{python[0]} to 3.{python[-1]}"
    badges = [
        pythons,
        f"Keras {keras}+",
        f"TensorFlow {tensorflow.pop()}+",
        f"JAX {jax.pop()}+ (Keras {jax_keras}+)",
        license_name,
    ]
    assert not tensorflow | jax, "the extras of a backend ask for different versions"
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"`([^`]+)`", readme.splitlines()[2]) == badges
    assert f"with {pythons}:" in readme
    assert f"License: {license_name}." in readme
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    install = " ".join((ROOT / "docs/install.md").read_text().split())
    assert f"needs {pythons}, and Keras {keras} or later on TensorFlow" in install
    assert f"Keras {jax_keras} or later on JAX" in install


def test_the_package_is_installed_from_a_clone_or_a_wheel():
    """It is on no package index, so no text may name it there."""
    paths = [*PAGES, *ROOT.glob("keras_multigpu/**/*.py"), *ROOT.glob("notebooks/*.ipynb")]
    for path in paths:
        assert not re.search(r"pip install[^`\n]*keras[-_]multigpu", path.read_text()), path
    assert "'FILE.whl[sparse]'" in how_to_install("sparse")
