"""The cost of a cut for a backend: the ops on both sides of a typical cut, run as two stages and as one.

Behind a cut the inputs lie in another core's cache, tensors are converted between the cut's layout and the runtime's, and
nothing is fused over the cut. Op times show none of this: planned by them alone, a ResNet-50 got 13 stages that were predicted
7 % faster than two, and ran 20 % slower.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autosplit.backends.base import get_backend, usual
from autosplit.backends.workspace import Workspace
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import split
from autosplit.values.graph import Graph
from autosplit.values.samples import Precision

NUM_OPS = 4
"""Ops on each side: most of a block of a convolutional network, so that ops which a backend fuses are fused here too."""


def loses_at_cuts(backend: str) -> bool:
    """Whether a cut is timed for a backend: not for one that loses nothing there (eager) or compiles for long."""
    return backend in usual() and not get_backend(backend).exact


@dataclass(frozen=True, slots=True)
class Cut:
    """The ops before and behind a cut, and the bytes of the values that cross it."""

    before: tuple[str, ...]
    behind: tuple[str, ...]
    num_bytes: int


def typical_cut(graph: Graph) -> Cut | None:
    """A cut as plans have it: crossed by the fewest values, then with the most bytes, then nearest to the middle.

    The cost per byte shows best where bytes outweigh the fixed cost. The first and the last eighth of the model are left out.
    None if no value is handed over anywhere.
    """
    num_ops = len(graph.ops)
    alive = np.zeros(num_ops + 1, dtype=np.int64)
    for value, maker in graph.producer.items():
        alive[graph.index[maker] + 1] += 1
        alive[max(graph.index[op] for op in (maker, *graph.consumers[value])) + 1] -= 1
    alive = alive.cumsum()  # number of values that cross the cut before each op
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
    """Save and prepare three stages: the ops before the cut, those behind it, and both together.

    Raises: BackendError: the backend refuses one of them.
    """
    names = tuple(op.name for op in traced.graph.ops)
    start, end = names.index(cut.before[0]), names.index(cut.behind[-1]) + 1
    folders = []
    for inner in ([cut.before, cut.behind], [names[start:end]]):
        stages = [ops for ops in (names[:start], *inner, names[end:]) if ops]
        for ops, program in zip(stages, split(traced, stages), strict=True):
            if ops in inner:
                folders.append(workspace.add(program, backend, precision))
    before, behind, both = folders
    return before, behind, both
