"""Load modules that a call needs in any case, before it needs them.

Not in a thread: packages change the filters of warnings while they load, and these belong to the whole process.
"""

import gc
import importlib
import sys


def load(*modules: str) -> None:
    """Import modules, which stay until the process ends.

    Searching them for garbage would take about a tenth of the time to load them, and some of the time of every later step.
    """
    gc.disable()
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def load_planner() -> None:
    """Load the solvers, and compile what each search asks for unless its machine code is cached."""
    load("autosplit.searching.loop", "autosplit.planners.warming")
    sys.modules["autosplit.planners.warming"].chains()
