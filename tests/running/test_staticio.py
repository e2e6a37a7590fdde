"""Stages over memory that stays: a worker writes their inputs and reads their outputs there."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pipelines import WIDTH, Once, fail_on_7, local, request

from autosplit.backends.staticio import StaticIO
from autosplit.errors import StageError
from autosplit.running.modules import LocalFunction
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement

pytestmark = pytest.mark.timeout(60)


class Uncalled(StaticIO):
    """Memory that nobody copies by calls of torch."""

    def __call__(self, given: Any) -> Any:
        raise AssertionError("the worker copied")


@dataclass(frozen=True, slots=True)
class Staying(LocalFunction):
    """The sum of a function of the first input and of the other inputs, in memory that stays."""

    num_inputs: int = 1

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> StaticIO:
        inputs, output = [torch.empty(WIDTH) for _ in range(self.num_inputs)], torch.empty(WIDTH)

        def compute() -> None:
            output.copy_(sum(inputs[1:], self.function(inputs[0])))

        return Uncalled(inputs, [output], compute)


def staying(name: str, function: Any, reads: str, makes: str, replicas: int = 1) -> StagePlacement:
    return replace(local(name, function, reads, makes, replicas), module=Staying(function, 0, len(reads.split())))


@pytest.mark.parametrize("replicas", [1, 2])
def test_requests_keep_their_values_past_full_rings_and_a_death(replicas: int) -> None:
    """Inputs come from the host and from a stage, and the output goes to both; one of its own inputs is filled when it dies."""
    stages = [
        staying("a", lambda x: 2 * x, "x", "h", replicas),
        staying("b", Once(7, 1), "h x", "z", replicas),
        local("c", lambda z: -z, "z", "y"),
    ]
    with Pipeline(stages, ["x"], ["y", "z"]) as pipeline:
        found = pipeline.run_many([request(number / 2) for number in range(100)])
        assert pipeline.restarts == 1
    assert [[float(value[0]) for value in values] for values in found] == [
        [-(1.5 * number + 1), 1.5 * number + 1] for number in range(100)
    ]


def test_a_request_that_fails_there_fails_alone() -> None:
    with Pipeline([staying("a", fail_on_7, "x", "h"), staying("b", lambda h: h, "h", "y")], ["x"], ["y"]) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(10)]
        with pytest.raises(StageError, match="seven is not for me"):
            futures[7].result(20)
        assert [float(one.result(20)[0][0]) for one in futures if one is not futures[7]] == [
            number + 1 for number in range(10) if number != 7
        ]
