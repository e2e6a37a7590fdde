"""Convex blocks: an assignment of ops to devices, cut into the fewest runs that can be executed one after the other."""

from collections.abc import Iterable, Sequence

from autosplit.costs.problem import Block, Problem
from autosplit.errors import PlanError
from autosplit.planners.items import strong_components

WIDTH = 48
"""Partial orders kept for each number of blocks; below it the answer is the fewest possible."""


def convex_blocks(problem: Problem, assignment: Sequence[int], width: int = WIDTH) -> tuple[Block, ...]:
    """Cut what each device holds into convex blocks, listed so that every value is made before its block's readers run.

    Breadth first over sequences of devices: a device that gets its turn runs everything that is ready, and what thereby
    becomes ready on it, for stopping earlier never saves a turn. Of two sequences of one length, the one whose finished ops
    contain the other's is kept; of those left, the `width` that finished most. Where nothing had to be dropped for
    width, no order has fewer blocks. Ops of one group come in one block, unless the group lies on a cycle of ``order``
    over several devices: then no order keeps it whole, and its ops are placed one by one.

    Args:
        problem: gives ``order`` and ``groups``.
        assignment: device of each op, length num_ops.
        width: sequences kept, at least 1.
    Returns: blocks of one device each, in the order in which they run.
    Raises: PlanError: ops on several devices wait for each other.
    """
    units = _units(problem, assignment)
    home = [assignment[unit[0]] for unit in units]
    unit_of = {op: number for number, unit in enumerate(units) for op in unit}
    edges = {(unit_of[before], unit_of[after]) for before, after in problem.order}
    before, after = [0] * len(units), [0] * len(units)
    for source, target in edges:
        if source != target:
            before[target] |= 1 << source
            after[source] |= 1 << target
    held: dict[int, int] = {}
    for number, device in enumerate(home):
        held[device] = held.get(device, 0) | 1 << number
    everything = (1 << len(units)) - 1
    layers: list[dict[int, tuple[int, int]]] = [{0: (0, -1)}]
    first = {device: [n for n in _members(mask) if not before[n]] for device, mask in held.items()}
    ready: dict[int, dict[int, list[int]]] = {0: first}
    while everything not in layers[-1]:
        reached: dict[int, tuple[int, int]] = {}
        waiting: dict[int, dict[int, list[int]]] = {}
        for done in layers[-1]:
            for device, starts in ready[done].items():
                if not starts:
                    continue
                finished, left = _run(done, device, ready[done], home, before, after)
                if finished not in reached:
                    reached[finished], waiting[finished] = (done, device), left
        if not reached:
            raise PlanError(
                f"problem '{problem.name}' has a cycle of order over several devices, which no sequence of blocks can run"
            )
        kept = _farthest(reached, width)
        layers.append({finished: reached[finished] for finished in kept})
        ready = {finished: waiting[finished] for finished in kept}
    blocks: list[Block] = []
    done = everything
    for layer in reversed(layers[1:]):
        earlier, device = layer[done]
        blocks.append(Block(tuple(sorted(op for n in _members(done & ~earlier) for op in units[n])), (device,)))
        done = earlier
    return tuple(reversed(blocks))


def _farthest(reached: Iterable[int], width: int) -> list[int]:
    """The sets that no other set contains, at most `width`, largest first."""
    kept: list[int] = []
    for finished in sorted(reached, key=lambda mask: (-mask.bit_count(), mask)):
        if len(kept) < width and not any(finished & other == finished for other in kept):
            kept.append(finished)
    return kept


def _run(
    done: int, device: int, ready: dict[int, list[int]], home: list[int], before: list[int], after: list[int]
) -> tuple[int, dict[int, list[int]]]:
    """Run all that is ready on a device and what becomes so: the finished units, and the ready ones of each device."""
    stack, left = list(ready[device]), {other: list(units) for other, units in ready.items() if other != device}
    left[device] = []
    while stack:
        unit = stack.pop()
        done |= 1 << unit
        for reader in _members(after[unit]):
            if not before[reader] & ~done:
                (stack if home[reader] == device else left[home[reader]]).append(reader)
    return done, left


def _members(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _units(problem: Problem, assignment: Sequence[int]) -> list[list[int]]:
    """Ops that are placed as one: groups and cycles through them, where these lie on one device."""
    bonds = list(problem.order)
    for group in problem.groups:
        bonds += zip(group, (*group[1:], group[0]), strict=True)
    component = strong_components(problem.num_ops, bonds)
    together: dict[int, list[int]] = {}
    for op, number in enumerate(component):
        together.setdefault(number, []).append(op)
    units: list[list[int]] = []
    for members in together.values():
        if len({assignment[op] for op in members}) == 1:
            units.append(members)
        else:
            units += [[op] for op in members]
    return sorted(units)
