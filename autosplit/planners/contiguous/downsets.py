"""The best chain over all orders, with proof: a dynamic program over down-sets of the items.

A chain of blocks is a chain of down-sets (Tarnawski et al., NeurIPS 2020). Here each down-set is reached forward from
smaller ones, and only while a chain through it can still beat the limit: the value of its prefix is below, and what is left
fits the devices that are left. From every down-set reached, its larger neighbours are walked depth first, each once, with
the nets' pin counts kept up to date. With a good limit to begin with, few of the possible down-sets are ever seen. A chain may
as well be laid from its end: the direction in which fewer first blocks are possible is often hundreds of times shorter.
"""

from dataclasses import dataclass
from time import monotonic

import numpy as np

from autosplit.costs.problem import Floats
from autosplit.planners.bounds import item_work
from autosplit.planners.contiguous.device_usage import Usage, capacity
from autosplit.planners.contiguous.downset_enumeration import DONE, FULL, HOPELESS, PAUSED, run
from autosplit.planners.contiguous.downset_table import Sets, Words, begin, grown, members_of, new_sets
from autosplit.planners.contiguous.growing_block import costs_of, empty_filling
from autosplit.planners.contiguous.linear import Chain
from autosplit.planners.contiguous.maximal_blocks import full_blocks_suffice, most_added
from autosplit.planners.contiguous.pruning import Rules, Walk
from autosplit.planners.items import Ints, Items
from autosplit.planners.jit import compiled
from autosplit.values.constraints import Demands

MAX_SETS = 3_000_000
MAX_ENTRIES = 8_000_000
MAX_WORDS = 24
"""Down-sets are kept as the words between the first that is not full and the last that is not empty; at most so many."""
MAX_CLOSURE = 40_000
SLICE_STEPS = 400_000
STEPS_OF_A_SET = (600_000, 2_400_000, 10_000_000, 40_000_000)
"""The work on one set is tried in so many steps, from either end, then in more while that should end before the deadline."""


@dataclass(frozen=True)
class Prices:
    """What may be said of every set of items that one device holds below a limit: it is worth no more than `most`.

    Attributes:
        values: of each item, shape (num_items, num_kinds).
        most: of each class of devices, shape (K, num_kinds).
    """

    values: Floats
    most: Floats

    @staticmethod
    def none(items: Items) -> "Prices":
        """Nothing is said."""
        return Prices(np.zeros((items.num_items, 0)), np.zeros((len(items.classes), 0)))


@dataclass(frozen=True)
class Outcome:
    """What the walk found: a better chain or None, and whether it looked everywhere, so that none is better than that."""

    chain: Chain | None
    complete: bool
    num_sets: int


def best_chain(
    items: Items, demands: Demands, usage: Usage, weights: Floats, limit_s: float, deadline: float, prices: Prices | None = None
) -> Outcome:
    """A chain with a value below ``limit_s``; where only full blocks are looked at (`maximal_blocks`), not always the best one.

    Args:
        items: what is to be put in a row.
        demands: the limits on a plan.
        usage: the devices.
        weights: multipliers of the classes, for pruning.
        limit_s: only chains below this count; the lower, the faster.
        deadline: monotonic seconds after which the walk gives up.
        prices: what a device below the limit holds at most; the better they are, the fewer sets are reached.
    Returns: the chain; ``complete`` with no chain proves that none is below the limit.
    """
    prices = prices or Prices.none(items)
    turned = Prices(prices.values[::-1].copy(), prices.most)
    ways = [_Way(way, demands, usage, weights, limit_s, said) for way, said in ((items, prices), (items.reversed(), turned))]
    for most in STEPS_OF_A_SET:
        for way in ways:
            way.go_on(1, deadline, most)
            if way.code == DONE:
                break
        if any(way.code != HOPELESS for way in ways) or monotonic() > deadline:
            break
    chosen = min(ways, key=lambda way: (way.code != DONE, way.code == HOPELESS, int(way.sets.tally[0])))
    while chosen.code == PAUSED and monotonic() <= deadline:
        chosen.go_on(SLICE_STEPS, deadline, STEPS_OF_A_SET[-1])
    chain = chosen.chain()
    if chain is not None and chosen is ways[1]:
        last = items.num_items - 1
        blocks = tuple((tuple(sorted(last - item for item in block)), takes) for block, takes in reversed(chain.blocks))
        chain = Chain(blocks, chain.value_s)
    complete = chosen.code == DONE and chosen.sets.tally[4] == 0 and not (chosen.rules.full and chain is not None)
    return Outcome(chain, complete, int(chosen.sets.tally[0]))


class _Way:
    """The walk over the down-sets of the items, in slices; ``code`` says how the last one ended."""

    def __init__(self, items: Items, demands: Demands, usage: Usage, weights: Floats, limit_s: float, prices: Prices) -> None:
        num_words = (items.num_items + 63) // 64
        self.items, self.usage = items, usage
        self.costs = costs_of(items)
        self.filling = empty_filling(self.costs)
        self.rules = _rules(items, demands, usage, weights, prices, full_blocks_suffice(items, demands))
        self.walk = _walk(items, num_words, self.rules.values.shape[1])
        self.sets = new_sets(1 << 12, 1 << 13, min(num_words, MAX_WORDS), items.num_items)
        begin(self.sets)
        self.limit = np.array([limit_s])
        self.code, self.most_of_a_set = PAUSED, STEPS_OF_A_SET[0]

    def go_on(self, num_steps: int, deadline: float, most_of_a_set: int = STEPS_OF_A_SET[-1]) -> None:
        """At least so many steps, with room made as needed while there is time."""
        self.code, self.most_of_a_set = FULL, max(self.most_of_a_set, most_of_a_set // 4)
        while self.code == FULL and monotonic() <= deadline:
            begun, most = monotonic(), min(self.most_of_a_set, most_of_a_set)
            self.code = run(self.costs, self.filling, self.rules, self.sets, self.walk, self.limit, num_steps, most)
            if self.code == HOPELESS and most < most_of_a_set and 5 * monotonic() - 4 * begun < deadline:
                self.code, self.most_of_a_set = FULL, 4 * most
                continue
            if self.code == FULL:
                if len(self.sets.words) >= MAX_SETS or len(self.sets.entry_value) >= MAX_ENTRIES:
                    return
                self.sets = grown(self.sets)

    def chain(self) -> Chain | None:
        """The best chain met below the limit."""
        best = int(self.sets.tally[3])
        return _trace(self.sets, self.usage, self.items, best) if best >= 0 else None


def _rules(items: Items, demands: Demands, usage: Usage, weights: Floats, prices: Prices, full: bool) -> Rules:
    compute = items.compute_s if items.overlap else items.compute_s + items.fixed_s
    values = np.column_stack([item_work(items, weights), prices.values, most_added(items), items.num_bytes])
    room = np.column_stack([capacity(usage, weights), usage.free @ prices.most])
    behind = np.column_stack([_work_behind(items, np.ascontiguousarray(column)) for column in values.T])
    return Rules(
        items.after.start, items.after.data, usage.after, usage.takes, usage.width, room, usage.free, usage.final, values,
        values.sum(axis=0), np.where(np.isfinite(compute), compute, 0).sum(axis=0), compute, behind,
        int(usage.width.max()), items.overlap, demands.min_stage_s, full,
    )  # fmt: skip


def _work_behind(items: Items, work: Floats) -> Floats:
    """The work of each item and all that follows it (on very large graphs, of the item alone), shape (num_items,)."""
    count = items.num_items
    behind = work.copy()
    if count <= MAX_CLOSURE:
        num_words = (count + 63) // 64
        padded = np.zeros(64 * num_words)
        padded[:count] = work
        reach = np.zeros((count, num_words), dtype=np.uint64)
        _close(items.after.start, items.after.data, padded, padded.reshape(-1, 64).sum(axis=1), reach, behind)
    return behind


@compiled
def _close(after_start: Ints, after: Ints, work: Floats, word_work: Floats, reach: Words, behind: Floats) -> None:
    """Fill in what each item reaches, itself included, as bits, and the work of that; last items first."""
    full = ~np.uint64(0)
    for item in range(len(behind) - 1, -1, -1):
        reach[item, item // 64] |= np.uint64(1) << np.uint64(item % 64)
        total = 0.0
        for word in range(item // 64, len(word_work)):
            for slot in range(after_start[item], after_start[item + 1]):
                reach[item, word] |= reach[after[slot], word]
            if reach[item, word] == full:
                total += word_work[word]
            else:
                for bit in range(64):
                    if (reach[item, word] >> np.uint64(bit)) & np.uint64(1):
                        total += work[64 * word + bit]
        behind[item] = total


def _walk(items: Items, num_words: int, num_values: int) -> Walk:
    count, classes = items.num_items, len(items.classes)
    waiting = np.bincount(items.after.data, minlength=count).astype(np.int64)
    sources = np.flatnonzero(waiting == 0)
    ready = np.zeros(count + 1, dtype=np.int64)
    ready[: len(sources)] = sources
    place = np.full(count, -1, dtype=np.int64)
    place[sources] = np.arange(len(sources))
    random = np.random.default_rng(0)
    return Walk(
        np.zeros(num_words, dtype=np.uint64), random.integers(1, 2**63, count, dtype=np.uint64), waiting, ready, place,
        np.array([len(sources), 0], dtype=np.int64), np.zeros(1, dtype=np.uint64), np.zeros(1 << 20, dtype=np.int64),
        np.zeros(count + 2, dtype=np.int64), np.zeros(count + 2, dtype=np.int64), np.zeros(count + 2, dtype=np.int64),
        np.zeros((count + 2, 5 * classes + 1 + num_values)), np.zeros(classes), np.zeros(num_values), np.zeros(num_values),
        np.zeros(classes), np.zeros(classes),
    )  # fmt: skip


def _trace(sets: Sets, usage: Usage, items: Items, entry: int) -> Chain:
    value = float(sets.entry_value[entry])
    blocks = []
    members = members_of(sets, int(sets.entry_set[entry]), items.num_items)
    while sets.entry_from[entry] >= 0:
        before = int(sets.entry_from[entry])
        inside = members_of(sets, int(sets.entry_set[before]), items.num_items)
        takes = tuple(usage.takes[sets.entry_move[entry]].tolist())
        blocks.append((tuple(np.flatnonzero(members & ~inside).tolist()), takes))
        members, entry = inside, before
    return Chain(tuple(reversed(blocks)), value)
