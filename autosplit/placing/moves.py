"""The copies that a placement needs, and the placed graph in which they are ops.

A value has a home: the device of the op that makes it, or for an input of the model the device of its first reader. A value
that an op on another device reads passes one copy for that device, however many readers there are. Weights and constants need
none: each device that reads them holds them. Devices that share a memory need none either.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autosplit.placing.sites import Choice
from autosplit.tracing.capturing import Traced
from autosplit.tracing.devicecopies import DEVICE_COPY
from autosplit.tracing.flattening import is_op
from autosplit.tracing.programs import weight, weight_names
from autosplit.tracing.tensorspec import layout
from autosplit.values.graph import Graph, Op
from autosplit.values.machine import Machine


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A copy of ``value`` from the device ``source`` to the device ``target``; ``name`` is the op's and the new value's."""

    name: str
    value: str
    source: str
    target: str
    num_bytes: int


def homes_of(graph: Graph, choices: Mapping[str, Choice]) -> dict[str, str]:
    """Value name to the device of its maker, or of the first reader of an input; an input that nothing reads is left out."""
    homes = {value: choices[op].site.device for value, op in graph.producer.items()}
    return homes | {value: choices[graph.consumers[value][0]].site.device for value in graph.inputs if graph.consumers[value]}


Reads = Mapping[tuple[str, str], str]
"""(op, value) to the name of the copy that the op reads in its place."""


def copies_of(graph: Graph, choices: Mapping[str, Choice], machine: Machine) -> tuple[tuple[DeviceCopy, ...], Reads]:
    """One copy for each value and each memory other than its home that reads it, in the order of first use; and who reads it."""
    homes, found, reads = homes_of(graph, choices), dict[tuple[str, str], DeviceCopy](), dict[tuple[str, str], str]()
    taken = {*graph.index, *graph.values}
    for op in graph.ops:
        target = choices[op.name].site.device
        for value in op.inputs:
            key = value, machine[target].memory
            if key[1] == machine[homes[value]].memory:
                continue
            if key not in found:
                name = plain = f"{value}_on_{''.join(letter if letter.isalnum() else '_' for letter in key[1])}"
                while name in taken:
                    name = f"{plain}_{len(taken)}"
                taken.add(name)
                found[key] = DeviceCopy(name, value, homes[value], target, graph.values[value].num_bytes)
            reads[op.name, value] = found[key].name
    return tuple(found.values()), reads


def graph_with(traced: Traced, copies: tuple[DeviceCopy, ...], reads: Reads) -> Graph:
    """The graph with copies as ops, each directly before its first reader."""
    graph, ops = traced.graph, list[Op]()
    waiting = {copy.name: copy for copy in copies}
    for op in graph.ops:
        for value in op.inputs:
            copy = waiting.pop(reads.get((op.name, value), ""), None)
            if copy is not None:
                signature = f"{DEVICE_COPY}({layout(traced.specs[value])}, '{copy.target}')"
                ops.append(Op(copy.name, str(DEVICE_COPY), "", (value,), (copy.name,), (), signature))
        ops.append(replace(op, inputs=tuple(reads.get((op.name, value), value) for value in op.inputs)))
    copied = {copy.name: replace(graph.values[copy.value], name=copy.name) for copy in copies}
    return replace(graph, ops=tuple(ops), values={**graph.values, **copied}).verify()


def program_with(traced: Traced, copies: tuple[DeviceCopy, ...], reads: Reads) -> fx.GraphModule:
    """The flat program with copies as nodes of ``autosplit.device_copy``, in the order of ``graph_with``."""
    made, graph = dict[str, fx.Node](), fx.Graph()
    by_name = {copy.name: copy for copy in copies}
    for node in traced.program.graph.nodes:
        read = {source: made[source.name] for source in node.all_input_nodes}
        for source in read if is_op(node) else ():
            copy = by_name.get(reads.get((node.name, source.name), ""))
            if copy is not None and copy.name not in made:
                made[copy.name] = graph.create_node("call_function", DEVICE_COPY, (read[source], copy.target), name=copy.name)
            read[source] = made[copy.name] if copy is not None else read[source]
        made[node.name] = graph.node_copy(node, read.__getitem__)
    weights = {name: weight(traced.program, name) for name in weight_names(graph)}
    return fx.GraphModule(weights, graph, class_name="Placed")
