"""Python looks for garbage in all that is in memory, and a million objects are there once torch and the tests are imported."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables are as wide as it says


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Import all tests without looking, leave out what is there then, and look less often: it took a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(700, 10, 100)
        gc.enable()
