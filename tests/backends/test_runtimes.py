"""What every backend must do, and what is special to one."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from autosplit.backends import conformance, onnxfile, onnxruntime
from autosplit.backends.base import get_backend, require_streams
from autosplit.backends.checking import check
from autosplit.errors import BackendError, PlanError
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage
from autosplit.tracing.verifying import distinct_inputs

QUICK = ("eager", "onnxruntime", "openvino")
RESNET = "transformers:ResNetForImageClassification?depths=[1,1]&hidden_sizes=[16,32]&embedding_size=8"
BERT = "transformers:BertModel?num_hidden_layers=1&hidden_size=64&num_attention_heads=2&intermediate_size=128&vocab_size=100"


@pytest.fixture(scope="session")
def prepared(layouts, halves, tmp_path_factory):
    """The two stages on disk, prepared for each quick backend as the host does it."""
    programs = halves(layouts)
    folders = [tmp_path_factory.mktemp("stages") / program.name for program in programs]
    for program, folder in zip(programs, folders, strict=True):
        save_stage(program, folder)
        for name in QUICK:
            get_backend(name).prepare(program, folder)
    return programs, folders


def run_in_order(traced, programs, runnables):
    """Every value that crosses a cut or leaves the model, by name."""
    values = dict(zip(traced.graph.inputs, traced.example_inputs, strict=True))
    for program, run in zip(programs, runnables, strict=True):
        made = run([values[spec.name] for spec in program.inputs])
        values |= dict(zip([spec.name for spec in program.outputs], made, strict=True))
    return values


@pytest.mark.parametrize("name", QUICK)
def test_loaded_stages_give_the_values_and_the_strides_of_eager(layouts, prepared, name):
    programs, folders = prepared
    runnables = [get_backend(name).load(folder, 1) for folder in folders]
    found = run_in_order(layouts, programs, runnables)
    expected = run_in_order(layouts, programs, [lambda inputs, p=program: p.module(*inputs) for program in programs])
    for value, reference in expected.items():
        assert found[value].stride() == reference.stride(), value
        assert found[value].dtype == reference.dtype
        torch.testing.assert_close(
            found[value], reference, rtol=0 if name == "eager" else 1e-4, atol=0 if name == "eager" else 1e-5
        )


@pytest.mark.parametrize("name", QUICK)
def test_outputs_outlive_the_next_call_and_inputs_stay_as_they_are(mlp, whole, name):
    program = whole(mlp)
    run = get_backend(name).compile(program, 2)
    x, other = mlp.example_inputs[0], torch.randn(4, 32)
    before = x.clone()
    first = run([x])[0]
    kept = first.clone()
    run([other])
    assert torch.equal(first, kept)
    assert torch.equal(x, before)
    assert torch.equal(run([x])[0], kept)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_inputs_with_other_strides_than_the_trace_are_made_to_fit(layouts, whole, name):
    program = whole(layouts)
    image, mask, index = layouts.example_inputs
    run = get_backend(name).compile(program, 1)
    torch.testing.assert_close(run([image.contiguous(), mask, index])[1], program.module(image, mask, index)[1])


@pytest.fixture(scope="module")
def experts():
    sizes = "hidden_size=32&num_hidden_layers=1&num_attention_heads=2&num_key_value_heads=2&intermediate_size=64&vocab_size=100"
    return trace(load_model(f"transformers:MixtralModel?{sizes}&num_local_experts=4", seq_len=16))


@pytest.mark.parametrize("spec", [RESNET, BERT])
def test_real_models_agree_with_eager(spec, whole):
    traced = trace(load_model(spec))
    program = whole(traced)
    for name in ("onnxruntime", "openvino"):
        assert check(get_backend(name), program, traced.example_inputs).relative < 1e-4
    assert check(get_backend("eager"), program, traced.example_inputs).absolute == 0


def test_prepare_does_its_work_once(prepared, monkeypatch):
    programs, folders = prepared
    monkeypatch.setattr(onnxfile, "write_onnx", lambda *_: pytest.fail("exported again"))
    get_backend("openvino").write(programs[0], folders[0], "f32")
    get_backend("onnxruntime").write(programs[0], folders[0], "f32")


def test_the_onnx_file_refers_to_the_weights_of_its_stage_and_both_may_be_moved(whole, tmp_path):
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=3&width=96"))
    program, (here, there) = whole(traced), (tmp_path / "here", tmp_path / "there")
    save_stage(program, here)
    onnxfile.prepare_onnx(program, here)
    for name in ("onnxruntime", "openvino"):
        get_backend(name).prepare(program, here)
    assert not list(here.glob("*.data"))
    assert sum(file.stat().st_size for file in here.glob("*.onnx")) < program.weight_bytes / 4
    here.rename(there)
    for name in ("onnxruntime", "openvino"):
        [found] = get_backend(name).load(there, 1)(traced.example_inputs)
        torch.testing.assert_close(found, program.module(*traced.example_inputs)[0], rtol=1e-4, atol=1e-5)


def test_a_weight_and_the_same_one_turned_are_told_apart_in_the_file_with_the_weights(whole, tmp_path):
    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.randn(32, 32))
            self.register_buffer("turned", self.one.t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.one + (x + 1) * self.turned

    traced = trace(load_model(Turned().eval(), inputs=(torch.randn(32, 32),)))
    program = whole(traced)
    save_stage(program, tmp_path)
    for name in ("onnxruntime", "openvino"):
        get_backend(name).prepare(program, tmp_path)
        [found] = get_backend(name).load(tmp_path, 1)(traced.example_inputs)
        torch.testing.assert_close(found, program.module(*traced.example_inputs)[0], rtol=1e-4, atol=1e-5)


def test_nothing_is_left_of_an_export_that_fails(odd, whole, tmp_path):
    with pytest.raises(BackendError, match="stage 'stage0' cannot become an ONNX file: op 'special_bessel_j0'"):
        get_backend("onnxruntime").prepare(whole(odd), tmp_path / "stage0")
    assert list((tmp_path / "stage0").iterdir()) == []


def test_refused_ops_are_named_with_the_reason(odd, mlp):
    for name in ("onnxruntime", "openvino"):
        refused = conformance.refused(odd, name)
        assert set(refused) == {"special_bessel_j0"}
        assert "aten.special_bessel_j0.default: No ONNX function found" in refused["special_bessel_j0"]
        assert conformance.refused(mlp, name) == {}


def test_whole_numbers_are_sorted_by_torch_which_puts_equal_ones_in_an_order_of_its_own():
    class Grouped(torch.nn.Module):
        def forward(self, x):
            _, order = torch.sort(x.argmax(-1))
            return x[order] + 1, torch.sort(x[:, 0])[1]

    refused = conformance.refused(trace(load_model(Grouped().eval(), inputs=(torch.randn(64, 3),))), "onnxruntime")
    assert set(refused) == {"sort"}
    assert "aten.sort.default: torch may put equal integers in any order" in refused["sort"]


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_mixture_of_experts_runs_as_one_stage(experts, whole, name):
    assert "aten.sort.stable" in {op.operator for op in experts.graph.ops}
    assert experts.module_error.relative < 1e-5
    program = whole(experts)
    run = get_backend(name).compile(program, 1)
    for inputs in distinct_inputs(experts.example_inputs, 3):
        assert check(get_backend(name), program, inputs, runnable=run).relative < 1e-4


def test_experts_are_tried_on_groups_in_order_and_memory_without_values_is_not(experts):
    """ONNX Runtime failed on ends of groups that were drawn at random, and no two runs have the same values in empty memory."""
    refused = conformance.refused(experts, "onnxruntime")
    operators = {op.operator for op in experts.graph.ops if op.name in refused}
    assert {"transformers.grouped_mm_fallback.default", "aten.empty_like.default"} <= {op.operator for op in experts.graph.ops}
    assert not [one for one in operators if "grouped_mm" in one or "empty_like" in one], refused


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "inductor"])
def test_a_folder_that_is_not_prepared_is_refused(tmp_path, name):
    with pytest.raises(BackendError, match="is not prepared for"):
        get_backend(name).load(tmp_path, 1)


def test_eager_needs_a_saved_stage(tmp_path):
    with pytest.raises(PlanError, match="does not exist"):
        get_backend("eager").load(tmp_path / "none", 1)


def test_threads_on_shared_cores_do_not_spin_after_a_request(mlp, whole, tmp_path):
    get_backend("onnxruntime").prepare(whole(mlp), tmp_path)

    def after_s(shared: bool) -> float:
        run, busy_s = get_backend("onnxruntime").load(tmp_path, 2, shared=shared), 0.0
        for _ in range(5):
            run(mlp.example_inputs)
            begun_s = time.process_time()
            time.sleep(0.06)
            busy_s += time.process_time() - begun_s
        return busy_s

    assert after_s(shared=True) < after_s(shared=False) / 4


def test_a_damaged_file_is_refused_by_its_runtime(mlp, whole, tmp_path):
    program = whole(mlp)
    get_backend("onnxruntime").prepare(program, tmp_path)
    for file in tmp_path.glob("**/*.onnx"):
        file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(BackendError, match="ONNX Runtime refuses"):
        get_backend("onnxruntime").load(tmp_path, 1)
    with pytest.raises(BackendError, match="OpenVINO refuses"):
        get_backend("openvino").load(tmp_path, 1)


def test_a_full_disk_is_said_where_onnx_runtime_says_that_it_failed_to_write(mlp, whole, tmp_path, monkeypatch):
    def full(path, options, providers):
        raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : Failed to write external initializers to file")

    monkeypatch.setattr("onnxruntime.InferenceSession", full)
    with pytest.raises(BackendError, match="ONNX Runtime refuses"):
        onnxruntime.optimise(tmp_path / "a.onnx", tmp_path / "b.onnx")
    (tmp_path / "weights").write_bytes(b"x" * 64)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=63))
    with pytest.raises(OSError, match="No space left on device"):
        onnxruntime.optimise(tmp_path / "a.onnx", tmp_path / "b.onnx")


class Kinds(torch.nn.Module):
    """No elements, booleans, doubles, bfloat16."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:0] * 2, x.bool(), x.double() * 2, x.to(torch.bfloat16)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_tensors_without_elements_and_of_all_dtypes_pass(whole, name):
    traced = trace(load_model(Kinds().eval(), inputs=(torch.randn(3, 2),)))
    program = whole(traced)
    found = get_backend(name).compile(program, 1)(traced.example_inputs)
    for value, reference in zip(found, program.module(*traced.example_inputs), strict=True):
        torch.testing.assert_close(value, reference, check_stride=True)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_dtype_without_tensors_in_the_runtime_is_refused(whole, name):
    class Cast(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    traced = trace(load_model(Cast().eval(), inputs=(torch.ones(2, dtype=torch.complex64),)))
    with pytest.raises(BackendError):
        get_backend(name).compile(whole(traced), 1)


def test_exporting_says_nothing(mlp, whole, tmp_path, capfd):
    get_backend("onnxruntime").prepare(whole(mlp), tmp_path)
    assert capfd.readouterr() == ("", "")


class Doubled(torch.nn.Module):
    """An op that needs every element of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("size", [64, 40_000])
def test_a_runtime_reads_no_more_of_an_input_than_there_is(whole, name, size):
    """At an address ONNX Runtime read as far as the shape in its file says, in memory of other tensors too."""
    traced = trace(load_model(Doubled().eval(), inputs=(torch.ones(size),)))
    run = get_backend(name).compile(whole(traced), 1)
    assert torch.equal(run([torch.ones(size)])[0], torch.full((size,), 2.0))
    for short in (torch.ones(size // 2), torch.ones(size, dtype=torch.int8)):
        with pytest.raises(Exception, match=r"(?i)input"):  # each runtime has errors of its own
            run([short])


def test_openvino_computes_in_the_precision_that_was_asked_for(mlp, whole):
    program = whole(mlp)
    backend = get_backend("openvino")
    exact = check(backend, program, mlp.example_inputs)
    coarse = check(backend, program, mlp.example_inputs, precision="bf16")
    assert exact.relative < 1e-5
    assert coarse.relative < 0.1


def test_openvino_works_on_several_requests_at_once_and_keeps_them_apart(mlp, whole, tmp_path):
    program = whole(mlp)
    backend = require_streams(get_backend("openvino"))
    backend.prepare(program, tmp_path)
    stage = backend.load_streams(tmp_path, 2, 2)
    requests = [[torch.full((4, 32), float(number))] for number in range(8)]
    begun, made = [], []
    for inputs in requests:
        if len(begun) == len(stage.contexts):
            begun[0].wait()
            made.append(begun.pop(0).outputs()[0])
        begun.append(stage.begin(inputs))
    for one in begun:
        one.wait()
        made.append(one.outputs()[0])
    for inputs, found in zip(requests, made, strict=True):
        torch.testing.assert_close(found, program.module(*inputs)[0])
    torch.testing.assert_close(stage(requests[3])[0], made[3])
    calls = SimpleQueue()
    for context, inputs in zip(stage.contexts, requests, strict=False):
        context.start(inputs, calls.put)
    assert [calls.get(timeout=20) for _ in stage.contexts] == [None] * 3
    for context, found in zip(stage.contexts, made, strict=False):
        torch.testing.assert_close(context.outputs()[0], found)
    with pytest.raises(BackendError, match=r"'eager' works on one request at a time; use replicas, or .*: openvino"):
        require_streams(get_backend("eager"))


def test_inductor_compiles_once_and_leaves_the_library_alone_in_the_folder(mlp, whole, tmp_path, monkeypatch):
    """What the real compiler leaves is looked at in tests/test_foreign_folders.py: it takes half a minute."""

    def compiled(module, inputs, options):
        library = Path(options["aot_inductor.output_path"])
        assert library.is_absolute()  # the compiler does not run where we are
        library.write_text("compiled")
        library.with_suffix(".cpp").write_text("source")
        return str(library)

    backend, program = get_backend("inductor"), whole(mlp)
    save_stage(program, tmp_path / "stage0")
    there = {*(tmp_path / "stage0").iterdir(), tmp_path / "stage0" / "inductor.so"}
    monkeypatch.setattr(torch._inductor, "aot_compile", compiled)
    monkeypatch.chdir(tmp_path)
    backend.write(program, Path("stage0"), "f32")
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *_, **__: pytest.fail("compiled again"))
    backend.write(program, tmp_path / "stage0", "f32")
    assert {*(tmp_path / "stage0").iterdir()} == there and (tmp_path / "stage0" / "inductor.so").read_text() == "compiled"


LOADED = """
import sys
sys.modules["onnx"] = sys.modules["onnxscript"] = None
import gc, signal, threading, torch
from pathlib import Path
from autosplit.backends import onnxruntime, openvino

folder, inputs = Path(sys.argv[1]), [torch.ones(4, 32)]
print(*(one.BACKEND.load(folder, 1)(inputs)[0].shape for one in (onnxruntime, openvino)))
print([thread.name for thread in threading.enumerate()], "openvino_telemetry" in sys.modules)
del sys.modules["onnx"], sys.modules["onnxscript"]
from autosplit.backends import conformance
from autosplit.backends.profiling import OpenVinoProbe

models = [openvino.BACKEND.load(folder, 1), OpenVinoProbe(folder, 1, "f32"), openvino.BACKEND.load(folder, 1)]
while models:
    del models[0]
    gc.collect()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("heard")
"""


def test_a_process_that_loads_stages_needs_no_exporter_sends_no_report_and_hears_ctrl_c(mlp, whole, tmp_path):
    """The import of OpenVINO started a thread, which sent an event. Ctrl-C was not heard once its models were gone."""
    save_stage(whole(mlp), tmp_path)
    for name in ("onnxruntime", "openvino"):
        get_backend(name).prepare(whole(mlp), tmp_path)
    done = subprocess.run([sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, check=False)
    shapes, threads = " ".join(["torch.Size([4, 32])"] * 2), "['MainThread'] False"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{shapes}\n{threads}\nheard\n", "")
