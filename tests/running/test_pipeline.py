"""Pipelines of real processes: split models bit for bit, memory, the cores they run on, and nothing left behind."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipelines import CORES, Telling, abandoned_since, double, request, spawned

from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import BackendError
from autosplit.running.modules import PythonFunction, StageFolder
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, split
from autosplit.values.machine import Device

pytestmark = pytest.mark.timeout(100)

NUM_DISTINCT = 4


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def placements(traced: Traced, folder: Path, num_stages: int, replicas: int = 1) -> list[StagePlacement]:
    """The graph cut into runs of equal length; the stages take the cores in turn."""
    ops = [op.name for op in traced.graph.ops]
    cuts = [len(ops) * number // num_stages for number in range(num_stages + 1)]
    stages = []
    for number, program in enumerate(split(traced, [ops[start:end] for start, end in itertools.pairwise(cuts)])):
        save_stage(program, folder / program.name)
        devices = tuple(CORES[(number + replica) % len(CORES)] for replica in range(replicas))
        stages.append(StagePlacement(program.name, StageFolder(folder / program.name), program.inputs, program.outputs, devices))
    return stages


@pytest.mark.parametrize(
    "model,num_stages,replicas",
    [
        ("autosplit.examples.unet:unet?channels=4&size=16&levels=2", 3, 1),
        ("autosplit.examples.branches:branches?size=16&channels=4&depth=2", 2, 1),
        ("autosplit.examples.tied:tied", 2, 2),
    ],
)
def test_a_split_model_equals_the_whole_one_bit_for_bit(tmp_path: Path, model: str, num_stages: int, replicas: int) -> None:
    traced = trace(load_model(model))
    requests = [
        [value if value.dtype == torch.int64 else value + number for value in traced.example_inputs]
        for number in range(NUM_DISTINCT)
    ]
    with torch.inference_mode():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        expected = [traced.program(*one) for one in requests]
        torch.set_num_threads(threads)
    with Pipeline(placements(traced, tmp_path, num_stages, replicas), traced.graph.inputs, traced.graph.outputs) as pipeline:
        answers = pipeline.run_many([requests[number % NUM_DISTINCT] for number in range(3 * NUM_DISTINCT)])
    for number, answer in enumerate(answers):
        for found, wanted in zip(answer, expected[number % NUM_DISTINCT], strict=True):
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()


def test_a_worker_holds_its_own_stage_and_says_how_it_used_its_time(tmp_path: Path) -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp"))
    programs = split(traced, [[op.name for op in traced.graph.ops]])
    with Pipeline(placements(traced, tmp_path, 2), traced.graph.inputs, traced.graph.outputs) as pipeline:
        pipeline.run_many([traced.example_inputs] * 10)
        stats = pipeline.stats()
    half = programs[0].weight_bytes / 2
    for stage in stats.stages:
        assert 0.9 * half < stage.held_bytes < 1.1 * half + 2**20 and stage.base_bytes > 2**20
        assert stage.num_requests == 10 and stage.busy.count == 10 and stage.threads == 1 and stage.backend == "eager"
        assert stage.busy.p50_s > 0 and stage.transfer.p50_s > 0


@pytest.mark.skipif(len(CORES) < 2, reason="one core is shared by all")
@pytest.mark.parametrize("second,num_told", [(CORES[-1], 0), (CORES[0], 2)])
def test_a_stage_is_told_whether_others_have_work_on_its_cores(second: Device, num_told: int) -> None:
    plain = [spawned("a", "double", "x", "y", CORES[:1]), spawned("b", "double", "y", "z", [second])]
    with Pipeline([replace(stage, module=Telling(double)) for stage in plain], ["x"], ["z"]) as pipeline:
        assert pipeline.run(request(0))[0].tolist() == request(num_told)[0].tolist()


def test_a_failing_op_is_named(tmp_path: Path) -> None:
    traced = trace(load_model("autosplit.examples.tied:tied"))
    ids = [position for position, value in enumerate(traced.example_inputs) if value.dtype == torch.int64]
    wrong = [value.clone() for value in traced.example_inputs]
    wrong[ids[0]].fill_(10**6)
    with Pipeline(placements(traced, tmp_path, 2), traced.graph.inputs, traced.graph.outputs) as pipeline:
        futures = [pipeline.submit(one) for one in (traced.example_inputs, wrong, traced.example_inputs)]
        assert torch.equal(futures[0].result(30)[0], futures[2].result(30)[0])
        text = str(futures[1].exception(30))
    assert "stage 'stage0'" in text and "failed on request 1 while executing 'embedding" in text and "IndexError" in text


def test_nothing_is_left_after_close_after_an_exception_and_after_a_failed_start() -> None:
    prepare_to_spawn()
    names, before = set(Path("/dev/shm").iterdir()), open_files()
    pids = []
    with pytest.raises(KeyboardInterrupt), Pipeline([spawned("a", "slow_increment", "x", "y")], ["x"], ["y"]) as pipeline:
        pids = pipeline.pids
        for number in range(6):
            pipeline.submit(request(number))
        raise KeyboardInterrupt
    missing = StagePlacement("b", PythonFunction("pipelines:nothing", ("pipelines",)), (), (), CORES[:1])
    with pytest.raises(
        BackendError,
        match=r"^stage 'b' could not be loaded on device '[^']*': [^\n]*module 'pipelines' has no function 'nothing'",
    ):
        Pipeline([spawned("a", "double", "x", "y"), missing], ["x"], ["y"])
    del pipeline
    assert len(pids) == 1 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert open_files() == before and not abandoned_since(names)
