"""Python processes that this process starts with ``subprocess``, and the folders that models of the user are imported from.

A folder that a model needs comes last on the path, so its modules shadow neither Python's nor installed ones. Forked workers
have the same path, because they import the model's custom operators. A process of ``python_running`` imports no code of the user
and does not have these folders.
"""

import os
import sys
from pathlib import Path

_HOME = str(Path(__file__).parents[1])
_model_folders: list[str] = []


def extend_path(folder: str) -> None:
    """Let this process and its workers import modules from a folder that the user trusts, after all others."""
    if folder not in sys.path:
        sys.path.append(folder)
        _model_folders.append(folder)


def user_folders() -> list[str]:
    """The folders on the path that do not belong to the installation of Python: of the main program, PYTHONPATH and models."""
    path = [Path(entry or Path.cwd()) for entry in sys.path]
    return [
        str(entry)
        for entry in path
        if entry.is_dir() and not entry.is_relative_to(sys.prefix) and not entry.is_relative_to(sys.base_prefix)
    ]


def python_running(code: str, *arguments: str) -> list[str]:
    """The command of a Python process that runs some code with these arguments and can import autosplit.

    Its path is the path of this process, without the current folder and without the folders of models. It is set once Python
    has started: entries in PYTHONPATH would come before Python's own modules, and Python would run a ``sitecustomize`` there.
    """
    given = {"E": sys.flags.ignore_environment, "s": sys.flags.no_user_site, "S": sys.flags.no_site}
    flags = [f"-{flag}" for flag, is_set in given.items() if is_set]
    return [sys.executable, "-P", *flags, "-c", f"import sys; sys.path[:] = {_child_path()!r}; {code}", *arguments]


def variables_for_torch() -> dict[str, str]:
    """Environment variables with which torch's compilers start Python processes that import nothing from the current folder.

    Torch hands the path on in PYTHONPATH; by default it takes all of ``sys.path``.
    """
    return {"PYTHONSAFEPATH": "1", "TORCH_CUSTOM_PYTHONPATH": os.pathsep.join(_child_path())}


def _child_path() -> list[str]:
    kept = [entry for entry in sys.path if entry and entry not in _model_folders]
    return list(dict.fromkeys([*kept, _HOME]))
