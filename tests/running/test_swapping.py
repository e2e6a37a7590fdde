"""Weights change under way: each request runs on the old ones or on the new ones in all stages, also in a replay."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pipelines import CORES, Gate, increment, local
from pipelines import request as vector

from autosplit.errors import BackendError, UsageError
from autosplit.running.modules import LocalFunction, StageFolder
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.running.stageworker import StageWorker
from autosplit.running.swapping import swap_modules
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, split

pytestmark = pytest.mark.timeout(100)


@pytest.fixture
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
    while pipeline.restarts == 0:
        pass
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


def test_the_files_of_old_weights_are_not_kept_for_ever(pipeline: Pipeline, traced: Traced, tmp_path: Path) -> None:
    for number in range(4):
        pipeline.swap("all", doubled(traced), tmp_path / str(number))
        pipeline.run(traced.example_inputs)
        kept = {folder.parent.name for folder in pipeline._deployment.kept}
        assert str(number) in kept and len(kept) <= 2


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


class Unloadable(LocalFunction):
    """A module that cannot be loaded."""

    def load(self, threads, device, shared, streams=1):
        raise RuntimeError("broken weights")


def test_a_report_that_is_still_to_come_is_not_taken_for_the_new_weights() -> None:
    gate = Gate()
    with Pipeline([local("a", gate, "x", "y")], ["x"], ["y"]) as pipeline:
        future = pipeline.submit(vector(1))
        gate.entered.acquire()
        pipeline._deployment.call(0, "during a report", StageWorker.events, False)  # and nobody waits for the reply
        threading.Timer(0.1, gate.opened.set).start()
        with pytest.raises(BackendError, match=r"(?s)the old ones stay in use.*broken weights"):
            swap_modules(pipeline._deployment, pipeline._executor, {"a": Unloadable(increment)})
        assert future.result(20)[0][0] == 2 and pipeline.run(vector(2))[0][0] == 3
