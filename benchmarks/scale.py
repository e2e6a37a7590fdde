"""Scale: large graphs with contiguous plans, as a table. ``python -m benchmarks.scale``.

Layered random graphs (ops of a layer read one to three of the layer before) and chained workloads. The bound is proved in
the same run.
"""

import argparse
from collections.abc import Sequence
from random import Random
from time import monotonic

import numpy as np

from autosplit.planners.portfolio import solve
from autosplit.problem import Net, Problem, Transfers
from benchmarks.planner import chained

GRAPHS = ((1000, 8, 1.0, 4), (3000, 16, 10.0, 4), (10_000, 32, 10.0, 4), (29_945, 32, 10.0, 5))
"""Layered graphs: (ops, devices, seconds of limit, widest layer)."""

CHAINS = (("op-bert_l-3_inference", 4, 8, 10.0), ("layer-resnet50_inference", 6, 8, 10.0))
"""Chained workloads: (workload, copies, accelerators, seconds of limit)."""


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
    cases = [(layered(ops, devices, widest), limit_s) for ops, devices, limit_s, widest in GRAPHS]
    cases += [(chained(name, copies, accelerators), limit_s) for name, copies, accelerators, limit_s in CHAINS]
    solve(layered(50, 3, 3), time_limit_s=5.0)
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
