"""Load modules that a call needs in any case, before it needs them."""

import gc
import importlib


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
