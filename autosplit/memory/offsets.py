"""Offsets of storages in one arena: greedy plans by several orders, and CP-SAT where none meets the bound."""

from collections.abc import Callable, Sequence

from autosplit.memory.arena import MemoryPlan, bound_of, plan_of
from autosplit.memory.lives import Life

ORDERS: dict[str, Callable[[Life], tuple[int, ...]]] = {
    "greedy by size": lambda life: (-life.num_bytes, life.first),
    "greedy by area": lambda life: (-life.num_bytes * (life.last - life.first + 1), life.first),
    "greedy by length": lambda life: (life.first - life.last, -life.num_bytes),
    "greedy by start": lambda life: (life.first, -life.num_bytes),
    "greedy by end": lambda life: (-life.last, -life.num_bytes),
}
"""Order in which storages get their offsets. By size is that of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural
Net Inference" (2020)."""


def plan_memory(lives: Sequence[Life], *, time_limit_s: float = 10.0, orders: Sequence[str] = tuple(ORDERS)) -> MemoryPlan:
    """The plan with the smallest peak that is found.

    Args:
        lives: the storages.
        time_limit_s: most seconds for CP-SAT where no greedy plan meets the bound; 0 for greedy plans alone.
        orders: the greedy orders to try, by name.
    """
    bound = bound_of(lives)
    best: tuple[int, list[int], str] | None = None
    for name in orders:
        keys = list(map(ORDERS[name], lives))
        offsets = first_fit(lives, sorted(range(len(lives)), key=keys.__getitem__))
        peak = max((offset + life.num_bytes for offset, life in zip(offsets, lives, strict=True)), default=0)
        if best is None or peak < best[0]:
            best = peak, offsets, name
        if peak <= bound:
            break
    assert best is not None, "at least one order is needed"
    if best[0] > bound and time_limit_s > 0:
        from autosplit.memory.packing import pack  # OR-Tools takes a second to load

        offsets, proved = pack(lives, best[1], bound, time_limit_s)
        if proved or offsets != best[1]:
            return plan_of(lives, offsets, "CP-SAT", proved)
    return plan_of(lives, best[1], best[2])


def first_fit(lives: Sequence[Life], order: Sequence[int]) -> list[int]:
    """The offset of each storage: the lowest at which it fits beside those that were placed before and are live with it.

    Storages are kept by blocks of steps, so that only those near in time are looked at.
    """
    offsets = [0] * len(lives)
    width = max(1, int(max((life.last for life in lives), default=0) ** 0.5))
    blocks: dict[int, list[tuple[int, int, int, int]]] = {}
    for number in order:
        life = lives[number]
        mine = range(life.first // width, life.last // width + 1)
        near = {item for block in mine for item in blocks.get(block, ()) if item[2] <= life.last and item[3] >= life.first}
        end = 0
        for start, stop, _, _ in sorted(near):
            if start - end >= life.num_bytes:
                break
            end = max(end, stop)
        offsets[number] = end
        for block in mine:
            blocks.setdefault(block, []).append((end, end + life.num_bytes, life.first, life.last))
    return offsets
