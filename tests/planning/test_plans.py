"""The Pareto front of a model's plans: from Python, and as the command writes it."""

from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autosplit.commands.options import Plans
from autosplit.commands.searching import _front_of_model
from autosplit.errors import InfeasibleError, UsageError
from autosplit.planning.caps import front_within_caps
from autosplit.planning.explaining import explain
from autosplit.planning.plans import plan_front, plan_model
from autosplit.planning.predicting import bounded, moved_s, predict
from autosplit.planning.question import Question
from autosplit.searching.candidates import SearchResult
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine, parse_device
from autosplit.values.plan import Plan, Source, held_on
from autosplit.values.planfile import read_plan, write_plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Provenance, Samples, Setting

NAMES = [f"a{i}" for i in range(4)]
OPS = tuple(Op(n, "linear", "", (f"a{i - 1}" if i else "x",), (n,), (f"w{i}",), f"s{i}") for i, n in enumerate(NAMES))
WEIGHTS = {f"w{i}": Value(f"w{i}", (25,), "float32", 100) for i in range(4)}
GRAPH = Graph("chain", ("x",), ("a3",), OPS, {n: Value(n, (8,), "float32", 32) for n in ["x", *NAMES]}, WEIGHTS).verify()
TWO = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])
PROFILE = Profile.given(GRAPH, {(name, device.name): 1.0 for name in NAMES for device in TWO.devices})


def values(plan: Plan, peak_bytes: float) -> tuple[float, float, float]:
    return plan.prediction.bottleneck_s, plan.prediction.latency_s, peak_bytes


@pytest.mark.parametrize("constraints", [Constraints(), Constraints(max_replicas=1)])
def test_plans_of_a_front_recompute_and_none_is_better_than_another(constraints: Constraints) -> None:
    # four ops take no time limit
    question = Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), constraints, time_limit_s=0)
    front = front_within_caps(question)
    rows = [values(*entry) for entry in front]
    assert len(rows) > 1 and rows == sorted(rows)
    for one, other in combinations(rows, 2):
        assert any(a < b for a, b in zip(one, other, strict=True)) and any(a > b for a, b in zip(one, other, strict=True))
    for plan, peak_bytes in front:
        again = predict(plan.verify(GRAPH, TWO), GRAPH, TWO, PROFILE, plan.prediction.bound_s).prediction
        assert again.bottleneck_s == plan.prediction.bottleneck_s and again.latency_s == plan.prediction.latency_s
        assert peak_bytes == max(sum(held_on(device, plan.stages, TWO.devices, GRAPH)) for device in TWO.devices)
        assert all(stage.memory is not None and stage.memory.weight_bytes == 100 * len(stage.ops) for stage in plan.stages)
        assert 0 <= plan.prediction.bound_s <= plan.prediction.bottleneck_s
    best = plan_model(Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), constraints))
    assert rows[0][0] == pytest.approx(best.prediction.bottleneck_s)


def test_a_front_that_no_plan_is_on_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="at least"):
        plan_front(Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), Constraints(max_latency_s=1e-3), time_limit_s=1))


def test_each_plan_of_the_front_has_a_file(tmp_path: Path) -> None:
    plan = plan_model(Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",)))
    traced: Any = SimpleNamespace(graph=GRAPH)
    found = SearchResult(plan, traced, PROFILE)
    given = Plans(model="m:f", objective="pareto", front=tmp_path / "front", time_limit="1s")
    rows, files = _front_of_model(given, found, TWO, None)
    assert len(rows) > 1 and [str(path) for path in files] == [row["plan"] for row in rows]
    for row, (path, one) in zip(rows, files.items(), strict=True):
        write_plan(one, GRAPH, path)
        written = read_plan(Path(row["plan"])).resolve(GRAPH)
        assert written.prediction.throughput_per_s == pytest.approx(row["items_per_s"])
        assert {op: list(stage.devices) for stage in written.stages for op in stage.ops} == row["assignment"]


def test_a_bound_says_nothing_of_a_plan_that_is_better() -> None:
    best = plan_model(Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), Constraints(max_replicas=1)))
    assert best.status == "optimal" and best.prediction.gap == 0
    loose = bounded(best, 0.5 * best.prediction.bottleneck_s)
    assert loose.status == "feasible" and loose.prediction.gap == pytest.approx(0.5)
    outside = bounded(best, 1.5 * best.prediction.bottleneck_s)
    assert outside.prediction.bound_s == 0.0 and outside.status == "feasible"


@pytest.mark.parametrize(("cache_bytes", "hosts_s"), [(1000, 0.5), (100, 0.75)])
def test_where_all_cores_are_devices_the_one_that_hands_over_the_answer_pays_for_the_host(
    cache_bytes: int, hosts_s: float
) -> None:
    stamp = Provenance(num_cores=2, caches={"L3": cache_bytes})
    here = replace(PROFILE, measured={s: replace(m, provenance=stamp) for s, m in PROFILE.measured.items()})
    links = [Link(a, b, 0, 0, 0, 0, 0) for a, b in permutations(("cpu:0", "cpu:1", HOST), 2) if b != HOST]
    here = here.with_links([*links, *(Link(d.name, HOST, 0, 0, 0, 0.5, 0, cold_receive_s=0.75) for d in TWO.devices)])
    plan = plan_model(Question(GRAPH, here, Source("m:f"), TWO, ("eager",), Constraints(num_stages=2, max_replicas=1)))
    assert [stage.load_s for stage in plan.stages] == [2, 2 + hosts_s] and plan.status == "optimal"
    assert moved_s(plan, GRAPH, TWO, here) == [0, hosts_s]
    assert f"({hosts_s * 1000:.2f} ms of it is the host's work, because the host has no core of its own)" in (
        explain(GRAPH, plan, TWO, here, time_limit_s=2).because
    )
    roomy = replace(here, measured={s: replace(m, provenance=replace(stamp, num_cores=3)) for s, m in here.measured.items()})
    assert predict(plan, GRAPH, TWO, roomy).prediction.bottleneck_s == 2


def test_a_link_of_the_machine_file_counts_in_place_of_a_measured_one() -> None:
    measured = PROFILE.with_links(Link(a, b, 0, 0, 0, 0, 0) for a, b in permutations(("cpu:0", "cpu:1", HOST), 2))
    wanted = Constraints(num_stages=2, max_replicas=1)
    slow = TWO.with_links(Link(a, b, 0, 5.0, 0, 0, 0) for a, b in permutations(("cpu:0", "cpu:1"), 2))
    loads = [
        sorted(stage.load_s for stage in plan_model(Question(GRAPH, measured, Source("m:f"), here, ("eager",), wanted)).stages)
        for here in (TWO, slow)
    ]
    assert loads[1] != loads[0] and max(loads[1]) >= 5 > max(loads[0])


def test_who_takes_a_value_over_a_cut_pays_what_that_costs_its_backend() -> None:
    per_byte = {"cpu:0": 0.0, "cpu:1": 0.01}
    here = PROFILE.with_links(Link(a, b, 0, 0, 0, 0, 0) for a, b in permutations(("cpu:0", "cpu:1", HOST), 2))
    cut = {s: replace(m, cut_s_per_byte=per_byte[s.device]) for s, m in here.measured.items()}
    wanted = Constraints(num_stages=2, max_replicas=1)
    plan = plan_model(Question(GRAPH, here, Source("m:f"), TWO, ("eager",), wanted))
    priced = replace(here, measured=cut)
    moves = dict(zip([stage.devices[0] for stage in plan.stages], moved_s(plan, GRAPH, TWO, priced), strict=True))
    assert moves == {name: 32 * per_byte[name] if name == plan.stages[1].devices[0] else 0 for name in moves}
    assert moved_s(plan, GRAPH, TWO, here) == [0, 0]
    free = plan_model(Question(GRAPH, priced, Source("m:f"), TWO, ("eager",), wanted))
    assert free.prediction.bottleneck_s == 2 and free.stages[1].devices == ("cpu:0",)


def test_at_most_so_many_stages() -> None:
    wanted = Constraints(max_replicas=1, max_stages=1)
    plan = plan_model(Question(GRAPH, PROFILE, Source("m:f"), TWO, ("eager",), wanted.verify(GRAPH, TWO)))
    assert len(plan.stages) == 1 and plan.status == "optimal"
    with pytest.raises(UsageError, match="num_stages 2 is above max_stages 1"):
        Constraints(num_stages=2, max_stages=1).verify(GRAPH, TWO)


REFUSED = {"a2": "no rule"}


def partly() -> Profile:
    """Eager takes 2 s an op, and ONNX Runtime 1 s for all but one that it refuses."""
    settings = [Setting(device.name, backend, 1) for device in TWO.devices for backend in ("eager", "onnxruntime")]
    seconds = {"eager": 2.0, "onnxruntime": 1.0}
    refused: dict[str, dict[str, str]] = {"eager": {}, "onnxruntime": REFUSED}
    measured = {
        s: Measured(
            {n: Samples((seconds[s.backend],)) for n in NAMES if n not in refused[s.backend]}, "op", refused=refused[s.backend]
        )
        for s in settings
    }
    return replace(Profile.empty(GRAPH), measured=measured).verify()


@pytest.mark.parametrize(
    ("constraints", "stages"),
    [
        (Constraints(), [("a0", "a1"), ("a2",), ("a3",)]),
        (Constraints(max_replicas=1), [("a0", "a1"), ("a2",), ("a3",)]),
        (Constraints(max_stages=1), [("a0", "a1", "a2", "a3")]),
    ],
)
def test_what_a_backend_refuses_becomes_a_stage_of_another_one(constraints: Constraints, stages: list[tuple[str, ...]]) -> None:
    profile = partly()
    plan = plan_model(Question(GRAPH, profile, Source("m:f"), TWO, ("onnxruntime", "eager"), constraints)).verify(GRAPH, TWO)
    assert [stage.ops for stage in plan.stages] == stages
    assert all(stage.backend == "eager" for stage in plan.stages if set(stage.ops) & set(REFUSED))
    assert {stage.backend for stage in plan.stages} == ({"eager"} if len(stages) == 1 else {"eager", "onnxruntime"})
    assert predict(plan, GRAPH, TWO, profile).prediction.bottleneck_s == plan.prediction.bottleneck_s
    assert plan.prediction.bound_s <= plan.prediction.bottleneck_s < 4.1


SLOW_LINKS = [Link(a, b, 0, 0.5, 0, 0.5, 0) for a in ("cpu:0", "cpu:1") for b in ("cpu:0", "cpu:1")]


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (Constraints(together=("a[12]",)), "'a1' and 'a2' must stay together"),
        (Constraints(min_stage_s=3.0, max_replicas=1), "one of its stages takes 1.50 s, and at least 3.00 s"),
        (Constraints(max_latency_s=5.5), "a request takes 7.00 s, and at most 5.50 s"),
    ],
)
def test_no_demand_is_broken_by_the_stages_of_a_second_backend(constraints: Constraints, message: str) -> None:
    machine = TWO.with_links(SLOW_LINKS)
    with pytest.raises(InfeasibleError, match=message):
        plan_model(Question(GRAPH, partly(), Source("m:f"), machine, ("onnxruntime",), constraints))
    with pytest.raises(InfeasibleError):
        plan_front(Question(GRAPH, partly(), Source("m:f"), machine, ("onnxruntime",), constraints, time_limit_s=1))


def test_a_latency_limit_is_of_the_whole_request_not_of_its_first_microbatch() -> None:
    source = Source("m:f", batch=4)
    with pytest.raises(InfeasibleError, match=r"in microbatches of 1 that .* takes 10.00 s, and at most 5.00 s"):
        plan_model(Question(GRAPH, PROFILE, source, TWO, ("eager",), Constraints(max_latency_s=5.0), microbatch=1))
    plan = plan_model(Question(GRAPH, PROFILE, source, TWO, ("eager",), Constraints(max_latency_s=10.1), microbatch=1))
    assert plan.prediction.latency_s <= 10.1


def test_devices_that_have_no_backend_in_common_are_not_replicas_of_one_stage() -> None:
    other = Profile.given(GRAPH, {(n, "cpu:1"): 1.0 for n in NAMES}, backend="onnxruntime")
    here = {setting: one for setting, one in PROFILE.measured.items() if setting.device == "cpu:0"}
    apart = replace(PROFILE, measured={**here, **other.measured})
    plan = plan_model(Question(GRAPH, apart, Source("m:f"), TWO, ("eager", "onnxruntime")))
    assert [stage.devices for stage in plan.stages] == [("cpu:0",), ("cpu:1",)] and plan.status == "optimal"


def test_a_plan_is_predicted_by_its_own_stages_where_newer_ones_contradict_them() -> None:
    whole, halves = (
        plan_model(Question(GRAPH, PROFILE, Source("m", 1), TWO, ("eager",), Constraints(num_stages=n))) for n in (1, 2)
    )
    profile = PROFILE
    for plan, seconds in ((whole, 5.0), (halves, 6.0)):
        for stage, setting in plan.workers:
            profile = profile.with_stage(stage.ops, setting, Samples((seconds,)), busy=["cpu:0", "cpu:1"])
    found = [predict(plan, GRAPH, TWO, profile).prediction.bottleneck_s for plan in (whole, halves)]
    assert found == pytest.approx([2.5, 6.0], rel=1e-3)
