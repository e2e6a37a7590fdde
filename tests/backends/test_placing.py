"""Stages on a simulated accelerator, whose queues do nothing until somebody waits for them."""

from pathlib import Path

import pytest
import torch
from simulated import InHostMemory, Simulated, Unrecordable, cuda

from autosplit.backends import inductor
from autosplit.backends.base import exact_on, get_backend, require_device
from autosplit.backends.placing import NUM_CONTEXTS, place_runnable
from autosplit.errors import BackendError
from autosplit.tracing.splitting import save_stage
from autosplit.tracing.tensorspec import TensorSpec, spec_of

VECTOR = (TensorSpec("x", (4,), (1,), "float32"),)


def doubling(device, **settings):
    """``2 * x`` on a device."""
    return place_runnable(device, lambda *_: (lambda inputs: [2 * inputs[0]], True), VECTOR, VECTOR, **settings)


@pytest.mark.parametrize("record", [True, False])
def test_requests_overlap_and_keep_apart(record) -> None:
    stage = doubling(Simulated(), record=record)
    begun = [stage.begin([torch.full((4,), float(number))]) for number in range(NUM_CONTEXTS)]
    for number in range(NUM_CONTEXTS, 9):
        oldest = begun.pop(0)
        oldest.wait()
        assert oldest.outputs()[0].tolist() == [2.0 * (number - NUM_CONTEXTS)] * 4
        begun.append(stage.begin([torch.full((4,), float(number))]))


def test_the_input_may_be_overwritten_once_a_request_has_begun() -> None:
    stage, value = doubling(Simulated()), torch.ones(4)
    begun = stage.begin([value])
    value.zero_()
    assert begun.outputs()[0].tolist() == [2.0] * 4


def test_a_context_whose_request_was_given_up_is_free_again() -> None:
    stage = doubling(Simulated())
    for _ in range(5):
        stage.begin([torch.zeros(4)])
    assert stage([torch.ones(4)])[0].tolist() == [2.0] * 4


def test_a_stage_that_cannot_be_recorded_runs_all_the_same() -> None:
    stage = doubling(Unrecordable())
    assert stage([torch.ones(4)])[0].tolist() == [2.0] * 4
    assert stage.note == "no graph was recorded: operation not permitted when stream is capturing"


def test_every_context_is_recorded_once_and_the_host_waits_for_results_only() -> None:
    device = Simulated()
    stage = doubling(device)
    assert device.calls["capture"] == NUM_CONTEXTS
    device.calls.clear()
    begun = stage.begin([torch.zeros(4)])
    assert device.calls["enqueue"] == 3 and device.calls["record"] == 3 and device.calls["synchronise"] == 0
    begun.outputs()
    assert device.calls["event.synchronise"] == 2  # the context's former request, and this one


def test_an_output_of_another_shape_is_refused() -> None:
    stage = place_runnable(Simulated(), lambda *_: (lambda inputs: [inputs[0][:1]], True), VECTOR, VECTOR)
    with pytest.raises(ValueError, match=r"output 'x' is torch.float32 \[1\] on the device, and torch.float32 \[4\] was"):
        stage([torch.zeros(4)])


@pytest.fixture(scope="module")
def folders(layouts, halves, tmp_path_factory) -> list[tuple[object, Path]]:
    """The two halves of a model whose values lie in memory in every way."""
    root = tmp_path_factory.mktemp("stages")
    programs = halves(layouts)
    for program in programs:
        save_stage(program, root / program.name)
    return [(program, root / program.name) for program in programs]


def placed(name, program, folder, precision="f32"):
    backend, accelerator = get_backend(name), InHostMemory() if name == "onnxruntime" else Simulated()
    return place_runnable(
        accelerator, lambda device, queue: backend.place(folder, device, queue, precision), program.inputs, program.outputs
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend,tolerance", [("eager", 0.0), ("onnxruntime", 1e-5)])
def test_values_of_every_layout_come_and_go(backend, tolerance, layouts, folders) -> None:
    values = dict(zip(layouts.graph.inputs, layouts.example_inputs, strict=True))
    for program, folder in folders:
        inputs = [values[spec.name] for spec in program.inputs]
        expected = program.module(*inputs)
        for _ in range(NUM_CONTEXTS):
            found = placed(backend, program, folder)(inputs)
            for made, wanted, spec in zip(found, expected, program.outputs, strict=True):
                assert spec_of(spec.name, made).stride == spec.stride
                torch.testing.assert_close(made, wanted, rtol=tolerance, atol=tolerance)
        values |= zip((spec.name for spec in program.outputs), expected, strict=True)


def test_bf16_is_lowered_on_the_device_too(mlp, whole, tmp_path) -> None:
    program = whole(mlp)
    save_stage(program, tmp_path / "stage")
    [found] = placed("eager", program, tmp_path / "stage", "bf16")(mlp.example_inputs)
    [exact] = program.module(*mlp.example_inputs)
    assert found.dtype == torch.float32 and 0 < (found - exact).abs().max() < 0.1


def test_inductor_compiles_the_placed_stage(mlp, whole, tmp_path, monkeypatch) -> None:
    asked = {}
    monkeypatch.setattr(torch, "compile", lambda module, **settings: asked.update(settings) or module)
    program = whole(mlp)
    save_stage(program, tmp_path / "stage")
    [found] = placed("inductor", program, tmp_path / "stage")(mlp.example_inputs)
    assert torch.equal(found, program.module(*mlp.example_inputs)[0])
    assert asked == {"fullgraph": True, "dynamic": False, "mode": inductor.ACCELERATOR_MODE}


def test_backends_say_why_they_do_not_run_on_a_device(monkeypatch) -> None:
    require_device(get_backend("eager"), "cuda:0")
    require_device(get_backend("openvino"), "cpu:0")
    with pytest.raises(BackendError, match="'openvino' does not run on 'cuda:0': OpenVINO has no plug-in for it; use eager"):
        require_device(get_backend("openvino"), "cuda:0")
    with pytest.raises(BackendError, match="CPUExecutionProvider, not CUDAExecutionProvider; install onnxruntime-gpu"):
        require_device(get_backend("onnxruntime"), "cuda:0")
    with cuda():
        require_device(get_backend("onnxruntime"), "cuda:0")
    monkeypatch.setattr(inductor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="Triton, which is not installed"):
        require_device(inductor.BACKEND, "cuda:0")


def test_only_a_cpu_gives_eagers_bits() -> None:
    eager = get_backend("eager")
    assert exact_on(eager, "cpu:0-1", "f32") and not exact_on(eager, "cuda:0", "f32") and not exact_on(eager, "cpu:0", "bf16")
