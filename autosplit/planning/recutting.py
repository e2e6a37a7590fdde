"""The next best cut at each border of a plan: ops are moved over the border, and the evaluator gives the new cost.

In a chain a border is between neighbours; the last ops before it or the first ops after it move. In other plans a border is
between any two blocks that exchange a value; one op or group at it moves, or all ops that make or read one value there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from math import inf

from autosplit.costs.cost import block_of
from autosplit.costs.faults import find_faults
from autosplit.costs.judge import judge
from autosplit.costs.problem import HOST, Block, Problem
from autosplit.planners.clock import now
from autosplit.values.constraints import Demands
from autosplit.values.explanation import Cut

MOST_MOVED = 12
"""Most ops that are moved over a border of a chain, in each direction."""

MOST_TRIED = 48
"""Most cuts that are tried between two blocks outside a chain."""

Changed = tuple[list[Block], tuple[int, ...], int]
"""Blocks after a move, the ops that moved, and the number of the block that they moved to."""


def next_cuts(problem: Problem, blocks: Sequence[Block], demands: Demands, *, deadline: float) -> list[Cut]:
    """For each two devices that meet at a border, the best plan with another cut there.

    Args:
        demands: their objective is the cost of the plan; a contiguous plan is a chain and stays one.
        deadline: second of ``now()``; borders that are not reached by then are left out.
    """
    contiguous = demands.contiguous
    borders = [
        (one, other)
        for one, other in (pairwise(range(len(blocks))) if contiguous else _meeting(problem, blocks))
        if blocks[one].devices != blocks[other].devices
    ]
    value_s, cuts = judge(problem, demands, blocks).objective_s, dict[frozenset[tuple[int, ...]], Cut]()
    for number, (one, other) in enumerate(borders):
        share_s = (deadline - now()) / (len(borders) - number)
        if share_s <= 0:
            break
        moves = _shifts(blocks, one, other) if contiguous else islice(_swaps(problem, blocks, one, other), MOST_TRIED)
        cut = _best(problem, blocks, (one, other), moves, demands, value_s, now() + share_s)
        devices = frozenset((blocks[one].devices, blocks[other].devices))
        cuts[devices] = _cheaper(cuts.get(devices, cut), cut)
    return list(cuts.values())


def _cheaper(known: Cut, cut: Cut) -> Cut:
    """The cheaper of two cuts between the same devices, which may meet at several borders."""
    if known is cut:
        return cut
    best = min((known, cut), key=lambda each: inf if each.objective_s is None else each.objective_s)
    return replace(best, border=known.border, tried=known.tried + cut.tried)


def _best(
    problem: Problem,
    blocks: Sequence[Block],
    border: tuple[int, int],
    moves: Iterator[Changed],
    demands: Demands,
    value_s: float,
    deadline: float,
) -> Cut:
    best: tuple[float, tuple[int, ...], int] | None = None
    tried = 0
    for row, moved, target in moves:
        tried += 1
        other_s = judge(problem, demands, row).objective_s
        if (best is None or other_s < best[0]) and not find_faults(problem, row, contiguous=demands.contiguous):
            best = other_s, moved, target
        if now() > deadline:
            break
    names = " and ".join("+".join(problem.devices[device] for device in blocks[number].devices) for number in border)
    if best is None:
        return Cut(names, None, None, "", 0, tried)
    best_s, moved, target = best
    there = " + ".join(f"'{problem.devices[device]}'" for device in blocks[target].devices)
    return Cut(names, best_s, best_s / value_s - 1 if value_s else None, f"{_ops(problem, moved)} on {there}", len(moved), tried)


def _shifts(blocks: Sequence[Block], one: int, other: int) -> Iterator[Changed]:
    """The blocks after 1, 2, ... ops were moved over the border of two neighbours, in each direction."""
    first, last = sorted(blocks[one].ops), sorted(blocks[other].ops)
    for source, target, ops in ((one, other, first[::-1]), (other, one, last)):
        for count in range(1, min(MOST_MOVED, len(ops) - 1) + 1):
            yield _moved(blocks, source, target, tuple(sorted(ops[:count])))


def _swaps(problem: Problem, blocks: Sequence[Block], one: int, other: int) -> Iterator[Changed]:
    """The blocks after ops at a crossing value were moved: one op or group, or all that make or read it; light ones first."""
    home = block_of(problem, blocks)
    bonds: dict[int, tuple[int, ...]] = {op: group for group in problem.groups for op in group}
    found: dict[tuple[tuple[int, ...], int], None] = {}
    for net in problem.nets:
        pins = [op for op in {net.producer, *net.consumers} if op != HOST and home[op] in (one, other)]
        if len({int(home[op]) for op in pins}) == 2 and net.producer in pins:
            for source in (one, other):
                here = [op for op in pins if home[op] == source]
                for part in (*([op] for op in here), here):
                    found[tuple(sorted({mate for op in part for mate in bonds.get(op, (op,))})), source] = None
    work_s = {key: float(problem.compute_s[list(key[0])].min(axis=1).sum()) for key in found}
    for ops, source in sorted(found, key=lambda key: (work_s[key], key)):
        if len(ops) < len(blocks[source].ops):
            yield _moved(blocks, source, other if source == one else one, ops)


def _moved(blocks: Sequence[Block], source: int, target: int, ops: tuple[int, ...]) -> Changed:
    row, gone = list(blocks), set(ops)
    row[source] = replace(row[source], ops=tuple(op for op in row[source].ops if op not in gone))
    row[target] = replace(row[target], ops=tuple(sorted((*row[target].ops, *ops))))
    return row, ops, target


def _meeting(problem: Problem, blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Pairs of blocks of which one makes a value that the other reads."""
    home = block_of(problem, blocks).tolist()
    pairs = {(home[maker], home[reader]) for maker, reader in problem.edges}
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


def _ops(problem: Problem, ops: Sequence[int]) -> str:
    if len(ops) <= 3 and ops != tuple(range(ops[0], ops[0] + len(ops))):
        return ", ".join(f"'{problem.ops[op]}'" for op in ops)
    if len(ops) == 1:
        return f"'{problem.ops[ops[0]]}'"
    more = "" if ops[-1] - ops[0] < len(ops) else f" ({len(ops)} ops)"
    return f"'{problem.ops[ops[0]]}' to '{problem.ops[ops[-1]]}'{more}"
