"""Pipelines with stages on a simulated accelerator: real rings and workers, everything real but the calls of torch.cuda."""

import re

import pytest
import torch
from pipelines import local, spec
from simulated import Simulated
from simulatedmemory import memory_of

from autosplit.backends import placing
from autosplit.backends.base import get_backend
from autosplit.backends.placing import place_runnable
from autosplit.devices.accelerators import PROVIDERS, open_accelerator
from autosplit.errors import BackendError, InfeasibleError, StageError
from autosplit.running.modules import LocalFunction, StageFolder
from autosplit.running.nullworker import SimulatedDeath
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, split
from autosplit.values.machine import parse_device

NULL = parse_device("null:0")


class Placed(LocalFunction):
    """A function of tensors on a simulated accelerator of its own, in a thread."""

    def load(self, threads, device, shared, streams=1):
        spec_of = (spec("x"),)
        return place_runnable(Simulated(), lambda *_: (lambda inputs: (self.function(*inputs),), True), spec_of, spec_of)


def stage(function, queue_depth=4, **settings) -> StagePlacement:
    return StagePlacement("placed", Placed(function), (spec("x"),), (spec("y"),), (NULL,), queue_depth=queue_depth, **settings)


def refuse_threes(x: torch.Tensor) -> torch.Tensor:
    if x[0] == 3:
        raise ValueError("three")
    return 2 * x


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("queue_depth", "num_contexts"), [(1, 2), (4, 2), (4, 4)])
def test_requests_keep_their_order_and_their_numbers(queue_depth, num_contexts, monkeypatch) -> None:
    monkeypatch.setattr(placing, "NUM_CONTEXTS", num_contexts)
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


class FallsOff(Simulated):
    """Every call fails after 500 requests of three parts of work each; ``opens`` says which opening of it succeeds."""

    opens = iter(())

    def __init__(self, index=0):
        if not next(self.opens):
            raise RuntimeError("no device")
        super().__init__(index)

    def enqueue(self, queue, work):
        if self.calls["enqueue"] > 3 * 500:
            raise RuntimeError("the device fell off the bus")
        super().enqueue(queue, work)


class PlacedOnOne(Placed):
    """A function on a device that falls off, opened as a stage opens it."""

    def load(self, threads, device, shared, streams=1):
        return place_runnable(open_accelerator("cuda:0"), lambda *_: (self.run, True), (spec("x"),), (spec("x"),))

    def run(self, inputs):
        return (self.function(*inputs),)


@pytest.fixture
def falling(monkeypatch):
    """A stage on a device that falls off, and can be opened as many times."""

    def made(times: int) -> StagePlacement:
        monkeypatch.setattr(FallsOff, "opens", iter([True] * times + [False]))
        return StagePlacement("placed", PlacedOnOne(lambda x: 2 * x), (spec("x"),), (spec("y"),), (NULL,))

    monkeypatch.setitem(PROVIDERS, "cuda", f"{__name__}:FallsOff")
    return made


@pytest.mark.timeout(60)
def test_a_device_that_a_new_worker_can_open_again_costs_no_request(falling) -> None:
    with Pipeline([falling(times=5)], ["x"], ["y"]) as pipeline:
        answers = pipeline.run_many([[torch.full((4,), float(number))] for number in range(1000)])
        assert [answer[0].tolist() for answer in answers] == [[2.0 * number] * 4 for number in range(1000)]
        assert 2 <= pipeline.restarts <= 3


@pytest.mark.timeout(60)
def test_a_device_that_is_gone_is_replaced_by_others_and_costs_no_request(falling, caplog) -> None:
    asked = []

    def replan(lost: str) -> list[StagePlacement]:
        asked.append(lost)
        return [local("all", lambda x: 3 * x, "x", "z", queue_depth=1)]

    after = local("after", lambda x, y: x + y, "x y", "z", replicas=2)
    with Pipeline([falling(times=1), after], ["x"], ["z", "x"], replan=replan) as pipeline:
        answers = pipeline.run_many([[torch.full((4,), float(number))] for number in range(1000)])
        assert [[one.tolist() for one in answer] for answer in answers] == [
            [[3.0 * number] * 4, [float(number)] * 4] for number in range(1000)
        ]
        [reason] = pipeline.replanned
        assert asked == ["null:0"] and caplog.messages.count(reason) == 1
        assert re.search("'null:0' was lost: .*fell off the bus.*no device; .*; planned anew: all on null:0$", reason)
        assert [worker.stage for worker in pipeline.health()] == ["all"] and pipeline.occupancy.num_answered == 1000


def refuse(lost: str) -> list[StagePlacement]:
    raise InfeasibleError(f"no plan fits without {lost}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("replan", [None, refuse])
def test_a_device_that_is_gone_ends_its_pipeline_with_one_error_and_gives_no_wrong_answer(falling, replan) -> None:
    with Pipeline([falling(times=1)], ["x"], ["y"], replan=replan) as pipeline:
        futures, reasons, right = [], set(), 0
        for number in range(1000):
            try:
                futures.append(pipeline.submit([torch.full((4,), float(number))]))
            except BackendError as failure:
                assert failure.device == "null:0"
                reasons.add(str(failure))
        for number, future in enumerate(futures):
            try:
                assert future.result(20)[0].tolist() == [2.0 * number] * 4
                right += 1
            except BackendError as failure:
                assert failure.device == "null:0"
                reasons.add(str(failure))
        [reason] = reasons
        assert 400 < right < 501
        assert "ended because device 'null:0' does not answer: RuntimeError: the device fell off the bus while it ran" in reason
        assert "device 'cuda:0' cannot be used: RuntimeError: no device; leave it out" in reason
        assert ("cannot take its stages: no plan fits without null:0" in reason) is (replan is not None)


@pytest.mark.timeout(30)
def test_memory_that_runs_out_in_a_request_fails_that_request_alone(monkeypatch) -> None:
    def grow(x):
        return x.expand(1 << 18, 4).contiguous()[0] if x[0] == 3 else 2 * x

    memory = memory_of(0)
    monkeypatch.setattr(memory, "most_bytes", memory.most_bytes - memory.free_bytes + 1_000_000)
    with Pipeline([stage(grow)], ["x"], ["y"]) as pipeline:
        futures = [pipeline.submit([torch.full((4,), float(number))]) for number in range(6)]
        with pytest.raises(StageError, match=r"failed on request 3: .*OutOfMemoryError: simulated:0 out of memory"):
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


@pytest.mark.timeout(60)
def test_a_stage_with_streams_answers_in_order(tmp_path) -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=16"))
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    save_stage(program, tmp_path / "stage")
    get_backend("openvino").prepare(program, tmp_path / "stage")
    module = StageFolder(tmp_path / "stage", "openvino")
    placed = StagePlacement("both", module, program.inputs, program.outputs, (NULL,), threads=2, streams=2)
    requests = [[torch.full((1, 16), float(number))] for number in range(12)]
    with Pipeline([placed], traced.graph.inputs, traced.graph.outputs) as pipeline:
        assert pipeline.wiring.window == 4
        for one, (found,) in zip(requests, pipeline.run_many(requests), strict=True):
            torch.testing.assert_close(found, program.module(*one)[0])
