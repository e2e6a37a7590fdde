"""Models after public reports of faults: each answer is right, or the op, the backend or the request is refused in time."""

import pytest
import torch
from reported import REPORTS, answers

import autosplit
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.limits import affinity

RUNTIMES = ("onnxruntime", "openvino")
pytestmark = pytest.mark.timeout(240)

SUMMARY = {
    ("hashes", "onnxruntime"): set(),
    ("hashes", "openvino"): {"mul", "add", "remainder"},
    ("masked", "onnxruntime"): set(),
    ("masked", "openvino"): set(),
    ("table", "onnxruntime"): set(),
    ("table", "openvino"): set(),
    ("stamps", "onnxruntime"): set(),
    ("stamps", "openvino"): {"unsqueeze", "sub", "mul", "sub_1"},
    ("turned", "onnxruntime"): set(),
    ("turned", "openvino"): set(),
    **{("complex", backend): {"view_as_complex", "unsqueeze", "mul", "view_as_real"} for backend in RUNTIMES},
}
"""The ops that run in eager; the other models have more of them, and at least one."""


@pytest.mark.parametrize("backend", RUNTIMES)
@pytest.mark.parametrize("name", ["hashes", "masked", "buckets", "table", "stamps", "rows", "complex", "turned"])
def test_hard_requests_are_right_or_fail_as_in_torch(name: str, backend: str) -> None:
    report, requests = REPORTS[name], [REPORTS[name].inputs(seed) for seed in range(6)]
    model = report.model()
    eager, found = answers(autosplit.trace(model, report.inputs(0)), backend, requests)
    expected = SUMMARY.get((name, backend))
    assert eager if expected is None else eager == expected
    for inputs, got in zip(requests, found, strict=True):
        try:
            right = model(*inputs)
        except IndexError:
            assert isinstance(got, IndexError) and "and 0 to 9 are computed right" in str(got)
            continue
        right = right if isinstance(right, tuple) else (right,)
        for ours, theirs in zip(got, right, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_backend_that_fails_on_a_fused_norm_is_left_out_with_the_words_of_its_runtime() -> None:
    report = REPORTS["norms"]
    traced = autosplit.trace(report.model(), report.inputs(0))
    setup = Setup(backends=["eager", *RUNTIMES], progress=False)
    profile = autosplit.measure(traced, f"cpu:{affinity()[0]}", setup=setup)
    assert {one.backend for one in profile.measured} == {"eager"}
    told = {backend: next(note for note in profile.notes if note.startswith(f"{backend} is left out")) for backend in RUNTIMES}
    assert "Got invalid dimensions for output: mul_1" in told["onnxruntime"] and "Got: 2 Expected: 1" in told["onnxruntime"]
    assert "ONNXRuntimeError" not in told["onnxruntime"] and "INVALID_ARGUMENT" not in told["onnxruntime"]
    assert "Exception from" not in told["openvino"] and "\n" not in told["openvino"]
    assert "model output tensor (shape=[4,1])" in told["openvino"]
    found = autosplit.search(traced, profile, f"cpu:{affinity()[0]}", setup=setup, budget=Budget(search_s=0.1))
    assert {stage.backend for stage in found.plan.stages} == {"eager"}


def test_a_crash_of_a_compiler_costs_the_backend_while_a_model_is_measured() -> None:
    report = REPORTS["crashing"]
    setup = Setup(backends=["eager", "openvino"], progress=False)
    profile = autosplit.measure(autosplit.trace(report.model(), report.inputs(0)), f"cpu:{affinity()[0]}", setup=setup)
    assert {one.backend for one in profile.measured} == {"eager"}
    assert any("openvino is left out: worker 'compiling' was killed by SIGSEGV" in note for note in profile.notes)
