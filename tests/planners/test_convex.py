from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.costs.problem import Block, Problem, Transfers
from autosplit.planners.convex import convex_blocks


def problem_of(num_ops: int, order: list[tuple[int, int]], groups: list[tuple[int, ...]] | None = None) -> Problem:
    return Problem(
        name="drawn",
        ops=tuple(f"op{number}" for number in range(num_ops)),
        devices=("a", "b", "c"),
        compute_s=np.ones((num_ops, 3)),
        nets=(),
        order=tuple(order),
        transfers=Transfers.free(3),
        op_bytes=np.zeros(num_ops),
        memory_bytes=np.full(3, np.inf),
        groups=tuple(groups or ()),
    )


def num_turns(order: tuple[int, ...], assignment: list[int]) -> int:
    return sum(1 for n, op in enumerate(order) if not n or assignment[op] != assignment[order[n - 1]])


def check(problem: Problem, assignment: list[int], blocks: tuple[Block, ...]) -> None:
    position = {op: number for number, block in enumerate(blocks) for op in block.ops}
    assert sorted(op for block in blocks for op in block.ops) == list(range(problem.num_ops))
    assert all((assignment[op],) == block.devices for block in blocks for op in block.ops)
    assert all(position[before] <= position[after] for before, after in problem.order)


def test_a_chain_that_comes_back_to_a_device_is_three_blocks() -> None:
    # 0 -> 1 -> 2 on a, b, a
    blocks = convex_blocks(problem_of(3, [(0, 1), (1, 2)]), [0, 1, 0])
    assert blocks == (Block((0,), (0,)), Block((1,), (1,)), Block((2,), (0,)))


def test_the_better_first_device_is_found() -> None:
    # a's op 0 first would give a, b, a; b first gives b, a
    blocks = convex_blocks(problem_of(3, [(1, 2)]), [0, 1, 0])
    assert blocks == (Block((1,), (1,)), Block((0, 2), (0,)))


def test_a_group_across_devices_is_placed_op_by_op() -> None:
    problem = problem_of(3, [(0, 1), (1, 2)], [(0, 2)])
    blocks = convex_blocks(problem, [0, 1, 0])
    check(problem, [0, 1, 0], blocks)
    assert len(convex_blocks(problem, [0, 0, 0])) == 1


def test_two_thousand_ops_on_eight_devices() -> None:
    rng = np.random.default_rng(0)
    order = sorted({(int(rng.integers(max(0, op - 30), op)), op) for op in range(1, 2000) for _ in range(2)})
    assignment = [min(7, op // 250 + int(rng.random() < 0.02)) for op in range(2000)]
    problem = problem_of(2000, order)
    check(problem, assignment, convex_blocks(problem, assignment, width=8))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_order_has_fewer_turns(data: st.DataObject) -> None:
    num_ops = data.draw(st.integers(1, 6))
    pairs = [(a, b) for b in range(num_ops) for a in range(b)]
    order = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    assignment = data.draw(st.lists(st.integers(0, 2), min_size=num_ops, max_size=num_ops))
    problem = problem_of(num_ops, order)
    blocks = convex_blocks(problem, assignment)
    check(problem, assignment, blocks)
    orders = (p for p in permutations(range(num_ops)) if all(p.index(a) < p.index(b) for a, b in order))
    assert len(blocks) == min(num_turns(p, assignment) for p in orders)
