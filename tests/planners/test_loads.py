"""The compiled prices against the one evaluator, on random problems: loads of growing blocks, and the latency of a row."""

from itertools import product
from math import inf

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_problem

from autosplit.costs.cost import TOLERANCE, evaluate
from autosplit.costs.pieces import latency_s
from autosplit.costs.problem import Block
from autosplit.planners.contiguous import linear
from autosplit.planners.instance import contract
from autosplit.planners.latency.order_annealing import _walk
from autosplit.planners.loads import empty_block, plan_of, times_of
from autosplit.values.constraints import Demands


@settings(max_examples=examples(160), deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_a_growing_block_costs_what_the_evaluator_says(seed):
    """One block takes all intervals of an order in turn, so items leave it too. If an instance is not exact, it costs less."""
    problem = random_problem(seed, num_devices=2 + seed % 2, pooled=False)
    items = contract(problem, Demands()).reversed if seed % 3 else contract(problem, Demands())
    count, usage, orders = items.num_items, items.usage, linear.topological_orders(items)
    order, block, alive = orders[seed % len(orders)], empty_block(items.costs), np.zeros(len(items.usage.after), dtype=np.int64)
    room, rest, shape = np.full(len(alive), inf), np.zeros(count + 1), (count + 1, len(alive))
    for start in range(count):
        value, parent = np.full(shape, inf), np.zeros((*shape, 3), dtype=np.int64)
        value[start, 0] = 0.0
        linear._forward(items.costs, block, order, usage, room, rest, inf, 0.0, False, 0.0, value, parent, alive, start, 0)
        for end, (k, members) in product(range(start + 1, count + 1), enumerate(items.classes)):
            inside, device = items.expand(order[start:end]), members[0]
            outside = tuple(sorted({*range(problem.num_ops)} - {*inside}))
            others = [Block(outside, ((device + 1) % problem.num_devices,))] if outside else []
            loads = evaluate(problem, [Block(inside, (device,)), *others])
            fits = loads.memory_bytes[device] <= problem.memory_bytes[device] * (1 + TOLERANCE)
            true_s, found_s = loads.stage_s[0] if fits else inf, value[end, usage.after[0, usage.takes[:, k].argmax()]]
            assert found_s <= true_s * (1 + TOLERANCE)
            assert found_s == pytest.approx(true_s, rel=TOLERANCE, abs=TOLERANCE) or not items.exact


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6))
def test_the_compiled_sample_is_the_evaluators(seed):
    """A walk without moves returns the latency of its start, within its caps or not."""
    problem = random_problem(seed, unsupported=False, loose_order=False)
    device = np.random.default_rng(seed).integers(problem.num_devices, size=problem.num_ops)
    cuts = np.flatnonzero(np.diff(device)) + 1
    blocks = [Block(tuple(ops.tolist()), (int(device[ops[0]]),)) for ops in np.split(np.arange(problem.num_ops), cuts)]
    times = times_of(problem)
    plans = plan_of(times, np.arange(problem.num_ops), device), plan_of(times, np.arange(problem.num_ops), device)
    _, _, found = _walk(times, *plans, seed, 0, 0.01)
    assert found == pytest.approx(latency_s(problem, blocks), rel=1e-12, abs=1e-12)
