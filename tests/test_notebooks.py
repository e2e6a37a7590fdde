"""Every notebook runs from top to bottom and from any folder, with every warning an error, and is kept without outputs."""

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
LEAST_PICTURES = {
    "1_from_model_to_plan.ipynb": 4,
    "2_what_if.ipynb": 7,
    "3_judging_a_plan_by_hand.ipynb": 7,
    "4_serving_under_load.ipynb": 4,
    "5_judging_a_given_split.ipynb": 2,
}
WITHOUT_TORCH = ("2_what_if.ipynb", "3_judging_a_plan_by_hand.ipynb", "5_judging_a_given_split.ipynb")
CPU_LIMIT_S = 80.0
"""Limit for the CPU seconds of all kernels with their workers, about twice what they take."""

spent_s: dict[str, float] = {}
"""Notebook name to its CPU seconds."""

STRICT = "import warnings\nwarnings.simplefilter('error')"
AT_THE_END = "import os\nwarnings.simplefilter('default')\nprint(sum(os.times()[:4]))"
"""The kernel's own shutdown warns, which is not the notebook's affair."""

each_notebook = pytest.mark.parametrize("name", LEAST_PICTURES)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def read(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / name, as_version=4)


def test_every_notebook_is_tested() -> None:
    assert sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")) == list(LEAST_PICTURES)


@each_notebook
def test_outputs_are_not_kept(name: str) -> None:
    assert [cell["id"] for cell in code_cells(read(name)) if cell.outputs or cell.execution_count] == []


@pytest.mark.timeout(180)
@each_notebook
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = read(name)
    without_torch = "import sys\nassert 'torch' not in sys.modules\n" if name in WITHOUT_TORCH else ""
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    notebook.cells.append(nbformat.v4.new_code_cell(without_torch + AT_THE_END))
    NotebookClient(notebook, timeout=150, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    errors = [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    assert [text for text in errors if not text.startswith("compiling the planner's inner loops, once")] == []
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) >= LEAST_PICTURES[name]
    spent_s[name] = float(outputs[-1].text)


def test_the_notebooks_take_little_time() -> None:
    assert sum(spent_s.values()) < CPU_LIMIT_S, spent_s
