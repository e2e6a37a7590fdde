"""How many requests are in flight, and how many answers the host waits for at once, follows from how fast they come."""

import threading
from itertools import repeat

import pytest
import torch
from pipelines import local, request

from autosplit.running.pacing import SOON_NS, Pace
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import RequestTimes

pytestmark = pytest.mark.timeout(60)


def answers(count: int, period_ns: int) -> list[RequestTimes]:
    return [RequestTimes(number, 0, 0, number * period_ns, number * period_ns) for number in range(count)]


@pytest.mark.parametrize(
    ("count", "period_ns", "num_soon", "size"),
    [
        (31, 1, 1, 3),  # too few to tell
        (40, SOON_NS + 1_000_000, 1, 3),
        (40, SOON_NS // 3, 3, 6),
        (40, 1000, 8, 16),
    ],
)
def test_more_are_in_flight_the_faster_they_come(count: int, period_ns: int, num_soon: int, size: int) -> None:
    pace = Pace(3, 16)
    pace.look(answers(count, period_ns))
    assert (pace.num_soon, pace.size) == (num_soon, size)
    pace.look(answers(40, 2 * SOON_NS))
    assert (pace.num_soon, pace.size) == (1, 3)


def test_a_window_that_was_asked_for_stays() -> None:
    pace = Pace(4, 4)
    pace.look(answers(40, 1))
    assert (pace.num_soon, pace.size) == (2, 4)


def test_a_request_is_answered_before_a_slow_one_of_a_fast_stream() -> None:
    """The host waits for several results of which the second does not come."""
    opened = threading.Event()

    def hold_2(x: torch.Tensor) -> torch.Tensor:
        if x[0] == 2:
            opened.wait(10)
        return x + 1

    with Pipeline([local("a", hold_2, "x", "y")], ["x"], ["y"]) as pipeline:
        stream = pipeline.stream(repeat(request(0)))
        for _ in range(200):
            assert next(stream)[0][0] == 1
        assert pipeline.wiring.window <= pipeline.window <= pipeline.wiring.most_in_flight == 16
        alone, slow = (pipeline.submit(request(number)) for number in (5, 2))
        assert alone.result(10)[0][0] == 6 and not slow.done()
        opened.set()
        assert slow.result(10)[0][0] == 3 and next(stream)[0][0] == 1
