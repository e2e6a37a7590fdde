"""The faults of a placement of ops on stages; the other faults of a plan are found by ``Plan.verify``."""

from collections.abc import Sequence

from autosplit.errors import SHOWN_FAULTS, close_names
from autosplit.parsing import shown
from autosplit.values.graph import Graph

SHOWN_OPS = 3
"""Number of ops that a message names if several have the same fault."""


def placement_faults(stages: Sequence[tuple[str, Sequence[str]]], graph: Graph) -> list[str]:
    """The faults of a placement: ops that are unknown, missing or placed twice, empty stages, tensors that go back.

    Args:
        stages: the name of each stage in messages, and its ops.
    """
    names, faults = [name for name, _ in stages], []
    place: dict[str, int] = {}
    twice: dict[tuple[int, int], list[str]] = {}
    for number, (name, ops) in enumerate(stages):
        if not ops:
            faults.append(f"stage {name} has no ops")
        for op in ops:
            if op not in graph.index:
                faults.append(unknown_op(name, op, graph, len(faults) < SHOWN_FAULTS))
            elif op in place:
                twice.setdefault((place[op], number), []).append(op)
            else:
                place[op] = number
    faults += [ops_are(f"on stage {names[a]} and on stage {names[b]}", ops) for (a, b), ops in twice.items()]
    if missing := [op.name for op in graph.ops if op.name not in place]:
        faults.append(ops_are("on no stage", missing))
    for reader in graph.ops:
        target = place.get(reader.name, len(stages))
        for value in reader.inputs:
            source = place.get(graph.producer.get(value, ""), -1)
            if target < source:
                faults.append(
                    f"op '{reader.name}' on stage {names[target]} reads '{value}' from stage {names[source]}; "
                    "a tensor goes to the same or a later stage"
                )
    return faults


def unknown_op(stage: str, op: str, graph: Graph, is_shown: bool) -> str:
    """The fault of a stage that names an unknown op. Close names take 0.1 s in a large graph: they are left out unless shown."""
    return f"stage {stage} names op {shown(op)}, which the graph does not have{close_names(op, graph.index) if is_shown else ''}"


def ops_are(where: str, ops: Sequence[str]) -> str:
    """The fault that some ops are at a wrong place; a few of them are named."""
    if len(ops) == 1:
        return f"op '{ops[0]}' is {where}"
    first = ", ".join(f"'{op}'" for op in ops[:SHOWN_OPS])
    return f"{len(ops)} ops are {where}: {first}{f' and {len(ops) - SHOWN_OPS} more' if len(ops) > SHOWN_OPS else ''}"
