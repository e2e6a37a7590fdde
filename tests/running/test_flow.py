"""The status block alone tells how many requests are ready for a worker, and which worker holds up the others."""

import pytest
from pipelines import double, local

from autosplit.running.flow import Flow, Position
from autosplit.running.statusblock import PAUSED, RUNNING, SENDING, STARTING, WAITING
from autosplit.running.wiring import wire

CHAIN = Flow(wire([local("a", double, "x", "u"), local("b", double, "u", "y", 2, queue_depth=1)], ["x"], ["y"], 8))
"""a feeds the replicas b.0 and b.1 over rings of one slot each; the workers are a, b.0, b.1."""

JOIN = Flow(wire([local("a", double, "x", "u"), local("b", double, "x", "v"), local("c", double, "u v", "y")], ["x"], ["y"], 8))


@pytest.mark.parametrize(
    "places,next_sequence,queued",
    [
        ([(WAITING, 0), (WAITING, 0), (WAITING, 1)], 0, [0, 0, 0]),
        ([(WAITING, 0), (WAITING, 0), (WAITING, 1)], 3, [3, 0, 0]),
        ([(RUNNING, 0), (WAITING, 0), (WAITING, 1)], 3, [2, 0, 0]),
        ([(RUNNING, 5), (RUNNING, 2), (WAITING, 3)], 6, [0, 1, 1]),
        ([(SENDING, 5), (SENDING, 4), (RUNNING, 3)], 6, [0, 0, 0]),
        ([(STARTING, 0), (PAUSED, 0), (WAITING, 1)], 6, [0, 0, 0]),
        ([(WAITING, 0), (WAITING, 0), (WAITING, 1)], 900, [8, 0, 0]),
    ],
)
def test_what_lies_ready(places: list[tuple[int, int]], next_sequence: int, queued: list[int]) -> None:
    found = [CHAIN.num_queued(number, [Position(*one) for one in places], [next_sequence]) for number in range(3)]
    assert found == queued


def test_a_request_is_ready_when_all_its_inputs_are() -> None:
    places = [Position(WAITING, 5), Position(RUNNING, 2), Position(RUNNING, 0)]
    assert JOIN.num_queued(2, places, [5]) == 1
    assert [JOIN.at_fault(number, places, [5]) for number in range(3)] == [False, True, True]


@pytest.mark.parametrize(
    "places,guilty",
    [
        ([(RUNNING, 5), (WAITING, 6), (WAITING, 5)], [True, False, False]),
        ([(WAITING, 6), (WAITING, 6), (WAITING, 5)], [False, False, True]),
        ([(SENDING, 5), (WAITING, 6), (RUNNING, 3)], [False, False, True]),
        ([(SENDING, 5), (WAITING, 6), (WAITING, 5)], [True, False, False]),
        ([(SENDING, 5), (WAITING, 6), (SENDING, 3)], [False, False, True]),
        ([(PAUSED, 5), (STARTING, 0), (WAITING, 5)], [True, False, False]),
    ],
)
def test_who_holds_up_the_others(places: list[tuple[int, int]], guilty: list[bool]) -> None:
    assert [CHAIN.at_fault(number, [Position(*one) for one in places], [6]) for number in range(3)] == guilty
