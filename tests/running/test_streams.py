"""Stages that work on several requests at once in one worker."""

import math
import threading
from collections.abc import Sequence
from itertools import cycle

import pytest
import torch
from pipelines import request, spec

from autosplit.errors import StageError
from autosplit.running.modules import LocalFunction
from autosplit.running.nullworker import SimulatedDeath
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.values.machine import parse_device

NULL = parse_device("null:0")


class Begun:
    """A request that is computed once another one was begun beside it, or somebody has given up."""

    def __init__(self, waiting: threading.Event, beside: threading.Event, inputs: Sequence[torch.Tensor]) -> None:
        self.waiting, self.beside = waiting, beside
        self.made = [2 * value for value in inputs]

    def wait(self, most_s: float = math.inf) -> bool:
        self.waiting.set()
        return self.beside.wait(min(most_s, 40.0)) or most_s == math.inf

    def outputs(self) -> list[torch.Tensor]:
        return self.made


class Pair:
    """Streams of which two are needed for one to end."""

    contexts = (None,) * 3

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.waiting, self.beside = threading.Event(), threading.Event()
        self.num_begun = 0

    def begin(self, inputs: Sequence[torch.Tensor]) -> Begun:
        self.num_begun += 1
        if self.num_begun == 2:
            self.beside.set()
        self.entered.release()
        return Begun(self.waiting, self.beside, inputs)


class Streaming(LocalFunction):
    """The streams themselves, in a thread."""

    def load(self, threads, device, shared, streams=1):
        return self.function


@pytest.mark.timeout(60)
def test_a_request_is_begun_while_an_earlier_one_is_computed() -> None:
    pair = Pair()
    stage = StagePlacement("pair", Streaming(pair), (spec("x"),), (spec("y"),), (NULL,))
    with Pipeline([stage], ["x"], ["y"]) as pipeline:
        first = pipeline.submit(request(1))
        assert pair.entered.acquire(timeout=20) and pair.waiting.wait(20)  # it has looked for others, and found none
        second = pipeline.submit(request(2))
        assert pair.entered.acquire(timeout=20), "the second waited for the first, and the first waits for the second"
        assert first.result(20)[0][0] == 2 and second.result(20)[0][0] == 4


class Short(Begun):
    """A request of which half is computed."""

    def outputs(self) -> list[torch.Tensor]:
        return [value[:2] for value in self.made]


class ShortPair(Pair):
    """Streams that make less than they announced."""

    def begin(self, inputs: Sequence[torch.Tensor]) -> Begun:
        self.beside.set()
        return Short(self.waiting, self.beside, inputs)


def test_outputs_of_streams_fit_what_was_announced() -> None:
    """A copy read as many bytes as the slot has, or expanded the output in silence."""
    stage = StagePlacement("pair", Streaming(ShortPair()), (spec("x"),), (spec("y"),), (NULL,))
    with Pipeline([stage], ["x"], ["y"]) as pipeline:
        for _ in range(2):
            with pytest.raises(StageError, match=r"output 0 is torch.float32 \[2\], and torch.float32 \[4\] was announced"):
                pipeline.run(request(1))


class Slot:
    """What one request occupies: the next one that is begun here overwrites what it made."""

    def __init__(self, go: threading.Event) -> None:
        self.go = go

    def wait(self, most_s: float = math.inf) -> bool:
        return self.go.wait(min(most_s, 20.0))

    def outputs(self) -> list[torch.Tensor]:
        return self.made


class Slots:
    """Three of them, which take turns; the first try to begin request 1 fails, and uses up a turn."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.contexts = [Slot(self.go) for _ in range(3)]
        self.turns = cycle(self.contexts)
        self.failed = False

    def begin(self, inputs: Sequence[torch.Tensor]) -> Slot:
        slot = next(self.turns)
        if inputs[0][0] == 1 and not self.failed:
            self.failed = True
            raise RuntimeError("not now")
        slot.made = [2 * value for value in inputs]
        return slot


@pytest.mark.timeout(60)
def test_a_request_that_cannot_be_begun_ahead_fails_alone() -> None:
    slots = Slots()
    stage = StagePlacement("slots", Streaming(slots), (spec("x"),), (spec("y"),), (NULL,))
    with Pipeline([stage], ["x"], ["y"], max_in_flight=8) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(8)]
        slots.go.set()
        failures = [future.exception(20) for future in futures]
        answers = {number: float(future.result(0)[0][0]) for number, future in enumerate(futures) if failures[number] is None}
    assert [number for number in answers if answers[number] != 2 * number] == []
    assert [number for number in range(8) if failures[number] is not None] == [1] and "not now" in str(failures[1])


class Deadly(Slots):
    """Streams whose worker dies when request 3 is begun."""

    def begin(self, inputs: Sequence[torch.Tensor]) -> Slot:
        if inputs[0][0] == 3:
            raise SimulatedDeath
        return super().begin(inputs)


@pytest.mark.timeout(60)
def test_the_request_that_crashed_its_worker_is_blamed_and_not_the_one_beside_it() -> None:
    slots = Deadly()
    slots.failed = True
    stage = StagePlacement("slots", Streaming(slots), (spec("x"),), (spec("y"),), (NULL,))
    with Pipeline([stage], ["x"], ["y"], max_in_flight=8) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(8)]
        slots.go.set()
        failures = [future.exception(20) for future in futures]
    assert [number for number in range(8) if failures[number] is not None] == [3] and "ran request 3" in str(failures[3])
