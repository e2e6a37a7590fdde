"""Usage numbers stand for what was taken: every walk through the table is a way to take devices, and every way is a walk."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import chain

from autosplit.planners.device_usage import MAX_STATES, sequence_usage, usage_of
from autosplit.planners.instance import contract
from autosplit.values.constraints import Demands


def walks(usage, longest):
    """Every sequence of moves from the start, with the state where it ends."""
    found = [((), 0)]
    for row, state in found:
        if len(row) < longest:
            found += [((*row, move), int(goal)) for move, goal in enumerate(usage.after[state]) if goal >= 0]
    return found


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 2, 3]),
)
def test_walks_are_the_ways_to_take_devices(speeds, max_replicas, num_stages, max_stages):
    demands = Demands(max_replicas=max_replicas, num_stages=num_stages, max_stages=max_stages if num_stages is None else None)
    counts = np.unique(speeds, return_counts=True)[1]
    usage = usage_of(counts.tolist(), demands)
    limit = min(num_stages or len(speeds), demands.max_stages or len(speeds), len(speeds))
    taken = {}
    for row, state in walks(usage, len(speeds)):
        left = counts - usage.takes[list(row)].sum(axis=0)
        assert (usage.free[state] == left).all() and (left >= 0).all() and len(row) <= limit
        assert usage.final[state] == (num_stages is None or len(row) == num_stages)
        taken[tuple(tuple(usage.takes[move].tolist()) for move in row)] = state
    assert (usage.width == usage.takes.sum(axis=1)).all() and usage.complete
    moves = [move for move in product(*(range(count + 1) for count in counts)) if 1 <= sum(move) <= max_replicas]
    ways = {row for length in range(limit + 1) for row in product(moves, repeat=length) if (sum_of(row, counts) <= counts).all()}
    assert set(taken) == ways


def sum_of(row, counts):
    return np.array(row).reshape(-1, len(counts)).sum(axis=0)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True), st.sampled_from([None, 2]))
def test_a_sequence_takes_devices_in_its_order_and_may_leave_some_out(speeds, max_stages):
    usage = sequence_usage(len(speeds), Demands(max_stages=max_stages), range(len(speeds)))
    assert not usage.complete
    rows = {tuple(int(usage.takes[move].argmax()) for move in row) for row, _ in walks(usage, len(speeds))}
    subsets = {tuple(d for d, kept in enumerate(bits) if kept) for bits in product((0, 1), repeat=len(speeds))}
    assert rows == {row for row in subsets if len(row) <= (max_stages or len(speeds))}


def test_too_many_devices_for_a_table_and_what_is_left_of_the_others():
    assert MAX_STATES < 2**13 and usage_of([1] * 13, Demands()) is None
    problem = chain([1.0, 1.0, 1.0], num_devices=13)
    problem = replace(problem, compute_s=problem.compute_s * np.arange(13.0, 0.0, -1.0))
    usage = contract(problem, Demands()).usage
    assert not usage.complete and usage.takes.argmax(axis=1).tolist() == list(range(12, -1, -1))
    usage = usage_of([2, 1], Demands())
    assert (usage.free @ np.array([0.25, 0.5])).max() == pytest.approx(1.0)
    assert (usage.free @ np.array([0.25, 0.5]))[0] == pytest.approx(1.0)
