"""Models after bug reports of runtimes: an answer is right, or its op runs in eager, or the request fails as in torch."""

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import autosplit
from autosplit.backends import conformance, faultstore
from autosplit.backends.apart import apart
from autosplit.backends.base import get_backend
from autosplit.backends.eager import program_runnable
from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import place
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import affinity
from autosplit.errors import BackendError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import split
from autosplit.tracing.valueranges import values_of
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.profile import Profile

RUNTIMES = ("onnxruntime", "openvino")
pytestmark = pytest.mark.timeout(240)


class Reports(nn.Module):
    """Hashes beyond 32 bits, attention with rows masked whole, bucket numbers, time stamps in float64, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.hashed, self.buckets = nn.Embedding(97, 16), nn.Embedding(40, 8)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.gap = nn.Linear(4, 3)

    def forward(
        self, ids: torch.Tensor, x: torch.Tensor, mask: torch.Tensor, t: torch.Tensor, n: torch.Tensor, stamps: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        slots = (ids * 2654435761 + 12345) % 97
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        bucket = (t // 0.1).long().clamp(0, 39)
        rest = torch.div(n, 4, rounding_mode="floor") * 10 + n % -7 + torch.fmod(n, 5) + torch.remainder(n, 3)
        gap = self.gap(torch.log1p((stamps - stamps[:, :1]).float().clamp(min=0)))
        turned = torch.view_as_complex(x.unflatten(-1, (8, 2)))
        spun = torch.view_as_real(turned * turned).flatten(-2) + x
        return self.hashed(slots).relu(), slots, seen.transpose(1, 2).flatten(2), self.buckets(bucket), bucket, rest, gap, spun


def requests(seed: int) -> tuple[torch.Tensor, ...]:
    """Example values for 0; hard values for other seeds."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    t, n = torch.rand(2, 4, generator=generator), torch.randint(0, 20, (3, 4), generator=generator)
    if seed:
        mask = torch.rand(2, 5, 5, generator=generator) > 0.4
        mask[1, 3] = False
        t, n = (
            torch.tensor([[1.0, 0.5, 0.3, 0.7], [0.6, 0.9, 2.0, 1.7]]),
            torch.randint(-(1 << 29), 1 << 29, (3, 4), generator=generator),
        )
    ids = torch.randint(0, 2**31 if seed else 1, (2, 6), generator=generator)
    stamps = (1.75e9 if seed else 0.0) + torch.rand(2, 4, generator=generator, dtype=torch.float64).sort(-1).values
    return ids, torch.randn(2, 5, 16, generator=generator), mask, t, n, stamps


@pytest.fixture(scope="module")
def model() -> Reports:
    torch.manual_seed(0)
    return Reports().eval()


@pytest.fixture(scope="module")
def reports(model: Reports) -> Traced:
    return autosplit.trace(model, requests(0))


def mixed(traced: Traced, backend: str) -> tuple[list[str], list]:
    """The model as stages of a backend, and of eager for the ops that the backend may not run."""
    refused = conformance.refused(traced, backend)
    label = {op.name: "eager" if op.name in refused else backend for op in traced.graph.ops}
    stages = traced.graph.runs(label, label)
    programs = split(traced, stages)
    backends = [label[ops[0]] for ops in stages]
    runs = [
        program_runnable(program, 1) if one == "eager" else get_backend(one).compile(program, 1)
        for one, program in zip(backends, programs, strict=True)
    ]
    return backends, list(zip(programs, runs, strict=True))


def answers(traced: Traced, parts: list, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    held = dict(zip(traced.graph.inputs, inputs, strict=True))
    for program, run in parts:
        held |= zip((spec.name for spec in program.outputs), run([held[spec.name] for spec in program.inputs]), strict=True)
    return [held[name] for name in traced.graph.outputs]


@pytest.mark.parametrize("backend", RUNTIMES)
def test_hard_requests_get_right_answers_on_every_backend(model: Reports, reports: Traced, backend: str) -> None:
    backends, parts = mixed(reports, backend)
    assert {*backends} == {"eager", backend}
    for seed in range(4):
        for found, right in zip(answers(reports, parts, requests(seed)), model(*requests(seed)), strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_reasons_name_the_values_and_both_results(reports: Traced) -> None:
    ops = {op.name: op.operator for op in reports.graph.ops}
    wrong = {backend: {ops[op]: why for op, why in conformance.refused(reports, backend).items()} for backend in RUNTIMES}
    for backend in RUNTIMES:
        assert wrong[backend]["aten.floor_divide.default"].startswith("computes otherwise, on finite values: torch gives ")
        assert wrong[backend]["aten.view_as_complex.default"] == "'view_as_complex' is complex64, which it cannot pass"
        assert "aten.scaled_dot_product_attention.default" not in wrong[backend] and "aten.linear.default" not in wrong[backend]
    assert "integers that leave 32 bits" in wrong["openvino"]["aten.mul.Tensor"]
    assert "aten.sub.Tensor" in wrong["openvino"] and "aten.sub.Tensor" not in wrong["onnxruntime"]  # float64


def test_outcomes_are_kept_and_shown(reports: Traced) -> None:
    conformance.refused(reports, "openvino")
    shown = [row for row in faultstore.rows(["openvino"]) if row["case"].startswith("aten.floor_divide.default(float32")]
    assert shown and shown[0]["values"] == "finite" and shown[0]["backend"] == "openvino"


def test_a_trusted_backend_gets_all_that_it_can_pass(model: Reports) -> None:
    traced = autosplit.trace(model, requests(0), trust_backends=["openvino"])
    assert {why.rpartition(" is ")[2] for why in conformance.refused(traced, "openvino").values()} == {
        "complex64, which it cannot pass"
    }


def test_a_plan_made_by_hand_may_not_put_an_op_where_it_is_computed_otherwise(reports: Traced) -> None:
    device = f"cpu:{affinity()[0]}"
    profile = Profile.given(reports.graph, {(op.name, device): 1.0 for op in reports.graph.ops})
    stage = Stage("s", tuple(reports.graph.index), (device,), "openvino")
    plan = Plan(reports.source, reports.graph.hash, profile.hash, (stage,), UNKNOWN)
    with Workspace() as workspace, pytest.raises(BackendError, match=r"must not run op 'mul' .*--trust-backend"):
        place(reports, plan, machine_for(device), workspace)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.emb(ids.view(-1))).sum(0)


@pytest.mark.parametrize("backend", RUNTIMES)
def test_ids_beyond_a_table_fail_as_in_torch(backend: str) -> None:
    table = Table().eval()
    traced = autosplit.trace(table, (torch.zeros(2, 4, dtype=torch.long),))
    assert conformance.refused(traced, backend) == {}
    [program] = split(traced, [list(traced.graph.index)])
    run = get_backend(backend).compile(program, 1)
    ids = torch.tensor([[0, 9, 3, 3], [1, 2, 9, 0]])
    torch.testing.assert_close(run([ids])[0], table(ids))
    for wrong in (10, -1, 1 << 33):
        with pytest.raises(IndexError, match=f"input 'ids' holds {wrong}, and 0 to 9"):
            run([ids + (wrong - 9) * (ids == 9)])


@pytest.mark.parametrize("backend", RUNTIMES)
def test_a_table_stays_in_eager_where_any_ids_may_come(backend: str) -> None:
    traced = autosplit.trace(Table().eval(), (torch.zeros(2, 4, dtype=torch.long),), values="any")
    [why] = [why for op, why in conformance.refused(traced, backend).items() if op == "embedding"]
    assert "index" in why or "32 bits" in why


class Crashing(nn.Module):
    """OpenVINO 2026.4.1 ends the process that compiles this."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) - y


def test_a_crash_of_a_compiler_is_an_error_of_the_stage_and_leaves_no_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    traced = autosplit.trace(Crashing().eval(), (torch.randn(2, 6), torch.randn(2, 6)))
    [program] = split(traced, [list(traced.graph.index)])
    for compiling in (get_backend("openvino").refuses, lambda one: get_backend("openvino").compile(one, 1)):
        with pytest.raises(BackendError, match=r"was killed by SIGSEGV while openvino .* stage 'stage0'"):
            compiling(program)
    assert list(tmp_path.glob("**/*.onnx")) == []


def test_a_search_goes_on_without_a_backend_whose_compiler_crashes() -> None:
    device = f"cpu:{affinity()[0]}"
    traced = autosplit.trace(Crashing().eval(), (torch.randn(2, 6), torch.randn(2, 6)))
    times = dict.fromkeys([(op.name, device) for op in traced.graph.ops], 1e-4)
    eager, other = Profile.given(traced.graph, times), Profile.given(traced.graph, dict.fromkeys(times, 1e-5), "openvino")
    profile = replace(eager, measured={**eager.measured, **other.measured})
    found = autosplit.search(traced, profile, device, setup=Setup(progress=False), budget=Budget(search_s=0.5))
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
