"""Account: the memory of a model's plans, as far as it is known, and measured where a plan can be run."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from autosplit.memory.stages import Known, ValueMemory, count
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, cap_faults


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

    def fitted(self, plan: Plan, machine: Machine) -> Plan:
        """The plan with the memory of its stages, in one form on devices where the weights in two forms break a cap."""
        plan = self.counted(plan)
        over = cap_faults(plan.stages, machine.devices, self.graph)
        return self.in_one_form(plan, over) if over else plan

    def in_one_form(self, plan: Plan, devices: Collection[str]) -> Plan:
        """The plan with the memory of its stages, in one form on these devices."""
        stages = list(self.counted(plan).stages)
        for number, stage in enumerate(stages):
            if stage.memory is not None and not set(devices).isdisjoint(stage.devices):
                stages[number] = replace(stage, memory=replace(stage.memory, one_form=True))
        return self.counted(replace(plan, stages=tuple(stages)))

    def measured(self, plan: Plan) -> Plan:
        """The plan with the memory of its stages, measured where they can be run."""
        if self.run is not None:
            self.run(plan)
        return self.counted(plan)
