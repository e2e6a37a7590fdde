"""The memory plan of each device of a placed graph: values, their storages and offsets in the device's arena."""

from collections.abc import Mapping, Sequence

from autosplit.memory.arena import MemoryPlan
from autosplit.memory.lives import Step, lives_of
from autosplit.memory.offsets import plan_memory
from autosplit.placing.moves import DeviceCopy
from autosplit.tracing.aliasing import Aliases
from autosplit.values.graph import Graph

TIME_LIMIT_S = 2.0
"""Most seconds of CP-SAT for each memory."""


def memory_of(
    graph: Graph,
    memory: Mapping[str, str],
    homes: Mapping[str, str],
    copies: Sequence[DeviceCopy],
    aliases: Aliases,
) -> dict[str, MemoryPlan]:
    """The name of each memory to the plan of all values in it.

    Args:
        graph: the graph with copies as ops.
        memory: op name to the name of the memory in which it computes; for a copy, the memory that it fills.
        homes: value name to the name of its memory; inputs that nothing reads are left out.
        aliases: views and overwrites of the model without copies.
    """
    num_bytes = {**aliases.num_bytes, **{copy.name: aliases.num_bytes[copy.value] for copy in copies}}
    plans = {}
    for name in dict.fromkeys(memory.values()):
        steps = [
            Step(
                tuple(value for value in op.inputs if homes[value] == name),
                op.outputs if memory[op.name] == name else (),
            )
            for op in graph.ops
        ]
        here = {value for value, home in homes.items() if home == name}
        copied = {copy.value: copy.name for copy in copies if homes[copy.name] == name}
        views = {value: copied.get(base, base) for value, base in aliases.views.items() if value in here}
        lives = lives_of(
            steps,
            num_bytes,
            given=[value for value in graph.inputs if value in here],
            kept=[value for value in graph.outputs if value in here],
            views=views,
            overwrites={
                value: [copied.get(source, source) for source in sources]
                for value, sources in aliases.overwrites.items()
                if value in here
            },
        )
        plans[name] = plan_memory(lives, time_limit_s=TIME_LIMIT_S)
    return plans
