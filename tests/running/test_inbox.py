"""Requests that overtake each other between stages, in pipelines that answer as ready."""

import random
import time

import pytest
import torch
from pipelines import Gate, Once, add, double, increment, local, request

from autosplit.running.inbox import Inbox
from autosplit.running.pipeline import Pipeline
from autosplit.running.ring import Ring, RingEnd
from autosplit.running.statusblock import StatusBlock
from autosplit.tracing.tensorspec import TensorSpec

pytestmark = pytest.mark.timeout(60)

SPEC = TensorSpec("x", (1,), (1,), "float32")


def send(ring: Ring, sequence: int) -> None:
    end = RingEnd(ring, sends=True)
    end.acquire(sequence, 0).write([torch.tensor([float(sequence)])])
    end.release(sequence)


def test_the_most_urgent_of_those_whose_inputs_are_all_here_is_taken() -> None:
    words, rings = StatusBlock.create(8, 1), [Ring.create([SPEC], 8) for _ in range(2)]
    inbox = Inbox([[RingEnd(ring, sends=False)] for ring in rings], words)
    for sequence, priority in enumerate((0, 0, -1, 2**80, -5)):
        words.describe(sequence, 0, priority, sequence)
        send(rings[0], sequence)
    assert inbox.pick() is None
    for sequence in (3, 1, 2, 0):
        send(rings[1], sequence)
    taken = [inbox.wait() for _ in range(4)]
    assert [sequence for sequence, _ in taken] == [2, 0, 1, 3]
    assert all(slot.tensors[0].item() == sequence for sequence, slots in taken for slot in slots)
    assert inbox.pick() is None
    for ring in rings:
        ring.refill([5, 6])
    inbox.restart()
    assert [inbox.wait()[0], inbox.wait()[0], inbox.pick()] == [5, 6, None]


def test_a_slot_that_is_being_filled_is_not_read() -> None:
    words, ring = StatusBlock.create(4, 1), Ring.create([SPEC], 4)
    inbox = Inbox([[RingEnd(ring, sends=False)]], words)
    send(ring, 0)
    words.describe(1, 0, -1, 1)
    ring.slot(1).write([torch.ones(1)])  # its number is not told yet
    assert inbox.wait()[0] == 0 and inbox.pick() is None
    RingEnd(ring, sends=True).release(1)
    assert inbox.wait()[0] == 1 and not inbox.waits()


def test_an_urgent_request_overtakes_those_that_wait_between_stages() -> None:
    gate = Gate()
    stages = [local("a", double, "x", "u"), local("b", gate, "u", "v"), local("c", add, "v x", "y")]
    for in_order, expected in ((False, [0, 10, 2, 4, 6, 8]), (True, [0, 2, 4, 6, 8, 10])):
        gate.seen.clear()
        gate.opened.clear()
        with Pipeline(stages, ["x"], ["y"], in_order=in_order, max_in_flight=6) as pipeline:
            futures = [pipeline.submit(request(0))]
            assert gate.entered.acquire(timeout=30)
            futures += [pipeline.submit(request(number), priority=-(number == 5)) for number in range(1, 6)]
            while not in_order and pipeline.health()[0].num_requests < 6:
                time.sleep(0.001)  # the first stage has handed all of them over
            gate.opened.set()
            assert [float(future.result(30)[0][0]) for future in futures] == [3.0 * number + 1 for number in range(6)]
        assert gate.seen == expected
        while gate.entered.acquire(blocking=False):
            pass


def test_overtaking_loses_nothing_when_workers_die_and_requests_are_cancelled() -> None:
    drawn = random.Random(3)
    stages = [
        local("a", double, "x", "u", 2, queue_depth=1),
        local("b", Once(40, 1), "u", "v", 3),
        local("c", add, "u v", "w"),
        local("d", increment, "w", "y", 2),
    ]
    with Pipeline(stages, ["x"], ["y", "u"], in_order=False, room=200) as pipeline:
        futures = [pipeline.submit(request(number), priority=drawn.randrange(-9, 9)) for number in range(200)]
        cancelled = [future.cancel() for future in futures[50:60]]
        for number, future in enumerate(futures):
            if number not in range(50, 60) or not cancelled[number - 50]:
                assert [float(value[0]) for value in future.result(30)] == [4 * number + 2, 2 * number]
        assert pipeline.restarts == 1
        assert pipeline.run(request(7))[0][0] == 30
