"""Under a memory cap no set below it is lost, most of those above it are, and bounds and resplits hold."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from fuzzing import examples
from problems import random_problem

from autosplit.planners.instance import Instance
from autosplit.planners.noncontiguous.column_generation import pricers_of, rising_bound
from autosplit.planners.noncontiguous.hypergraph import fits, hypergraph_of, load_s, loads_s
from autosplit.planners.noncontiguous.local_search import start_from
from autosplit.planners.noncontiguous.pricing import Pricer
from autosplit.planners.noncontiguous.resplitting import resplit
from autosplit.planners.noncontiguous.sweeps import capped_sweep


def drawn(seed, num_ops=7) -> Instance:
    """A hypergraph of two devices, in which the caps often bind, and often one only."""
    problem = random_problem(seed, num_ops=num_ops, num_devices=2, unsupported=False, caps=False, host=False, pooled=False)
    problem, rng = replace(problem, memory_bytes=np.array([1e9, 2e9])), np.random.default_rng(seed)  # two classes
    graph = hypergraph_of(problem)
    sizes = rng.choice([0.0, 1.0, 2.5, 3.0, 10.0], size=graph.num_items)
    caps = sizes.sum() * rng.uniform(0.4, 1.1, size=2)
    return replace(graph, num_bytes=sizes, memory_bytes=caps)


def subsets(graph):
    return [np.array(bits, dtype=bool) for bits in product((False, True), repeat=graph.num_items)]


@pytest.mark.parametrize("seed", range(examples(10)))
def test_no_set_below_the_cap_is_lost_and_with_many_levels_none_above_it_is_left(seed):
    graph, limit_s = drawn(seed), 25.0
    values = np.random.default_rng(seed).integers(0, 9, size=graph.num_items)
    room_bytes, sizes = float(graph.memory_bytes[0]), graph.num_bytes
    fitting = [part for part in subsets(graph) if load_s(graph, part, 0) <= limit_s]
    below = [part for part in fitting if sizes[part].sum() <= room_bytes]
    most, wide = (max(int(values[part].sum()) for part in parts) for parts in (below, fitting))
    plain = pricers_of(graph)[0]
    for num_levels in (1, 2, 5, 1000):
        sweep = capped_sweep(plain.sweep, sizes, room_bytes, num_levels)
        pricer = Pricer(sweep, plain.work_s, 1)
        found = pricer.best_set(values, limit_s)
        assert most <= values[found].sum() <= wide
        assert len(pricer.profile(values, limit_s)) - 1 == values[found].sum()
        assert load_s(graph, found, 0) <= limit_s * (1 + 1e-12)
    assert values[found].sum() == most


def test_a_device_that_holds_nothing_takes_what_weighs_nothing():
    graph = drawn(1)
    sizes = graph.num_bytes
    light = sizes == 0
    assert 0 < light.sum() < graph.num_items
    plain = pricers_of(graph)[0]
    for num_levels in (1, 5):
        pricer = Pricer(capped_sweep(plain.sweep, sizes, 0.0, num_levels), plain.work_s, 1)
        found = pricer.best_set(np.ones(graph.num_items, dtype=np.int64), 1e9)
        assert (found == light).all()


@pytest.mark.parametrize("seed", range(examples(10)))
def test_bounds_and_plans_keep_the_caps(seed):
    graph = drawn(seed, num_ops=6)
    plans = [part.astype(np.int64) for part in subsets(graph) if fits(graph, part.astype(np.int64))]
    if not plans:
        return
    best_s, best = min(((float(loads_s(graph, plan).max()), plan) for plan in plans), key=lambda found: found[0])
    bound = rising_bound(graph, lambda: (best_s, best), lambda *_: None, deadline=np.inf)
    assert best_s == 0.0 or (bound is not None and bound.bound_s <= best_s * (1 + 1e-9))
    for plan in plans[:: max(1, len(plans) // 4)]:
        limit_s = float(loads_s(graph, plan).max()) * (1 + 1e-9)
        found = resplit(graph, plan, 1, 0, limit_s=limit_s, seed=seed)
        assert found is None or (fits(graph, found[0]) and best_s * (1 - 1e-9) <= max(found[1:]) <= limit_s)


@pytest.mark.parametrize("seed", range(examples(10)))
def test_starts_keep_the_caps_that_can_be_kept(seed):
    graph = drawn(seed)
    caps = np.full(2, graph.num_items // 2 + 1.0)
    roomy = replace(graph, num_bytes=np.ones(graph.num_items), memory_bytes=caps)
    home = start_from(roomy, None, roomy.num_items, seed)
    assert fits(roomy, home)
    moved = [start_from(roomy, home, roomy.num_items, number) for number in range(20)]
    assert all(fits(roomy, other) for other in moved) and any((other != home).any() for other in moved)
