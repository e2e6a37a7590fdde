"""What a cut costs a backend: the ops on both sides of one, run as two stages and as one.

A stage finds its inputs where another core wrote them; it turns them from the layout of the cut into that of its runtime, and its
outputs back; and what would be fused over the cut is not. Times of ops know nothing of it, and who plans the latency of a
ResNet-50 by them alone gets 13 stages that are predicted 7 % faster than two, and run 20 % slower.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autosplit.backends.base import get_backend, usual
from autosplit.deploying.workspace import Workspace
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, split
from autosplit.values.graph import Graph
from autosplit.values.samples import Precision

NUM_OPS = 4
"""On each side: most of a block of a convolutional network, so that what is fused elsewhere is fused there too; a small part of a
transformer's, which has many more."""


def loses_at_cuts(backend: str) -> bool:
    """Whether what a cut costs a backend is timed: not of one that loses nothing there (eager), or that compiles for long."""
    return backend in usual() and not get_backend(backend).exact


@dataclass(frozen=True, slots=True)
class Cut:
    """The ops before and behind a cut, and the bytes of the values that pass from these to those."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    num_bytes: int


def typical_cut(graph: Graph) -> Cut | None:
    """Of the cuts that the fewest values pass, as those of plans, the one with the most bytes; None if no value is handed over.

    What a cut costs beside its bytes is little, and there the least part of what is measured. Of several the one nearest to the
    middle is taken. The ops just before and behind are looked at alone, ``NUM_OPS`` of each where the model has as many, and none
    in the first and the last eighth, where a model is not what it is elsewhere.
    """
    num_ops = len(graph.ops)
    alive = np.zeros(num_ops + 1, dtype=np.int64)
    for value, maker in graph.producer.items():
        alive[graph.index[maker] + 1] += 1
        alive[max(graph.index[op] for op in (maker, *graph.consumers[value])) + 1] -= 1
    alive = alive.cumsum()  # how many values pass the cut before each op
    sides = min(max(NUM_OPS, num_ops // 8), max(1, num_ops // 2))
    cuts = {place: cut for place in range(sides, num_ops - sides + 1) if (cut := _cut(graph, place)).num_bytes > 0}
    place = min(cuts, key=lambda place: (alive[place], -cuts[place].num_bytes, abs(2 * place - num_ops)), default=None)
    return None if place is None else cuts[place]


def _cut(graph: Graph, place: int) -> Cut:
    before, behind = graph.ops[max(0, place - NUM_OPS) : place], graph.ops[place : place + NUM_OPS]
    handed = {value for op in before for value in op.outputs} & {value for op in behind for value in op.inputs}
    num_bytes = sum(graph.values[value].num_bytes for value in handed)
    return Cut(tuple(op.name for op in before), tuple(op.name for op in behind), num_bytes)


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
