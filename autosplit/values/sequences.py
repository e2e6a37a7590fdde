"""Sequences: the traffic of a generator, for which it is planned and measured. No torch."""

import re
from dataclasses import asdict, dataclass, fields, replace
from math import ceil, inf
from typing import Any

from autosplit.arguments import checked
from autosplit.errors import UsageError, raise_faults

LIMITS = ("first_token_s", "per_token_s")
"""The fields that may be left out."""


@checked
@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of tokens that a generator continues.

    Attributes:
        prompt, new: tokens of a usual prompt and of its answer.
        max_sequences: sequences side by side.
        max_length: most tokens of a sequence, those of its prompt included; with an encoder of an answer, and of a prompt.
        first_token_s, per_token_s: most seconds to the first new token of sequences that come at once, and from one token of a
            sequence to its next one, in the mean of a sequence; None for no limit.
    Raises: UsageError: a number is below 1, a limit is not above 0, or a usual prompt or answer is longer than ``max_length``.
    """

    prompt: int = 128
    new: int = 64
    max_sequences: int = 16
    max_length: int = 1024
    first_token_s: float | None = None
    per_token_s: float | None = None

    def __post_init__(self) -> None:
        counts = {name: number for name, number in self.given.items() if name not in LIMITS}
        faults = [f"{name} is {number}, and must be at least 1" for name, number in counts.items() if number < 1]
        wrong = {name: limit for name, limit in self.limits.items() if not 0 < limit < inf}
        faults += [f"{name} is {limit} s, and must be above 0 s" for name, limit in wrong.items()]
        if not faults and max(self.prompt, self.new) > self.max_length:
            faults = [self._too_long]
        raise_faults(UsageError, "the sequences cannot be planned for", faults)

    def require_room(self) -> None:
        """Raises: UsageError: a usual answer has no room behind its prompt, for a model that keeps both in one cache."""
        if self.prompt + self.new - 1 > self.max_length:
            raise UsageError(f"the sequences cannot be planned for: {self._too_long}")

    @property
    def _too_long(self) -> str:
        usual = f"prompt {self.prompt} and new {self.new} are beyond max_length {self.max_length}"
        return f"{usual}; give max_length={self.prompt + self.new - 1}, or fewer new tokens"

    def largest_group(self, num_groups: int) -> int:
        """The most sequences in one of ``num_groups`` groups, as stages or replicas divide them."""
        return ceil(self.max_sequences / num_groups)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given, by their names."""
        return {name: value for name, value in self.given.items() if name in LIMITS}

    @property
    def given(self) -> dict[str, Any]:
        """The fields by their names, without limits that are not given."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.given.items())


def parse_sequences(text: str, default: Sequences = Sequences()) -> Sequences:
    """The sequences in a text such as ``prompt=128,new=64``, the rest as in ``default``; the inverse of ``str``.

    Raises: UsageError: as ``sequence_numbers``, and as ``Sequences``.

    >>> str(parse_sequences("prompt=8,max_sequences=2,per_token_s=0.05"))
    'prompt=8,new=64,max_sequences=2,max_length=1024,per_token_s=0.05'
    """
    return replace(default, **sequence_numbers(text))


def sequence_numbers(text: str) -> dict[str, Any]:
    """The fields of ``Sequences`` that a text such as ``prompt=128,new=64`` gives.

    Raises: UsageError: a name is unknown, or comes twice, or has no number.
    """
    known, found, faults = [one.name for one in fields(Sequences)], dict[str, Any](), list[str]()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})(\.\d{1,9})?\s*", part)
        if not match or match[1] not in known or match[1] in found or (match[3] and match[1] not in LIMITS):
            faults.append(f"'{part:.60}' is not one of {', '.join(known)}, once each, with a number")
        else:
            found[match[1]] = float(f"{match[2]}{match[3] or ''}") if match[1] in LIMITS else int(match[2])
    raise_faults(UsageError, f"'{text:.60}' says no sequences; write prompt=128,new=64", faults)
    return found
