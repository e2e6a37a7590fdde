"""Run the notebooks and keep their outputs, which the gallery of the documentation shows.

    python -m benchmarks.gallery [NAME.ipynb ...]

Each notebook notes the digest of its code, so that ``tests/test_notebooks.py`` sees outputs of older code.
"""

import argparse
import os
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
TIMES = ("iopub.execute_input", "iopub.status.busy", "iopub.status.idle", "shell.execute_reply")


def code_hash(notebook: Any) -> str:
    """The digest of the code cells of a notebook."""
    return sha256("\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code").encode()).hexdigest()[:16]


def execute(path: Path) -> None:
    """Run a notebook in an empty folder, and write it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as empty:
        NotebookClient(
            notebook, timeout=900, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": empty}}
        ).execute()
    for cell in notebook.cells:
        for name in ("execution", *TIMES):
            cell.metadata.pop(name, None)
        if cell.cell_type == "code":  # what is said on stderr is about this run: a first compilation, bars that cannot be drawn
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            for kind in ("image/svg+xml", "text/plain") if "image/png" in output.get("data", {}) else ():
                output.data.pop(kind, None)
    notebook.metadata["autosplit"] = {"code": code_hash(notebook)}
    nbformat.write(notebook, path)


def main() -> int:
    """Run the named notebooks, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks; by default all")
    names = parser.parse_args().names or sorted(path.name for path in FOLDER.glob("*.ipynb"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for name in names:
        execute(FOLDER / name)
        print(f"{name}: {(FOLDER / name).stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
