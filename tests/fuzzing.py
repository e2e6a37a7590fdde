"""Random cases of properties: a quarter of them in the suite, the same at each run, and all, new ones, under ``make fuzz``."""

import os

FUZZES = "AUTOSPLIT_FUZZ_CASES" in os.environ
LEAST = 5


def examples(most: int) -> int:
    """The number of cases to draw, of ``most``."""
    return most if FUZZES else max(LEAST, most // 4)
