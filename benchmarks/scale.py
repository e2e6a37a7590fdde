"""Contiguous plans of simple and of large graphs beside three simple methods, as a table: ``python -m benchmarks.scale``.

The simple methods are a dynamic program along the order in which ops were given, the best of ten such programs along random
topological orders, and an annealer that starts from the better one. The bound is proved in the same run as our plan.
"""

import argparse
import json
import re
from collections.abc import Sequence
from math import exp, inf
from random import Random
from time import monotonic
from typing import Any

import numpy as np

from autosplit.costs.cost import block_of, evaluate
from autosplit.costs.planschedule import schedule_blocks
from autosplit.costs.problem import Block, Problem
from autosplit.costs.workloads import parse_dnn_partitioning
from autosplit.planners.clusters import topological_order
from autosplit.planners.contiguous.linear import chain_in_order
from autosplit.planners.contiguous.proving import chain_blocks
from autosplit.planners.instance import contract
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands
from benchmarks.planner import WORKLOADS, chained
from benchmarks.scale_graphs import cluster_problem, graph_problem, layered_edges, simple_graphs

ENCODERS = ((16, 8, 1.0), (16, 32, 1.0), (163, 32, 10.0), (491, 32, 10.0))
"""Layers of BERT: (layers, accelerators, seconds of limit)."""

LARGE = ((3000, 16, 1.0), (10_000, 32, 1.0), (30_000, 32, 1.0), (30_000, 32, 4.0))
"""Layered graphs: (ops, devices, times that an op takes on the slowest device over the fastest)."""

NUM_ORDERS = 10

CHAINS = (("op-bert_l-3_inference", 4, 8, 10.0), ("layer-resnet50_inference", 6, 8, 10.0))
"""Chained workloads: (workload, copies, accelerators, seconds of limit)."""


RACKS_OPS, RACKS_S = 30_000, 45.0
"""Ops of the graph for a cluster of racks, and seconds of limit."""


def encoder(num_layers: int, accelerators: int, name: str = "op-bert_l-3_inference") -> Problem:
    """The embedding of a BERT and ``num_layers`` copies of its second layer; every layer reads the mask of the embedding.

    An op belongs to the last layer whose weights it, or an op that it depends on, uses. A layer reads one op of the layer before.
    """
    data = json.loads((WORKLOADS / f"{name}.json").read_text())
    nodes = {node["id"]: node for node in data["nodes"]}
    writers: dict[int, list[int]] = {node: [] for node in nodes}
    for edge in data["edges"]:
        writers[edge["destId"]].append(edge["sourceId"])
    layer: dict[int, int] = {}

    def layer_of(node: int) -> int:
        if node not in layer:
            own = re.search(r"encoder\.layer\.(\d+)\.", nodes[node]["name"])
            outside = -1 if not re.match(r"cls|bert\.pooler", nodes[node]["name"]) else len(nodes)
            layer[node] = max([int(own[1]) if own else outside, *(layer_of(writer) for writer in writers[node])])
        return layer[node]

    inner = [node for node in nodes if layer_of(node) == 1]
    joints = {layer[edge["sourceId"]]: edge["sourceId"] for edge in data["edges"] if layer[edge["destId"]] == 1}
    leaving = next(edge["sourceId"] for edge in data["edges"] if layer[edge["sourceId"]] == 1 and layer[edge["destId"]] == 2)
    entering = next(  # the op that layer 0 reads where layer 1 reads layer 0
        edge["sourceId"]
        for edge in data["edges"]
        if layer[edge["sourceId"]] == -1 and layer[edge["destId"]] == 0 and edge["cost"] == _cost(data, leaving)
    )
    stride, colours = 1 + max(nodes), 1 + max(node.get("colorClass") or 0 for node in data["nodes"])
    found = [node for node in data["nodes"] if layer[node["id"]] == -1]
    edges = [edge for edge in data["edges"] if layer[edge["destId"]] == -1]
    for number in range(1, num_layers + 1):
        for node in inner:
            colour = nodes[node].get("colorClass")
            moved = None if colour is None else colour + colours * number
            found.append(nodes[node] | {"id": node + stride * number, "colorClass": moved})
        for edge in data["edges"]:
            if layer[edge["destId"]] != 1:
                continue
            source = edge["sourceId"]
            if layer[source] == 1:
                source += stride * number
            elif source == joints[0]:
                source = entering if number == 1 else leaving + stride * (number - 1)
            edges.append({"sourceId": source, "destId": edge["destId"] + stride * number, "cost": edge["cost"]})
    whole = data | {"nodes": found, "edges": edges, "maxFPGAs": accelerators}
    return parse_dnn_partitioning(whole, f"{num_layers} layers of BERT")


def _cost(data: dict[str, Any], node: int) -> float:
    return float(next(edge["cost"] for edge in data["edges"] if edge["sourceId"] == node))


def program_s(problem: Problem, seconds: float) -> tuple[float, float, tuple[Block, ...]]:
    """The largest load of the program along the given order, the smallest of ten random orders, and the better plan.

    The given order has no time limit. After ``seconds``, no more random orders are tried.
    """
    items, random = contract(problem, Demands()), Random(0)
    bound_s = items.compute_bound_s
    after = [items.after.row(item).tolist() for item in range(items.num_items)]
    given = np.array([ops[0] for ops in items.ops])
    found: list[tuple[float, tuple[Block, ...]]] = []
    deadline = inf
    for number in range(1 + NUM_ORDERS):
        keys = given if not number else np.array(random.sample(range(items.num_items), items.num_items))
        order, chain = topological_order(after, keys), None
        known_s = min((value_s for value_s, _ in found[1:]), default=inf)
        for limit_s in (1.05 * bound_s, 1.5 * bound_s, inf):
            if chain is None and limit_s < 2 * known_s:
                chain = chain_in_order(items, order, min(limit_s, known_s), deadline)
        if chain is not None or not number:
            found.append((chain.value_s, chain_blocks(items, chain)) if chain is not None else (inf, ()))
        deadline = monotonic() + seconds if not number else deadline
    random_s = min((value_s for value_s, _ in found[1:]), default=inf)
    return found[0][0], random_s, min(found, key=lambda pair: pair[0])[1]


def annealed_s(problem: Problem, blocks: Sequence[Block], seconds: float) -> float:  # noqa: C901 - one loop
    """The largest load after annealing for some seconds: single ops move to the block before or after theirs.

    A value costs its bytes in seconds at each block that it touches, if there are several: the model of all these graphs.
    """
    random, place = Random(0), block_of(problem, blocks).tolist()
    device = [block.devices[0] for block in blocks]
    loads = evaluate(problem, blocks).device_s[device].tolist()
    held = np.bincount(place, problem.op_bytes, len(blocks)).tolist()
    before: list[list[int]] = [[] for _ in problem.ops]
    after: list[list[int]] = [[] for _ in problem.ops]
    for source, target in problem.order:
        after[source].append(target)
        before[target].append(source)
    pins = [[op for op in {net.producer, *net.consumers} if op >= 0] for net in problem.nets]
    nets: list[list[int]] = [[] for _ in problem.ops]
    for number, members in enumerate(pins):
        for op in members:
            nets[op].append(number)
    best_s, began = max(loads), monotonic()
    target_s, share = best_s * 0.998, 0.0
    while share < 1.0:
        share = (monotonic() - began) / seconds
        heat = 0.003 * best_s * 0.001 ** min(share, 1.0)
        for _ in range(200):
            op = random.randrange(problem.num_ops)
            here = place[op]
            goal = here + random.choice((-1, 1))
            if not 0 <= goal < len(blocks) or held[goal] + problem.op_bytes[op] > problem.memory_bytes[device[goal]]:
                continue
            if any(place[o] > goal for o in before[op]) or any(place[o] < goal for o in after[op]):
                continue
            change = {here: -float(problem.compute_s[op, device[here]]), goal: float(problem.compute_s[op, device[goal]])}
            for net in nets[op]:
                homes, size = [place[o] for o in pins[net]], problem.nets[net].num_bytes
                moved = [*homes, goal]
                moved.remove(here)
                for block in set(homes) if len(set(homes)) > 1 else ():
                    change[block] = change.get(block, 0.0) - size
                for block in set(moved) if len(set(moved)) > 1 else ():
                    change[block] = change.get(block, 0.0) + size
            rise = sum(max(0.0, loads[b] + more - target_s) - max(0.0, loads[b] - target_s) for b, more in change.items())
            if rise > 0 and random.random() >= exp(-rise / heat):
                continue
            place[op] = goal
            held[here] -= problem.op_bytes[op]
            held[goal] += problem.op_bytes[op]
            for block, more in change.items():
                loads[block] += more
            if max(loads) < best_s:
                best_s = max(loads)
                target_s = min(target_s, best_s * 0.998)
    return best_s


def racks(num_ops: int, limit_s: float) -> None:
    """Print what is planned for 256 devices of 32 hosts in 4 racks, and what the simulator makes of the plan."""
    problem = cluster_problem(num_ops)
    began = monotonic()
    solution = solve(problem, time_limit_s=limit_s)
    solve_s, began = monotonic() - began, monotonic()
    paced_s = 1 / schedule_blocks(problem, solution.blocks, 2 * problem.num_devices).steady_per_s
    wire_s = evaluate(problem, solution.blocks).wire_s
    cells = [problem.num_ops, problem.num_devices, f"{solution.objective_s:.3f}", f"{solution.bound_s:.3f}"]
    cells += [f"{100 * solution.gap:.2f} %", f"{solve_s:.1f}", f"{paced_s:.3f}", f"{monotonic() - began:.1f}"]
    cells += [f"{problem.wires.all[int(wire_s.argmax())].name}: {wire_s.max():.3f}"]
    print("\n| ops | devices in racks | ours | bound | gap | s | simulated | s | busiest wire |\n" + "|---" * 9 + "|")
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-ops", type=int, default=30_000, help="leave larger graphs out")
    parser.add_argument(
        "--time-limit", type=float, default=10.0, help="seconds for our plan of a simple graph, the annealer, and ten orders"
    )
    parser.add_argument("--num-ops", type=int, default=1000, help="ops of each simple graph")
    parser.add_argument("--num-devices", type=int, default=8, help="devices of each simple graph")
    parser.add_argument("--only", default="", help="part of the names of graphs to run")
    options = parser.parse_args(arguments)
    limit_s = options.time_limit
    cases = [(problem, limit_s) for problem in simple_graphs(options.num_ops, options.num_devices)]
    for ops, devices, slowest in LARGE:
        caps = (1.6, 2.5) if slowest > 1 else None
        name = "unequal devices, caps" if slowest > 1 else "layered"
        edges = list(layered_edges(ops, Random(1)))
        cases.append((graph_problem(name, edges, ops, devices, caps=caps, speeds=(1.0, slowest)), 20.0))
    num_simple = len(cases)
    cases += [(encoder(*case[:2]), case[2]) for case in ENCODERS]
    cases += [(chained(name, copies, accelerators), limit_s) for name, copies, accelerators, limit_s in CHAINS]
    for small in (graph_problem("small", list(layered_edges(100, Random(1))), 100, 3), encoder(2, 3)):
        solve(small, time_limit_s=5.0)
    print("| graph | ops | devices | given order | ten orders | annealer | ours | bound | gap | over ten | s |", flush=True)
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for number, (problem, seconds) in enumerate(cases):
        if problem.num_ops > options.most_ops or options.only not in problem.name:
            continue
        given_s, random_s, blocks = program_s(problem, limit_s)
        near_s = annealed_s(problem, blocks, limit_s) if number < num_simple and blocks else inf
        began = monotonic()
        solution = solve(problem, time_limit_s=seconds)
        cells = [problem.name, str(problem.num_ops), str(problem.num_devices)]
        cells += [f"{value:.3f}" if value < inf else "" for value in (given_s, random_s, near_s)]
        cells += [f"{solution.objective_s:.3f}", f"{solution.bound_s:.3f}", f"{100 * solution.gap:.2f} %"]
        cells += [f"{100 * (solution.objective_s / random_s - 1):+.2f} %" if random_s < inf else "", f"{monotonic() - began:.1f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    if options.most_ops >= RACKS_OPS and options.only in "racks":
        racks(RACKS_OPS, RACKS_S)


if __name__ == "__main__":
    main()
