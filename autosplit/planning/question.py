"""Question: everything that an answer of the planner depends on."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from autosplit.costs.graphproblem import problem_from
from autosplit.planners.feasibility import require_room
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph
from autosplit.values.machine import HOST_KINDS, Machine
from autosplit.values.plan import QUEUE_DEPTH, Source
from autosplit.values.profile import Profile

TIME_LIMIT_S = 10.0
"""Seconds for each set of backends, where the user gives no limit."""

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Question:
    """Which plan of a model is best on a machine?

    Attributes:
        graph: the model, traced for ``microbatch`` items.
        profile: seconds of each op with each backend on each device.
        source: the spec and the batch of the model.
        machine: devices, memory caps and measured links.
        backends: the backends that a device may run.
        constraints: the user's demands.
        streaming_s: seconds of each request in which the link of an accelerator may bring it weights. It may hold as many more
            bytes of weights than its cap as come in that time.
        queue_depth: slots of each ring.
        microbatch: items that pass the stages together; None for the whole request.
        max_threads: most threads of a stage; None for one for each core of its device.
        time_limit_s: seconds for each set of the backends.
        shares_time: whether all sets of a larger problem have the time limit together. Small problems count work for each set.
        seed: seed of the solvers.
        log: called with a line of the solver's log.
    """

    graph: Graph
    profile: Profile
    source: Source
    machine: Machine
    backends: tuple[str, ...]
    constraints: Constraints = field(default_factory=Constraints)
    streaming_s: float = 0.0
    queue_depth: int = QUEUE_DEPTH
    microbatch: int | None = None
    max_threads: int | None = None
    time_limit_s: float = TIME_LIMIT_S
    shares_time: bool = False
    seed: int = 0
    log: Log | None = None

    def verify(self) -> "Question":
        """Return the question with constraints as the planner takes them. Call it once for a question with a user's demands.

        Raises: UsageError: with every fault, as ``Constraints.verify``.
        """
        return replace(self, constraints=self.constraints.verify(self.graph, self.machine))

    def demanding(self, **demands: Any) -> "Question":
        """The question with other values of some demands."""
        return replace(self, constraints=replace(self.constraints, **demands))

    def within(self, seconds: float) -> "Question":
        """The question with at most so many seconds, which all sets of its backends share."""
        return replace(self, time_limit_s=min(self.time_limit_s, seconds), shares_time=True)

    @property
    def num_parts(self) -> int:
        """How many microbatches a request is cut into."""
        return self.source.batch // (self.microbatch or self.source.batch)


def verify_early(constraints: Constraints, graph: Graph, machine: Machine) -> Constraints:
    """Return the constraints as the planner takes them, if nothing is wrong that shows before ops are measured.

    Only caps of cores are looked at: an accelerator may have weights streamed to it.

    Raises: UsageError: with every fault, as ``Constraints.verify``. InfeasibleError: weights alone break the caps.
    """
    wanted = constraints.verify(graph, machine)
    caps = [inf if d.memory_bytes is None or d.kind not in HOST_KINDS else float(d.memory_bytes) for d in machine.devices]
    if min(caps) < graph.weight_bytes:
        free = np.zeros((len(graph.ops), len(caps)))
        problem = replace(problem_from(graph, machine, free, wanted.placement(graph, machine)), memory_bytes=np.array(caps))
        together = [*((number,) for number in range(problem.num_ops)), *problem.groups]
        require_room(problem, together, wanted.num_stages or wanted.max_stages)
    return wanted
