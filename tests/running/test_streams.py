"""Stages that work on several requests at once in one worker."""

import math
import threading
from collections.abc import Sequence

import pytest
import torch
from pipelines import request, spec

from autosplit.machine import parse_device
from autosplit.running.modules import LocalFunction
from autosplit.running.pipeline import Pipeline
from autosplit.running.wiring import StagePlacement

NULL = parse_device("null:0")


class Begun:
    """A request that is computed once another one was begun beside it, or somebody has given up."""

    def __init__(self, waiting: threading.Event, beside: threading.Event, inputs: Sequence[torch.Tensor]) -> None:
        self.waiting, self.beside = waiting, beside
        self.made = [2 * value for value in inputs]

    def wait(self, most_s: float = math.inf) -> bool:
        self.waiting.set()
        return self.beside.wait(min(most_s, 5.0)) or most_s == math.inf

    def outputs(self) -> list[torch.Tensor]:
        return self.made


class Pair:
    """Streams of which two are needed for one to end."""

    num_contexts = 3

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

    def load(self, threads, device):
        return self.function


@pytest.mark.timeout(60)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_request_is_begun_while_an_earlier_one_is_computed(in_order: bool) -> None:
    pair = Pair()
    stage = StagePlacement("pair", Streaming(pair), (spec("x"),), (spec("y"),), (NULL,))
    with Pipeline([stage], ["x"], ["y"], in_order=in_order) as pipeline:
        first = pipeline.submit(request(1))
        assert pair.entered.acquire(timeout=20) and pair.waiting.wait(20)  # it has looked for others, and found none
        second = pipeline.submit(request(2))
        assert pair.entered.acquire(timeout=2), "the second waited for the first, and the first waits for the second"
        assert first.result(20)[0][0] == 2 and second.result(20)[0][0] == 4
