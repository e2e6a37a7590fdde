"""Planner workloads of others, read as problems: dnn-partitioning JSON and PipeDream's graph.txt; and splits of them.

The JSON format and its cost model are those of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN
Graph Operators" (NeurIPS 2020); ``graph.txt`` is what the profiler of PipeDream (Narayanan et al., SOSP 2019) writes. Times
keep the file's own unit.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from autosplit.costs.cost import find_faults
from autosplit.costs.problem import Block, Net, Problem, Transfers
from autosplit.errors import PlanError, UsageError, raise_faults

Format = Literal["dnn-partitioning", "pipedream"]
COST_TOLERANCE = 1e-6


def read_workload(path: Path, format: Format = "dnn-partitioning", *, num_devices: int = 4, bytes_per_s: float = 1e9) -> Problem:
    """The problem that a workload file describes.

    Args:
        path: the file.
        format: ``dnn-partitioning`` (JSON) or ``pipedream`` (graph.txt).
        num_devices: for ``pipedream`` only, whose files name no devices.
        bytes_per_s: for ``pipedream`` only: what a link between two of its devices carries.
    Raises: UsageError: every fault of the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if format == "dnn-partitioning" else None
    except (OSError, UnicodeDecodeError) as failure:
        raise UsageError(f"workload file '{path}' cannot be read: {failure}") from None
    except (ValueError, RecursionError) as failure:  # too many digits; too many brackets
        raise UsageError(f"workload file '{path}' is truncated or no JSON: {failure}") from None
    if format == "pipedream":
        return parse_pipedream(text, path.stem, num_devices, bytes_per_s)
    return parse_dnn_partitioning(data, path.stem)


def parse_dnn_partitioning(data: Any, name: str) -> Problem:
    """The problem that the parsed JSON describes; devices are ``acc0``… and, for all CPU cores together, ``cpu0``.

    Accelerators pay for every value that crosses their border, once each; the CPUs are one device that pays nothing for
    transfers and has no cap. Forward edges bind the order; a colour class stays together.
    Raises: UsageError: every fault of the data.
    """
    faults = _json_faults(data)
    raise_faults(UsageError, f"workload '{name}' is not understood", faults)
    nodes = {node["id"]: node for node in data["nodes"]}
    edges = list(dict.fromkeys((edge["sourceId"], edge["destId"]) for edge in data["edges"]))
    costs = {edge["sourceId"]: float(edge["cost"]) for edge in reversed(data["edges"])}
    ids = _sorted_ids(nodes, edges, name)
    place = {node: number for number, node in enumerate(ids)}
    accelerators, cpus = int(data["maxFPGAs"]), min(1, int(data["maxCPUs"]))
    devices = [f"acc{number}" for number in range(accelerators)] + ["cpu0"] * cpus
    compute = np.empty((len(ids), len(devices)))
    reasons: dict[tuple[int, int], str] = {}
    for number, node in enumerate(ids):
        supported = bool(nodes[node]["supportedOnFpga"])
        compute[number, :accelerators] = float(nodes[node]["fpgaLatency"]) if supported else math.inf
        compute[number, accelerators:] = float(nodes[node]["cpuLatency"])
        if not supported:
            reasons |= {(number, device): f"accelerators do not support node {node}" for device in range(accelerators)}
    readers: dict[int, list[int]] = {}
    for source, target in edges:
        readers.setdefault(source, []).append(place[target])
    classes: dict[Any, list[int]] = {}
    for node in ids:
        if nodes[node].get("colorClass") is not None:
            classes.setdefault(nodes[node]["colorClass"], []).append(place[node])
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
        op_bytes=np.array([float(nodes[node].get("size") or 0.0) for node in ids]),
        memory_bytes=np.array([float(data["maxSizePerFPGA"])] * accelerators + [math.inf] * cpus),
        groups=tuple(tuple(members) for members in classes.values() if len(members) > 1),
        send_once=True,
        reasons=reasons,
    ).verify()


SMALLEST, LARGEST = 1e-280, 1e300
"""Numbers outside, 0 and infinity aside, are no times or sizes: their sums would overflow, or what planners divide by them."""

NEEDED = f"0 or more is needed, and between {SMALLEST:g} and {LARGEST:g} where it is not 0"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and (value in (0, math.inf) or SMALLEST <= value <= LARGEST)


def _count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= 10_000


def _json_faults(data: Any) -> list[str]:
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in ("nodes", "edges")):
        return ["it must be an object with the lists 'nodes' and 'edges'"]
    faults = [] if _number(data.get("maxSizePerFPGA")) else [f"'maxSizePerFPGA' must be a number; {NEEDED}"]
    faults += [f"'{key}' must be a whole number, 0 to 10000" for key in ("maxFPGAs", "maxCPUs") if not _count(data.get(key))]
    if not faults and data["maxFPGAs"] + data["maxCPUs"] < 1:
        faults.append("it has no devices: 'maxFPGAs' and 'maxCPUs' are both 0")
    if not data["nodes"]:
        faults.append("it has no nodes")
    seen = set()
    for position, node in enumerate(data["nodes"]):
        if not isinstance(node, dict) or not isinstance(node.get("id"), int):
            faults.append(f"entry {position} of 'nodes' has no whole number as 'id'")
            continue
        if node["id"] in seen:
            faults.append(f"node {node['id']} stands twice")
        seen.add(node["id"])
        faults += _node_faults(node)
        if not node.get("supportedOnFpga") and data.get("maxCPUs") == 0:
            faults.append(f"node {node['id']} is not supported on accelerators, and there are no CPUs")
    return faults + _edge_faults(data["edges"], seen)


def _node_faults(node: Mapping[str, Any]) -> list[str]:
    colour = node.get("colorClass")
    missing = [] if colour is None or isinstance(colour, int | float | str) else [f"node {node['id']} has colorClass {colour!r}"]
    missing += [
        f"node {node['id']} has no '{key}'" for key in ("supportedOnFpga", "cpuLatency", "fpgaLatency") if key not in node
    ]
    values = {"cpuLatency": node.get("cpuLatency", 0), "fpgaLatency": node.get("fpgaLatency", 0), "size": node.get("size") or 0}
    if not node.get("supportedOnFpga"):
        del values["fpgaLatency"]
    return missing + [
        f"node {node['id']} has {key} {value!r}; {NEEDED}"
        for key, value in values.items()
        if not _number(value) or (key == "size" and value == math.inf)
    ]


def _edge_faults(edges: Sequence[Any], known: set[int]) -> list[str]:
    faults: list[str] = []
    costs: dict[int, float] = {}
    for position, edge in enumerate(edges):
        if not isinstance(edge, dict) or not {"sourceId", "destId", "cost"} <= set(edge):
            faults.append(f"entry {position} of 'edges' needs 'sourceId', 'destId' and 'cost'")
            continue
        source, target, cost = edge["sourceId"], edge["destId"], edge["cost"]
        if not isinstance(source, int) or not isinstance(target, int):
            faults.append(f"edge {source!r} -> {target!r} must name nodes by their whole numbers")
            continue
        faults += [f"edge {source} -> {target} names unknown node {node}" for node in (source, target) if node not in known]
        if not _number(cost) or cost == math.inf:
            faults.append(f"edge {source} -> {target} has cost {cost!r}; {NEEDED}")
        elif abs(costs.setdefault(source, cost) - cost) > COST_TOLERANCE:
            faults.append(f"the out-edges of node {source} have costs {costs[source]} and {cost}; one node has one cost")
    return faults


def _sorted_ids(nodes: Mapping[int, Any], edges: Sequence[tuple[int, int]], name: str) -> list[int]:
    sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(nodes, ()))
    for source, target in edges:
        sorter.add(target, source)
    try:
        return list(sorter.static_order())
    except CycleError as failure:
        path = " -> ".join(str(node) for node in failure.args[1])
        raise UsageError(f"workload '{name}' has a cycle: {path}. Remove one of its edges.") from None


def _order(
    nodes: Mapping[int, Mapping[str, Any]],
    edges: Sequence[tuple[int, int]],
    place: Mapping[int, int],
    classes: Mapping[Any, Sequence[int]],
) -> tuple[tuple[int, int], ...]:
    """Forward edges; and, for a backward class without forward node, its backward edges the other way round."""
    backward = {place[node] for node, entry in nodes.items() if entry.get("isBackwardNode")}
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
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")


def parse_pipedream(text: str, name: str, num_devices: int, bytes_per_s: float) -> Problem:
    """The problem that a PipeDream profile describes, on ``num_devices`` equal devices; times are milliseconds.

    Compute is forward plus backward. A value costs sender and receiver ``activation_size / bytes_per_s``, twice where there
    is a backward pass (its gradient comes back). ``parameter_size`` is what the op keeps in memory.
    Raises: UsageError: every fault of the text.
    """
    entries: dict[str, dict[str, float]] = {}
    edges: list[tuple[str, str]] = []
    faults: list[str] = []
    if num_devices < 1 or not bytes_per_s > 0:
        faults.append(f"at least 1 device and a positive rate are needed, but there are {num_devices} and {bytes_per_s} bytes/s")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        ends = line.strip().split(" -- ")
        if line[0].isspace() and len(ends) == 2:
            edges.append((ends[0], ends[1]))
        elif match := _NODE.match(line):
            if match[1] in entries:
                faults.append(f"line {number} names node {match[1]} again")
            entries[match[1]] = _pipedream_fields(match[3], number, faults)
        else:
            faults.append(f"line {number} is neither a node nor an edge: {line.strip()[:60]!r}")
    faults += [f"edge {a} -- {b} names unknown node {node}" for a, b in edges for node in (a, b) if node not in entries]
    if not entries:
        faults.append("it has no nodes")
    raise_faults(UsageError, f"workload '{name}' is not understood", faults)
    numbers = {node: number for number, node in enumerate(entries)}
    names = list(entries)
    ids = _sorted_ids(dict.fromkeys(range(len(names))), [(numbers[a], numbers[b]) for a, b in edges], name)
    ops = [names[number] for number in ids]
    place = {op: number for number, op in enumerate(ops)}
    readers: dict[int, set[int]] = {}
    for source, target in edges:
        readers.setdefault(place[source], set()).add(place[target])
    work = np.array([entries[op]["forward_compute_time"] + entries[op]["backward_compute_time"] for op in ops])
    ways = 2.0 if any(entry["backward_compute_time"] for entry in entries.values()) else 1.0
    transfers = Transfers.free(num_devices)
    for array in (transfers.send_s_per_byte, transfers.receive_s_per_byte):
        array[:num_devices, :num_devices] = ways * 1e3 / bytes_per_s
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
    ).verify()


def _pipedream_fields(text: str, line: int, faults: list[str]) -> dict[str, float]:
    """The four numbers of a node; a list (one size for each output) counts as its sum."""
    wanted = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    found = dict(_FIELD.findall(text))
    values = dict.fromkeys(wanted, 0.0)
    for key in wanted:
        try:
            values[key] = sum(float(part) for part in re.split(r"[;,\s]+", found[key].strip("[] ")) if part)
        except KeyError:
            faults.append(f"line {line} has no {key}")
        except ValueError:
            faults.append(f"line {line} has {key}={found[key]}, which is no number")
        if not _number(values[key]) or values[key] == math.inf:
            faults.append(f"line {line} has {key}={found[key]}; {NEEDED}, and no infinity")
    return values


def read_split(problem: Problem, data: Any) -> tuple[Block, ...]:
    """The blocks that a split describes: {op: device}, {"assignment": {...}}, or the paper's {"fpgas": [...], "cpus": [...]}.

    A list of devices stands for replicas. The paper's form may leave out backward nodes: they follow their colour class. Blocks
    come in the order of their devices.
    Raises: PlanError: no split, an op that is unknown, on no device or on two, an unknown device, or a broken rule.
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
    faults = [f"op '{op}' is unknown" for op in homes if op not in problem.index]
    faults += [f"device '{device}' is unknown" for device in dict.fromkeys(map(str, unknown))]
    faults += [f"op '{op}' is on no device" for op in problem.ops if not homes.get(op)]
    raise_faults(PlanError, f"the split does not fit '{problem.name}'", faults)
    members: dict[tuple[int, ...], list[int]] = {}
    for number, op in enumerate(problem.ops):
        members.setdefault(tuple(sorted(place[device] for device in homes[op])), []).append(number)
    blocks = tuple(Block(tuple(ops), devices) for devices, ops in sorted(members.items()))
    raise_faults(PlanError, f"the split does not fit '{problem.name}'", find_faults(problem, blocks, contiguous=False))
    return blocks


def _paper_split(problem: Problem, data: Mapping[str, Any]) -> dict[str, str]:
    """Op to device; ops that are left out follow their group where that is on one device."""
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
                raise PlanError(f"op '{op}' is on two devices of the split, '{assignment[op]}' and '{device}'")
    for group in problem.groups:
        homes = {assignment[problem.ops[op]] for op in group if problem.ops[op] in assignment}
        if len(homes) == 1:
            assignment |= {problem.ops[op]: next(iter(homes)) for op in group}
    return assignment
