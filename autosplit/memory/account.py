"""Account: the memory of a model's plans, as far as it is known, and measured where a plan can be run."""

from collections.abc import Callable
from dataclasses import dataclass, field

from autosplit.memory.stages import Known, ValueMemory, count
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan


@dataclass(frozen=True)
class Account:
    """The memory account of one model.

    Attributes:
        values: the bytes of its values; None for dense tensors.
        known: footprints of its stages; ``run`` adds to them.
        run: runs a plan, so that the footprints of its stages become known, where it can be run; None for never.
    """

    graph: Graph
    values: ValueMemory | None = None
    known: Known = field(default_factory=dict)
    run: Callable[[Plan], None] | None = None

    def counted(self, plan: Plan) -> Plan:
        """The plan with the memory of its stages, as far as it is known."""
        return count(self.graph, plan, self.values, self.known)

    def measured(self, plan: Plan) -> Plan:
        """The plan with the memory of its stages, measured where they can be run."""
        if self.run is not None:
            self.run(plan)
        return self.counted(plan)
