"""What only a GPU can show: the calls of torch.cuda themselves, and a whole run on ``cpu`` and ``cuda:0``.

Everything around these calls is tested without a GPU (``simulated.py``). With one: ``pytest tests/devices/test_cuda.py``. Outputs
are held to the tolerance of f32, 1e-3 of the largest value: a GPU sums in another order than a CPU, so no bits are equal.
"""

from pathlib import Path

import pytest
import torch

from autosplit import api
from autosplit.backends.base import get_backend, require_device
from autosplit.backends.checking import F32_TOLERANCE
from autosplit.backends.placing import place_runnable
from autosplit.deploying.setup import Budget
from autosplit.devices.accelerators import Accelerator, calibration_s
from autosplit.devices.cuda import Cuda
from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import affinity
from autosplit.errors import BackendError
from autosplit.measuring import Store, measure
from autosplit.running.modules import StageFolder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import compare
from autosplit.tracing.splitting import StageProgram, save_stage, split
from autosplit.values.constraints import Constraints
from autosplit.values.samples import Setting

pytestmark = [
    pytest.mark.skipif(Cuda.count() == 0, reason=f"torch {torch.__version__} sees no CUDA device here"),
    pytest.mark.timeout(600),
]

MODEL = "autosplit.examples.unet:unet"


@pytest.fixture(scope="module")
def device() -> Accelerator:
    return Cuda(0)


@pytest.fixture(scope="module")
def traced() -> Traced:
    return api.trace(MODEL)


@pytest.fixture(scope="module")
def saved(traced: Traced, tmp_path_factory: pytest.TempPathFactory) -> tuple[StageProgram, Path]:
    """The whole model as one stage."""
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    folder = tmp_path_factory.mktemp("cuda") / "stage"
    save_stage(program, folder)
    return program, folder


def test_facts_and_calibration(device: Accelerator) -> None:
    facts = device.facts()
    assert 0 < facts.free_bytes <= facts.total_bytes and facts.name and "." in facts.capability and facts.runtime != "CUDA None"
    assert 0 < calibration_s(device) < 1


def test_events_time_what_is_between_them(device: Accelerator) -> None:
    queue, start, end = device.queue(), device.event(), device.event()
    memory, staging = device.empty(1 << 24), device.staging(1 << 24)
    assert memory.device == device.device and staging.is_pinned()
    start.record(queue)
    device.enqueue(queue, lambda: memory.copy_(staging, non_blocking=True))
    end.record(queue)
    end.synchronise()
    assert 1e-6 < end.seconds_since(start) < 1


def test_a_graph_does_on_replay_what_was_recorded(device: Accelerator) -> None:
    queue = device.queue()
    value = device.empty(4).zero_()
    device.synchronise()
    replay = device.capture(queue, lambda: value.add_(1))
    device.synchronise()
    before = value.tolist()
    device.enqueue(queue, replay)
    device.synchronise()
    assert value.tolist() == [number + 1 for number in before]


@pytest.mark.parametrize("backend", ["eager", "inductor", "onnxruntime"])
@pytest.mark.parametrize("record", [True, False])
def test_a_stage_gives_the_numbers_of_eager_on_a_cpu(
    backend: str, record: bool, traced: Traced, saved: tuple[StageProgram, Path], device: Accelerator
) -> None:
    program, folder = saved
    chosen = get_backend(backend)
    try:
        require_device(chosen, "cuda:0")
    except BackendError as refusal:
        pytest.skip(str(refusal))
    stage = place_runnable(
        device, lambda where, queue: chosen.place(folder, where, queue), program.inputs, program.outputs, record=record
    )
    assert stage.note == ("its kernels are launched one by one" if backend == "onnxruntime" else "")
    with torch.inference_mode():
        for factor in (1.0, 0.5, -1.0):  # both lanes, and the first once more
            inputs = [factor * value for value in traced.example_inputs]
            error = compare(traced.graph.outputs, stage(inputs), program.module(*inputs))
            assert error.relative <= F32_TOLERANCE, error


def test_what_does_not_fit_is_refused_with_numbers(saved: tuple[StageProgram, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageFolder, "num_bytes", 1 << 50)
    with pytest.raises(BackendError, match=r"weights take 1048576.0 GiB, and .* are free on 'cuda:0'"):
        StageFolder(saved[1]).load(1, "cuda:0", shared=False)


def test_profile_search_and_run_on_a_core_and_a_gpu(traced: Traced, tmp_path: Path) -> None:
    core = f"cpu:{affinity()[0]}"
    machine = machine_for(f"{core},cuda:0")
    assert machine["cuda:0"].memory_bytes
    profile = measure(traced, machine, store=Store(tmp_path), budget_s=5)
    found = profile.measured[Setting("cuda:0", "eager", 1)]
    assert found.provenance.accelerator["driver"] and found.error is not None
    assert found.error <= F32_TOLERANCE
    again = measure(traced, machine, store=Store(tmp_path), budget_s=5)
    assert again.measured == profile.measured, again.notes
    for wanted in (Constraints(), Constraints(pins={traced.graph.ops[0].name: core, traced.graph.ops[-1].name: "cuda:0"})):
        plan = api.search(traced, profile, machine, wanted, budget=Budget(search_s=0, explain_s=0)).plan
        report = api.run(traced, plan, machine, baselines=False, budget=Budget(num_requests=40, num_rounds=2))
        outcome = report.best
        print(f"{plan.summary()}: {outcome.throughput_per_s:.4g} items/s, error {outcome.max_relative_error:.2g}")
        assert outcome.outputs_equal and outcome.max_relative_error <= F32_TOLERANCE
        assert all(stage.note == "" for stage in outcome.stats.stages), "a stage was not recorded as a graph"
