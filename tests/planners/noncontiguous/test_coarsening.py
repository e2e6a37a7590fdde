"""A coarse graph costs what the graph costs when each item stands for its own, and keeps an assignment that it was given."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from fuzzing import examples
from problems import random_problem

from autosplit.costs.workloads import read_workload
from autosplit.planners.noncontiguous.hypergraph import fits, hypergraph_of, loads_s
from autosplit.planners.noncontiguous.local_search import coarsened, descents, start_from


@pytest.mark.parametrize("seed", range(examples(12)))
def test_a_coarse_graph_costs_the_same(seed):
    graph = hypergraph_of(random_problem(seed, num_ops=14, num_devices=3, pooled=False))
    home = start_from(graph, None, graph.num_items, seed)
    for given in (None, home):
        for num_items in (2, 5, 9, 14):
            coarse, group = coarsened(graph, num_items, seed=seed, home=given)
            assert sorted(set(group.tolist())) == list(range(coarse.num_items))
            assert coarse.num_items <= graph.num_items and (num_items < 14 or coarse is graph)
            place = np.arange(coarse.num_items) % graph.num_devices
            if given is not None:
                place[group] = home
                assert np.array_equal(place[group], home)
            np.testing.assert_allclose(loads_s(coarse, place), loads_s(graph, place[group]))
            assert fits(coarse, place) == fits(graph, place[group])
            assert np.array_equal(coarse.item_of, group[graph.item_of])


def test_descents_only_get_better_and_say_what_they_are_worth():
    graph = hypergraph_of(read_workload(Path(__file__).parents[2] / "data" / "workloads" / "layer-bert24_inference.json"))
    found, asked = [], iter(range(300))
    for value_s, home in descents(graph, [], seed=1, halt=lambda: next(asked, None) is None):
        assert value_s == pytest.approx(loads_s(graph, home).max()) and fits(graph, home)
        found.append(value_s)
    assert found and all(after < before for before, after in pairwise(found))


def test_ops_of_no_time_are_joined_too():
    problem = random_problem(5, num_ops=10, num_devices=2, pooled=False, unsupported=False)
    problem = replace(problem, compute_s=np.zeros_like(problem.compute_s))
    coarse, group = coarsened(hypergraph_of(problem), 3, seed=0)
    assert coarse.num_items < 10 and len(group) == hypergraph_of(problem).num_items
