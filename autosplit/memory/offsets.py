"""Offsets of storages in one arena: a greedy plan, and CP-SAT where it is above the bound."""

from collections.abc import Sequence

from autosplit.memory.arena import MemoryPlan, plan_of
from autosplit.memory.lives import Life


def plan_memory(lives: Sequence[Life], *, time_limit_s: float = 10.0) -> MemoryPlan:
    """The plan with the smallest peak that is found.

    Large storages get their offsets first (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020).

    Args:
        time_limit_s: most seconds for CP-SAT where the greedy plan is above the bound; 0 for the greedy plan alone.
    """
    offsets = first_fit(lives, sorted(range(len(lives)), key=lambda number: (-lives[number].num_bytes, lives[number].first)))
    greedy = plan_of(lives, offsets, "greedy by size")
    if greedy.proved or time_limit_s <= 0:
        return greedy
    from autosplit.memory.packing import pack  # OR-Tools takes a second to load

    packed, proved = pack(lives, offsets, greedy.bound_bytes, time_limit_s)
    return plan_of(lives, packed, "CP-SAT", proved) if proved or packed != offsets else greedy


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
