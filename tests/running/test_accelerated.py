"""Pipelines with stages on a simulated accelerator: real rings and workers, everything real but the calls of torch.cuda."""

import pytest
import torch
from pipelines import local, spec
from simulated import Simulated

from autosplit.backends.placing import place_runnable
from autosplit.errors import StageError
from autosplit.machine import parse_device
from autosplit.running.modules import LocalFunction
from autosplit.running.pipeline import Pipeline
from autosplit.running.threads import SimulatedDeath
from autosplit.running.wiring import StagePlacement

NULL = parse_device("null:0")


class Placed(LocalFunction):
    """A function of tensors on a simulated accelerator of its own, in a thread."""

    def load(self, threads, device):
        spec_of = (spec("x"),)
        return place_runnable(Simulated(), lambda *_: (lambda inputs: (self.function(*inputs),), True), spec_of, spec_of)


def stage(function, queue_depth=4) -> StagePlacement:
    return StagePlacement("placed", Placed(function), (spec("x"),), (spec("y"),), (NULL,), queue_depth=queue_depth)


def refuse_threes(x: torch.Tensor) -> torch.Tensor:
    if x[0] == 3:
        raise ValueError("three")
    return 2 * x


@pytest.mark.timeout(30)
@pytest.mark.parametrize("queue_depth", [1, 4])
def test_requests_keep_their_order_and_their_numbers(queue_depth) -> None:
    with Pipeline([stage(lambda x: 2 * x, queue_depth)], ["x"], ["y"]) as pipeline:
        answers = pipeline.run_many([[torch.full((4,), float(number))] for number in range(40)])
        assert [answer[0].tolist() for answer in answers] == [[2.0 * number] * 4 for number in range(40)]
        assert pipeline.stats().stages[0].num_requests == 40


@pytest.mark.timeout(30)
def test_a_request_that_fails_does_not_take_its_neighbours_along() -> None:
    with Pipeline([stage(refuse_threes)], ["x"], ["y"]) as pipeline:
        futures = [pipeline.submit([torch.full((4,), float(number))]) for number in range(6)]
        with pytest.raises(StageError, match="failed on request 3: ValueError: three"):
            futures[3].result(20)
        assert [futures[number].result(20)[0][0].item() for number in (0, 1, 2, 4, 5)] == [0, 2, 4, 8, 10]


@pytest.mark.timeout(30)
def test_what_was_begun_ahead_is_begun_anew_after_a_recovery() -> None:
    deaths = iter([7])

    def die_once(y: torch.Tensor) -> torch.Tensor:
        if y[0] == 14 and next(deaths, None):
            raise SimulatedDeath
        return y + 1

    with Pipeline([stage(lambda x: 2 * x), local("after", die_once, "y", "z")], ["x"], ["z"]) as pipeline:
        answers = pipeline.run_many([[torch.full((4,), float(number))] for number in range(20)])
        assert [answer[0][0].item() for answer in answers] == [2 * number + 1 for number in range(20)]
        assert pipeline.restarts == 1
