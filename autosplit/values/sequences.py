"""Sequences: what a generator is planned and measured for. No torch."""

import re
from dataclasses import dataclass, fields, replace
from math import ceil

from autosplit.arguments import checked
from autosplit.errors import UsageError, raise_faults


@checked
@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of tokens that a generator goes on with.

    Attributes:
        prompt, new: tokens of a usual prompt and of its answer.
        max_sequences: sequences side by side.
        max_length: most tokens of a sequence, those of its prompt included.
    Raises: UsageError: a number is below 1, or a usual sequence is longer than ``max_length``.
    """

    prompt: int = 128
    new: int = 64
    max_sequences: int = 16
    max_length: int = 1024

    def __post_init__(self) -> None:
        faults = [f"{one.name} is {number}, and at least 1" for one in fields(self) if (number := getattr(self, one.name)) < 1]
        if not faults and self.prompt + self.new - 1 > self.max_length:
            faults = [f"prompt {self.prompt} and new {self.new} are beyond max_length {self.max_length}"]
        raise_faults(UsageError, "no sequences", faults)

    def largest_group(self, num_groups: int) -> int:
        """The most sequences in one of ``num_groups`` groups, as stages or replicas divide them."""
        return ceil(self.max_sequences / num_groups)

    def __str__(self) -> str:
        return ",".join(f"{one.name}={getattr(self, one.name)}" for one in fields(self))


def parse_sequences(text: str, default: Sequences = Sequences()) -> Sequences:
    """The sequences in a text such as ``prompt=128,new=64``, the rest as in ``default``; the inverse of ``str``.

    Raises: UsageError: a name is unknown, or comes twice, or has no number; numbers as for ``Sequences``.

    >>> parse_sequences("prompt=8,max_sequences=2")
    Sequences(prompt=8, new=64, max_sequences=2, max_length=1024)
    """
    known, found, faults = [one.name for one in fields(Sequences)], dict[str, int](), list[str]()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})\s*", part)
        if not match or match[1] not in known or match[1] in found:
            faults.append(f"'{part:.60}' is not one of {', '.join(known)}, once each, with a number")
        else:
            found[match[1]] = int(match[2])
    raise_faults(UsageError, f"'{text:.60}' says no sequences; write prompt=128,new=64", faults)
    return replace(default, **found)
