"""A notebook as a program: its cells in order, in one namespace, every warning an error. It needs neither Jupyter nor torch."""

import ast
import json
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
SHOWN = ("__repr__", "_repr_html_", "_repr_png_")
"""The ways in which a notebook shows the value of a cell's last expression."""


def run(name: str) -> int:
    """Run a notebook, and show the values of its cells in every way. Returns: the number of pictures among them."""
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    names, shown = dict[str, Any](__name__="__main__"), list[Any]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cell in [cell for cell in cells if cell["cell_type"] == "code"]:
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), names)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), name, "eval"), names)
                shown += [getattr(value, way)() for way in SHOWN if hasattr(value, way)]
    return sum(isinstance(one, bytes) for one in shown)
