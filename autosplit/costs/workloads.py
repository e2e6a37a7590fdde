"""Planner workloads of others, read as problems: dnn-partitioning JSON and PipeDream's graph.txt; and splits of them.

The JSON format and its cost model are those of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN
Graph Operators" (NeurIPS 2020); ``graph.txt`` is the file of PipeDream's profiler (Narayanan et al., SOSP 2019). Times
keep the file's own unit.
"""

import math
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from autosplit.costs.faults import find_faults
from autosplit.costs.problem import Block, Net, Problem, Transfers
from autosplit.errors import SHOWN_FAULTS, PlanError, UsageError, raise_faults
from autosplit.files import field_faults, read_data, validated
from autosplit.parsing import parse_json, shown

Format = Literal["dnn-partitioning", "pipedream"]
M = TypeVar("M", bound=BaseModel)

COST_TOLERANCE = 1e-6
"""Difference of the costs of two edges from one node that counts as rounding: published files have six digits."""
SMALLEST, LARGEST = 1e-280, 1e300
"""Limits of numbers in files. Sums of larger numbers, and quotients by smaller ones, would overflow."""
NEEDED = f"0 or more is needed, and between {SMALLEST:g} and {LARGEST:g} where it is not 0"
"""The rule for a number in a file, in words."""

MAX_WORKLOAD_BYTES = 20_000_000
"""Largest file, 100 times the largest published one."""
MAX_DEVICES = 1024
"""Most devices of a file."""
MAX_TIMES = 1_000_000
"""Largest number of nodes times devices; a time, and a reason where a node is not supported, take up to 200 bytes."""
MAX_SHOWN_CYCLE = 20
"""Most nodes of a cycle that a message names."""
MAX_ID = 2**53
"""Largest id. Larger ids may have equal hashes, which makes a mapping slow."""


def read_workload(
    path: Path, format: Format = "dnn-partitioning", *, num_devices: int = 4, bytes_per_s: float = 1e9, overlap: bool = False
) -> Problem:
    """The problem that a workload file describes.

    Args:
        format: ``dnn-partitioning`` (JSON) or ``pipedream`` (graph.txt).
        num_devices: for ``pipedream`` only, whose files name no devices.
        bytes_per_s: for ``pipedream`` only: bytes per second of a link between two devices.
        overlap: for ``pipedream`` only: devices compute and transfer at the same time.
    Raises: UsageError: every fault of the file.
    """
    if format == "pipedream":
        text = read_data(path, "workload", UsageError, str, MAX_WORKLOAD_BYTES)
        return parse_pipedream(text, path.stem, num_devices, bytes_per_s, overlap)
    return parse_dnn_partitioning(read_data(path, "workload", UsageError, parse_json, MAX_WORKLOAD_BYTES), path.stem)


def _usable(value: float) -> float:
    if not (value in (0, math.inf) or SMALLEST <= value <= LARGEST):
        raise ValueError(f"{NEEDED}, but it is {value}")
    return value


def _finite(value: float) -> float:
    if value == math.inf:
        raise ValueError("a finite number is needed, but it is inf")
    return _usable(value)


_Number = Annotated[float, Strict(), AfterValidator(_usable)]
_Finite = Annotated[float, Strict(), AfterValidator(_finite)]
_Id = Annotated[int, Strict(), Field(ge=-MAX_ID, le=MAX_ID)]
_Count = Annotated[int, Strict(), Field(ge=0, le=MAX_DEVICES)]


class _Entry(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)


class _Node(_Entry):
    id: _Id
    supported_on_fpga: bool
    cpu_latency: _Number
    fpga_latency: _Number
    size: _Finite | None = None
    is_backward_node: bool = False
    color_class: _Id | str | None = None

    @model_validator(mode="before")
    @classmethod
    def _needs_no_time_where_it_cannot_run(cls, data: Any) -> Any:
        return data | {"fpgaLatency": 0.0} if isinstance(data, dict) and not data.get("supportedOnFpga") else data


class _Edge(_Entry):
    source_id: _Id
    dest_id: _Id
    cost: _Finite


class _Header(BaseModel):
    accelerator_bytes: _Number = Field(alias="maxSizePerFPGA")
    accelerators: _Count = Field(alias="maxFPGAs")
    cpus: _Count = Field(alias="maxCPUs")
    nodes: list[Any]
    edges: list[Any]


def parse_dnn_partitioning(data: Any, name: str) -> Problem:
    """The problem that the parsed JSON describes; devices are ``acc0``… and, for all CPU cores together, ``cpu0``.

    Accelerators pay for every value that crosses their border, once each; the CPUs are one device that pays nothing for
    transfers and has no cap. Forward edges bind the order; a colour class stays together.
    Raises: UsageError: every fault of the data.
    """
    header, nodes, given = _parsed(data, name)
    edges = list(dict.fromkeys((edge.source_id, edge.dest_id) for edge in given))
    costs = {edge.source_id: edge.cost for edge in reversed(given)}
    ids = _sorted_ids(nodes, edges, name)
    place = {node: number for number, node in enumerate(ids)}
    accelerators, cpus = header.accelerators, min(1, header.cpus)
    devices = [f"acc{number}" for number in range(accelerators)] + ["cpu0"] * cpus
    compute = np.empty((len(ids), len(devices)))
    reasons: dict[tuple[int, int], str] = {}
    classes: dict[int | str, list[int]] = {}
    for number, node in enumerate(nodes[identity] for identity in ids):
        compute[number, :accelerators] = node.fpga_latency if node.supported_on_fpga else math.inf
        compute[number, accelerators:] = node.cpu_latency
        if not node.supported_on_fpga:
            reasons |= dict.fromkeys(((number, d) for d in range(accelerators)), f"accelerators do not support node {node.id}")
        if node.color_class is not None:
            classes.setdefault(node.color_class, []).append(number)
    readers: dict[int, list[int]] = {}
    for source, target in edges:
        readers.setdefault(source, []).append(place[target])
    transfers = Transfers.free(len(devices))
    transfers.send_s_per_byte[:accelerators] = 1.0
    transfers.receive_s_per_byte[:, :accelerators] = 1.0
    np.fill_diagonal(transfers.send_s_per_byte, 0.0)
    np.fill_diagonal(transfers.receive_s_per_byte, 0.0)
    return Problem(
        name=name,
        ops=tuple(str(node) for node in ids),
        devices=tuple(devices),
        compute_s=compute,
        nets=tuple(Net(place[source], tuple(sorted(found)), costs[source]) for source, found in sorted(readers.items())),
        order=_order(nodes, edges, place, classes),
        transfers=transfers,
        op_bytes=np.array([nodes[node].size or 0.0 for node in ids]),
        memory_bytes=np.array([header.accelerator_bytes] * accelerators + [math.inf] * cpus),
        groups=tuple(tuple(members) for members in classes.values() if len(members) > 1),
        send_once=True,
        reasons=reasons,
    ).verify()


def _parsed(data: Any, name: str) -> tuple[_Header, dict[int, _Node], list[_Edge]]:
    """The data with the right types. Raises: UsageError: with every fault."""
    subject = f"workload '{name}' is not understood"
    header = validated(_Header, data, UsageError, subject)
    faults = _size_faults(len(header.nodes), header.accelerators + min(1, header.cpus))
    nodes, edges = _entries(_Node, header.nodes, "nodes", faults), _entries(_Edge, header.edges, "edges", faults)
    raise_faults(UsageError, subject, faults or _relation_faults(header, nodes, edges))
    return header, {node.id: node for node in nodes}, edges


def _size_faults(num_nodes: int, num_devices: int) -> list[str]:
    faults = ["it has no nodes"] if num_nodes < 1 else []
    if not 1 <= num_devices <= MAX_DEVICES:
        faults.append(f"it has {num_devices or 'no'} devices, and 1 to {MAX_DEVICES} are needed")
    if (num_times := num_nodes * num_devices) > MAX_TIMES:
        faults.append(f"{num_nodes} nodes on {num_devices} devices are {num_times} times, and at most {MAX_TIMES} are read")
    return faults


def _entries(model: type[M], data: Sequence[Any], name: str, faults: list[str]) -> list[M]:
    """The entries of a list. After many faults the rest is left out, because all messages together would fill the memory."""
    found = []
    for position, entry in enumerate(data):
        if len(faults) > SHOWN_FAULTS:
            break
        try:
            found.append(model.model_validate(entry))
        except ValidationError as failure:
            faults += field_faults([{**e, "loc": (name, position, *e["loc"])} for e in failure.errors(include_url=False)])
    return found


def _relation_faults(header: _Header, nodes: Sequence[_Node], edges: Sequence[_Edge]) -> list[str]:
    faults = []
    known: set[int] = set()
    for node in nodes:
        if node.id in known:
            faults.append(f"node {node.id} stands twice")
        known.add(node.id)
        if not node.supported_on_fpga and header.cpus == 0:
            faults.append(f"node {node.id} is not supported on accelerators, and there are no CPUs")
    costs: dict[int, float] = {}
    for edge in edges:
        source, target = edge.source_id, edge.dest_id
        faults += [f"edge {source} -> {target} names unknown node {node}" for node in (source, target) if node not in known]
        if abs(costs.setdefault(source, edge.cost) - edge.cost) > COST_TOLERANCE:
            faults.append(f"the out-edges of node {source} have costs {costs[source]} and {edge.cost}; one node has one cost")
    return faults


def _sorted_ids(nodes: Mapping[int, Any], edges: Sequence[tuple[int, int]], name: str) -> list[int]:
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(nodes, ()))
    for source, target in edges:
        sorter.add(target, source)
    try:
        return list(sorter.static_order())
    except CycleError as failure:
        cycle = [str(node) for node in failure.args[1]]
        path = " -> ".join(cycle if len(cycle) <= MAX_SHOWN_CYCLE else [*cycle[: MAX_SHOWN_CYCLE - 1], "…", cycle[-1]])
        raise UsageError(f"workload '{name}' has a cycle: {path}. Remove one of its edges.") from None


def _order(
    nodes: Mapping[int, _Node],
    edges: Sequence[tuple[int, int]],
    place: Mapping[int, int],
    classes: Mapping[Any, Sequence[int]],
) -> tuple[tuple[int, int], ...]:
    """Forward edges. A backward class without a forward node adds its backward edges, reversed."""
    backward = {place[node] for node, entry in nodes.items() if entry.is_backward_node}
    orphans = set(backward)
    for members in classes.values():
        if not backward.issuperset(members):
            orphans.difference_update(members)
    order = set()
    for source, target in ((place[source], place[target]) for source, target in edges):
        if source not in backward and target not in backward:
            order.add((source, target))
        elif source in backward and target in backward and (source in orphans or target in orphans):
            order.add((target, source))
    return tuple(sorted(order))


_NODE = re.compile(r"^(\S+) -- (.*?) -- (.*)$")
_FIELD = re.compile(r"\b(\w+)=(\[[^][]*\]|[^,\s]+)")
"""A field and its value; the pattern takes linear time on any text."""


def parse_pipedream(text: str, name: str, num_devices: int, bytes_per_s: float, overlap: bool = False) -> Problem:
    """The problem that a PipeDream profile describes, on ``num_devices`` equal devices; times are milliseconds.

    Compute is forward plus backward. A value costs sender and receiver ``activation_size / bytes_per_s``, twice where there is a
    backward pass (its gradient comes back). ``parameter_size`` is the memory of the op; the exchange of parameters between
    replicas that train is not counted. Sources described as ``Input`` take no time and send nothing: the profiler measures the
    loader there. With ``overlap``, devices transfer while they compute, as PipeDream's planner assumes.
    Raises: UsageError: every fault of the text.
    """
    entries: dict[str, dict[str, float]] = {}
    edges: list[tuple[str, str]] = []
    inputs: list[str] = []
    faults: list[str] = []
    if not bytes_per_s > 0:
        faults.append(f"a positive rate is needed, but it is {bytes_per_s} bytes/s")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or len(faults) > SHOWN_FAULTS:
            continue
        ends = line.strip().split(" -- ")
        if line[0].isspace() and len(ends) == 2:
            edges.append((ends[0], ends[1]))
        elif match := _NODE.match(line):
            if match[1] in entries:
                faults.append(f"line {number} names node {shown(match[1])} again")
            entries[match[1]] = _pipedream_fields(match[3], number, faults)
            if match[2].startswith("Input"):
                inputs.append(match[1])
        else:
            faults.append(f"line {number} is neither a node nor an edge: {shown(line.strip())}")
    faults += [f"edge {a} -- {b} names unknown node {node}" for a, b in edges for node in (a, b) if node not in entries]
    faults += _size_faults(len(entries), num_devices)
    raise_faults(UsageError, f"workload '{name}' is not understood", faults)
    for node in set(inputs) - {target for _, target in edges}:
        entries[node] = dict.fromkeys(entries[node], 0.0)
    numbers = {node: number for number, node in enumerate(entries)}
    names = list(entries)
    ids = _sorted_ids(dict.fromkeys(range(len(names))), [(numbers[a], numbers[b]) for a, b in edges], name)
    ops = [names[number] for number in ids]
    place = {op: number for number, op in enumerate(ops)}
    readers: dict[int, set[int]] = {}
    for source, target in edges:
        readers.setdefault(place[source], set()).add(place[target])
    work = np.array([entries[op]["forward_compute_time"] + entries[op]["backward_compute_time"] for op in ops])
    trains = any(entry["backward_compute_time"] for entry in entries.values())
    transfers = Transfers.free(num_devices)
    for array in (transfers.send_s_per_byte, transfers.receive_s_per_byte):
        array[:num_devices, :num_devices] = (1.0 + trains) * 1e3 / bytes_per_s
        np.fill_diagonal(array, 0.0)
    return Problem(
        name=name,
        ops=tuple(ops),
        devices=tuple(f"acc{number}" for number in range(num_devices)),
        compute_s=np.repeat(work[:, None], num_devices, axis=1),
        nets=tuple(Net(s, tuple(sorted(t)), entries[ops[s]]["activation_size"]) for s, t in sorted(readers.items())),
        order=tuple(sorted((source, target) for source, targets in readers.items() for target in targets)),
        transfers=transfers,
        op_bytes=np.array([entries[op]["parameter_size"] for op in ops]),
        memory_bytes=np.full(num_devices, math.inf),
        send_once=True,
        overlap=overlap,
    ).verify()


def _pipedream_fields(text: str, line: int, faults: list[str]) -> dict[str, float]:
    """The four numbers of a node; a list (one size for each output) counts as its sum."""
    found = dict(_FIELD.findall(text))
    values = {}
    for key in ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size"):
        try:
            values[key] = _finite(sum(float(part) for part in re.split(r"[;,\s]+", found[key].strip("[] ")) if part))
        except KeyError:
            faults.append(f"line {line} has no {key}")
        except ValueError as failure:
            faults.append(f"line {line} has {key}={shown(found[key])}: {failure!s:.200}")
    return values


def read_split(problem: Problem, data: Any) -> tuple[Block, ...]:
    """The blocks that a split describes: {op: device}, {"assignment": {...}}, or the paper's {"fpgas": [...], "cpus": [...]}.

    A list of devices stands for replicas. The paper's form may leave out backward nodes: they follow their colour class. Blocks
    come in the order of their devices.
    Raises: PlanError: not a split, an op that is unknown, on no device or on two, an unknown device, or a broken rule.
    """
    assignment = data.get("assignment", data) if isinstance(data, dict) else data
    if isinstance(data, dict) and "fpgas" in data:
        assignment = _paper_split(problem, data)
    if not isinstance(assignment, dict):
        raise PlanError(f"a split is a mapping from op to device, not {type(assignment).__name__}")
    homes = {op: tuple(devices) if isinstance(devices, list) else (devices,) for op, devices in assignment.items()}
    place = {name: number for number, name in enumerate(problem.devices)}
    named = [device for devices in homes.values() for device in devices]
    unknown = [device for device in named if not isinstance(device, str) or device not in place]
    faults = [f"op {shown(op)} is unknown" for op in homes if op not in problem.index]
    faults += [f"device {name} is unknown" for name in dict.fromkeys(map(shown, unknown))]
    faults += [f"op '{op}' is on no device" for op in problem.ops if not homes.get(op)]
    raise_faults(PlanError, f"the split does not fit '{problem.name}'", faults)
    members: dict[tuple[int, ...], list[int]] = {}
    for number, op in enumerate(problem.ops):
        members.setdefault(tuple(sorted(place[device] for device in homes[op])), []).append(number)
    blocks = tuple(Block(tuple(ops), devices) for devices, ops in sorted(members.items()))
    raise_faults(PlanError, f"the split does not fit '{problem.name}'", find_faults(problem, blocks, contiguous=False))
    return blocks


def _paper_split(problem: Problem, data: Mapping[str, Any]) -> dict[str, str]:
    """Op to device; ops that are left out follow their group if the group is on one device."""
    parts = [(f"acc{number}", part) for number, part in enumerate(data["fpgas"])] if isinstance(data["fpgas"], list) else []
    cpus = data.get("cpus", [])
    parts += [("cpu0", part) for part in cpus] if isinstance(cpus, list) else []
    lists = [(device, part.get("nodes")) for device, part in parts if isinstance(part, dict)]
    if not parts or len(lists) < len(parts) or not all(isinstance(nodes, list) for _, nodes in lists):
        raise PlanError("'fpgas' and 'cpus' of a split must be lists of objects with a list 'nodes'")
    assignment: dict[str, str] = {}
    for device, nodes in lists:
        for op in map(str, nodes or []):
            if assignment.setdefault(op, device) != device:
                raise PlanError(f"op {shown(op)} is on two devices of the split, '{assignment[op]}' and '{device}'")
    for group in problem.groups:
        homes = {assignment[problem.ops[op]] for op in group if problem.ops[op] in assignment}
        if len(homes) == 1:
            assignment |= {problem.ops[op]: next(iter(homes)) for op in group}
    return assignment
