"""Writes `docs/api.md`, the reference of all public names, from their docstrings.

python docs/make_api.py
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any

PAGE = pathlib.Path(__file__).parent / "api.md"
MODULES = (
    "keras_multigpu",
    "keras_multigpu.cluster",
    "keras_multigpu.layers",
    "keras_multigpu.reports",
    "keras_multigpu.sparse",
    "keras_multigpu.zoo",
)
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Warns|Example|Examples):")


def make_page() -> str:
    """The page's text."""
    parts = [
        "# API reference",
        "Made from the docstrings by `python docs/make_api.py`; `help(name)` shows the same. All "
        "examples are run by the tests.",
        "\n".join(_contents()),
    ]
    for module in MODULES:
        found = importlib.import_module(module)
        parts += [f"## `{module}`", *_prose(inspect.getdoc(found) or "")]
        for name, value in _public(found):
            parts += _describe(f"{module}.{name}", value)
    return "\n\n".join(parts) + "\n"


def _public(module: Any) -> Iterator[tuple[str, Any]]:
    """The names that a module offers, without modules and versions."""
    for name in module.__all__:
        value = getattr(module, name)
        if not inspect.ismodule(value) and not name.startswith("_"):
            yield name, value


def _contents() -> Iterator[str]:
    for module in MODULES:
        found = importlib.import_module(module)
        links = [f"[`{name}`](#{_anchor(f'{module}.{name}')})" for name, _ in _public(found)]
        yield f"- `{module}`: {', '.join(links)}"


def _anchor(name: str) -> str:
    return name.replace(".", "").lower()


def _describe(name: str, value: Any) -> Iterator[str]:
    """A name with its signature, its docstring, and of a class its methods."""
    yield f"### {name}"
    if not callable(value):
        yield f"`{value!r}`" if not isinstance(value, dict) else _list_values(value)
        return
    yield _call(name.rpartition(".")[2], value)
    yield from _prose(inspect.getdoc(value) or "")
    if inspect.isclass(value):
        lines = [f"- `{text}`: {summary}" for text, summary in _methods(value)]
        if lines:
            yield "**Methods and properties**\n\n" + "\n".join(lines)


def _list_values(values: dict[str, Any]) -> str:
    return "\n".join(f"- `{key!r}`: {value}" for key, value in values.items())


def _call(name: str, value: Any) -> str:
    return f"```python\n{name}{_signature(value)}\n```"


def _signature(value: Any) -> str:
    """The arguments with their defaults, without types."""
    function = value.__init__ if inspect.isclass(value) else value
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    return str(inspect.Signature(parameters))


def _methods(cls: type) -> Iterator[tuple[str, str]]:
    """The methods and properties that a class and its bases in this package define."""
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("keras_multigpu"):
            continue
        for name, value in vars(base).items():
            summary = (inspect.getdoc(getattr(value, "__func__", value)) or "").split("\n\n")[0]
            if name.startswith("_") or name in seen or not _is_described(value):
                continue
            seen.add(name)
            function = getattr(value, "__func__", value)
            is_property = isinstance(value, property)
            text = name if is_property else f"{name}{_signature(function)}"
            yield text.replace("(cls, ", "(").replace("(cls)", "()"), " ".join(summary.split())


def _is_described(value: Any) -> bool:
    is_method = inspect.isfunction(value) or isinstance(value, (classmethod, property))
    return is_method and bool(inspect.getdoc(getattr(value, "__func__", value)))


def _prose(text: str) -> Iterator[str]:
    """A docstring of Google's style as paragraphs of Markdown."""
    heading, lines = "", []
    for line in text.splitlines():
        starts = _SECTION.fullmatch(line)
        is_back = heading and line and not line.startswith(" ")
        if starts or is_back:
            yield from _section(heading, lines)
            heading, lines = (starts[1] if starts else ""), []
        if not starts:
            lines.append(line)
    yield from _section(heading, lines)


def _section(heading: str, lines: list[str]) -> Iterator[str]:
    text = "\n".join(lines).strip("\n")
    if not text.strip():
        return
    if heading.startswith("Example"):
        yield f"```pycon\n{textwrap.dedent(text)}\n```"
    elif heading in ("Returns", "Yields"):
        yield f"**{heading}** {' '.join(text.split())}"
    elif heading:
        yield f"**{heading}**\n\n" + "\n".join(_entries(textwrap.dedent(text)))
    else:
        yield re.sub(r"^(Input|Output): ", r"\n**\1** ", text, flags=re.MULTILINE).strip("\n")


def _entries(text: str) -> Iterator[str]:
    """The entries of a list of arguments or errors, each in a line."""
    for entry in re.split(r"\n(?=\S)", text):
        name, _, description = entry.partition(":")
        yield f"- `{name}`: {' '.join(description.split())}"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
