"""Every notebook runs from top to bottom and from any folder, with every warning an error, and is kept with its outputs."""

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from benchmarks.gallery import code_hash

ROOT = Path(__file__).parents[1]
LEAST_PICTURES = {
    "1_from_model_to_plan.ipynb": 4,
    "2_what_if.ipynb": 7,
    "3_judging_a_plan_by_hand.ipynb": 7,
    "4_serving_under_load.ipynb": 4,
    "5_judging_a_given_split.ipynb": 2,
    "6_streaming_text.ipynb": 1,
}
WITHOUT_TORCH = ("2_what_if.ipynb", "3_judging_a_plan_by_hand.ipynb", "5_judging_a_given_split.ipynb")
WITH_TORCH = tuple(name for name in LEAST_PICTURES if name not in WITHOUT_TORCH)
CPU_LIMIT_S = 50.0
"""Limit for the CPU seconds of a kernel with its workers, about twice what it takes."""

STRICT = "import warnings\nwarnings.simplefilter('error')"
BRIEF = "import brief\nbrief.measure_briefly()\nbrief.measure_links_once()"
FORGET = "%reset -f"
NO_TORCH = "import sys\nassert 'torch' not in sys.modules"
AT_THE_END = "import os, warnings\nwarnings.simplefilter('default')\nprint(sum(os.times()[:4]))"
"""The kernel's own shutdown warns, which is not the notebook's affair."""


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def read(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / name, as_version=4)


def test_every_notebook_is_tested() -> None:
    assert sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")) == list(LEAST_PICTURES)


@pytest.mark.parametrize("name", LEAST_PICTURES)
def test_the_outputs_that_are_kept_are_those_of_the_code(name: str) -> None:
    """They are shown in the gallery; ``python -m benchmarks.gallery`` makes them."""
    found = read(name)
    assert found.metadata["autosplit"]["code"] == code_hash(found)
    assert [cell.execution_count for cell in code_cells(found)] == [*range(1, len(code_cells(found)) + 1)]
    outputs = [output for cell in code_cells(found) for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) >= LEAST_PICTURES[name]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [WITH_TORCH, WITHOUT_TORCH], ids=["with torch", "without torch"])
def test_notebooks_run(names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel runs several notebooks in turn, because a kernel takes seconds to import; it forgets all names in between."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
    notebooks = {name: read(name) for name in names}
    for cell in [cell for notebook in notebooks.values() for cell in code_cells(notebook)]:
        cell.outputs = []
    cells = [nbformat.v4.new_code_cell(f"{STRICT}\n{BRIEF}" if names == WITH_TORCH else STRICT)]
    for notebook in notebooks.values():
        cells += [*code_cells(notebook), nbformat.v4.new_code_cell(FORGET)]
    if names == WITHOUT_TORCH:
        cells.append(nbformat.v4.new_code_cell(NO_TORCH))
    cells.append(nbformat.v4.new_code_cell(AT_THE_END))
    whole = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(whole, timeout=150, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    errors = [out.text for cell in cells for out in cell.outputs if out.output_type == "stream" and out.name == "stderr"]
    assert [text for text in errors if not text.startswith("compiling the planner's inner loops, once")] == []
    for name, notebook in notebooks.items():
        outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
        assert len([output for output in outputs if "image/png" in output.get("data", {})]) >= LEAST_PICTURES[name], name
    assert float(cells[-1].outputs[-1].text) < CPU_LIMIT_S
