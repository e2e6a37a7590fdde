"""Real runtimes that compute something else than the model: refused in a profile and in a run, by name, and shown."""

from pathlib import Path
from typing import Any

import onnx
import pytest

import autosplit
from autosplit.backends import onnxfile
from autosplit.backends.base import get_backend
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.limits import affinity
from autosplit.errors import BackendError
from autosplit.measuring import measure
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Stage

ONE = Machine.of([parse_device(f"cpu:{affinity()[0]}")])
SENTENCE = r"backend '{}' \(f32\) gives wrong numbers on stage '\w+': output '\w+' is off by .* the tolerance is 0.001"


@pytest.fixture(scope="module")
def traced() -> Traced:
    return autosplit.trace("autosplit.examples.mlp:mlp?depth=3&width=16")


@pytest.fixture(params=["onnxruntime", "openvino"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A runtime whose files take absolute values where the model has its ReLUs."""
    if reason := get_backend(request.param).missing():
        pytest.skip(reason)
    write = onnxfile.write_onnx

    def write_wrong(program: Any, path: Path, *args: Any, **options: Any) -> None:
        write(program, path, *args, **options)
        model = onnx.load(path, load_external_data=False)
        wrong = [node for node in model.graph.node if node.op_type == "Relu"]
        assert wrong
        for node in wrong:
            node.op_type = "Abs"
        onnx.save(model, path)

    monkeypatch.setattr(onnxfile, "write_onnx", write_wrong)
    monkeypatch.setattr("autosplit.backends.base.apart", lambda function, *arguments, **_: function(*arguments))
    return str(request.param)


def test_a_profile_leaves_it_out_and_says_why(traced: Traced, runtime: str) -> None:
    profile = measure(traced, ONE, ["eager", runtime], budget_s=0.2, links=False)
    assert {setting.backend for setting in profile.measured} == {"eager"}
    [note] = [note for note in profile.notes if "is left out" in note]  # a busy machine adds others
    assert note.startswith(f"{runtime} is left out: ") and "Run it on another backend, such as eager." in note
    with pytest.raises(BackendError, match=SENTENCE.format(runtime)):
        measure(traced, ONE, [runtime], budget_s=0.2, links=False)


def test_a_run_shows_it_and_does_not_choose_it(traced: Traced, runtime: str) -> None:
    stage = Stage("whole", tuple(op.name for op in traced.graph.ops), (ONE.devices[0].name,), runtime)
    plan = Plan(traced.source, traced.graph.hash, "", (stage,), UNKNOWN)
    setup, budget = Setup(backends=["eager", runtime]), Budget(num_requests=4, num_rounds=1)
    report = autosplit.run(traced, plan, ONE, Constraints(), setup=setup, budget=budget)
    assert not report.plan.outputs_equal and report.best.outputs_equal
    assert {stage.backend for stage in report.best.plan.stages} == {"eager"}
    wrong = {name: reason for name, reason in report.left_out.items() if "gives wrong numbers" in reason}
    assert wrong and all(f"'{runtime}'" in reason for reason in wrong.values())
