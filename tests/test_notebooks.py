"""Every notebook runs from top to bottom and from any folder, with every warning an error, and is kept with its outputs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import notebookcells
import pytest

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
CPU_LIMIT_S = 50.0
"""Limit for the CPU seconds of a notebook with its workers, and of all without torch, about twice what they take."""

PLANNING = """
import os, sys, time
import notebookcells
from autosplit.planners import clock

clock.monotonic = lambda: 10 * time.monotonic()
pictures = [notebookcells.run(name) for name in sys.argv[1:]]
assert "torch" not in sys.modules
print(*pictures, sum(os.times()[:4]))
"""
"""Limits of planners end ten times as early as the notebooks say."""


def test_every_notebook_is_tested() -> None:
    assert sorted(path.name for path in notebookcells.FOLDER.glob("*.ipynb")) == list(LEAST_PICTURES)


@pytest.mark.parametrize("name", LEAST_PICTURES)
def test_the_outputs_that_are_kept_are_those_of_the_code(name: str) -> None:
    """They are shown in the gallery; ``python -m benchmarks.gallery`` makes them."""
    found = nbformat.read(notebookcells.FOLDER / name, as_version=4)
    cells = [cell for cell in found.cells if cell.cell_type == "code"]
    assert found.metadata["autosplit"]["code"] == code_hash(found)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) >= LEAST_PICTURES[name]


def test_the_kept_verdict_on_a_split_knows_the_splits_beside_it() -> None:
    """A split by layers keeps the rules of a device map, so the best one under these is no slower. An old run was kept."""
    found = nbformat.read(notebookcells.FOLDER / "5_judging_a_given_split.ipynb", as_version=4)
    tables = [
        output.data["text/plain"]
        for cell in found.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    for table in tables:
        best, by_layers = (
            float(re.search(rf"^{name} +\d+ +\d+ +(\S+)", table, re.M)[1])
            for name in ("best under the same rules", r"even by layers \(vLLM\)")
        )
        assert best >= by_layers
    assert len(tables) == 2


@pytest.mark.parametrize("name", [name for name in LEAST_PICTURES if name not in WITHOUT_TORCH])
def test_a_notebook_runs_from_any_folder(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any, caplog: Any) -> None:
    """In this process, which has torch, and processes of its workers and of compilers."""
    caplog.set_level("WARNING", "autosplit")  # and it is set back, which a notebook does not
    monkeypatch.chdir(tmp_path)
    before_s = sum(os.times()[:4])
    assert notebookcells.run(name) >= LEAST_PICTURES[name]
    assert capsys.readouterr().err == "" and not caplog.records
    assert sum(os.times()[:4]) - before_s < CPU_LIMIT_S


@pytest.mark.timeout(300)
def test_notebooks_that_plan_run_without_torch(tmp_path: Path) -> None:
    """In one process, whose imports take seconds."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    words, environment = [sys.executable, "-W", "error", "-c", PLANNING, *WITHOUT_TORCH], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("compiling the planner's inner loops, once")]
    assert (done.returncode, errors) == (0, []), done.stderr
    *pictures, taken_s = done.stdout.splitlines()[-1].split()
    assert all(int(count) >= LEAST_PICTURES[name] for name, count in zip(WITHOUT_TORCH, pictures, strict=True))
    assert float(taken_s) < CPU_LIMIT_S
