"""A chain may be laid from either end: both walks find the same value."""

from dataclasses import replace
from functools import partial
from math import inf

import numpy as np
import pytest
from fuzzing import examples
from problems import chain, random_problem

from autosplit.costs.problem import Net, Transfers
from autosplit.planners.contiguous import downsets
from autosplit.planners.instance import contract
from autosplit.values.constraints import Demands


def last_below(walk_below):
    """The chains found below ever lower limits: the value of the last one, which is the best one."""
    limit_s = inf
    while (chain := walk_below(limit_s)) is not None:
        assert chain.value_s < limit_s
        limit_s = chain.value_s
    return limit_s


@pytest.mark.parametrize("seed", range(examples(30)))
def test_both_ends_give_the_same_value(seed):
    items = contract(random_problem(seed), Demands())
    values = []

    def from_one_end(turned, limit_s):
        way = downsets._Way(turned, limit_s)
        way.go_on(1 << 40, inf)
        assert way.code == downsets.DONE
        return way.chain()

    def from_either_end(turned, limit_s):
        outcome = downsets.best_chain(turned, limit_s, inf)
        assert outcome.complete or outcome.chain is not None
        if outcome.chain is not None:
            placed = [item for block, _ in outcome.chain.blocks for item in block]
            assert sorted(placed) == list(range(items.num_items))
            block_of = {item: number for number, (block, _) in enumerate(outcome.chain.blocks) for item in block}
            for item in range(items.num_items):
                assert all(block_of[item] <= block_of[int(goal)] for goal in turned.after.row(item))
        return outcome.chain

    for turned in (items, items.reversed):
        values.append(last_below(partial(from_one_end, turned)))
        assert last_below(partial(from_either_end, turned)) == pytest.approx(values[-1])
    assert values[0] == pytest.approx(values[1])


@pytest.mark.parametrize("seed", range(examples(60)))
def test_full_blocks_are_enough(seed):
    """Walks that leave blocks with room aside, against walks that do not."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, num_ops=int(rng.integers(4, 12)), pooled=False, loose_order=False, host=False)
    transfers, price = Transfers.free(problem.num_devices), rng.choice([0.3, 1.0])
    for array in (transfers.send_s_per_byte, transfers.receive_s_per_byte):
        array += price
    uneven = np.where(np.isfinite(problem.compute_s), rng.random((problem.num_ops, 1)), 0.0)
    problem = replace(problem, transfers=transfers, send_once=True, compute_s=problem.compute_s + uneven)
    items = contract(problem, Demands(max_replicas=1 + seed % 2))
    items = items.reversed if rng.random() < 0.5 else items
    assert downsets.maximal_blocks_suffice(items)

    def walk_below(full, limit_s):
        way = downsets._Way(items, limit_s)
        way.walk = way.walk._replace(maximal=full)
        way.go_on(1 << 40, inf)
        return way.chain()

    values = [last_below(partial(walk_below, full)) for full in (False, True)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


@pytest.mark.parametrize("times", [[5.6, 3.0, 4.5, 2.4], [5.6, 4.5, 3.0, 2.4]])
def test_what_is_dear_to_receive_leaves_no_room_for_others(times):
    """Ops a, y, w in a row, and x alone: a chain of 9.8 s was missed, since y seemed to have room for x without its transfer."""
    y = times.index(4.5)
    nets = (Net(0, (y,), 4.2), Net(y, (3,), 0.0))
    items = contract(chain(times, num_devices=3, nets=nets, order=((0, y), (y, 3)), send_once=True), Demands())
    for turned in (items, items.reversed):
        way = downsets._Way(turned, 10.0)
        way.go_on(1 << 40, inf)
        assert way.walk.maximal and way.chain() is not None
