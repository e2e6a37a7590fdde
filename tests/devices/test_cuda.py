"""What only a GPU can show: the calls of torch.cuda themselves, and a whole run on ``cpu`` and ``cuda:0``.

Everything around these calls is tested without a GPU (``simulated.py``). With one: ``pytest tests/devices/test_cuda.py``. Outputs
are held to the tolerance of f32, 1e-3 of the largest value: a GPU sums in another order than a CPU, so no bits are equal.
"""

import gc
from pathlib import Path

import pytest
import torch

from autosplit import api
from autosplit.backends.base import get_backend, require_device
from autosplit.backends.checking import F32_TOLERANCE, TOLERANCES
from autosplit.backends.placing import PlacedStage, place_runnable
from autosplit.backends.streaming import streamed_runnable
from autosplit.deploying.setup import Budget
from autosplit.devices.accelerators import Accelerator, calibration_s
from autosplit.devices.cuda import Cuda
from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import affinity
from autosplit.errors import BackendError
from autosplit.measuring import Store, measure
from autosplit.memory.slots import NUM_CONTEXTS
from autosplit.running.modules import StageFolder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import compare
from autosplit.tracing.splitting import StageProgram, save_stage, split
from autosplit.values.constraints import Constraints
from autosplit.values.residency import least_bytes, parts_of
from autosplit.values.samples import Precision, Setting

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


def ops_of(traced: Traced) -> list[str]:
    return [op.name for op in traced.graph.ops]


@pytest.fixture(scope="module")
def saved(traced: Traced, tmp_path_factory: pytest.TempPathFactory) -> tuple[StageProgram, Path]:
    """The whole model as one stage."""
    [program] = split(traced, [ops_of(traced)])
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
    assert worst_error(traced, program, stage) <= F32_TOLERANCE


def worst_error(traced: Traced, program: StageProgram, stage: PlacedStage) -> float:
    """The largest error of requests that are in progress together, more than there are contexts, as a share."""
    requests = [[(number - 2.5) * value for value in traced.example_inputs] for number in range(2 * NUM_CONTEXTS)]
    worst, begun = 0.0, []
    with torch.inference_mode():
        for inputs in requests:
            begun.append((inputs, stage.begin(inputs)))
            if len(begun) == NUM_CONTEXTS or inputs is requests[-1]:
                for given, one in begun:
                    worst = max(worst, compare(traced.graph.outputs, one.outputs(), program.module(*given)).relative)
                begun = []
    return worst


@pytest.mark.parametrize("precision", ["tf32", "bf16", "f16"])
def test_a_lower_precision_is_less_exact_and_within_its_tolerance(
    precision: Precision, traced: Traced, saved: tuple[StageProgram, Path], device: Accelerator
) -> None:
    program, folder = saved
    eager = get_backend("eager")
    eager.prepare(program, folder, precision)
    device.allow_tf32(precision == "tf32")
    try:
        stage = place_runnable(
            device, lambda one, queue: eager.place(folder, one, queue, precision), program.inputs, program.outputs
        )
        assert stage.note == "" and 0 < worst_error(traced, program, stage) <= 4 * TOLERANCES[precision][0]
    finally:
        device.allow_tf32(False)


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_streamed_stage_gives_the_numbers_of_eager_on_a_cpu(
    kept: float, traced: Traced, saved: tuple[StageProgram, Path], device: Accelerator
) -> None:
    own, shared = traced.graph.own_bytes(ops_of(traced))
    least = least_bytes(own, shared)
    resident_bytes = round(least + kept * (traced.graph.weight_bytes - least))
    parts = parts_of(own, shared, resident_bytes)
    assert parts is not None and len(parts.streamed) > 2
    program = saved[0]
    stage = place_runnable(
        device,
        lambda one, queue: (streamed_runnable(program, resident_bytes, one, queue), False),
        program.inputs,
        program.outputs,
    )
    assert worst_error(traced, program, stage) <= F32_TOLERANCE


def test_memory_that_another_program_takes_is_told_and_comes_back(saved: tuple[StageProgram, Path], device: Accelerator) -> None:
    program, folder = saved
    gc.collect()
    torch.cuda.empty_cache()
    others = device.empty(device.facts().free_bytes - program.weight_bytes // 2)
    with pytest.raises(
        BackendError, match=r"weights take .* are free on 'cuda:0'; place fewer ops there, or end what else uses it"
    ):
        StageFolder(folder).load(1, "cuda:0", shared=False)
    del others
    torch.cuda.empty_cache()
    assert StageFolder(folder).load(1, "cuda:0", shared=False).note == ""


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
    assert again.measured[Setting("cuda:0", "eager", 1)] == found, again.notes  # a core's clock may have changed since
    pins = {traced.graph.ops[0].name: core, traced.graph.ops[-1].name: "cuda:0"}
    context_bytes = machine["cuda:0"].context_bytes
    assert context_bytes > 1 << 20
    capped = machine.with_memory({"cuda:0": context_bytes + (64 << 20) + traced.graph.weight_bytes // 2})
    for wanted, there in ((Constraints(), machine), (Constraints(pins=pins), machine), (Constraints(pins=pins), capped)):
        plan = api.search(traced, profile, there, wanted, budget=Budget(search_s=0, explain_s=0)).plan
        report = api.run(traced, plan, there, baselines=False, budget=Budget(num_requests=40, num_rounds=2))
        outcome = report.best
        print(f"{plan.summary()}: {outcome.throughput_per_s:.4g} items/s, error {outcome.max_relative_error:.2g}")
        assert outcome.outputs_equal and outcome.max_relative_error <= F32_TOLERANCE
        notes = {stage.note for one, stage in zip(plan.stages, outcome.stats.stages, strict=True) if one.resident_bytes is None}
        assert notes <= {""}, "a stage was not recorded as a graph"
