import importlib.util
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

from autosplit.backends import base
from autosplit.backends.base import BACKENDS, get_backend, installed, states
from autosplit.backends.checking import TIMES_EAGER, TOLERANCES, check, stage_reference
from autosplit.backends.eager import EagerBackend
from autosplit.errors import BackendError, MissingExtraError, UsageError
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model


class Wrong(EagerBackend):
    """Says that it runs the stage, and is off by a little."""

    name = "wrong"
    exact = False

    def __init__(self, factor):
        self.factor = factor

    def compile(self, program, threads, precision="f32"):
        run = super().compile(program, threads, precision)

        def off(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [value * self.factor for value in run(inputs)]

        return off


def test_unknown_backend_gives_the_valid_names():
    with pytest.raises(UsageError, match="'tensorrt' does not exist, the backends are eager, onnxruntime, openvino, inductor"):
        get_backend("tensorrt")


def test_missing_package_says_what_needs_it_and_the_command(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino" else found(name))
    with pytest.raises(MissingExtraError, match=r"backend 'openvino' needs openvino: pip install 'autosplit\[openvino\]'"):
        get_backend("openvino")
    assert "openvino" not in installed()


@pytest.mark.parametrize("package", ["openvino", "onnxscript"])
def test_a_backend_with_a_part_of_its_packages_is_not_installed(package, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    rows = {row["backend"]: row["state"] for row in states()}
    assert rows["openvino"] == f"needs {package}: pip install 'autosplit[openvino]'" and rows["eager"] == "installed"


def test_missing_compiler_is_the_reason_given(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingExtraError, match="'no-such-compiler' is not found: install g"):
        get_backend("inductor")


def test_names_of_backends_are_their_own():
    assert [get_backend(name).name for name in installed()] == [name for name in BACKENDS if name in installed()]
    assert "eager" in installed()


def test_wrong_numbers_are_refused_with_name_and_figure(mlp, whole):
    with pytest.raises(
        BackendError, match=r"backend 'wrong' \(f32\) gives wrong numbers on stage 'stage0'.* off by 0.01 .*0.001"
    ):
        check(Wrong(1.01), whole(mlp), mlp.example_inputs)
    with pytest.raises(BackendError, match=r"NaN or infinite in other places than eager's\. Run it on another backend"):
        check(Wrong(math.nan), whole(mlp), mlp.example_inputs)
    with pytest.raises(BackendError, match="'linear_2' is not 0 where eager's all is"):
        right = stage_reference(whole(mlp), mlp.example_inputs)
        zeros = [[0 * value for value in right.own[0]]]
        check(Wrong(1.0), whole(mlp), mlp.example_inputs, reference=replace(right, own=zeros))


def test_small_errors_are_returned_and_the_tolerance_is_the_callers(mlp, whole):
    error = check(Wrong(1.0001), whole(mlp), mlp.example_inputs)
    assert 5e-5 < error.relative < 2e-4
    with pytest.raises(BackendError, match="wrong numbers"):
        check(Wrong(1.0001), whole(mlp), mlp.example_inputs, 1e-6)


def test_an_exact_backend_must_be_exact(mlp, whole):
    backend = Wrong(1.00001)
    backend.exact = True
    with pytest.raises(BackendError, match="the tolerance is 0"):
        check(backend, whole(mlp), mlp.example_inputs, 0.1)


def test_failure_in_a_backend_names_backend_and_stage(mlp, whole):
    with pytest.raises(BackendError, match="backend 'eager' failed on stage 'stage0'"):
        check(get_backend("eager"), whole(mlp), mlp.example_inputs, runnable=lambda inputs: 1 / 0)


def test_a_precision_that_a_backend_lacks_is_refused(mlp, whole):
    with pytest.raises(BackendError, match=r"'onnxruntime' does not compute in bf16: its CPU provider has no matrix products"):
        get_backend("onnxruntime").compile(whole(mlp), 1, "bf16")


def test_bf16_is_judged_beside_torchs_own(mlp, whole):
    program = whole(mlp)
    own = check(get_backend("eager"), program, mlp.example_inputs, precision="bf16").relative
    allowed = max(TOLERANCES["bf16"][0], TIMES_EAGER * own)
    assert 0 < own < allowed < 0.5
    assert check(Wrong(1 + allowed / 2), program, mlp.example_inputs, precision="bf16").relative > own
    for factor in (0.0, 1 + 2 * allowed):
        with pytest.raises(BackendError, match=r"backend 'wrong' \(bf16\) gives wrong numbers"):
            check(Wrong(factor), program, mlp.example_inputs, precision="bf16")


class Mixed(nn.Module):
    """Two products in a short dtype around a norm in f32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64, dtype=dtype), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(self.linear(x).float()).to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_a_short_dtype_is_judged_by_f32_of_its_weights(whole, dtype):
    torch.manual_seed(0)
    module, inputs = Mixed(dtype).eval(), (torch.randn(4, 64, dtype=dtype),)
    program = whole(trace(load_model(module, inputs=inputs)))
    right = stage_reference(program, inputs)
    with torch.no_grad():
        wide = Mixed(torch.float32).eval()
        wide.load_state_dict(module.state_dict())
        best = wide(inputs[0].float()).to(dtype)
    assert torch.equal(right.outputs[0][0], best) and not torch.equal(right.own[0][0], best)
    eager = get_backend("eager")
    assert check(eager, program, inputs, reference=right).relative == 0  # its bits are torch's own
    error = check(eager, program, inputs, reference=right, exact=False).relative
    limit = right.tolerance("f32")
    assert torch.finfo(dtype).eps / 4 < error <= limit / 4 * (1 + 1e-9) or limit == TOLERANCES[right.precision][0]
    assert check(eager, program, inputs, reference=right, runnable=lambda _: right.outputs[0], exact=False).relative == 0
    for factor, is_right in ((1 + limit / 4, True), (1 + 3 * limit, False), (0.0, False)):
        with nullcontext() if is_right else pytest.raises(BackendError, match="gives wrong numbers"):
            check(Wrong(factor), program, inputs, reference=right)


def test_a_conjugated_spectrum_is_wrong_numbers(whole):
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x)

    inputs = (torch.randn(8),)
    program = whole(trace(load_model(Spectrum().eval(), inputs=inputs)))
    conjugated = [value.conj() for value in stage_reference(program, inputs).own[0]]
    with pytest.raises(BackendError, match="gives wrong numbers"):
        check(get_backend("eager"), program, inputs, runnable=lambda _: conjugated)


def test_runtimes_that_are_not_installed_are_named_with_the_way_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert base.absent_runtimes() == ()
    missing = type(base.get_backend("onnxruntime"))
    monkeypatch.setattr(missing, "missing", lambda self: "it is not installed")
    [sentence] = base.absent_runtimes()
    assert "onnxruntime" in sentence and "openvino" not in sentence and "pip install 'autosplit[onnx]'" in sentence
