"""Python processes that this process starts with ``subprocess``: they can import what this process can."""

import os
import sys
from pathlib import Path


def python_running(code: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a Python process that runs some code with these arguments.

    The folder that it starts in is not on its path; the folders of this process are, as absolute paths.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return [sys.executable, "-P", "-c", code, *arguments], {**os.environ, "PYTHONPATH": path}
