"""Load modules that every call needs, before they are needed.

Not in a thread: packages change the filters of warnings while they load, and these belong to the whole process.
"""

import ctypes
import gc
import importlib
import inspect
import sys
import traceback
from types import FrameType
from typing import Any


def load(*modules: str) -> None:
    """Import modules, which stay until the process ends.

    Searching them for garbage would take about a tenth of the time to load them, and some of the time of every later step.
    Errors that they keep, such as that of a package which is not installed, lose their tracebacks: these hold the variables of
    every caller (optuna kept a user's model and its traces in memory until the process ended).
    """
    gc.disable()
    try:
        for name in modules:
            importlib.import_module(name)
        _drop_tracebacks(inspect.currentframe())
    finally:
        gc.freeze()
        gc.enable()


def _drop_tracebacks(frame: FrameType | None) -> None:
    """Drop the tracebacks of errors that were raised in a call of this frame and are still held."""
    for error in gc.get_objects():
        held = error.__traceback__ if issubclass(type(error), BaseException) else None
        if held is not None and any(caller is frame for caller, _ in traceback.walk_stack(held.tb_frame)):
            error.__traceback__ = None


def settle() -> None:
    """Give the free memory of earlier calls back to the system.

    That is rings of objects, such as graphs with their weights, also those that ``load`` has frozen, and freed blocks that malloc
    keeps: of a model of 25 M parameters 109 MB.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim()


def trim() -> None:
    """Give the blocks that malloc holds free back to the system."""
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def load_planner() -> None:
    """Load the solvers, and compile the inner loops of every search unless their machine code is cached."""
    load("autosplit.searching.loop", "autosplit.planners.warming")
    sys.modules["autosplit.planners.warming"].chains()
