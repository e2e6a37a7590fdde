"""Compile the inner loops of all planners ahead of time: ``python -m autosplit.planners.warming``."""

import logging
import sys
from dataclasses import replace
from math import inf
from time import monotonic

import numpy as np

from autosplit import jit
from autosplit.costs.problem import Block, Net, Problem, Transfers
from autosplit.planners.contiguous import downsets, linear
from autosplit.planners.contiguous.downset_table import grown, new_sets
from autosplit.planners.instance import contract
from autosplit.planners.latency import order_annealing
from autosplit.planners.noncontiguous import column_generation, resplitting
from autosplit.planners.noncontiguous.hypergraph import hypergraph_of
from autosplit.values.constraints import Demands


def small_problem() -> Problem:
    """Five ops with a branch, on two equal devices and a third one."""
    transfers = Transfers.free(3)
    transfers.send_s_per_byte[:] = transfers.receive_s_per_byte[:] = 1.0
    compute = np.array([[2.0, 2.0, 3.0]] * 5)
    nets = (Net(0, (1, 2), 1.0), Net(1, (3,), 1.0), Net(2, (3,), 1.0), Net(3, (4,), 1.0))
    order = tuple((net.producer, reader) for net in nets for reader in net.consumers)
    names = "abcde"
    return Problem(
        "small", tuple(names), ("one", "two", "three"), compute, nets, order, transfers, np.zeros(5), np.full(3, np.inf),
        send_once=True,
    ).verify()  # fmt: skip


def chains() -> None:
    """Compile chains along one order and over all orders, which every search for throughput asks for."""
    instance = contract(small_problem(), Demands())
    linear.best_chain(instance, inf, inf)
    downsets.best_chain(instance, inf, inf)
    grown(new_sets(4, 5, 2))


def orders() -> None:
    """Compile annealing of the order of one sample's ops."""
    row = [Block((0, 1), (0,)), Block((2, 3, 4), (1,))]
    order_annealing.anneal_order(small_problem(), row, seed=0, deadline=inf, enough_s=1e300)


def any_sets() -> None:
    """Compile sweeps, pricing and resplits."""
    graph = hypergraph_of(small_problem())
    home = np.array([0, 1, 0, 0, 0])
    tight = replace(graph, num_bytes=np.ones(5), memory_bytes=np.full(2, 3.0))
    resplitting.resplit(tight, home, 0, 1, limit_s=100.0, seed=0)
    values, pricers = np.ones(5, dtype=np.int64), column_generation.pricers_of(graph)
    for pricer in (*pricers, *column_generation.capped_pricers(tight, pricers)):
        pricer.profile(values, 20.0)
        pricer.best_set(values, 20.0, 1)


PARTS = chains, orders, any_sets


def main() -> None:
    """Compile everything that is not cached, with a line for each part on stderr."""
    logging.getLogger(jit.__name__).setLevel(logging.ERROR)  # the lines below say it in more detail
    for number, part in enumerate(PARTS, start=1):
        sys.stderr.write(f"compiling the planner, {number} of {len(PARTS)}: {part.__name__.replace('_', ' ')} … ")
        sys.stderr.flush()
        begun = monotonic()
        part()
        sys.stderr.write(f"{monotonic() - begun:.1f} s\n")


if __name__ == "__main__":
    main()
