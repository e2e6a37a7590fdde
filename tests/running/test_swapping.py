"""Weights change under way: each request runs on the old ones or on the new ones in all stages, also in a replay."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipelines import CORES, Gate, increment, local, wait_until
from pipelines import request as vector

from autosplit.errors import BackendError, RefusedError, UsageError
from autosplit.running.modules import LocalFunction, StageFolder
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, split

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model("autosplit.examples.mlp:mlp?depth=4&width=8"))


@pytest.fixture(params=[1, 2])
def pipeline(traced: Traced, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    """Four linear layers in two stages, both in group 'all', each on one core, or on both as two lanes."""
    ops = [op.name for op in traced.graph.ops]
    stages = []
    for program, core in zip(split(traced, [ops[: len(ops) // 2], ops[len(ops) // 2 :]]), (CORES[0], CORES[-1]), strict=True):
        save_stage(program, tmp_path / program.name)
        devices = (core,) if request.param == 1 else (CORES[0], CORES[-1])
        stages.append(
            StagePlacement(program.name, StageFolder(tmp_path / program.name), program.inputs, program.outputs, devices)
        )
    with Pipeline(stages, traced.graph.inputs, traced.graph.outputs, groups={"all": ["stage0", "stage1"]}) as running:
        yield running


def doubled(traced: Traced) -> dict[str, torch.Tensor]:
    """All weights times two; biases too, so that no mixture of old and new gives the same answer."""
    return {
        name: 2 * tensor
        for program in split(traced, [[op.name for op in traced.graph.ops]])
        for name, tensor in program.weights.items()
    }


def test_a_swap_under_way_is_seen_by_all_stages_at_one_request_and_survives_a_death(
    pipeline: Pipeline, traced: Traced, tmp_path: Path
) -> None:
    [old] = pipeline.run(traced.example_inputs)
    futures = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            futures.append(pipeline.submit(traced.example_inputs))

    asker = threading.Thread(target=ask)
    asker.start()
    first = pipeline.swap("all", doubled(traced), tmp_path / "new")
    os.kill(pipeline.pids[1], signal.SIGKILL)
    wait_until(lambda: pipeline.restarts > 0)
    stop.set()
    asker.join()
    answers = [future.result(30)[0] for future in futures]
    [new] = pipeline.run(traced.example_inputs)
    assert not torch.equal(old, new) and first > 0
    for number, answer in enumerate(answers, start=1):
        assert torch.equal(answer, old if number < first else new), f"request {number}, swap at {first}"
    program = split(traced, [[op.name for op in traced.graph.ops]])[0]
    with torch.inference_mode():
        value = traced.example_inputs[0]
        for layer, (weight, bias) in enumerate(zip(*[iter(doubled(traced)[name] for name in program.weights)] * 2, strict=True)):
            value = torch.nn.functional.linear(value.relu() if layer else value, weight, bias)
    assert torch.allclose(value, new)


def test_the_files_of_old_weights_are_not_kept(pipeline: Pipeline, traced: Traced, tmp_path: Path) -> None:
    for number in range(4):
        pipeline.swap("all", doubled(traced), tmp_path / str(number))
        pipeline.run(traced.example_inputs)
        kept = {folder.parent.name for folder in pipeline._transport.deployment.kept}
        assert kept == {str(number)}


def test_weights_that_do_not_fit_change_nothing(pipeline: Pipeline, traced: Traced, tmp_path: Path) -> None:
    [old] = pipeline.run(traced.example_inputs)
    name = next(iter(doubled(traced)))
    with pytest.raises(UsageError, match="no parameter group 'none'; the groups are: all"):
        pipeline.swap("none", {}, tmp_path / "new")
    with pytest.raises(UsageError, match="weights must be a mapping of names to tensors, but are NoneType"):
        pipeline.swap("all", None, tmp_path / "new")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="folder must be the path of an empty folder, but is None"):
        pipeline.swap("all", {}, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is NoneType, and a dense"):
        pipeline.swap("all", {name: None}, tmp_path / "new")  # type: ignore[dict-item]
    with pytest.raises(
        UsageError, match=r"(?s)do not fit group 'all' \(2 faults\).*no stage of the group reads 'q'.*is expected"
    ):
        pipeline.swap("all", {"q": torch.zeros(1), name: torch.zeros(3)}, tmp_path / "new")
    assert torch.equal(pipeline.run(traced.example_inputs)[0], old)


class Loads(LocalFunction):
    """A function that can be loaded ``left`` times."""

    left = 1

    def load(self, threads, device, shared, streams=1):
        type(self).left -= 1
        if type(self).left < 0:
            raise RuntimeError("broken weights")
        return super().load(threads, device, shared)


def test_weights_that_cannot_be_loaded_leave_the_old_ones_in_use(tmp_path: Path) -> None:
    stage = replace(local("a", increment, "x", "y"), module=Loads(increment))
    with Pipeline([stage], ["x"], ["y"], groups={"all": ["a"]}) as pipeline:
        with pytest.raises(BackendError, match=r"(?s)the old ones stay in use.*broken weights"):
            pipeline.swap("all", {}, tmp_path)
        assert pipeline.run(vector(2))[0][0] == 3


def test_requests_that_run_or_wait_when_weights_are_swapped_are_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some run on the old weights, some wait in their queue, and callers wait for room there."""
    gate = Gate()
    with Pipeline(
        [local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=1, groups={"all": ["a"]}
    ) as pipeline:
        futures = {number: pipeline.submit(vector(number)) for number in range(2)}
        outside = [threading.Thread(target=lambda n=n: futures.update({n: pipeline.submit(vector(n))})) for n in range(2, 5)]
        for caller in outside:
            caller.start()
        threading.Timer(0.3, gate.opened.set).start()
        with caplog.at_level("INFO"):
            assert pipeline.swap("all", {}, tmp_path) >= 2
        for caller in outside:
            caller.join(10)
        assert {number: float(future.result(10)[0][0]) for number, future in futures.items()} == {n: n + 1 for n in range(5)}
        assert pipeline.run(vector(7))[0][0] == 8 and pipeline.occupancy.num_running == pipeline.occupancy.num_waiting == 0
        assert pipeline.swap_bytes == {"null:0": 0} and "beside those in use, which takes 0 B on null:0 more" in caplog.text
    with pytest.raises(RefusedError, match="closed"):
        pipeline.swap("all", {}, tmp_path)
