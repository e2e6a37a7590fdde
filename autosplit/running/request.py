"""A request: what was asked, until when, and what has become of it."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from autosplit.errors import AutosplitError, DeadlineError, UsageError

Tensors = tuple[torch.Tensor, ...]


class RequestTimes(NamedTuple):
    """When a request was submitted, fed to the first stage, and answered, in monotonic nanoseconds."""

    sequence: int
    submitted_ns: int
    fed_ns: int
    done_ns: int


@dataclass(eq=False, slots=True)
class Request:
    """One request from the door to its answer."""

    inputs: Sequence[torch.Tensor]
    deadline_ns: int
    submitted_ns: int
    future: "Future[Tensors]" = field(default_factory=Future)
    sequence: int = -1
    fed_ns: int = 0
    tokens: int = 0
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    error: AutosplitError | None = None
    answered: bool = False

    def late(self) -> bool:
        """Whether its deadline passed; asked while it waits at the door."""
        if not 0 < self.deadline_ns <= time.monotonic_ns():
            return False
        self.error = DeadlineError("the request's deadline passed while it waited at the door")
        return True


def monotonic_deadline(deadline_s: float | None) -> int:
    """Seconds from now as a monotonic nanosecond count; 0 for none."""
    if deadline_s is None:
        return 0
    if not deadline_s > 0 or math.isinf(deadline_s):
        raise UsageError(f"deadline_s must be more than 0 seconds from now, but is {deadline_s}")
    return time.monotonic_ns() + int(deadline_s * 1e9)
