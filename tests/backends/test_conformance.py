"""Ops are tried on hard values, and those that a backend computes otherwise run in eager."""

import gc
import math
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reported import REPORTS, answers
from torch import nn

import autosplit
from autosplit.backends import conformance, faultstore, trials
from autosplit.backends.apart import apart
from autosplit.backends.base import Runnable, get_backend
from autosplit.backends.opcases import case_of
from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import place
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import affinity
from autosplit.errors import BackendError, WorkerError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.flattening import is_op
from autosplit.tracing.splitting import StageProgram, split
from autosplit.tracing.valueranges import values_of
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.profile import Profile

RUNTIMES = ("onnxruntime", "openvino")
pytestmark = pytest.mark.timeout(240)


def traced_report(name: str, **options: Any) -> Traced:
    return autosplit.trace(REPORTS[name].model(), REPORTS[name].inputs(0), **options)


def whole(traced: Traced) -> StageProgram:
    [program] = split(traced, [list(traced.graph.index)])
    return program


def test_reasons_name_the_values_and_both_results() -> None:
    for backend in RUNTIMES:
        divided, spun = (conformance.refused(traced_report(name), backend) for name in ("buckets", "complex"))
        assert divided["floor_divide"].startswith("computes otherwise, on finite values: torch gives ")
        assert spun["view_as_complex"] == "'view_as_complex' is complex64, which it cannot pass"
    assert "integers that leave 32 bits" in conformance.refused(traced_report("hashes"), "openvino")["mul"]


def test_outcomes_are_kept_and_shown() -> None:
    conformance.refused(traced_report("buckets"), "openvino")
    shown = [row for row in faultstore.rows(["openvino"]) if row["case"].startswith("aten.floor_divide.default(float32")]
    assert shown and shown[0]["values"] == "finite" and shown[0]["backend"] == "openvino"


def test_a_trusted_backend_gets_all_that_it_can_pass() -> None:
    assert conformance.refused(traced_report("hashes", trust_backends=["openvino"]), "openvino") == {}
    spun = conformance.refused(traced_report("complex", trust_backends=["openvino"]), "openvino")
    assert {why.rpartition(" is ")[2] for why in spun.values()} == {"complex64, which it cannot pass"}


def test_a_plan_made_by_hand_may_not_put_an_op_where_it_is_computed_otherwise() -> None:
    traced, device = traced_report("hashes"), f"cpu:{affinity()[0]}"
    profile = Profile.given(traced.graph, {(op.name, device): 1.0 for op in traced.graph.ops})
    stage = Stage("s", tuple(traced.graph.index), (device,), "openvino")
    plan = Plan(traced.source, traced.graph.hash, profile.hash, (stage,), UNKNOWN)
    with Workspace() as workspace, pytest.raises(BackendError, match=r"must not run op 'mul' .*--trust-backend"):
        place(traced, plan, machine_for(device), workspace)


class Short(nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2).float(), n.to(torch.int32) + 1


def test_ops_on_values_that_a_backend_cannot_pass_run_in_eager_with_these_values() -> None:
    values = torch.randn(3).to(torch.bfloat16), torch.arange(3).to(torch.uint16)
    traced = autosplit.trace(Short().eval(), values, trust_backends=RUNTIMES)
    told = {backend: conformance.refused(traced, backend) for backend in RUNTIMES}
    unsigned = [op.name for op in traced.graph.ops if "uint16" in told["onnxruntime"].get(op.name, "")]
    assert len(unsigned) == 1 and told["onnxruntime"].keys() == {"mul", *unsigned}  # it has no product in bfloat16
    assert told["openvino"].keys() == {*unsigned}
    for backend in RUNTIMES:
        for found, right in zip(mixed_answers(traced, backend, values), Short()(*values), strict=True):
            assert torch.equal(found, right)


class Kinds(nn.Module):
    """Ops on the kinds of values that a model seldom gets."""

    def forward(self, n, m, u, empty, thin, x, rows, spots) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        turned = x.transpose(0, 1)
        return (
            *(torch.div(n, m, rounding_mode="trunc"), n // m, n % m, torch.fmod(n, m)),
            *(u + u, u * u, u - 3),
            *(empty.sum(0), torch.cat([empty, empty], 1), thin.mean(1), thin.amax(0)),
            *(turned.softmax(-1), turned @ x, x.index_put((rows,), spots), x.index_put((rows,), spots, accumulate=True)),
            *(x.index_add(0, rows, spots), x.scatter_add(0, rows[:, None].expand(-1, 8), spots)),
            *(x.relu().reciprocal(), spots.relu()),
        )


def kinds(seed: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    n, m = torch.randint(-(1 << 29), 1 << 29, (3, 4)), torch.randint(1, 1 << 26, (3, 4)) * (1 - 2 * torch.randint(0, 2, (3, 4)))
    u, rows = torch.randint(0, 256, (7,), dtype=torch.uint8), torch.tensor([0, 2, 2, 5, 5, 5])
    x = torch.randn(6, 8).masked_fill(torch.rand(6, 8) < 0.2, -0.0)
    return n, m, u, torch.zeros(0, 5), torch.randn(4, 1), x, rows, torch.randn(6, 8)


@pytest.mark.parametrize("backend", RUNTIMES)
def test_signs_and_divisors_of_0_short_integers_empty_turned_and_repeated_values_are_tried(backend: str) -> None:
    model = Kinds().eval()
    traced = autosplit.trace(model, kinds(0))
    told = conformance.refused(traced, backend)
    keys = " ".join(case.key for _, case, _ in conformance.needed_cases(traced, backend))
    assert "[0,18]" in keys and "[18,1]" in keys and " by 1,0]" in keys
    assert "beyond 24 bits" in told["div"] and "relu_1" not in told  # no op observes the sign of its zeros
    if backend == "openvino":
        assert {"add", "mul", "sub", "floor_divide", "remainder", "fmod"} <= told.keys()
        assert (
            told["relu"] == f"{conformance.WRONG}, on zeros whose sign another op observes: torch gives -0 for -0, and it gives 0"
        )
        assert told["add"].startswith("computes otherwise, on finite values: torch gives ") and told["add"].endswith("gives 255")
        key = "aten.floor_divide.default(int64[18,19], int64[18,19])"
        assert faultstore.table(backend)[key]["outside"] == "torch refuses 0 (ZeroDivisionError), and it answers"
    for seed in range(3):
        for found, right in zip(mixed_answers(traced, backend, kinds(seed)), model(*kinds(seed)), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    by_zero = [value * (1 - (k == 1)) for k, value in enumerate(kinds(1))]
    with pytest.raises(RuntimeError, match=r"ZeroDivision|modulo by zero"):
        mixed_answers(traced, backend, by_zero)


def mixed_answers(traced: Traced, backend: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    [found] = answers(traced, backend, [inputs])[1]
    if isinstance(found, Exception):
        raise found
    return found


class Dies(BaseException):
    """A process ends."""


class DyingLibrary:
    """In the place of a backend: its code ends the process where the divisor of whole numbers is 0, as that of inductor does."""

    def __init__(self) -> None:
        self.program: StageProgram

    def prepare(self, program: StageProgram, folder: Path) -> None:
        self.program = program

    def load(self, folder: Path, threads: int) -> Runnable:
        divisions = self.program.module.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor_mode)
        divisors, names = {node.args[1].name for node in divisions}, [spec.name for spec in self.program.inputs]

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            if any(name in divisors and not value.all() for name, value in zip(names, inputs, strict=True)):
                raise Dies
            return self.program.module(*inputs)

        return run


def test_inductor_is_tried_too_and_a_crash_costs_the_kind_of_values_that_caused_it(monkeypatch, tmp_path) -> None:
    """Each call after a crash goes on with what the one before has left in its folder; real crashes are below."""

    class Divided(nn.Module):
        def forward(self, n: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return torch.div(n, m, rounding_mode="trunc") + 1

    def here(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        asked.append(arguments[1])
        try:
            return function(*arguments)
        except Dies:
            raise WorkerError("worker 'compiling' was killed by SIGFPE while it was tried") from None

    asked: list[str] = []
    monkeypatch.setenv("AUTOSPLIT_CACHE", str(tmp_path))
    monkeypatch.setattr(faultstore, "_found", defaultdict(dict))
    monkeypatch.setattr(trials, "get_backend", {"inductor": DyingLibrary()}.__getitem__)
    monkeypatch.setattr(trials, "apart", here)
    n = torch.randint(1, 9, (3, 4))
    told = conformance.refused(autosplit.trace(Divided().eval(), (n, n.clone())), "inductor")
    assert told == {"div": "computes otherwise, on an index beyond a table or a divisor of 0: it ends the process"}
    assert asked == ["inductor"] * 2


def test_an_op_is_at_fault_that_differs_alone(monkeypatch, tmp_path) -> None:
    """Beside the ops of a Mixtral, a view on OpenVINO was found to hold the values of others."""

    class Overwriting(DyingLibrary):
        def load(self, folder: Path, threads: int) -> Runnable:
            asked.append(len(self.program.ops))
            return lambda inputs: [value + (len(self.program.ops) > 1) for value in self.program.module(*inputs)]

    class Divided(nn.Module):
        def forward(self, n: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return torch.div(n, m, rounding_mode="trunc") + 1

    asked: list[int] = []
    monkeypatch.setenv("AUTOSPLIT_CACHE", str(tmp_path))
    monkeypatch.setattr(faultstore, "_found", defaultdict(dict))
    monkeypatch.setattr(trials, "get_backend", {"inductor": Overwriting()}.__getitem__)
    monkeypatch.setattr(trials, "apart", lambda function, *arguments, **_: function(*arguments))
    n = torch.randint(1, 9, (3, 4))
    assert conformance.refused(autosplit.trace(Divided().eval(), (n, n.clone())), "inductor") == {}
    assert asked == [2, 1, 1]


@pytest.mark.parametrize("backend", RUNTIMES)
def test_a_table_stays_in_eager_where_any_ids_may_come(backend: str) -> None:
    traced = traced_report("table", values="any")
    [why] = [why for op, why in conformance.refused(traced, backend).items() if op == "embedding"]
    assert "index" in why or "32 bits" in why


def test_a_crash_of_a_compiler_is_an_error_of_the_stage_and_leaves_no_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(BackendError, match=r"was killed by SIGSEGV while openvino prepared stage 'stage0'"):
        get_backend("openvino").compile(whole(traced_report("crashing")), 1)
    assert list(tmp_path.glob("**/*.onnx")) == []


def test_a_search_goes_on_without_a_backend_whose_compiler_crashes() -> None:
    device = f"cpu:{affinity()[0]}"
    traced = traced_report("crashing")
    times = dict.fromkeys([(op.name, device) for op in traced.graph.ops], 1e-4)
    eager, other = Profile.given(traced.graph, times), Profile.given(traced.graph, dict.fromkeys(times, 1e-5), "openvino")
    profile = replace(eager, measured={**eager.measured, **other.measured})
    found = autosplit.search(traced, profile, device, setup=Setup(progress=False), budget=Budget(search_s=0.1))
    assert {stage.backend for stage in found.plan.stages} == {"eager"}
    assert any("openvino is left out: worker 'compiling' was killed by SIGSEGV" in note for note in found.profile.notes)


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_apart_that_died_is_replaced() -> None:
    with pytest.raises(BackendError, match="worker 'compiling' was killed by SIGKILL while nothing was done"):
        apart(_end, doing="while nothing was done")
    assert apart(math.sqrt, 16.0, doing="while a root was taken") == 4.0


class Integers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 4)
        self.register_buffer("causal", torch.full((5, 5), -math.inf).triu(1))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        near = (ids + 3) * 2 - ids.flip(1)
        places = mask.cumsum(1) * 7 % 50
        return (
            self.emb(ids),
            near.clamp(max=90),
            places,
            (scores + self.causal).softmax(-1),
            scores.masked_fill(mask[0] > 0, -math.inf),
        )


def test_the_values_of_an_op_follow_from_those_of_the_inputs() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    traced = autosplit.trace(Integers().eval(), (ids, ids, torch.randn(5, 5)))
    known = {node.name: found for node, found in values_of(traced.program, "narrow").items()}
    assert known["ids"][:2] == (0, 49)  # it indexes a table
    assert known["mask"][:2] == (-(1 << 30), 1 << 30)
    assert known["clamp"][:2] == (6 - 49, 90)
    assert known["remainder"][:2] == (0, 49)
    assert known["cumsum"].high >= 5 << 30
    assert known["add_1"].strange == 1 and known["softmax"].strange == 0  # the mask leaves an element of each row
    assert known["masked_fill"].strange == 2
    assert {node.name: found for node, found in values_of(traced.program, "ids").items()}["mask"].high == (1 << 63) - 1


def test_cases_of_a_model_hold_no_tensors_as_large_as_its_weights() -> None:
    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    traced = autosplit.trace(Turned(67, 71).eval(), (torch.randn(2, 67),))
    cases = [case_of(node) for node in traced.program.graph.nodes if is_op(node)]
    assert any(tensor.shape == (71, 67) for case in cases if case for tensor in case.arguments().values())
    every = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == (71, 67)]
    assert all(one.any() for one in every)  # the tensors of cases are zeros
