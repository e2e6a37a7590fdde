"""Random cases of properties: a quarter of them in the suite, the same at each run, and all, new ones, under ``make fuzz``."""

import os

FUZZES = "AUTOSPLIT_FUZZ_CASES" in os.environ


def examples(most: int) -> int:
    """The number of cases to draw, of ``most``."""
    return most if FUZZES else max(5, most // 4)
