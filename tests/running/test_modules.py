"""What a worker runs: a function only from an allowed module, a stage on any torch device, the op that failed by name."""

from pathlib import Path

import pytest
import reported
import torch
from reported import REPORTS
from simulated import cuda
from simulatedmemory import memory_of, taken

from autosplit.errors import BackendError, UsageError
from autosplit.running.modules import StageFolder, import_function, positional
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, split, unsplit


@pytest.mark.parametrize(
    "path,fault",
    [
        ("math", "function 'math' is not understood; write package.module:function"),
        ("mathematics:hypot", "is not in an allowed module (math, torch)"),
        ("math:none", "module 'math' has no function 'none'"),
        ("torch.none:f", "function 'torch.none:f' cannot be imported: No module named 'torch.none'"),
        ("math:pi", "'math:pi' is float, not a function"),
    ],
)
def test_a_function_that_cannot_be_had(path: str, fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        import_function(path, ["math", "torch"])
    assert fault in str(caught.value)


def test_a_package_allows_its_modules() -> None:
    assert import_function("torch.nn.functional:relu", ["torch"]) is torch.nn.functional.relu


def test_one_tensor_or_several_come_back_as_a_sequence() -> None:
    x = torch.ones(2)
    assert list(positional(lambda value: value)([x])) == [x]
    assert list(positional(lambda value: None)([x])) == []
    assert positional(torch.max)([torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 0.0]])])[0].tolist() == [[2, 3]]


def test_a_stage_on_an_accelerator_is_placed_there_and_refused_once_another_program_has_the_memory(tmp_path: Path) -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=8"))
    program = split(traced, [[op.name for op in traced.graph.ops]])[0]
    save_stage(program, tmp_path / "stage")
    stage = StageFolder(tmp_path / "stage")
    with cuda(), torch.inference_mode():
        placed = stage.load(1, "cuda:0", shared=False)
        assert torch.equal(placed(traced.example_inputs)[0], traced.program(*traced.example_inputs)[0])
        with pytest.raises(BackendError, match="'openvino' does not run on 'cuda:0'"):
            StageFolder(tmp_path / "stage", "openvino").load(1, "cuda:0", shared=False)
        words = r"weights take .*B, and 16 B of 1\.0 GiB are free on 'cuda:0'; place fewer ops there, or end what else uses it"
        with taken(0, memory_of(0).free_bytes - 16), pytest.raises(BackendError, match=words):
            stage.load(1, "cuda:0", shared=False)
        words = r"the stage's weights fit, and its values do not \(simulated:0 out of memory.*\), on 'cuda:0'; place fewer ops"
        with taken(0, memory_of(0).free_bytes - stage.num_bytes - 32), pytest.raises(BackendError, match=words):
            stage.load(1, "cuda:0", shared=False)
    assert StageFolder(tmp_path / "stage").failing_op([torch.zeros(3)]) == f"'{program.ops[0]}'"
    assert StageFolder(tmp_path / "stage").failing_op(traced.example_inputs) is None
    assert StageFolder(tmp_path / "stage").num_bytes == program.weight_bytes


def test_the_op_that_fails_is_told_with_its_line_of_code_also_for_a_compiled_stage(tmp_path: Path) -> None:
    report = REPORTS["table"]
    save_stage(unsplit(trace(load_model(report.model(), inputs=report.inputs(0)))), tmp_path / "stage")
    code = "return self.body(self.emb(ids)).sum(1)"
    number = Path(reported.__file__).read_text(encoding="utf-8").partition(code)[0].count("\n") + 1
    told = StageFolder(tmp_path / "stage", "onnxruntime").failing_op(report.inputs(2))
    assert told == f"'embedding' ({reported.__file__}:{number}: {code})"
