"""What a cut costs a backend: the ops on both sides of one in the middle of the model, run as two stages and as one.

A stage finds its inputs where another core wrote them; it turns them from the layout of the cut into that of its runtime, and its
outputs back; and what would be fused over the cut is not. Times of ops know nothing of it, and who plans the latency of a
ResNet-50 by them alone gets 13 stages that are predicted 7 % faster than two, and run 20 % slower.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autosplit.deploying.workspace import Workspace
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, split
from autosplit.values.graph import Graph
from autosplit.values.samples import Precision

NUM_OPS = 4
"""On each side: most of a block of a network, so that what is fused elsewhere is fused there too."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The ops before and behind a cut, and the bytes of the values that pass from these to those."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    num_bytes: int


def middle_cut(graph: Graph) -> Cut | None:
    """In the middle third of the graph order the cut that the fewest values pass; None where none can be made."""
    num_ops = len(graph.ops)
    made_at = {value: graph.index[maker] for value, maker in graph.producer.items()}
    alive = np.zeros(num_ops + 1, dtype=np.int64)
    for value, made in made_at.items():
        alive[made + 1] += 1
        alive[max((graph.index[op] for op in graph.consumers[value]), default=made) + 1] -= 1
    alive = alive.cumsum()  # how many values pass the cut before each op
    places = [
        place
        for place in range(-(-num_ops // 3), min(num_ops, 2 * num_ops // 3 + 1))
        # Where the op behind it reads nothing from just before it, another branch of the model begins.
        if any(value in made_at and made_at[value] >= place - NUM_OPS for value in graph.ops[place].inputs)
    ]
    place = min(places, key=lambda one: (alive[one], abs(2 * one - num_ops)), default=0)
    before, behind = graph.ops[max(0, place - NUM_OPS) : place], graph.ops[place : place + NUM_OPS]
    passing = {value for op in before for value in op.outputs} & {value for op in behind for value in op.inputs}
    num_bytes = sum(graph.values[value].num_bytes for value in passing)
    return Cut(tuple(op.name for op in before), tuple(op.name for op in behind), num_bytes) if num_bytes else None


def save_cut(traced: Traced, cut: Cut, backend: str, precision: Precision, workspace: Workspace) -> tuple[Path, Path, Path]:
    """The ops before the cut, those behind it, and both as one stage: each saved and prepared for the backend.

    Raises: BackendError: the backend refuses one of them.
    """
    names = tuple(op.name for op in traced.graph.ops)
    start, end = names.index(cut.before[0]), names.index(cut.behind[-1]) + 1
    programs: dict[tuple[str, ...], StageProgram] = {}
    for inner in ([cut.before, cut.behind], [names[start:end]]):
        stages = [ops for ops in (names[:start], *inner, names[end:]) if ops]
        programs |= {ops: program for ops, program in zip(stages, split(traced, stages), strict=True) if ops in inner}
    before, behind, both = (workspace.add(program, ops, backend, precision).folder for ops, program in programs.items())
    return before, behind, both
