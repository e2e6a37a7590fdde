"""The incumbent keeps what is better and forgets what no longer holds."""

from problems import chain

from autosplit.costs.problem import Block
from autosplit.planners.incumbent import Incumbent
from autosplit.values.constraints import Demands

ALONE = (Block((0, 1), (0,)),)
APART = (Block((0,), (0,)), Block((1,), (1,)))


def incumbent(**demands) -> Incumbent:
    return Incumbent(chain([2.0, 3.0], num_bytes=0.0), Demands(**demands))


def test_only_better_plans_that_meet_the_demands_are_kept() -> None:
    found = incumbent()
    found.offer(APART, "apart")
    found.offer(ALONE, "alone")
    assert (found.blocks, found.objective_s, found.methods) == (APART, 3.0, ["apart"])
    alone = incumbent(max_stages=1)
    alone.offer(APART, "apart")
    alone.offer((), "nothing")
    assert not alone.blocks


def test_a_plan_as_good_with_fewer_blocks_is_kept() -> None:
    found = incumbent(objective="latency")
    for blocks in (APART, ALONE, APART):
        found.offer(blocks, "same latency")
    assert (found.blocks, found.objective_s) == (ALONE, 5.0)


def test_a_bound_only_rises_and_ends_at_the_best_plan() -> None:
    found = incumbent()
    found.prove(2.5, "one")
    found.prove(2.0, "lower")
    assert (found.bound_s, found.bound_method) == (2.5, "one")
    found.offer(APART, "apart")
    assert not found.closed
    found.prove(3.0 + 1e-12, "rounded")
    assert found.closed and found.bound_s == 3.0
    solution = found.solution()
    assert (solution.status, solution.gap, solution.method) == ("optimal", 0.0, "one, apart, rounded")


def test_what_was_proved_does_not_hold_for_shared_devices() -> None:
    found = incumbent()
    found.prove(2.5, "bound")
    found.refuted = found.demands
    found.share_devices()
    assert (found.demands.reuse, found.refuted, found.bound_s) == (True, None, 0.0)
    assert "there is no plan with one block on a device" in found.log[-1]
    found.offer(ALONE, "alone")
    assert found.solution().status == "shared"


def test_every_line_of_the_log_reaches_the_caller() -> None:
    lines: list[str] = []
    found = Incumbent(chain([1.0, 1.0]), Demands(), say=lines.append)
    found.prove(0.5, "bound")
    assert lines == found.log and len(lines) == 1 and lines[0].endswith("bound: bound of 0.5 s")
