"""Orders and sweeps that column generation stands on: nets left aside only lower a bound."""

from math import inf

import exhaustive
import numpy as np
import pytest
from fuzzing import examples
from problems import random_problem

from autosplit.planners.noncontiguous import column_generation
from autosplit.planners.noncontiguous.column_generation import ColumnBound, pricers_of, rising_bound
from autosplit.planners.noncontiguous.hypergraph import hypergraph_of, with_nets
from autosplit.planners.noncontiguous.pricing import Pricer
from autosplit.planners.noncontiguous.sweeps import cheap_nets
from autosplit.values.constraints import Demands


def area(graph, order) -> float:
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    num_open = np.zeros(len(order))
    for net in range(graph.pins.num_rows):
        pins = place[graph.pins.row(net)]
        num_open[pins.min() : pins.max()] += 1
    return float((2.0**num_open).sum())


def drawn(seed, num_ops=7):
    return random_problem(seed, num_ops=num_ops, num_devices=2, unsupported=False, caps=False, host=False, pooled=False)


@pytest.mark.parametrize("seed", range(examples(8)))
def test_a_bound_without_the_cheapest_nets_still_holds(seed):
    problem = drawn(seed, num_ops=5)
    graph = hypergraph_of(problem)
    order, least = np.arange(graph.num_items), 2.0 * graph.num_items
    dropped = cheap_nets(graph, order, 0, least)
    thin = with_nets(graph, ~dropped)
    assert area(thin, order) <= least and thin.pins.num_rows == graph.pins.num_rows - dropped.sum()
    best = exhaustive.best_blocks(problem, Demands(contiguous=False))
    assert best is not None
    bound = ColumnBound(thin, pricers_of(thin), 10 * best[1] + 1.0)
    bound.try_prices(graph.compute_s.min(axis=1) + 1e-300)
    assert bound.bound_s <= best[1] * (1 + 1e-9)


def test_after_the_deadline_one_order_is_tried_and_each_class_still_has_its_pricer(monkeypatch):
    # the orders of a model of 1500 ops take up to a second, and a limit of 1 s became 8 s
    graph = hypergraph_of(drawn(4))
    made = []
    monkeypatch.setattr(column_generation, "narrow_order", lambda graph, members, *, tries: made.append(tries) or np.arange(7))
    assert len(pricers_of(graph, deadline=-inf)) == len(graph.classes) and set(made) == {1}
    assert len(pricers_of(graph)) == len(graph.classes) and made[-1] == 200


def test_after_the_deadline_no_prices_are_tried(monkeypatch):
    # a sweep of 290,000 states took 8 s for prices on each of 60 items, where 0.2 s were left
    graph, priced, profile = hypergraph_of(drawn(4)), [], Pricer.profile
    monkeypatch.setattr(Pricer, "profile", lambda *args: priced.append(args) or profile(*args))
    bound = rising_bound(graph, lambda: (100.0, None), lambda *_: None, deadline=-inf)
    assert bound is not None and (bound.bound_s, bound.prices, priced) == (0.0, None, [])
    assert rising_bound(graph, lambda: (100.0, None), lambda *_: None, deadline=inf).bound_s > 0 and priced
