"""A chain may be laid from either end: both walks find the same value."""

from math import inf

import numpy as np
import pytest
from problems import random_problem

from autosplit.planners import bounds, downsets
from autosplit.planners.items import contract
from autosplit.planners.request import Request
from autosplit.planners.usage import usage_of


@pytest.mark.parametrize("seed", range(30))
def test_both_ends_give_the_same_value(seed):
    request = Request()
    items = contract(random_problem(seed), request)
    usage, weights = usage_of(items, request), bounds.multipliers(items)
    values = []
    for turned in (items, items.reversed()):
        way = downsets._Way(turned, request, usage, weights, inf, downsets.Prices.none(turned))
        way.go_on(1 << 40, inf)
        assert way.code == downsets.DONE
        found = way.chain()
        values.append(inf if found is None else found.value_s)
        outcome = downsets.best_chain(turned, request, usage, weights, inf, inf)
        assert outcome.complete
        assert (inf if outcome.chain is None else outcome.chain.value_s) == pytest.approx(values[0])
        if outcome.chain is not None:
            placed = [item for block, _ in outcome.chain.blocks for item in block]
            assert sorted(placed) == list(range(items.num_items))
            block_of = {item: number for number, (block, _) in enumerate(outcome.chain.blocks) for item in block}
            for item in range(items.num_items):
                assert all(block_of[item] <= block_of[int(goal)] for goal in turned.after[item])
    assert values[0] == pytest.approx(values[1])


def test_items_turned_twice_are_the_same():
    items = contract(random_problem(3), Request())
    again = items.reversed().reversed()
    assert again.ops == items.ops
    np.testing.assert_array_equal(again.pins.data, items.pins.data)
    np.testing.assert_array_equal(again.producer, items.producer)
    assert [again.after[item].tolist() for item in range(items.num_items)] == [
        items.after[item].tolist() for item in range(items.num_items)
    ]
