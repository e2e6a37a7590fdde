"""How many random cases a property gets: a quarter of them in the suite, all of them under ``make fuzz``."""

import os

LEAST = 5


def examples(most: int) -> int:
    """The number of cases to draw, of ``most``."""
    return most if "AUTOSPLIT_FUZZ_CASES" in os.environ else max(LEAST, most // 4)
