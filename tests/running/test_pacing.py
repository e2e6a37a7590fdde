"""The number of requests in flight, and of answers that the host waits for at once, follow from the rate of answers."""

import threading
from collections.abc import Sequence
from itertools import repeat

import pytest
import torch
from pipelines import local, request, wait_until

from autosplit.running.inflight import SOON_NS, Pace
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import RequestTimes

pytestmark = pytest.mark.timeout(60)


def answers(count: int, period_ns: int) -> list[RequestTimes]:
    return [RequestTimes(number, 0, 0, number * period_ns, number * period_ns) for number in range(count)]


@pytest.mark.parametrize(
    ("count", "period_ns", "batch_to_collect", "size"),
    [
        (31, 1, 1, 3),  # too few to tell
        (40, SOON_NS + 1_000_000, 1, 3),
        (40, SOON_NS // 3, 3, 6),
        (40, 1000, 8, 16),
    ],
)
def test_more_are_in_flight_the_faster_they_come(count: int, period_ns: int, batch_to_collect: int, size: int) -> None:
    pace = Pace(3, 16)
    pace.look(answers(count, period_ns))
    assert (pace.batch_to_collect, pace.size) == (batch_to_collect, size)
    pace.look(answers(40, 2 * SOON_NS))
    assert (pace.batch_to_collect, pace.size) == (1, 3)


def test_a_window_that_was_asked_for_stays() -> None:
    pace = Pace(4, 4)
    pace.look(answers(40, 1))
    assert (pace.batch_to_collect, pace.size) == (2, 4)


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
        assert pipeline.wiring.window <= pipeline.max_in_flight <= pipeline.wiring.most_in_flight == 16
        alone, slow = (pipeline.submit(request(number)) for number in (5, 2))
        assert alone.result(10)[0][0] == 6 and not slow.done()
        opened.set()
        assert slow.result(10)[0][0] == 3 and next(stream)[0][0] == 1


def test_none_overtakes_waiting_ones_when_more_may_be_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    let_out, fast, seen = threading.Semaphore(0), threading.Event(), []

    def see(x: torch.Tensor) -> torch.Tensor:
        seen.append(int(x[0]))
        let_out.acquire(timeout=30)
        return x

    def grow(pace: Pace, times: Sequence[RequestTimes]) -> None:
        pace.size = 8 if fast.is_set() else 3

    monkeypatch.setattr(Pace, "look", grow)
    with Pipeline([local("a", see, "x", "y")], ["x"], ["y"]) as pipeline:
        assert pipeline.max_in_flight == 3
        futures = [pipeline.submit(request(number)) for number in range(6)]
        fast.set()
        let_out.release()
        futures[0].result(10)
        wait_until(lambda: pipeline.max_in_flight > 3)  # two are in the queue
        futures.append(pipeline.submit(request(6)))
        let_out.release(6)
        assert [int(future.result(10)[0][0]) for future in futures] == seen == list(range(7))
