"""Question: everything that an answer of the planner depends on."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from autosplit.costs.graphproblem import problem_from
from autosplit.errors import InfeasibleError
from autosplit.memory.account import Account
from autosplit.memory.stages import footprints_of
from autosplit.planners.feasibility import require_places, require_room
from autosplit.tables import bytes_text
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph
from autosplit.values.machine import HOST_KINDS, Machine
from autosplit.values.plan import QUEUE_DEPTH, Source
from autosplit.values.profile import Profile
from autosplit.values.residency import fewest_bytes

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
        streaming_s: seconds of each request in which the link of an accelerator may bring it weights. It may hold as many more
            bytes of weights than its cap as come in that time.
        queue_depth: slots of each ring.
        microbatch: items that pass the stages together; None for the whole request.
        max_threads: most threads of a stage; None for one for each core of its device.
        time_limit_s: seconds for each set of the backends.
        shares_time: whether all sets of a larger problem have the time limit together. Small problems count work for each set.
        seed: seed of the solvers.
        log: called with a line of the solver's log.
        account: the memory of stages; by default dense values, and the footprints of the profile.
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
    account: Account | None = None

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
    def memory(self) -> Account:
        """The memory account of the model."""
        return self.account or Account(self.graph, known=footprints_of(self.profile))

    @property
    def num_parts(self) -> int:
        """How many microbatches a request is cut into."""
        return self.source.batch // (self.microbatch or self.source.batch)


def verify_early(constraints: Constraints, graph: Graph, machine: Machine) -> Constraints:
    """Return the constraints as the planner takes them, if nothing is wrong that shows before ops are measured.

    An accelerator may have weights streamed to it: there each op must fit alone, and all ops with two buffers.

    Raises: UsageError: with every fault, as ``Constraints.verify``. InfeasibleError: weights alone break the caps.
    """
    wanted = constraints.verify(graph, machine)
    rooms = [inf if d.memory_bytes is None else float(d.memory_bytes - d.context_bytes) for d in machine.devices]
    if min(rooms) >= graph.weight_bytes:
        return wanted
    free = problem_from(graph, machine, wanted.placement(graph, machine), machine.devices)
    problem = replace(free, memory_bytes=np.array(rooms))
    alone = [(number,) for number in range(problem.num_ops)]
    on_cores = [room if device.kind in HOST_KINDS else inf for room, device in zip(rooms, machine.devices, strict=True)]
    cores = replace(problem, memory_bytes=np.array(on_cores))
    require_room(cores, [*alone, *problem.groups], wanted.num_stages or wanted.max_stages)
    try:
        require_places(problem, alone)
        _require_buffers(graph, machine, sum(rooms))
    except InfeasibleError as failure:
        raise with_base(failure, max(device.context_bytes for device in machine.devices)) from None
    return wanted


def _require_buffers(graph: Graph, machine: Machine, room: float) -> None:
    """Raise InfeasibleError if the devices cannot even hold the weights that stay and two buffers for the others."""
    least = fewest_bytes(*graph.own_bytes(op.name for op in graph.ops))
    if least > room:
        names = ", ".join(f"'{device.name}'" for device in machine.devices)
        raise InfeasibleError(
            f"no plan fits: weights that stay and two buffers for streamed ones take at least {bytes_text(least)}, and the caps "
            f"of {names} leave {bytes_text(room)}. Raise a cap, or add a device."
        )


def with_base(failure: InfeasibleError, base_bytes: int) -> InfeasibleError:
    """The failure, whose message says that caps are counted without the bytes that a worker takes for itself."""
    if not base_bytes:
        return failure
    less = f" (caps are counted without the {bytes_text(base_bytes)} that a worker takes for itself)."
    return InfeasibleError(str(failure).removesuffix(".") + less)
