"""The clock of planners: seconds of the machine or, for small problems, seconds of work.

Solvers compare ``now()`` with their deadlines. While work is counted, each look at the clock takes ``LOOK_S`` seconds, and
loops that look seldom add their work with ``spend``. So a small problem has one answer, however busy the machine is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic

SMALL_PLACES = 160
"""Ops times devices up to which work is counted: 40 ops on 4 devices. CP-SAT can place their ops, so it is asked first."""
LOOK_S = 2e-4
"""Seconds of work between two looks at the clock: about the time of one dynamic program of a small problem."""
LEAST_S = 0.5
"""Least seconds of work, and of each solver that looks for a first plan: with fewer, small problems get worse plans than with
20 s (13 of 60 random ones of up to five ops)."""
LATEST_S = 60.0
"""A small problem ends at the latest so many seconds of the machine after its limit."""
CELL_S = 5e-9
"""Seconds of work of one cell of a dynamic program over a sweep, before a run has measured it."""


@dataclass
class _Work:
    """The work so far in seconds, and the machine's second at which it ends anyway."""

    end_s: float
    done_s: float = 0.0
    late: bool = False


_WORK: ContextVar[_Work | None] = ContextVar("work", default=None)


def now() -> float:
    """Seconds since some moment in the past."""
    work = _WORK.get()
    if work is None:
        return monotonic()
    work.done_s += LOOK_S
    if not work.late and monotonic() > work.end_s:
        work.late, work.done_s = True, work.done_s + 1e9
    return work.done_s


def halfway(deadline: float) -> float:
    """The second halfway from now to a deadline.

    A solver that others follow gets half of the time left. So each gets as much as all that follow it, and none needs a share of
    its own.
    """
    return (now() + deadline) / 2


def spend(seconds: float) -> None:
    """Count work of a loop that does not look at the clock."""
    work = _WORK.get()
    if work is not None:
        work.done_s += seconds


def counts_work() -> bool:
    """Whether ``now()`` counts work: then nothing may run beside it in another thread."""
    return _WORK.get() is not None


def machine_seconds_left(deadline: float) -> float:
    """Seconds of the machine until a deadline of ``now()`` at the latest."""
    work = _WORK.get()
    return deadline - monotonic() if work is None else work.end_s - monotonic()


@contextmanager
def time_limit(num_places: int, limit_s: float, num_solves: int = 1) -> Iterator[float]:
    """Give the deadline of ``now()`` for a problem with so many ops times devices, solved so many times.

    Each solve of a small problem has ``LEAST_S`` at least.
    """
    if num_places > SMALL_PLACES or counts_work():
        yield now() + limit_s
        return
    token = _WORK.set(_Work(monotonic() + LATEST_S + limit_s))
    try:
        yield max(num_solves * LEAST_S, limit_s)
    finally:
        _WORK.reset(token)
