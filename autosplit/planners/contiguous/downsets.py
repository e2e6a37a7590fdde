"""The best chain over all orders, with proof: a dynamic program over down-sets of the items.

A chain of blocks is a chain of down-sets (Tarnawski et al., NeurIPS 2020). Each down-set is reached from smaller ones, and only
while a chain through it can still be below the limit: the value of its prefix is below, and the remaining items fit on the
remaining devices. With a good limit, few of the possible down-sets are reached. The search runs from either end of the chain; the
end at which fewer first blocks are possible is often hundreds of times quicker.
"""

from dataclasses import dataclass

import numpy as np

from autosplit.planners.clock import now
from autosplit.planners.contiguous.downset_enumeration import DONE, FULL, HOPELESS, PAUSED, run
from autosplit.planners.contiguous.downset_table import BEST, NUM_SETS, grown, members_of, new_sets
from autosplit.planners.contiguous.linear import Chain
from autosplit.planners.contiguous.pruning import Walk, maximal_blocks_suffice, most_added
from autosplit.planners.instance import MANY_ITEMS, Instance
from autosplit.planners.loads import empty_block

MAX_SETS, MAX_SET_BYTES, MAX_ENTRIES = 3_000_000, 500_000_000, 16_000_000
"""Most down-sets, bytes of their bits and values of a table: up to 1.4 GB together."""
SLICE_STEPS = 600_000
"""Steps of a walk between two looks at the clock."""
STEPS_OF_A_SET = tuple(SLICE_STEPS * 4**power for power in range(4))
"""Most steps for one set: the first number is tried from either end, the next ones while they should end before the deadline."""


@dataclass(frozen=True)
class ChainSearch:
    """A better chain or None, and whether the search was complete, so that no chain is better than that."""

    chain: Chain | None
    complete: bool
    num_sets: int


def best_chain(instance: Instance, limit_s: float, deadline: float) -> ChainSearch:
    """A chain with a value below ``limit_s``. Where maximal blocks suffice, it is not always the best one.

    Args:
        instance: the items of the chain.
        limit_s: only chains below this count; a lower limit is quicker.
        deadline: second of ``now()`` after which the search gives up.
    Returns: the chain. Where there is none and the search is ``complete``, no chain is below the limit.
    """
    ways = [_Way(way, limit_s) for way in (instance, instance.reversed)]
    for most in STEPS_OF_A_SET:
        for way in ways:
            way.go_on(1, deadline, most)
            if way.code == DONE:
                break
        if any(way.code != HOPELESS for way in ways) or now() > deadline:
            break
    chosen = min(ways, key=lambda way: (way.code != DONE, way.code == HOPELESS, int(way.walk.sets.tally[NUM_SETS])))
    while chosen.code == PAUSED and now() <= deadline:
        chosen.go_on(SLICE_STEPS, deadline, STEPS_OF_A_SET[-1])
    chain = chosen.chain()
    if chain is not None and chosen is ways[1]:
        last = instance.num_items - 1
        blocks = tuple((tuple(sorted(last - item for item in block)), takes) for block, takes in reversed(chain.blocks))
        chain = Chain(blocks, chain.value_s)
    complete = chosen.code == DONE and not (chosen.walk.maximal and chain is not None)
    return ChainSearch(chain, complete, int(chosen.walk.sets.tally[NUM_SETS]))


class _Way:
    """The search from one end of the chain, in slices; ``code`` says how the last slice ended."""

    def __init__(self, instance: Instance, limit_s: float) -> None:
        self.instance, self.walk = instance, _walk(instance, limit_s)
        self.code, self.most_of_a_set = PAUSED, STEPS_OF_A_SET[0]

    def go_on(self, num_steps: int, deadline: float, most_of_a_set: int = STEPS_OF_A_SET[-1]) -> None:
        """Take at least ``num_steps`` steps, and enlarge the table as needed while there is time."""
        self.code, self.most_of_a_set = FULL, max(self.most_of_a_set, most_of_a_set // 4)
        while self.code == FULL and now() <= deadline:
            begun, most = now(), min(self.most_of_a_set, most_of_a_set)
            self.code = run(self.walk, num_steps, most)
            if self.code == HOPELESS and most < most_of_a_set and 5 * now() - 4 * begun < deadline:
                self.code, self.most_of_a_set = FULL, 4 * most
                continue
            if self.code == FULL:
                sets = self.walk.sets
                if len(sets.words) >= MAX_SETS or sets.words.nbytes >= MAX_SET_BYTES or sets.value.size >= MAX_ENTRIES:
                    return
                self.walk = self.walk._replace(sets=grown(sets))

    def chain(self) -> Chain | None:
        """The best chain found below the limit."""
        sets, instance, number = self.walk.sets, self.instance, int(self.walk.sets.tally[BEST])
        if number < 0:
            return None
        values, members = np.where(instance.usage.final, sets.value[number], np.inf), np.ones(instance.num_items, dtype=np.bool_)
        blocks, usage = [], int(values.argmin())
        while number:
            number, usage, move = sets.origin[number, usage].tolist()
            inside = members_of(sets, number, instance.num_items)
            blocks.append((tuple(np.flatnonzero(members & ~inside).tolist()), tuple(instance.usage.takes[move].tolist())))
            members = inside
        return Chain(tuple(reversed(blocks)), float(values.min()))


def _walk(instance: Instance, limit_s: float) -> Walk:
    """A walk that begins at the empty set."""
    usage, num_bytes, count, classes = instance.usage, instance.num_bytes, instance.num_items, len(instance.classes)
    values = np.ascontiguousarray(np.column_stack([instance.priced_work, num_bytes, most_added(instance)]))
    most = np.column_stack([instance.multipliers, np.minimum(instance.memory_bytes, num_bytes.sum())])
    room = np.ascontiguousarray(usage.free @ most, dtype=np.float64)  # else it compiles again
    behind = values if count > MANY_ITEMS else np.array([values[row].sum(axis=0) for row in instance.reach])
    num_usages, sums = len(usage.final), np.zeros(3 * classes + 1 + values.shape[1])
    waiting = np.bincount(instance.after.data, minlength=count).astype(np.int64)
    sources = np.flatnonzero(waiting == 0)
    ready = np.zeros(count + 1, dtype=np.int64)
    ready[: len(sources)] = sources
    place = np.full(count, -1, dtype=np.int64)
    place[sources] = np.arange(len(sources))
    return Walk(
        instance.costs, instance.after, usage, int(usage.width.max()), instance.demands.min_stage_s,
        maximal_blocks_suffice(instance), values, room, values.sum(axis=0), behind, empty_block(instance.costs, sums),
        new_sets(1 << max(2, 14 - num_usages.bit_length()), count, num_usages), np.array([limit_s]),
        np.zeros((count + 63) // 64, dtype=np.uint64), np.random.default_rng(0).integers(1, 2**63, count, dtype=np.uint64),
        waiting, ready, place, np.array([len(sources), 0, 0], dtype=np.int64), np.zeros(1, dtype=np.uint64),
        np.zeros(1 << 20, dtype=np.int64), np.zeros(count + 2, dtype=np.int64), np.zeros(count + 2, dtype=np.int64),
        np.zeros(count + 2, dtype=np.int64), sums, np.zeros((count + 2, len(sums))), sums[3 * classes + 1 :],
        np.zeros(num_usages, dtype=np.int64), np.zeros(room.shape[1]),
    )  # fmt: skip
