"""A request goes to the replica with the fewest requests under way; numbers, order, replays and messages stay right."""

import threading
from collections import Counter

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import Once, double, fail_on_7, local, request

from autosplit.errors import StageError
from autosplit.running.inflight import Lanes
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import Request
from autosplit.running.wiring import wire

pytestmark = pytest.mark.timeout(60)


class Uneven:
    """Adds 1; the thread that came first takes as long for two requests as the other for three, while there are others."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self._slow = 0
        self._turn = threading.Condition()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.get_ident()
        with self._turn:
            self._slow = self._slow or thread
            self.counts[thread] += 1
            self._turn.notify_all()
            if thread == self._slow:
                mine = self.counts[thread]
                self._turn.wait_for(lambda: 2 * (self.counts.total() - mine) >= 3 * mine, timeout=0.25)
        return x + 1


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=60))
def test_numbers_are_those_of_the_lane_and_go_to_the_one_with_the_fewest(replicas: int, steps: list[int]) -> None:
    """Steps: 0 feeds a request, ``k`` finishes the oldest one of the lane ``k``, if it has one."""
    lanes = Lanes(wire([local("a", double, "x", "u", replicas), local("b", double, "u", "y", replicas)], ["x"], ["y"]))
    window: dict[int, Request] = {}
    assert lanes.num == replicas
    for step in steps:
        before = [sum(number % replicas == lane for number in window) for lane in range(replicas)]
        if step == 0:
            number = lanes.take()
            assert number not in window and before[number % replicas] == min(before)
            assert number == lanes.next(number) - replicas
            window[number] = Request((), 0, 0)
            window[number].tokens = 1
        elif step <= replicas and before[step - 1]:
            window[lanes.base(step - 1)].tokens = 0
            lanes.settle(window)
    for lane in range(replicas):
        waiting = sorted(number for number in window if number % replicas == lane)
        assert waiting == list(range(lanes.base(lane), lanes.next(lane), replicas))


@pytest.mark.parametrize(("replicas", "num"), [((2, 2), 2), ((2, 1), 1), ((3, 3), 3), ((1,), 1)])
def test_there_are_lanes_where_replicas_never_meet(replicas: tuple[int, ...], num: int) -> None:
    values = "xuyz"
    stages = [local(f"s{k}", double, values[k], values[k + 1], count) for k, count in enumerate(replicas)]
    assert wire(stages, ["x"], [values[len(replicas)]]).num_lanes == num


@pytest.mark.parametrize("stages", [1, 2])
def test_a_slow_replica_does_not_hold_up_the_other(stages: int) -> None:
    uneven = Uneven()
    placed = [local("a", uneven, "x", "u", 2), local("b", double, "u", "y", 2)][:stages]
    with Pipeline(placed, ["x"], ["u" if stages == 1 else "y"]) as pipeline:
        answers = pipeline.run_many([request(number) for number in range(200)])
        assert pipeline.occupancy.num_answered == 200 and pipeline.occupancy.num_running == 0
        assert sum(stage.num_requests for stage in pipeline.stats().stages) == stages * 200
    assert [float(answer[0][0]) for answer in answers] == [stages * (number + 1) for number in range(200)]
    slow, fast = sorted(uneven.counts.values())
    assert fast > 1.3 * slow, uneven.counts


def test_uneven_lanes_replay_what_a_death_left_and_tell_requests_by_their_arrival() -> None:
    uneven, deadly = Uneven(), Once(57, 1)

    def work(x: torch.Tensor) -> torch.Tensor:
        return deadly(uneven(x)) - 1

    stages = [local("a", work, "x", "u", 2), local("b", fail_on_7, "u", "y", 2)]
    with Pipeline(stages, ["x"], ["y"]) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(100)]
        for number, future in enumerate(futures):
            if number == 6:
                with pytest.raises(StageError, match="failed on request 6: ValueError: seven is not for me"):
                    future.result(10)
            else:
                assert float(future.result(10)[0][0]) == number + 2
        assert pipeline.restarts == 1
