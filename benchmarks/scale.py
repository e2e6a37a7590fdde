"""Scale: large graphs with contiguous plans, as a table. ``python -m benchmarks.scale``.

Encoder layers of BERT one after the other, layered random graphs (ops of a layer read one to three of the layer before) and
chained workloads. The bound is proved in the same run.
"""

import argparse
import json
import re
from collections.abc import Sequence
from random import Random
from time import monotonic
from typing import Any

import numpy as np

from autosplit.costs.problem import Net, Problem, Transfers
from autosplit.costs.workloads import parse_dnn_partitioning
from autosplit.planners.portfolio import solve
from benchmarks.planner import WORKLOADS, chained

ENCODERS = ((16, 8, 1.0), (16, 32, 1.0), (163, 32, 10.0), (491, 32, 10.0))
"""Layers of BERT: (layers, accelerators, seconds of limit)."""

GRAPHS = ((1000, 8, 1.0, 4), (3000, 16, 10.0, 4), (10_000, 32, 10.0, 4), (29_945, 32, 10.0, 5))
"""Layered graphs: (ops, devices, seconds of limit, widest layer)."""

CHAINS = (("op-bert_l-3_inference", 4, 8, 10.0), ("layer-resnet50_inference", 6, 8, 10.0))
"""Chained workloads: (workload, copies, accelerators, seconds of limit)."""


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


def layered(num_ops: int, num_devices: int, widest: int, seed: int = 0) -> Problem:
    """Layers of one to ``widest`` ops of 0.2 to 2 s; an op reads one to three of the layer before. A cut costs 0.01 to 0.1 s."""
    random = Random(seed)
    layers: list[list[int]] = []
    readers: list[set[int]] = [set() for _ in range(num_ops)]
    first = 0
    while first < num_ops:
        ops = list(range(first, min(num_ops, first + random.randint(1, widest))))
        for op in ops if layers else ():
            for source in random.sample(layers[-1], min(len(layers[-1]), random.randint(1, 3))):
                readers[source].add(op)
        layers.append(ops)
        first = ops[-1] + 1
    transfers = Transfers.free(num_devices)
    for array in (transfers.send_s_per_byte, transfers.receive_s_per_byte):
        array[:num_devices, :num_devices] = 1.0
        np.fill_diagonal(array, 0.0)
    work = np.array([random.uniform(0.2, 2.0) for _ in range(num_ops)])
    return Problem(
        name=f"layered, at most {widest} wide",
        ops=tuple(f"op{op}" for op in range(num_ops)),
        devices=tuple(f"acc{device}" for device in range(num_devices)),
        compute_s=np.repeat(work[:, None], num_devices, axis=1),
        nets=tuple(Net(op, tuple(sorted(found)), random.uniform(0.01, 0.1)) for op, found in enumerate(readers) if found),
        order=tuple((op, reader) for op, found in enumerate(readers) for reader in sorted(found)),
        transfers=transfers,
        op_bytes=np.zeros(num_ops),
        memory_bytes=np.full(num_devices, np.inf),
        send_once=True,
    ).verify()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-ops", type=int, default=30_000, help="leave larger graphs out")
    options = parser.parse_args(arguments)
    cases = [(encoder(*case[:2]), case[2]) for case in ENCODERS]
    cases += [(layered(ops, devices, widest), limit_s) for ops, devices, limit_s, widest in GRAPHS]
    cases += [(chained(name, copies, accelerators), limit_s) for name, copies, accelerators, limit_s in CHAINS]
    for small in (layered(50, 3, 3), encoder(2, 3)):
        solve(small, time_limit_s=5.0)
    print("| graph | ops | devices | limit, s | ours | bound | gap | s |\n|---|---|---|---|---|---|---|---|", flush=True)
    for problem, limit_s in cases:
        if problem.num_ops > options.most_ops:
            continue
        started = monotonic()
        solution = solve(problem, time_limit_s=limit_s)
        cells = [
            problem.name, str(problem.num_ops), str(problem.num_devices), f"{limit_s:g}", f"{solution.objective_s:.4f}",
            f"{solution.bound_s:.4f}", f"{100 * solution.gap:.2f} %", f"{monotonic() - started:.2f}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
