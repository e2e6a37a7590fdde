"""Every notebook runs from top to bottom on the stored profiles, with every warning an error, and is kept without outputs."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STRICT = "import warnings\nwarnings.simplefilter('error')"
AT_THE_END = "import sys\nassert 'torch' not in sys.modules\nwarnings.simplefilter('default')"
"""The kernel's own shutdown warns, which is not the notebook's affair."""


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks() -> None:
    assert "explore_split_plans.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_not_kept(path: Path) -> None:
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell["id"] for cell in cells if cell.outputs or cell.execution_count] == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_needs_no_torch(path: Path) -> None:
    if not list((ROOT / "profiles").glob("*/graph.json")):
        pytest.skip("no profile is stored; make one with `make profiles`")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    notebook.cells.append(nbformat.v4.new_code_cell(AT_THE_END))
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "stream" and output.name == "stderr"] == []
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 6
