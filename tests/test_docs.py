"""What a reader may copy runs: code in ARCHITECTURE.md and docs/, in the order in which it stands there.

- Every ```` ```python ```` block runs; the blocks of one document are one program, in one namespace, in an empty folder.
- A ```` ```bash ```` block runs, line by line, in that same folder and at its place in the program, if the line above it is
  ``<!-- run -->``. Its commands begin with ``autosplit``.
- A python block is left out if the line above it is ``<!-- not run: REASON -->``.
- README.md's code and commands run in tests/test_readme_path.py.
- ```` ```yaml ```` and ```` ```json ```` blocks must parse. Links to files must lead somewhere.
"""

import functools
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

import autosplit
from autosplit import cli, modeltrace
from autosplit.devices.limits import affinity

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path for path in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()
]
reference = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "reference.py")))  # the hook of the documentation's site
CORES = {0, 1}  # devices that the documents' commands name
LIMIT_S = 400


def run_commands(lines: list[str]) -> None:
    """Run commands of ours in this process, which has torch and its tracer imported."""
    for line in lines:
        done = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert done.exit_code == 0, f"'{line}' ended with {done.exit_code}: {done.output}{done.exception!r}"


class Block(NamedTuple):
    """A fenced block: its language, its first line's number in the document (from 0), its lines, the line above the fence."""

    language: str
    start: int
    lines: list[str]
    above: str


def blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"(`{3,})(\w*).*", lines[number])
        number += 1
        if fence:
            end = next((n for n in range(number, len(lines)) if lines[n].rstrip() == fence[1]), len(lines))
            above = lines[number - 2].strip() if number > 1 else ""
            yield Block(fence[2], number, lines[number:end], above)
            number = end + 1


def commands(block: Block) -> list[str]:
    """The commands of a shell block: prompts and comments taken away, continued lines joined."""
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(block.lines))
    stripped = [re.sub(r"^\$ ", "", line.strip()) for line in joined.splitlines()]
    return [line for line in stripped if line and not line.startswith("#")]


def program(text: str) -> str:
    """The document as a Python program in which every line of code stands at its own number, so that tracebacks fit."""
    made = [""] * (len(text.splitlines()) + 1)
    for block in blocks(text):
        if block.language == "python" and not block.above.startswith("<!-- not run:"):
            made[block.start : block.start + len(block.lines)] = block.lines
        elif block.language == "bash" and block.above == "<!-- run -->":
            made[block.start] = f"_autosplit({commands(block)!r})"
    return "\n".join(made)


def program_of(path: Path) -> str:
    return program(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_traceback_names_the_line_of_the_document() -> None:
    page = "# Page\n\n```bash\nls\n```\n<!-- run -->\n```bash\nautosplit --version\n```\n\n```python\n\nraise ValueError\n```\n"
    with pytest.raises(ValueError) as caught:
        exec(compile(program(page), "page.md", "exec"), {"_autosplit": lambda lines: None})
    assert page.splitlines()[caught.traceback[-1].lineno] == "raise ValueError"


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("path", [path for path in DOCUMENTS[1:] if program_of(path).strip()], ids=name_of)
def test_code_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not set(affinity()) >= CORES:
        pytest.skip(f"its commands run on cores 0 and 1, and this process may use {affinity()}")
    document = ModuleType("document")
    document.__dict__["_autosplit"] = run_commands
    monkeypatch.setitem(sys.modules, "document", document)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Calls on one language model would each trace its steps anew, for seconds; and searches of a second decide no check.
    monkeypatch.setattr(modeltrace, "step_family", functools.cache(modeltrace.step_family))
    exec(compile(re.sub(r"\b(search_s|budget)=1\b", r"\1=0.3", program_of(path)), str(path), "exec"), document.__dict__)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_to_run_are_our_own_data_parse_and_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block in blocks(text):
        if block.above == "<!-- run -->":
            assert block.language == "bash", f"line {block.start}: only bash blocks are marked to run"
            assert all(command.startswith("autosplit ") for command in commands(block)), f"line {block.start}"
        if block.language in ("yaml", "json"):
            (yaml.safe_load if block.language == "yaml" else json.loads)("\n".join(block.lines))
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    files = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    files = [re.sub(r"^gallery/(\w+)\.md$", r"../notebooks/\1.ipynb", target) for target in files]  # pages made of notebooks
    assert [target for target in files if not (path.parent / target).exists()] == []


def test_the_reference_has_every_public_name_once() -> None:
    named = re.findall(r"^::: autosplit\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == autosplit.__all__


def test_the_reference_shows_signatures_sections_and_members() -> None:
    found = reference.reference("trace")
    assert "```python\ntrace(\n    model: " in found and "\n    *,\n    inputs: Tensor | " in found
    assert "\n**Args**\n\n- `model`: a spec" in found and "**Raises** ModelError:" in found
    told = reference.reference("Session")
    assert "### `Session`" in told and "Session." in told and "::\n" not in told


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_gallery_shows_code_and_outputs(path: Path) -> None:
    page = reference.notebook_page(path)
    assert page.startswith("# ") and page.count("```python") > 3 and "image/png" in page and "Traceback" not in page


@pytest.mark.parametrize(("name", "quote"), [("SECURITY.md", "`"), ("tests/trial.txt", "")])
def test_every_test_that_a_page_names_exists(name: str, quote: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(rf"{quote}(tests/[\w/]+\.py)(?:::(\w+))?{quote}", text)
    assert len(named) == text.count(f"{quote}tests/") > 10
    assert [file for file, _ in named if not (ROOT / file).is_file()] == []
    assert [test for file, test in named if test and f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")] == []


def test_the_security_page_names_a_test_in_each_row() -> None:
    rows = [row for row in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    assert len(rows) > 15 and [row for row in rows if "`tests/" not in row and row.split()[-2] not in ("in", "---")] == []
