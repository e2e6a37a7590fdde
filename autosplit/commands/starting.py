"""The start of a command that measures or runs a model."""

import gc
import importlib
import time

import psutil

from autosplit.devices.processes import prepare_to_spawn

LOADED = ("autosplit.api", "autosplit.compat.exporter")
"""Modules that such a command needs in any case."""

SOLVERS = "autosplit.searching.loop"
"""The module that loads all solvers, for commands that search."""


def start(*modules: str) -> float:
    """Start the fork server, which imports torch, and load meanwhile what the command needs: ``LOADED`` and these modules.

    They stay until the process ends. Searching them for garbage would take about a tenth of the time to load them, and some of
    the time of every later step.

    Returns: seconds since this process began.
    """
    prepare_to_spawn()
    gc.disable()
    try:
        for name in (*LOADED, *modules):
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
    return time.time() - psutil.Process().create_time()
