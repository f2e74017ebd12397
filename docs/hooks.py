"""Hooks of MkDocs: the site has the repository's own pages, at the repository's own paths.

Relative links between them then hold on the site as they do on a code host.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/site.css",
    "docs/launchers/*",
)
FENCE = "````"


def on_config(config: Any) -> None:
    """The navigation is what `docs/README.md` lists."""
    contents = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    config.nav = [{"Home": ["README.md", "docs/README.md"]}, *_sections(contents)]


def on_files(files: Files, config: Any) -> Files:
    """The theme's files, the pages, and the notebooks as pages."""
    found = [file for file in files if file.src_dir != config.docs_dir]
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            found.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        text = "\n\n".join(_cells(json.loads(path.read_text(encoding="utf-8"))))
        found.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return Files(found)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks lead to their pages; mkdocstrings makes the headings of the reference."""
    headings = r"(?m)^## (\w+)\n\n\[Source\]\(.+\)$"
    markdown = re.sub(headings, lambda found: f'<a id="{found[1].lower()}"></a>', markdown)
    return re.sub(r"(\]\([^)\s]+)\.ipynb\)", r"\1.md)", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """The cells of tables name their columns."""
    return re.sub(r"<table>.*?</table>", _label_cells, content, flags=re.DOTALL)


class KerasDocstrings(griffe.Extension):
    """Reads docstrings as Keras writes them: `Example:`, and sentences after `Returns:`."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
            text = re.sub(r"(?m)^(Input|Output|Returns|Yields):\s+", r"\n**\1:** ", text)
            obj.docstring.value = text


def _sections(contents: str) -> Iterator[dict[str, Any]]:
    for section in re.split(r"^## ", contents, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        links = re.findall(r"^- \[([^]]+)\]\(([^)#]+)\)", body, flags=re.MULTILINE)
        yield {heading: [{title.replace("`", ""): _place(target)} for title, target in links]}


def _place(target: str) -> str:
    """A link's target, from the root of the repository."""
    path = (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()
    return path.replace(".ipynb", ".md")


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    """A notebook's cells and their outputs, as Markdown."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"{FENCE}python\n{source}\n{FENCE}"
        for output in cell.get("outputs", ()):
            yield _output({"text/plain": output.get("text"), **output.get("data", {})})


def _output(forms: dict[str, Any]) -> str:
    """An output in the richest form that it has."""
    if "image/png" in forms:
        picture = "".join(forms["image/png"]).replace("\n", "")
        return f"![A picture that the cell above draws](data:image/png;base64,{picture})"
    if "text/html" in forms:
        styled = "".join(forms["text/html"])
        return _as_in_pages(re.sub(r"<style.*?</style>\n?", "", styled, flags=re.DOTALL))
    return f"{FENCE}{{ .text .output }}\n{''.join(forms['text/plain'])}\n{FENCE}"


def _as_in_pages(table: str) -> str:
    """pandas's tables without attributes: the site draws them as it draws the pages' tables."""
    return re.sub(r"<(table|tr) [^>]*>", r"<\1>", table)


def _label_cells(table: re.Match[str]) -> str:
    """A table whose cells know the names of their columns: narrow screens show those beside."""
    head, rule, body = table[0].partition("</thead>")
    texts = re.findall(r"<th\b[^>]*>(.*?)</th>", head, flags=re.DOTALL)
    names = [re.sub(r"<[^>]+>", "", text).strip().replace('"', "&quot;") for text in texts]

    def label(row: re.Match[str]) -> str:
        columns = iter(names)
        return re.sub(
            r"<(t[dh])\b([^>]*)>(.*?)</\1>",
            lambda cell: (
                f'<{cell[1]}{cell[2]} data-column="{next(columns, "")}">'
                f"<div>{cell[3]}</div></{cell[1]}>"
            ),
            row[0],
            flags=re.DOTALL,
        )

    return head + rule + re.sub(r"<tr>.*?</tr>", label, body, flags=re.DOTALL)
