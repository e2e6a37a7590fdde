"""Planner table: workload, reference value, ours, bound, gap, seconds; for latency with ``--objective latency``."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from autosplit.costs.faults import find_faults
from autosplit.costs.judge import Solution
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import Problem
from autosplit.costs.workloads import parse_dnn_partitioning, read_workload
from autosplit.planners.clusters import forced_clusters
from autosplit.planners.incumbent import plans_on_one_device
from autosplit.planners.latency.order_annealing import anneal_order, is_plain
from autosplit.planners.portfolio import solve
from autosplit.values.constraints import Demands

WORKLOADS = Path(__file__).parents[1] / "tests" / "data" / "workloads"

REFERENCE = {
    "layer-bert24_inference": (17.7899, 17.7147),
    "layer-gnmt_inference": (32.9107, 31.6873),
    "layer-inceptionv3_inference": (51.5519, 51.3161),
    "layer-resnet50_inference": (33.7747, 33.4296),
    "op-bert_l-3_inference": (27.9186, 21.9084),
    "op-bert_l-3_training": (65.3031, 54.2074),
    "op-bert_l-6_inference": (29.5795, 28.3322),
    "op-resnet50_inference": (124.3488, 124.3488),
}
"""Contiguous optimum, and the best non-contiguous value known before: Tarnawski et al. 2020 and annealing with CP-SAT."""

CHAINED = (
    ("op-bert_l-3_training", 2, 3),
    ("op-bert_l-3_training", 3, 6),
    ("op-bert_l-6_inference", 2, 6),
    ("op-resnet50_inference", 2, 6),
    ("layer-inceptionv3_inference", 3, 6),
)
"""Larger graphs: (workload, copies in a row, accelerators)."""


TRAINING = tuple(("layer-inceptionv3_inference", accelerators) for accelerators in (2, 4, 5, 7, 8))
"""Training graphs made of inference ones: (workload, accelerators)."""

CAPPED = (
    ("layer-bert24_inference", 0.14375, 8),
    ("layer-gnmt_inference", 0.23, 8),
    ("layer-gnmt_inference", 0.2, 8),
    ("layer-inceptionv3_inference", 0.14375, 8),
    ("layer-inceptionv3_inference", 0.6, 2),
    ("layer-resnet50_inference", 0.14375, 8),
    ("layer-resnet50_inference", 0.6, 2),
    ("op-bert_l-3_inference", 0.325, 4),
    ("op-bert_l-6_inference", 0.325, 4),
    ("op-resnet50_inference", 0.325, 4),
)
"""Workloads with less memory than one device needs: (workload, memory of an accelerator over all weights, accelerators)."""


def capped(name: str, share: float, accelerators: int) -> Problem:
    """A workload on accelerators that each hold a share of all weights."""
    data = json.loads((WORKLOADS / f"{name}.json").read_text())
    total = sum(node.get("size") or 0.0 for node in data["nodes"])
    smaller = data | {"maxSizePerFPGA": total * share, "maxFPGAs": accelerators}
    return parse_dnn_partitioning(smaller, f"{name}, {accelerators} of {share:g} of its bytes")


def chained(name: str, copies: int, accelerators: int) -> Problem:
    """Copies of a workload one after the other; backward nodes run through the copies the other way."""
    data = json.loads((WORKLOADS / f"{name}.json").read_text())
    num_ids = 1 + max(node["id"] for node in data["nodes"])
    num_colours = 1 + max(node.get("colorClass") or 0 for node in data["nodes"])
    backward = {node["id"]: bool(node["isBackwardNode"]) for node in data["nodes"]}
    cost = {edge["sourceId"]: edge["cost"] for edge in data["edges"]}
    readers: dict[int, list[int]] = {node: [] for node in backward}
    writers: dict[int, list[int]] = {node: [] for node in backward}
    for edge in data["edges"]:
        readers[edge["sourceId"]].append(edge["destId"])
        writers[edge["destId"]].append(edge["sourceId"])
    usual = sorted(cost.values())[len(cost) // 2]
    ends = [node for node in backward if not backward[node] and all(backward[other] for other in readers[node])]
    heads = [node for node in backward if not backward[node] and not writers[node]]
    last, first = max(ends, key=lambda node: cost.get(node, 0)), max(heads, key=lambda node: len(readers[node]))
    links = [(last, first, cost.get(last, usual))]
    if any(backward.values()):
        leaving = [node for node in backward if backward[node] and not readers[node]][-1]
        entering = next(n for n in backward if backward[n] and not any(backward[other] for other in writers[n]))
        links.append((leaving, entering, cost.get(leaving, usual)))
    nodes, edges = [], []
    for copy in range(copies):
        base = copy * num_ids
        for node in data["nodes"]:
            colour = node.get("colorClass")
            nodes.append(node | {"id": node["id"] + base, "colorClass": None if colour is None else colour + copy * num_colours})
        edges += [
            {"sourceId": edge["sourceId"] + base, "destId": edge["destId"] + base, "cost": edge["cost"]} for edge in data["edges"]
        ]
        if copy + 1 < copies:
            edges.append({"sourceId": links[0][0] + base, "destId": links[0][1] + base + num_ids, "cost": links[0][2]})
            edges += [{"sourceId": a + base + num_ids, "destId": b + base, "cost": price} for a, b, price in links[1:]]
    whole = data | {"nodes": nodes, "edges": edges, "maxFPGAs": accelerators}
    return parse_dnn_partitioning(whole, f"{copies} x {name}")


def trained(name: str, accelerators: int) -> Problem:
    """A workload with a backward node for each node, on the same device, which takes twice as long and has no bytes.

    A backward node reads those of its readers. What it makes has the size of the largest value that its node reads.
    """
    data = json.loads((WORKLOADS / f"{name}.json").read_text())
    num_ids = 1 + max(node["id"] for node in data["nodes"])
    nodes, sizes = [], dict[int, float]()
    for node in data["nodes"]:
        times = {key: 2 * node[key] for key in ("cpuLatency", "fpgaLatency")}
        back = {"id": node["id"] + num_ids, "isBackwardNode": True, "size": 0.0}
        nodes += [node | {"colorClass": node["id"]}, node | times | back | {"colorClass": node["id"]}]
    for edge in data["edges"]:
        sizes[edge["destId"]] = max(sizes.get(edge["destId"], 0.0), edge["cost"])
    edges = [
        {"sourceId": edge["destId"] + num_ids, "destId": edge["sourceId"] + num_ids, "cost": sizes[edge["destId"]]}
        for edge in data["edges"]
    ]
    whole = data | {"nodes": nodes, "edges": data["edges"] + edges, "maxFPGAs": accelerators}
    return parse_dnn_partitioning(whole, f"{name}, training, {accelerators} accelerators")


def annealed_s(problem: Problem, solution: Solution, seconds: float) -> float | None:
    """The latency after annealing our plan in two walks; None where its rules are more than an order of ops and caps."""
    clusters = forced_clusters(problem, contiguous=True)
    row = clusters.shrink(solution.blocks)
    if row is None or not is_plain(clusters.problem):
        return None
    found = anneal_order(
        clusters.problem, row, seed=1, deadline=monotonic() + seconds, enough_s=solution.bound_s, walk_s=seconds / 2.3
    )
    return min(solution.objective_s, latency_s(clusters.problem, found))


def alone_s(problem: Problem) -> float | None:
    """The latency of everything on one device, where a device holds it: what a latency plan has to beat."""
    rows = [blocks for blocks in plans_on_one_device(problem) if not find_faults(problem, blocks)]
    return min((latency_s(problem, blocks) for blocks in rows), default=None)


def row(
    kind: str, problem: Problem, reference: float | None, solution: Solution, seconds: float, near_s: float | None = None
) -> str:
    known = f"{reference:.4f}" if reference is not None else ""
    cells = [
        problem.name, str(problem.num_ops), kind, known, f"{solution.objective_s:.4f}", f"{solution.bound_s:.4f}",
        f"{100 * solution.gap:.2f} %", f"{seconds:.1f}",
    ]  # fmt: skip
    if near_s is not None:
        cells += [f"{near_s:.4f}", f"{100 * (solution.objective_s / near_s - 1):.2f} %"]
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each plan")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", choices=("throughput", "latency"), default="throughput")
    parser.add_argument("--caps", action="store_true", help="with latency: the workloads with little memory instead")
    parser.add_argument("--anneal", type=float, default=0.0, help="with latency: minutes of annealing from our plan")
    parser.add_argument("--training", action="store_true", help="training graphs made of inception's inference graph instead")
    parser.add_argument("--kind", choices=("both", "contiguous", "non-contiguous"), default="both")
    parser.add_argument("--chained", action="store_true", help="the larger graphs made of copies, too")
    parser.add_argument("workloads", nargs="*", help="names without .json; all where none is given")
    options = parser.parse_args(arguments)
    problems = [(read_workload(WORKLOADS / f"{name}.json"), *REFERENCE[name]) for name in options.workloads or REFERENCE]
    cases: list[tuple[Problem, float | None, float | None]] = list(problems)
    if options.chained:
        cases += [(chained(*case), None, None) for case in CHAINED]
    if options.caps:
        cases = [(capped(*case), None, None) for case in CAPPED if not options.workloads or case[0] in options.workloads]
    if options.training:
        cases = [(trained(*case), None, None) for case in TRAINING]
    for is_chain in (True, False):  # compiles
        solve(cases[0][0], Demands(contiguous=is_chain), time_limit_s=2.0)
    print("| workload | nodes | plan | reference | ours | bound | gap | s |\n|---|---|---|---|---|---|---|---|", flush=True)
    for problem, contiguous, free in cases:
        if options.objective == "latency":
            started = monotonic()
            solution = solve(problem, Demands(objective="latency"), time_limit_s=options.time_limit, seed=options.seed)
            took_s = monotonic() - started
            near_s = annealed_s(problem, solution, 60 * options.anneal) if options.anneal else None
            print(row("latency", problem, alone_s(problem), solution, took_s, near_s), flush=True)
            continue
        if options.kind != "non-contiguous":
            started = monotonic()
            solution = solve(problem, time_limit_s=options.time_limit, seed=options.seed)
            print(row("contiguous", problem, contiguous, solution, monotonic() - started), flush=True)
        if options.kind != "contiguous":
            started = monotonic()
            solution = solve(problem, Demands(contiguous=False), time_limit_s=options.time_limit, seed=options.seed)
            print(row("non-contiguous", problem, free, solution, monotonic() - started), flush=True)


if __name__ == "__main__":
    main()
