"""How many random cases a property gets (a quarter in the suite, all under ``make fuzz``), and the places to damage in data."""

import os
from collections.abc import Iterator
from typing import Any

LEAST = 5


def examples(most: int) -> int:
    """The number of cases to draw, of ``most``."""
    return most if "AUTOSPLIT_FUZZ_CASES" in os.environ else max(LEAST, most // 4)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each container with each of its keys or indices."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places(data[key])
