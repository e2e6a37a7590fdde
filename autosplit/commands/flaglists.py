"""Flags whose text is a list with commas between: given in parts on the command line, or as a list in an options file."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

JOINED = ("devices", "memory", "backend")
"""The names of these flags."""


def join_parts(words: Sequence[str], names: Iterable[str]) -> list[str]:
    """A command line on which each flag of ``names`` stands once: click would take the last part for the whole.

    >>> join_parts(["--memory", "cpu:0=1GB", "-v", "--memory=cpu:1=2GB"], ["memory"])
    ['--memory', 'cpu:0=1GB,cpu:1=2GB', '-v']
    """
    flags, places, found, left = {f"--{name}" for name in names}, dict[str, int](), list[str](), iter(words)
    for word in left:
        flag, sign, text = word.partition("=")
        values = [] if flag not in flags else [text] if sign else [*itertools.islice(left, 1)]
        if word == "--":
            found += [word, *left]
        elif not values:  # of a flag without a value the parser says that it is missing
            found.append(word)
        elif flag in places:
            found[places[flag]] += f",{values[0]}"
        else:
            found += [flag, *values]
            places[flag] = len(found) - 1
    return found


def joined(flag: Any, value: Any) -> Any:
    """A list or mapping as the flag takes it: ``[cpu:0, cpu:1]`` is 'cpu:0,cpu:1', ``{cpu:0: 1GB}`` is 'cpu:0=1GB'."""
    single = str | int | float
    if isinstance(value, dict) and all(isinstance(item, single) for item in value.values()):
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, list) and flag.name in JOINED and all(isinstance(item, single) for item in value):
        return ",".join(map(str, value))
    return value
