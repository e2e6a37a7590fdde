"""The start of a command that measures or runs a model."""

import time
from collections.abc import Callable, Sequence

import psutil

from autosplit.devices.processes import prepare_to_spawn
from autosplit.preloading import load


def start(backends: Callable[[], Sequence[str]]) -> float:
    """Start the fork server, which imports torch, and load meanwhile the modules that the command needs.

    A forked process loads the exporters of the named backends; ``backends`` may need torch to name them. Solvers are
    loaded later, while files are written.

    Returns: seconds since this process began.
    """
    prepare_to_spawn()
    load("autosplit.backends.warming")
    from autosplit.backends.warming import begin_loading

    begin_loading(backends())
    load("autosplit.api", "autosplit.compat.exporter")  # such a command needs them in any case
    return time.time() - psutil.Process().create_time()
