"""Setup and Budget: how the calls measure and plan, and their limits of time. Both have a default for every field."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from autosplit.arguments import checked
from autosplit.backends.base import get_backend, usual
from autosplit.backends.workspace import Workspace
from autosplit.errors import UsageError, names, raise_faults
from autosplit.progress import Progress
from autosplit.running.engine import Engine
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.plan import MAX_QUEUE_DEPTH, QUEUE_DEPTH
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision

ROUND_S = 2.0
"""Most seconds that each plan runs in a round of the report, where no number of requests is asked for."""

SMALL_S = 3.0
"""A search of at most so many seconds is small: one candidate spends it, and rounds are as short as they may be."""

LEAST_ROUND_S = 0.2
ROUND_SHARE = LEAST_ROUND_S / SMALL_S
"""Least seconds of a round, and the share of ``Budget.search_s`` that it takes within its limits."""

LEAST_COMPARE_S = 4.0
"""Least seconds for comparing the plan with its baselines, after a search."""

COMPILE_BUDGETS = 2.0
"""Compiling a baseline may take this many times the seconds of the search, unless its own limit is given."""


@runtime_checkable
class Hosts(Protocol):
    """Hosts that are one machine together."""

    @property
    def machine(self) -> Machine:
        """Their devices, and the links between hosts."""

    def measure(
        self, traced: Traced, backends: Sequence[str], precision: Precision, store: Path | None = None, remeasure: bool = False
    ) -> Profile:
        """Profile a model on all of them. The folder ``store`` keeps the measurements."""

    def engine_factory(self) -> Callable[..., Engine]:
        """A function that opens pipelines there, in place of ``Pipeline``."""


@checked
@dataclass(frozen=True, slots=True)
class Setup:
    """How to measure and plan.

    Attributes:
        backends: backends to consider, as a list or one text (``"eager,openvino"``); None for all that are installed, without
            those that compile for long.
        precision: the precision of every stage: ``f32`` (the model's own dtypes), ``tf32``, ``bf16`` or ``f16``.
        max_error: lets a search give stages on accelerators a lower precision than f32, as long as the outputs differ from those
            of torch in f32 by at most this share of their largest value, on the model's inputs; None for f32 everywhere. It is
            for requests of one size on this machine.
        store: folder where measurements and runs are kept and found again; None keeps nothing.
        remeasure: measure again, whatever the store holds.
        profile_of: words in the name of another machine's processor or accelerator, whose stored profile counts for devices that
            are not here.
        isolate: rule out the caller's process as a place for a model, so that a crash of the model cannot end the caller.
        queue_depth: slots of each ring, to begin with.
        seed: seed of every random choice.
        progress: True draws bars in a terminal or notebook, False shows nothing. A function is called with the step, its share
            done from 0 to 1, and the present step in words.
        log: called with each line of the solvers' logs.
        journal: file of the trials, with which a search that was stopped goes on.
        workspace: where stages are saved and prepared, to be shared between calls.
        bench: a ``Bench`` where candidates and baselines run, so that ``run`` does not load again what ``search`` has loaded.
        observe: called once with the HostManager on which a plan and its baselines run.
        keep: called with the ``SearchResult`` so far, if a search, or ``auto`` after one, is stopped by Ctrl-C or a failure.
        hosts: the hosts on which to measure and run, such as a ``Cluster``; None for this machine.
    Raises: UsageError, MissingExtraError: with every fault, a value that cannot be used or a backend that is not installed.
    """

    backends: str | Sequence[str] | None = None
    precision: Precision = "f32"
    max_error: float | None = None
    store: str | Path | None = None
    remeasure: bool = False
    profile_of: str = ""
    isolate: bool = False
    queue_depth: int = QUEUE_DEPTH
    seed: int = 0
    progress: bool | Progress = True
    log: Callable[[str], None] | None = None
    journal: str | Path | None = None
    workspace: Workspace | None = None
    bench: AbstractContextManager[Any] | None = None
    observe: Callable[[Any], None] | None = None
    keep: Callable[[Any], None] | None = None
    hosts: Hosts | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.precision not in get_args(Precision):
            faults.append(f"precision '{self.precision}' is not known; valid: {', '.join(get_args(Precision))}")
        if self.max_error is not None and not 0 <= self.max_error < math.inf:
            faults.append(f"max_error must be a share of the largest value, at least 0, but is {self.max_error}")
        if self.max_error is not None and self.precision != "f32":
            faults.append(f"max_error chooses precisions for stages of a plan in f32, but precision is {self.precision}")
        if self.max_error is not None and self.hosts is not None:
            faults.append("max_error chooses precisions on the accelerators of this machine; over hosts give precision= for all")
        if not 1 <= self.queue_depth <= MAX_QUEUE_DEPTH:
            faults.append(f"queue_depth must be at least 1 and at most {MAX_QUEUE_DEPTH}, but is {self.queue_depth}")
        raise_faults(UsageError, "this Setup cannot be used", faults)
        if self.backends is not None:
            object.__setattr__(self, "backends", names("backends", self.backends))
            for backend in self.backends:
                get_backend(backend)

    def require_one_precision(self) -> None:
        """Raises: UsageError: ``max_error`` is given for a model of several sizes: the error at each of them is not measured."""
        if self.max_error is not None:
            raise UsageError(
                "max_error chooses precisions for requests of one size; for several sizes, give a precision for all stages"
            )

    @property
    def considered(self) -> tuple[str, ...]:
        """The backends that a search considers."""
        return tuple(usual() if self.backends is None else names("backends", self.backends))


@checked
@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of time for a call. Tracing, measuring ops and loading plans come on top, without a limit.

    Attributes:
        search_s: seconds for planning and running candidate plans; 0 takes the planner's answer from the profile alone.
        planner_s: most seconds of the planner for each set of the backends. Where ``search_s`` is above 0, all sets together have
            at most a fifth of it. None for 10 s, and for 1 s where ``search_s`` is 0 and a plan is found so soon.
        compile_s: seconds for compiling the model once for each backend that compiles for long; None for twice ``search_s``.
        explain_s: seconds for finding out why the plan is not faster; None for a tenth of ``search_s`` and at most 1 s where
            throughput is the objective, else 0.
        num_rounds: interleaved rounds of the plan and its baselines.
        num_requests: requests of the plan over all rounds; None for as many as ``round_s`` holds.
    Raises: UsageError: with every fault, a value out of range.
    """

    search_s: float = 30.0
    planner_s: float | None = None
    compile_s: float | None = None
    explain_s: float | None = None
    num_rounds: int = 5
    num_requests: int | None = None

    def __post_init__(self) -> None:
        faults = []
        for name in ("search_s", "planner_s", "compile_s", "explain_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                faults.append(f"{name} must be at least 0 seconds, but is {value}")
        for name in ("num_rounds", "num_requests"):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name} must be at least 1, but is {value}")
        raise_faults(UsageError, "this Budget cannot be used", faults)

    @property
    def round_s(self) -> float:
        """Seconds that each plan runs in a round of the report: ``ROUND_S`` without a search, else as ``round_s``."""
        return ROUND_S if self.search_s == 0 else round_s(self.search_s, ROUND_S)

    @property
    def compare_s(self) -> float:
        """Seconds after which a report begins no more rounds; after half of them it loads only baselines that may win.

        A report may take as long as the search, and at least ``LEAST_COMPARE_S``. Without a search, and with a given number of
        requests, there is no limit. Two rounds are made in any case.
        """
        no_limit = self.search_s == 0 or self.num_requests is not None
        return math.inf if no_limit else max(LEAST_COMPARE_S, self.search_s)

    @property
    def compiling_s(self) -> float:
        """Seconds for compiling the model for one backend."""
        return COMPILE_BUDGETS * self.search_s if self.compile_s is None else self.compile_s


def as_budget(budget: Budget | float) -> Budget:
    """A budget given as a value, or as the seconds of its search."""
    return budget if isinstance(budget, Budget) else Budget(search_s=budget)


def round_s(search_s: float, most_s: float) -> float:
    """Seconds of a round that may last ``most_s``, where a search may last ``search_s``.

    >>> round_s(1.0, 2.0), round_s(15.0, 2.0), round_s(60.0, 2.0)
    (0.2, 1.0, 2.0)
    """
    return min(most_s, max(LEAST_ROUND_S, ROUND_SHARE * search_s))


SETUP, BUDGET = Setup(), Budget()
