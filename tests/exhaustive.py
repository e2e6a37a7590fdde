"""Brute force: every assignment of at most 8 ops. The oracle that the other planners are held to."""

from collections.abc import Iterator
from itertools import combinations, product
from math import inf

from autosplit.costs.judge import judge
from autosplit.costs.problem import Block, Problem
from autosplit.errors import UsageError
from autosplit.values.constraints import Demands

MAX_OPS = 8


def best_blocks(problem: Problem, demands: Demands) -> tuple[tuple[Block, ...], float] | None:
    """The best blocks and their objective in seconds, or None when no blocks meet the demands.

    Raises: UsageError: more than 8 ops.
    """
    if problem.num_ops > MAX_OPS:
        raise UsageError(f"brute force takes at most {MAX_OPS} ops, and there are {problem.num_ops}; use another planner")
    best: tuple[Block, ...] = ()
    best_s = inf
    for parts in _ordered_partitions(problem, demands):
        for devices in product(_device_sets(problem.num_devices, demands.max_replicas), repeat=len(parts)):
            used = [device for group in devices for device in group]
            if not demands.reuse and len(set(used)) < len(used):
                continue
            blocks = tuple(Block(tuple(ops), group) for ops, group in zip(parts, devices, strict=True))
            judged = judge(problem, demands, blocks)
            if judged.faults:
                continue
            value_s = judged.objective_s
            if value_s < best_s:
                best, best_s = blocks, value_s
    return (best, best_s) if best else None


def _most_blocks(problem: Problem, demands: Demands) -> int:
    limits = [problem.num_ops]
    limits += [limit for limit in (demands.num_stages, demands.max_stages) if limit]
    return min(limits if demands.reuse else [*limits, problem.num_devices])


def _device_sets(num_devices: int, most: int) -> list[tuple[int, ...]]:
    return [group for size in range(1, min(most, num_devices) + 1) for group in combinations(range(num_devices), size)]


def _ordered_partitions(problem: Problem, demands: Demands) -> Iterator[list[list[int]]]:
    """Every way to put the ops into an ordered row of non-empty parts; of contiguous ones those in which no value goes back.

    The judge refuses the others on all devices, and there are many more of them.
    """
    num_ops, order = problem.num_ops, problem.order if demands.contiguous else ()
    for count in range(1, _most_blocks(problem, demands) + 1):
        for labels in product(range(count), repeat=num_ops):
            if len(set(labels)) == count and all(labels[before] <= labels[after] for before, after in order):
                yield [[op for op in range(num_ops) if labels[op] == part] for part in range(count)]
