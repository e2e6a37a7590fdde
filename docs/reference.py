"""A hook of mkdocs that makes pages of the sources: the API reference of docstrings, and the gallery of notebooks.

In a page, a line ``::: autosplit.NAME`` stands for the signature and the docstring of a public name, in the notation of
mkdocstrings. A page ``gallery/NAME.md`` is made of each ``notebooks/NAME.ipynb`` with the outputs that are kept there.
"""

import inspect
import json
import re
from html import escape
from pathlib import Path
from textwrap import dedent
from typing import Any

from mkdocs.structure.files import File, Files

import autosplit

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
WIDTH = 100
LONGEST_DEFAULT = 30
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each ``::: autosplit.NAME`` by its reference."""
    return re.sub(r"^::: autosplit\.(\w+)$", lambda found: reference(found[1]), markdown, flags=re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"gallery/{path.stem}.md", content=notebook_page(path)))
    return files


def reference(name: str) -> str:
    """The reference of a public name, as Markdown."""
    found = getattr(autosplit, name)
    if inspect.ismodule(found):
        return f"### `{name}`\n\n{docstring(found)}\n"
    parts = [f"### `{name}`", signature(name, found), docstring(found)]
    if inspect.isclass(found):
        own = [vars(kind) for kind in reversed(found.__mro__) if kind.__module__.startswith("autosplit")]
        for member, value in {member: value for members in own for member, value in members.items()}.items():
            if not member.startswith("_") and (text := inspect.getdoc(value)):
                if isinstance(value, property):
                    parts.append(f"**`{name}.{member}`**: {text}")
                elif callable(value) or isinstance(value, classmethod | staticmethod):
                    parts.append(signature(f"{name}.{member}", getattr(found, member)))
                    parts.append(docstring(value))
    return "\n\n".join(filter(None, parts)) + "\n"


def signature(name: str, found: Any) -> str:
    """The signature of a call, a parameter a line where it is long; '' if it has none."""
    try:
        told = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    parameters = []
    for one in told.parameters.values():
        if one.name == "self":
            continue
        text = str(one if len(repr(one.default)) <= LONGEST_DEFAULT else one.replace(default=...)).replace("Ellipsis", "...")
        parameters.append(re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text))
        if one.kind is one.VAR_POSITIONAL:
            continue
    first = next((k for k, one in enumerate(told.parameters.values()) if one.kind is one.KEYWORD_ONLY), None)
    if first is not None and not any(one.kind is one.VAR_POSITIONAL for one in told.parameters.values()):
        parameters.insert(first - ("self" in told.parameters), "*")
    line = f"{name}({', '.join(parameters)})"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in parameters) + ")"
    return f"```python\n{line}\n```"


def docstring(found: Any) -> str:
    """A docstring as Markdown: sections as lists, and indented blocks as code."""
    lines = (inspect.getdoc(found) or "").splitlines()
    made: list[str] = []
    section = False
    while lines:
        line = lines.pop(0)
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            section = True
            made += ["", f"**{line.rstrip(':')}**", ""]
        elif line.strip() == "::":
            block = _indented(lines)
            made += ["```python", *dedent("\n".join(block)).strip().splitlines(), "```"]
        elif (head := re.match(rf"({'|'.join(SECTIONS)}): (.*)", line)) is not None:
            section = False
            made += ["", f"**{head[1]}** {head[2]}"]
        elif section and (item := re.match(r"    (\S[^:]*): (.*)", line)) is not None:
            made.append(f"- `{item[1]}`: {item[2]}")
        elif section and line and not line.startswith(" "):
            section = False
            made += ["", line]
        else:
            made.append(line.strip() if section else line)
    return "\n".join(made)


def _indented(lines: list[str]) -> list[str]:
    """Take the indented block at the beginning of the lines."""
    block = []
    while lines and (not lines[0].strip() or lines[0].startswith(" ")):
        block.append(lines.pop(0))
    return block


def notebook_page(path: Path) -> str:
    """A notebook with its outputs, as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in cell_parts(cell)) + "\n"


def cell_parts(cell: dict[str, Any]) -> list[str]:
    """The text of a cell, or its code with what it printed and showed."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data:
            parts.append(f'<div class="notebook">{"".join(data["text/html"])}</div>')
        elif "image/png" in data:
            parts.append(f'<img src="data:image/png;base64,{"".join(data["image/png"]).strip()}" alt="the picture of this cell">')
        else:
            text = "".join(output.get("text", data.get("text/plain", "")))
            parts.append(f"<pre>{escape(text)}</pre>")
    return parts
