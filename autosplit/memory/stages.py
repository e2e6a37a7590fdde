"""What each stage of a plan holds beside its process: weights, values at their peak, the slots of its rings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autosplit.memory.arena import bound_of
from autosplit.memory.lives import Step, aligned, lives_of
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan, Stage


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one replica of a stage.

    Attributes:
        stage: the name of the stage.
        devices: names of the devices of its replicas.
        weight_bytes: its weights, each once.
        arena_bytes: largest sum of bytes that are live at an op, times the number of streams; inputs lie in rings.
        ring_bytes: slots of the rings from which it takes its inputs, and of those that take its results to the host.
    """

    stage: str
    devices: tuple[str, ...]
    weight_bytes: int
    arena_bytes: int
    ring_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, values and slots together."""
        return self.weight_bytes + self.arena_bytes + self.ring_bytes

    def row(self) -> dict[str, Any]:
        """The row of a table."""
        return {
            "stage": self.stage,
            "devices": " ".join(self.devices),
            "weight_bytes": self.weight_bytes,
            "arena_bytes": self.arena_bytes,
            "ring_bytes": self.ring_bytes,
            "total_bytes": self.total_bytes,
        }


def stage_memories(graph: Graph, plan: Plan, num_bytes: Mapping[str, int], views: Mapping[str, str]) -> list[StageMemory]:
    """The memory of each stage.

    No op is taken to write over its input: torch eager writes every result to new memory.

    Args:
        graph: the model, traced for the plan's microbatch.
        plan: the plan.
        num_bytes: bytes of memory of each value.
        views: value to the value or weight whose memory it shares.
    """
    return [_stage_memory(graph, plan, stage, num_bytes, views) for stage in plan.stages]


def held_by_device(stages: Iterable[StageMemory]) -> dict[str, tuple[int, int]]:
    """Device name to the bytes of weights, and of values and ring slots, that all its stages hold."""
    held: dict[str, tuple[int, int]] = {}
    for stage in stages:
        for device in stage.devices:
            weights, beside = held.get(device, (0, 0))
            held[device] = weights + stage.weight_bytes, beside + stage.arena_bytes + stage.ring_bytes
    return held


def _stage_memory(graph: Graph, plan: Plan, stage: Stage, num_bytes: Mapping[str, int], views: Mapping[str, str]) -> StageMemory:
    ops = [graph.ops[graph.index[name]] for name in stage.ops]
    made = {value for op in ops for value in op.outputs}
    entering = {value for op in ops for value in op.inputs} - made
    leaving = {
        value for value in made if value in graph.outputs or any(reader not in stage.ops for reader in graph.consumers[value])
    }
    lives = lives_of(
        [Step(op.inputs, op.outputs) for op in ops],
        {value: size for value, size in num_bytes.items() if value in made},
        given=entering,
        kept=leaving,
        views=views,
    )
    answers = [value for value in leaving if value in graph.outputs]
    slots = sum(aligned(num_bytes[value]) for value in (*entering, *answers))
    arena_bytes = bound_of(lives) * stage.streams
    return StageMemory(stage.name, stage.devices, graph.stage_bytes(stage.ops), arena_bytes, slots * plan.queue_depth)
