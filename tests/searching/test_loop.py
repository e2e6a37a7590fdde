import errno
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch
from pipelines import Once, fail_on_7, increment, local, request

from autosplit.deploying.bench import Bench, Contender
from autosplit.deploying.setup import Budget, Setup
from autosplit.errors import AutosplitError, BackendError, InfeasibleError, TraceError, UsageError, WorkerError
from autosplit.memory.stages import StageKey, with_footprints
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.predicting import predict
from autosplit.planning.question import Question
from autosplit.progress import quiet
from autosplit.reports.outcomes import PLAN, Ratio
from autosplit.running.modules import LocalFunction
from autosplit.running.nullworker import SimulatedDeath
from autosplit.searching import candidates, loop
from autosplit.searching.candidates import SearchResult, Trial, asking, run_order, usual_plans, with_bound
from autosplit.searching.hunt import BESIDE, FIRST, MAX_TRIALS, NUM_ROUNDS, Hunt
from autosplit.searching.loop import search
from autosplit.searching.tuning import Study, first_trials, open_study, space
from autosplit.tracing.differing import NumericalError
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Plan, Prediction, Source, Stage
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint, Measured, Samples, Setting, stage_key

SOURCE = Source("m", 1)
TWO = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])
OPS = tuple(Op(f"a{i}", "linear", "", (f"a{i - 1}" if i else "x",), (f"a{i}",), (), f"s{i}") for i in range(4))
VALUES = {name: Value(name, (8,), "float32", 32) for name in ["x", *[op.name for op in OPS]]}
WEIGHTS = {op.name: Value(op.name, (1 << 26,), "float32", 1 << 28) for op in OPS}
GRAPH = Graph("chain", ("x",), ("a3",), OPS, VALUES, {})
CAPPED = TWO.with_memory(dict.fromkeys(("cpu:0", "cpu:1"), 3 << 28))
PROFILE = Profile.given(GRAPH, {(op.name, device.name): 1.0 for op in OPS for device in TWO.devices})
TRACED: Any = SimpleNamespace(graph=GRAPH)
"""Four ops of a second each on two devices, as far as a planner looks."""


def question(machine: Machine, constraints: Constraints, backends: tuple[str, ...], **more: Any) -> Question:
    return Question(GRAPH, more.pop("profile", PROFILE), more.pop("source", SOURCE), machine, backends, constraints, **more)


def planned(about: Question, **asked: Any) -> Plan:
    """The planner's answer to what a trial asks."""
    return plan_within_caps(asking(about, (TRACED, about.profile), asked))


def plan(*stages: Stage) -> Plan:
    return Plan(SOURCE, "graph", "profile", stages, Prediction(1.0, 1.0, 1.0, 0.0, 1.0))


def test_a_pipeline_and_replicas_of_the_best_backend_are_tried_first() -> None:
    job = question(TWO, Constraints(), ("eager", "onnxruntime"))
    best = plan(Stage("s", ("op",), ("cpu:0", "cpu:1"), "onnxruntime"))
    tried = [(t["num_stages"], t["replicate"], t["backend"]) for t in first_trials(job, best)]
    assert tried == [(1, True, "onnxruntime"), (2, False, "onnxruntime"), (1, True, "onnxruntime")]


def test_a_plan_with_several_stages_on_a_device_gives_a_trial_that_can_be_asked_for() -> None:
    job = question(TWO, Constraints(reuse=True), ("eager", "onnxruntime"))
    mixed = [Stage(f"s{n}", (f"a{n}",), (f"cpu:{n % 2}",), job.backends[n % 3 > 0]) for n in range(7)]
    asked, choices = first_trials(job, plan(*mixed))[0], space(job)
    assert asked["num_stages"] == 6 and all(c._contains(c.to_internal_repr(asked[name])) for name, c in choices.items())


def exactly(times: float) -> Ratio:
    """A ratio without noise."""
    return Ratio(times, times, times, 3)


def won(monkeypatch: pytest.MonkeyPatch, about: Question, asked: dict[str, Any]) -> tuple[Plan, SearchResult]:
    """The plan for what a trial asks, and the search in which it measures best."""
    best = planned(about, **asked)

    def correct(hunt: Hunt, first: Plan, *others: Plan) -> None:
        hunt.trials.append(Trial({}, first, 1.0, exactly(1.0)))

    def tune(hunt: Hunt, study: Study) -> None:
        hunt.trials.append(Trial(asked, best, 2.0, exactly(2.0)))

    monkeypatch.setattr(Hunt, "correct", correct)
    monkeypatch.setattr(Hunt, "tune", tune)
    return best, search(about, TRACED, budget=Budget(1.0))


def test_a_device_that_cannot_be_opened_any_more_is_left_out_and_the_others_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []

    def once(about: Question, *others: Any) -> SearchResult:
        asked.append(about)
        if len(asked) == 1:
            raise BackendError("device 'cpu:1' cannot be used", backend="eager", device="cpu:1")
        return SearchResult(planned(about), TRACED, about.profile)

    monkeypatch.setattr(loop, "_search", once)
    found = search(question(TWO, Constraints(), ("eager",)), TRACED)
    assert [device.name for device in asked[1].machine.devices] == ["cpu:0"] and asked[1].backends == ("eager",)
    assert found.profile.notes == ("cpu:1 is left out: device 'cpu:1' cannot be used",)
    assert {name for stage in found.plan.stages for name in stage.devices} == {"cpu:0"}
    unmeasured = {setting: one for setting, one in PROFILE.measured.items() if setting.device == "cpu:0"}
    about = question(TWO, Constraints(), ("eager",), profile=replace(PROFILE, measured=unmeasured, notes=found.profile.notes))
    again = search(about, TRACED)
    assert asked[-1].machine.devices == asked[1].machine.devices and again.profile.notes == found.profile.notes
    with pytest.raises(BackendError, match="cpu:1 is left out: device 'cpu:1' cannot be used"):
        search(replace(about, constraints=Constraints(pins={"a0": "cpu:1"})), TRACED)


def predicted(first_s: float, *stages: Stage) -> Plan:
    """A plan that a device is predicted to be busy with for so many seconds."""
    return replace(plan(*stages), prediction=Prediction(first_s, first_s, 0.0, 1.0, 1 / first_s))


REPLICAS = Stage("s0", ("a0", "a1", "a2", "a3"), ("cpu:0", "cpu:1"))
HALVES = Stage("s0", ("a0", "a1"), ("cpu:0",)), Stage("s1", ("a2", "a3"), ("cpu:1",))
THIRDS = Stage("s0", ("a0",), ("cpu:0",)), Stage("s1", ("a1", "a2", "a3"), ("cpu:1",))
MIXTURE = Stage("s0", ("a0", "a1"), ("cpu:0",)), Stage("s1", ("a2", "a3"), ("cpu:1",), "onnxruntime")


def test_every_search_knows_the_usual_ways_of_each_backend_and_leaves_out_what_breaks_a_demand_or_a_cap() -> None:
    both = Profile.empty(GRAPH)
    seconds = {(op.name, device.name): 1.0 for op in OPS for device in TWO.devices}
    for backend in ("eager", "onnxruntime"):
        both = replace(both, measured={**both.measured, **Profile.given(GRAPH, seconds, backend=backend).measured})
    about = question(TWO, Constraints(), ("eager", "onnxruntime"), profile=both)

    def ways(about: Question) -> list[tuple[str, str]]:
        return [(found.method, found.stages[0].backend) for found in usual_plans(about)]

    assert ways(about) == [(way, name) for name in about.backends for way in ("one device", "replicas", "even split")]
    assert Trial({}, usual_plans(about)[0]).row()["changed_settings"] == "none (one device)"
    assert {way for way, _ in ways(about.demanding(num_stages=2))} == {"even split"}
    heavy = replace(GRAPH, ops=tuple(replace(op, weights=(op.name,)) for op in OPS), weights=dict(WEIGHTS))
    capped = replace(about, graph=heavy, profile=replace(both, graph_hash=heavy.hash), machine=CAPPED)
    assert {way for way, _ in ways(capped)} == {"even split"}


@pytest.mark.parametrize(
    ("planned", "usual", "order"),
    [
        (predicted(0.98, *MIXTURE), predicted(1.0, REPLICAS), ["replicas"]),
        (predicted(0.9, *MIXTURE), predicted(1.0, REPLICAS), ["replicas", "planned"]),
        (predicted(0.98, *HALVES), predicted(1.0, REPLICAS), ["replicas"]),
        (predicted(0.9, *THIRDS), predicted(1.0, *HALVES), ["halves", "planned"]),
        (predicted(1.0, *THIRDS), predicted(0.99, *HALVES), ["halves", "planned"]),
    ],
    ids=["level mixture", "better mixture", "level chain", "another cut", "a better usual cut"],
)
def test_a_plan_with_more_parts_is_run_only_if_it_is_ahead_by_more_than_predictions_err(
    planned: Plan, usual: Plan, order: list[str]
) -> None:
    """In a demo, 20 s went into a mixture that measured 0.76 of the replicas, which were predicted better from the beginning."""
    names = {planned.hash: "planned", usual.hash: "replicas" if len(usual.stages) == 1 else "halves"}
    assert [names[one.hash] for one in run_order(question(TWO, Constraints(), ("eager",)), planned, [usual])] == order


@pytest.mark.parametrize(("low", "chosen"), [(0.97, REPLICAS), (1.02, HALVES[0])])
def test_of_candidates_that_rounds_do_not_tell_apart_the_simpler_one_is_chosen(low: float, chosen: Stage) -> None:
    hunt = Hunt(question(TWO, Constraints(), ("eager",)), TRACED, Any, 60.0, quiet)
    hunt.trials += [Trial({}, plan(REPLICAS), 1.0, exactly(1.0)), Trial({}, plan(*HALVES), 1.05, Ratio(1.05, low, 1.1, 3))]
    assert hunt.best().plan.stages[0] == chosen


def test_a_candidate_that_its_run_measured_to_break_a_cap_gives_way_to_one_that_keeps_it() -> None:
    """The best candidate became the plan, and was refused when it ran again: 'cuda:0' would hold 740.8 MiB of weights."""
    over = {StageKey("cpu", "eager", 1, "f32", stage_key(REPLICAS.ops)): Footprint(0, 10**9, 0)}
    capped = TWO.with_memory(dict.fromkeys(("cpu:0", "cpu:1"), 10**8))
    about = question(capped, Constraints(), ("eager",), profile=with_footprints(PROFILE, over))
    hunt = Hunt(about, TRACED, Any, 60.0, quiet)
    hunt.trials += [Trial({}, plan(REPLICAS), 2.0, exactly(2.0)), Trial({}, plan(*HALVES), 1.0, exactly(1.0))]
    assert hunt.best().plan.stages == HALVES
    assert len(with_bound(about, plan(REPLICAS)).stages) == 2


def test_an_even_split_that_measures_better_than_the_planner_s_cut_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """BERT under caps: the even split measured 3.72 items/s and the planner's cut 2.73; no search had tried the former."""
    ran: list[Plan] = []

    def measure(hunt: Hunt, candidate: Plan, asked: dict[str, Any]) -> Trial:
        ran.append(candidate)
        halves = len(candidate.stages[0].ops) == len(candidate.stages[-1].ops) == 2
        hunt.trials.append(Trial(asked, candidate, 0.372 if halves else 0.273, exactly(1.36 if halves else 1.0)))
        return hunt.trials[-1]

    monkeypatch.setattr(Hunt, "_measure", measure)
    monkeypatch.setattr(Hunt, "tune", lambda hunt, study: None)
    uneven = {(op.name, device.name): 2.2 if op.name == "a0" else 1.0 for op in OPS for device in TWO.devices}
    about = question(TWO, Constraints(num_stages=2), ("eager",), profile=Profile.given(GRAPH, uneven))
    found = search(about, TRACED, budget=Budget(60.0))
    assert [len(stage.ops) for plan in ran for stage in plan.stages] == [2, 2, 1, 3]
    assert [len(stage.ops) for stage in found.plan.stages] == [2, 2]


@pytest.mark.parametrize(
    ("per_s", "ran"), [({"replicas": 5.6, "planned": 4.99}, ["replicas", "planned"]), ({"replicas": 5.8}, ["replicas"])]
)
def test_the_best_usual_way_runs_also_where_the_first_candidate_spends_the_budget(
    monkeypatch: pytest.MonkeyPatch, per_s: dict[str, float], ran: list[str]
) -> None:
    """A mixture, predicted at 5.91 items/s, took the budget and measured 4.99. Replicas, at 5.34, were not tried."""
    names, tried = {plan(REPLICAS).hash: "replicas", plan(*MIXTURE).hash: "planned"}, list[str]()
    behind = [predicted(1 / 5.3, replace(REPLICAS, backend="onnxruntime"))]  # for which no time is left

    def measure(hunt: Hunt, candidate: Plan, asked: dict[str, Any]) -> Trial:
        tried.append(names[candidate.hash])
        found_per_s = per_s[tried[-1]]
        hunt.trials.append(Trial(asked, candidate, found_per_s, exactly(found_per_s / per_s[tried[0]])))
        return hunt.trials[-1]

    def as_measured(plan: Plan, *_: Any) -> Plan:
        return replace(plan, prediction=replace(plan.prediction, bottleneck_s=1 / per_s[names[plan.hash]]))

    monkeypatch.setattr(Hunt, "_measure", measure)
    monkeypatch.setattr(Hunt, "spent", lambda hunt: float(bool(tried)))
    monkeypatch.setattr("autosplit.searching.hunt.predict", as_measured)
    hunt = Hunt(question(TWO, Constraints(), ("eager", "onnxruntime")), TRACED, Any, 20.0, quiet)
    hunt.correct(*run_order(hunt.question, predicted(1 / 5.91, *MIXTURE), [predicted(1 / 5.34, REPLICAS), *behind]))
    assert tried == ran and hunt.best().plan.stages == (REPLICAS,)


@pytest.mark.parametrize(
    ("measured_per_s", "ran"),
    [
        ({"eager": 8.0, "openvino": 8.7}, ["eager", "openvino"]),
        ({"eager": 8.1, "openvino": 7.2}, ["eager", "openvino", "mixture"]),
    ],
    ids=["predictions err by 21 %", "predictions err by 1 %"],
)
def test_a_mixture_has_to_be_ahead_by_more_than_the_error_between_backends_that_ran_first(
    monkeypatch: pytest.MonkeyPatch, measured_per_s: dict[str, float], ran: list[str]
) -> None:
    """Nine stages of a BERT, predicted 9.5 % ahead of replicas, took the budget and measured 0.79 of them."""
    monkeypatch.setattr("autosplit.searching.hunt.PREDICTION_ERROR", 0.0)
    ways = {"eager": predicted(1 / 8.1, REPLICAS), "openvino": predicted(1 / 7.1, replace(REPLICAS, backend="openvino"))}
    slow = predicted(1 / 6.0, replace(REPLICAS, backend="onnxruntime"))
    mixture = predicted(1 / 8.9, HALVES[0], replace(HALVES[1], backend="openvino"))
    names, tried = {one.hash: name for name, one in {**ways, "mixture": mixture}.items()}, list[str]()

    def measure(hunt: Hunt, candidate: Plan, asked: dict[str, Any]) -> Trial:
        tried.append(names[candidate.hash])
        found_per_s = {**measured_per_s, "mixture": 7.0}[tried[-1]]
        hunt.trials.append(Trial(asked, candidate, found_per_s, exactly(found_per_s / measured_per_s["eager"])))
        return hunt.trials[-1]

    monkeypatch.setattr(Hunt, "_measure", measure)
    monkeypatch.setattr(Hunt, "spent", lambda hunt: 0.65 if tried else 0.0)
    monkeypatch.setattr(
        "autosplit.searching.hunt.predict", lambda plan, *_: replace(plan, prediction=predicted(1 / 8.1, REPLICAS).prediction)
    )
    hunt = Hunt(question(TWO, Constraints(), ("eager", "openvino", "onnxruntime")), TRACED, Any, 20.0, quiet)
    hunt.correct(*run_order(hunt.question, mixture, [slow, *ways.values()]))
    assert tried == ran


@pytest.mark.parametrize(("budget_s", "ran", "runs"), [(3.0, True, False), (3.0, False, True), (4.0, True, True)])
def test_a_small_budget_runs_nothing_where_the_stages_of_the_answer_ran_before(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, ran: bool, runs: bool
) -> None:
    profile = PROFILE
    job = question(TWO, Constraints(num_stages=1, max_replicas=1), ("eager",))
    first = planned(job)
    for stage, setting in first.workers if ran else []:
        profile = profile.with_stage(stage.ops, setting, Samples((4.0,)))
    corrected: list[Plan] = []

    def correct(hunt: Hunt, plan: Plan, *others: Plan) -> None:
        corrected.append(plan)
        hunt.trials.append(Trial({}, plan, 1.0, exactly(1.0)))

    monkeypatch.setattr(Hunt, "correct", correct)
    monkeypatch.setattr(Hunt, "tune", lambda hunt, study: None)
    found = search(replace(job, profile=profile), TRACED, budget=Budget(budget_s))
    assert bool(corrected) == bool(found.trials) == runs and found.plan.hash == first.hash


@pytest.mark.parametrize("measured", [False, True])
def test_a_search_that_is_stopped_hands_out_what_was_measured(monkeypatch: pytest.MonkeyPatch, measured: bool) -> None:
    def correct(hunt: Hunt, first: Plan, *others: Plan) -> None:
        if measured:
            hunt.trials += [Trial({}, first, 1.0, exactly(1.0)), Trial({}, replace(first, queue_depth=9), 2.0, exactly(2.0))]
        raise KeyboardInterrupt

    kept: list[SearchResult] = []
    monkeypatch.setattr(Hunt, "correct", correct)
    with pytest.raises(KeyboardInterrupt):
        search(question(TWO, Constraints(), ("eager",)), TRACED, budget=Budget(1.0), keep=kept.append)
    assert [(found.plan.queue_depth, len(found.trials)) for found in kept] == ([(9, 2)] if measured else [])


def test_the_bound_of_a_trial_that_wins_holds_for_all_that_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    best, found = won(monkeypatch, question(TWO, Constraints(max_replicas=1), ("eager",)), {"num_stages": 1})
    assert best.status == "optimal" and best.prediction.gap == 0  # of plans with one stage
    assert found.plan.hash == best.hash and found.plan.prediction.bottleneck_s == pytest.approx(4.0, rel=1e-3)
    assert found.plan.prediction.bound_s == pytest.approx(2.0, rel=1e-3) and found.plan.status == "feasible"
    assert "(feasible, gap 50.0" in found.plan.summary()


def test_a_trial_that_wins_with_another_queue_only_is_proved_as_the_planners_answer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    best, found = won(monkeypatch, question(TWO, Constraints(max_replicas=1), ("eager",)), {"queue_depth": 8})
    assert found.plan.hash == best.hash and found.plan.queue_depth == 8
    assert found.plan.status == "optimal" and found.plan.prediction.gap == pytest.approx(0.0, abs=1e-6)


def test_a_plan_that_measured_best_has_a_bound_where_no_plan_is_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(about: Question) -> Plan:
        if about.microbatch is not None:
            raise InfeasibleError("no plan was found in 0.3 s")
        return plan_within_caps(about)

    monkeypatch.setattr(candidates, "plan_within_caps", late)
    best, found = won(monkeypatch, question(TWO, Constraints(max_replicas=1), ("eager",)), {"num_stages": 1})
    assert found.plan.hash == best.hash and found.plan.prediction.bound_s == pytest.approx(2.0, rel=1e-3)


def test_a_trial_with_fewer_threads_that_beats_the_bound_has_a_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    [device] = (wide := Machine.of([parse_device("cpu:0-1")])).devices
    by_threads = {Setting(device.name, "eager", threads): seconds for threads, seconds in ((1, 0.1), (2, 1.0))}
    measured = {
        s: Measured({op.name: Samples((t,)) for op in GRAPH.ops}, per="op", cut_s_per_byte=0.0) for s, t in by_threads.items()
    }
    profile = replace(Profile.empty(GRAPH), measured=measured).verify()
    best, found = won(monkeypatch, question(wide, Constraints(), ("eager",), profile=profile), {"threads": 1})
    assert found.plan.hash == best.hash and 0 < found.plan.prediction.bound_s <= found.plan.prediction.bottleneck_s < 1


@pytest.mark.parametrize(("budget_s", "share_s"), [(1.0, 1.0), (20.0, 4.0), (600.0, 10.0)])
def test_each_question_to_the_planner_has_a_share_of_the_budget_and_the_first_all_its_time_where_it_needs_it(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, share_s: float
) -> None:
    asked_s: list[float] = []

    def slow(about: Question) -> Plan:
        asked_s.append(about.time_limit_s)
        if about.time_limit_s < 10.0 and about.microbatch is None:
            raise InfeasibleError("no plan was found in time")
        return plan_within_caps(about)

    monkeypatch.setattr(loop, "LEAST_PLANNING_S", 1.0)
    monkeypatch.setattr(candidates, "plan_within_caps", slow)
    monkeypatch.setattr(Hunt, "correct", lambda hunt, first, *others: hunt.trials.append(Trial({}, first, 1.0, exactly(1.0))))
    monkeypatch.setattr(Hunt, "tune", lambda hunt, study: None)
    found = search(question(TWO, Constraints(max_replicas=1), ("eager",)), TRACED, budget=Budget(budget_s))
    assert found.plan.status == "optimal"
    assert asked_s == ([share_s, 10.0, share_s] if share_s < 10.0 else [10.0, 10.0])


@pytest.mark.parametrize(("planner_s", "first_s"), [(None, 1.0), (10.0, 10.0)])
def test_where_nothing_is_run_and_no_time_was_given_the_planner_has_a_second(
    monkeypatch: pytest.MonkeyPatch, planner_s: float | None, first_s: float
) -> None:
    asked_s: list[float] = []
    monkeypatch.setattr(loop, "LEAST_PLANNING_S", 1.0)
    monkeypatch.setattr(
        candidates, "plan_within_caps", lambda about: asked_s.append(about.time_limit_s) or plan_within_caps(about)
    )
    search(question(TWO, Constraints(num_stages=2), ("eager",)), TRACED, budget=Budget(0.0, planner_s, explain_s=0.0))
    assert asked_s == [first_s]


def test_a_plan_of_any_queue_depth_and_number_of_threads_can_be_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Machine.of([parse_device("cpu:0"), parse_device("cpu:1-2"), parse_device("cpu:3-6")])
    hunt = Hunt(question(devices, Constraints(), ("eager",), queue_depth=3), TRACED, Any, 60.0, quiet)
    hunt.trials.append(Trial({}, replace(plan(Stage("s", ("a0",), ("cpu:1-2",), "eager", 2)), queue_depth=3), 1.0, exactly(1.0)))
    tried: list[dict[str, Any]] = []
    monkeypatch.setattr(hunt, "_try", tried.append)
    hunt.tune(open_study(hunt.question, None))
    assert [(asked["queue_depth"], asked["threads"]) for asked in tried[:3]] == [(3, 2)] * 3
    assert {asked["threads"] for asked in tried} == {1, 2, 4} and {asked["queue_depth"] for asked in tried} == {1, 2, 3, 4, 8}


def test_a_journal_goes_on_with_trials_of_the_same_search_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Optuna refuses a parameter whose choices have changed, such as another set of backends."""
    path = tmp_path / "folder" / "journal.log"

    def tried(*backends: str, machine: Machine = TWO, **wanted: float) -> list[int]:
        """The number of trials of each study in the journal after one more search."""
        hunt = Hunt(question(machine, Constraints(**wanted), backends), TRACED, Any, 60.0, quiet)
        hunt.trials.append(Trial({}, plan(Stage("s", ("a0",), ("cpu:0",), backends[0])), 1.0, exactly(1.0)))
        seen: list[dict[str, Any]] = []
        monkeypatch.setattr(hunt, "_try", lambda asked: seen.append(asked) or float(asked["queue_depth"]))
        hunt.tune(open_study(hunt.question, path))
        assert {asked["backend"] for asked in seen} == set(backends)
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        return [len(optuna.load_study(study_name=name, storage=storage).trials) for name in optuna.get_all_study_names(storage)]

    both = ("eager", "onnxruntime")
    assert (tried(*both), tried(*both)) == ([MAX_TRIALS], [2 * MAX_TRIALS])
    assert tried(*both, "openvino") == [2 * MAX_TRIALS, MAX_TRIALS]
    assert tried(*both) == [3 * MAX_TRIALS, MAX_TRIALS]
    assert tried(*both, max_latency_s=9.0) == [3 * MAX_TRIALS, MAX_TRIALS, MAX_TRIALS]
    assert tried(*both, machine=TWO.with_memory({"cpu:0": 1 << 30})) == [3 * MAX_TRIALS, *[MAX_TRIALS] * 3]


def test_a_damaged_journal_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    path.write_text("[" * 4000 + "\n")
    with pytest.raises(UsageError, match=r"journal '.*journal.log' is damaged or another kind of file: line 1: .*nested"):
        search(question(TWO, Constraints(), ("eager",)), TRACED, budget=Budget(1.0), setup=Setup(journal=path))
    assert path.read_text() == "[" * 4000 + "\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff\xfe\0", "can't decode"),
        (b"{}", "line 1 is cut off"),
        (b"{}\n", "op_code"),
        (b"[]\n", "line 1 is not a JSON object"),
        (b'{"op_code": 4, "worker_id": "", "study_id": []}\n', "unhashable"),
        (b"{}\n" * 50_001, "at most 50000 are read"),
        (b" " * 20_000_001, "above the limit of 20 MB"),
    ],
    ids=["binary", "cut off", "empty object", "list", "another type", "many lines", "enormous"],
)
def test_a_journal_of_another_kind_is_refused_in_a_sentence(text: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "journal.log").write_bytes(text)
    with pytest.raises(UsageError, match=f"journal '.*journal.log' .*{why}.*; (remove it, or )?name another file$"):
        open_study(question(TWO, Constraints(), ("eager",)), tmp_path / "journal.log")


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ('"directions": [2]', '"directions": [1]'),
        ('"low\\": 1', '"low\\": 0'),
        ('"queue_depth": 1', '"queue_depth": 1000000'),
        ('"num_stages": 2', '"num_stages": [[2]]'),
        ('"values": [1.0]', '"values": [NaN]'),
    ],
    ids=["direction", "distribution", "value", "list", "result"],
)
def test_a_study_that_no_search_wrote_is_refused(then: str, now: str, tmp_path: Path) -> None:
    """The name of a study is a hash of what was searched, so whoever makes a journal can give it the name of any search."""
    path, job = tmp_path / "journal.log", question(TWO, Constraints(), ("eager",))
    study = open_study(job, path)
    study.enqueue_trial({"queue_depth": 1, "num_stages": 1})
    study.tell(study.ask(space(job)), 1.0)
    study.enqueue_trial({"queue_depth": 1, "num_stages": 2})
    assert len(open_study(job, path).trials) == 2
    text = "".join(json.dumps(json.loads(line)) + "\n" for line in path.read_text().splitlines())
    assert then in text
    path.write_text(text.replace(then, now))
    with pytest.raises(UsageError, match="is damaged or another kind of file"):
        open_study(job, path)


def test_a_killed_search_locks_its_journal_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock that Optuna makes by itself is a link with the journal's name, and it waits for a link that leads nowhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "journal.log.lock").symlink_to("folder/journal.log")
    assert open_study(question(TWO, Constraints(), ("eager",)), Path("folder/journal.log")).trials == []


def test_a_plan_that_begins_with_a_backend_it_was_not_asked_for_can_be_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend that the profile knows takes the ops that those asked for refuse, as stages of its own."""
    hunt = Hunt(question(TWO, Constraints(), ("onnxruntime", "openvino")), TRACED, Any, 60.0, quiet)
    stages = Stage("s", ("a0",), ("cpu:0",), "eager"), Stage("t", ("a1",), ("cpu:1",), "openvino")
    hunt.trials.append(Trial({}, plan(*stages), 1.0, exactly(1.0)))
    tried: list[dict[str, Any]] = []
    monkeypatch.setattr(hunt, "_try", tried.append)
    hunt.tune(open_study(hunt.question, None))
    assert tried[0]["backend"] == "openvino"


@pytest.mark.parametrize("failure", [TraceError("it reshapes to (4, -1)"), WorkerError("the worker died"), BackendError("no")])
def test_a_microbatch_without_a_trace_or_a_profile_is_dropped_and_not_tried_again(failure: AutosplitError) -> None:
    wanted: list[int] = []

    def subject_for(microbatch: int) -> Any:
        wanted.append(microbatch)
        raise failure

    about, told = question(TWO, Constraints(), ("eager",), source=Source("m", 4)), list[str]()
    hunt = Hunt(about, TRACED, Any, 60.0, lambda step, share, text: told.append(text), subject_for=subject_for)
    assert hunt._try({"microbatch": 2}) is None and hunt._try({"microbatch": 2}) is None
    assert wanted == [2] and told[-1] == f"no microbatches of 2: {failure}"


MIXED = Machine.of([parse_device("cpu:0"), parse_device("cuda:0")])
EAGER, ONNX = (Setting("cpu:0", name, 1) for name in ("eager", "onnxruntime"))
ON_CUDA = tuple(one._replace(device="cuda:0") for one in (EAGER, ONNX))
DIED = "worker 's/0' was killed by SIGSEGV during loading its stage"


@pytest.mark.parametrize(
    ("settings", "backend", "where", "what", "names"),
    [
        ((EAGER, ONNX), "onnxruntime", "cpu:0", "onnxruntime", "cpu:0"),
        ((EAGER, ONNX, *ON_CUDA), "onnxruntime", "cuda:0", "onnxruntime on cuda devices", "cpu:0 cuda:0"),
        ((EAGER, ONNX, ON_CUDA[0]), "eager", "cuda:0", "cuda:0", "cpu:0"),
        ((EAGER, ONNX), "onnxruntime", "", "onnxruntime", "cpu:0"),
        ((EAGER, ON_CUDA[1]), "eager", "cpu:0", "cpu:0", "cuda:0"),
    ],
)
def test_a_backend_whose_worker_dies_is_left_out_on_that_kind_of_device(
    settings: tuple[Setting, ...], backend: str, where: str, what: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Question] = []

    def search_once(about: Question, *_: Any) -> Any:
        asked.append(about)
        if len(asked) == 1:
            raise WorkerError(DIED, backend, where)

    monkeypatch.setattr(loop, "_search", search_once)
    machine = MIXED.only(dict.fromkeys(setting.device for setting in settings))
    profile = replace(PROFILE, measured=dict.fromkeys(settings, PROFILE.measured[EAGER]))
    loop.search(question(machine, Constraints(), ("eager", "onnxruntime"), profile=profile), TRACED)
    left, gone = asked[1], {one for one in settings if (one.backend, one.device) == (backend, where or "cpu:0")}
    assert left.profile.notes == (f"{what} is left out: {DIED}",)
    assert " ".join(device.name for device in left.machine.devices) == names
    there = {setting for setting in left.profile.measured if setting.device in names and setting.backend in left.backends}
    assert there == {one for one in settings if one.device in names} - gone


@pytest.mark.parametrize("constraints", [Constraints(pins={"a3": "cuda:0"}), Constraints(allows={"a*": ("cuda:0",)})])
def test_a_device_that_the_demands_name_is_not_left_out(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> None:
        raise WorkerError(DIED, "eager", "cuda:0")

    monkeypatch.setattr(loop, "_search", die)
    profile = replace(PROFILE, measured=dict.fromkeys((EAGER, ON_CUDA[0]), PROFILE.measured[EAGER]))
    with pytest.raises(WorkerError, match="SIGSEGV"):
        loop.search(question(MIXED, constraints, ("eager",), profile=profile), TRACED)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A side-by-side benchmark that runs functions on null devices: for each plan that it loads the next of its ``functions``."""
    with Bench(TWO) as made:
        functions = [increment]

        def load(name: str, plan: Plan, traced: Any) -> Contender:
            pipeline = made.host.add_network(name, [local("s", functions.pop(0), "x", "y")], ["x"], ["y"], max_restarts=0)
            error, calls = NumericalError(0.0, 0.0, "y"), [functools.partial(pipeline.submit, request(7))]
            made.loaded[name] = Contender(plan, name, pipeline, calls, error, "", [0.01])
            return made.loaded[name]

        monkeypatch.setattr(made, "load", load)
        monkeypatch.setattr(made, "functions", functions, raising=False)
        yield made


@pytest.mark.parametrize(("function", "words"), [(fail_on_7, "seven is not for me"), (Once(7, 9), "given up")])
def test_a_candidate_that_fails_as_it_runs_is_noted_and_unloaded(bench: Any, function: Any, words: str) -> None:
    hunt = Hunt(question(TWO, Constraints(max_replicas=1), ("eager",)), TRACED, bench, 60.0, quiet)
    first, second, third = (planned(hunt.question, num_stages=1, queue_depth=depth) for depth in (4, 2, 8))
    bench.functions += [function, increment]
    assert hunt._measure(first, {}).times_first is not None
    assert words in (failed := hunt._measure(second, {})).note and failed.times_first is None
    assert list(bench.loaded) == [FIRST] and list(bench.host.networks()) == [FIRST]
    assert hunt._measure(third, {}).times_first is not None


def test_the_first_and_the_last_candidate_stay_loaded_for_a_report_that_runs_them_too(bench: Any) -> None:
    hunt = Hunt(question(TWO, Constraints(max_replicas=1), ("eager",)), TRACED, bench, 60.0, quiet)
    first, second, third = (planned(hunt.question, num_stages=1, queue_depth=depth) for depth in (4, 2, 8))
    bench.functions += [increment] * 2
    for plan in (first, second, third):
        hunt._measure(plan, {})
    assert [entry.plan for entry in bench.loaded.values()] == [first, third] and [*bench.host.networks()] == [FIRST, BESIDE]
    proved = replace(third, prediction=replace(third.prediction, bound_s=1e-9))
    kept = bench.loaded[BESIDE]
    bench.adopt({PLAN: proved, "replicas": second})
    assert bench.loaded == {PLAN: kept} and kept.plan is proved and [*bench.host.networks()] == [BESIDE]
    bench.adopt({})
    assert not bench.loaded and not bench.host.networks()


def test_a_candidate_for_which_descriptors_are_short_is_noted_and_the_first_one_ends_the_search(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    hunt = Hunt(question(TWO, Constraints(max_replicas=1), ("eager",)), TRACED, bench, 60.0, quiet)
    first, second = (planned(hunt.question, num_stages=1, queue_depth=depth) for depth in (4, 2))
    hunt._measure(first, {})
    monkeypatch.setattr(bench, "load", short)
    assert "Too many open files" in hunt._measure(second, {}).note
    del bench.loaded[FIRST]
    with pytest.raises(OSError, match="Too many open files"):
        hunt._measure(second, {})


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_candidates_for_latency_are_judged_by_requests_alone_in_turn_with_the_first(bench: Any, objective: Any) -> None:
    """A second candidate does ten times as many requests at once, and each takes twice as long."""
    wanted = Constraints(max_replicas=1, objective=objective)
    hunt = Hunt(question(TWO, wanted, ("eager",)), TRACED, bench, 60.0, quiet)
    first, second = (planned(hunt.question, num_stages=1, queue_depth=depth) for depth in (4, 2))
    bench.functions += [increment]
    paces = iter([(10.0, 0.01), (100.0, 0.02)])

    def load(name: str, plan: Plan, traced: Any, load: Any = bench.load) -> Contender:
        entry, (per_s, alone_s) = load(name, plan, traced), next(paces)
        entry.run = lambda num_items: entry.rounds_per_s.append(per_s)
        entry.run_alone = lambda seconds: entry.rounds_alone_s.append([alone_s])
        return entry  # type: ignore[no-any-return]

    bench.load = load
    hunt._measure(first, {})
    assert hunt._measure(second, {}).times_first == pytest.approx(10.0 if objective == "throughput" else 0.5)
    rounds, alone = len(bench.loaded[FIRST].rounds_per_s), len(bench.loaded[FIRST].rounds_alone_s)
    assert (rounds, alone) == ((2 * NUM_ROUNDS, 0) if objective == "throughput" else (2, 2 * NUM_ROUNDS))


@pytest.mark.parametrize(("objective", "seen_s"), [("throughput", 0.02), ("latency", 0.05)])
def test_a_plan_for_latency_is_corrected_by_requests_alone(
    bench: Any, monkeypatch: pytest.MonkeyPatch, objective: Any, seen_s: float
) -> None:
    """Each takes longer alone, for its core has idled, than where the next one is there already."""
    hunt = Hunt(
        question(TWO, Constraints(max_replicas=1, objective=objective), ("eager",)),
        TRACED,
        bench,
        60.0,
        quiet,
    )
    first = planned(hunt.question, num_stages=1)
    ran: list[float] = []

    def load(name: str, plan: Plan, traced: Any, load: Any = bench.load) -> Contender:
        entry = load(name, plan, traced)
        entry.run = lambda num_items: (entry.rounds_per_s.append(1.0), ran.append(0.02))
        entry.run_alone = lambda seconds: (entry.rounds_alone_s.append([0.05]), ran.append(0.05))
        return entry  # type: ignore[no-any-return]

    bench.load = load
    monkeypatch.setattr("autosplit.searching.hunt.taken_of", lambda entry, since_ns=0: (Samples((ran[-1],)),))
    hunt._measure(first, {})
    assert predict(first, GRAPH, TWO, hunt.subject(1)[1]).prediction.latency_s == pytest.approx(seen_s, rel=0.01)


def test_the_search_ends_where_the_first_plan_gives_up(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[bool] = []

    def die(*_: Any, **__: Any) -> None:
        raise SimulatedDeath

    def dying(x: torch.Tensor) -> torch.Tensor:
        if armed:
            monkeypatch.setattr(LocalFunction, "load", die)  # nor can its stage be loaded again
            die()
        return x + 1

    hunt = Hunt(question(TWO, Constraints(max_replicas=1), ("eager",)), TRACED, bench, 60.0, quiet)
    first, second = (planned(hunt.question, num_stages=1, queue_depth=depth) for depth in (4, 2))
    bench.functions[:] = [dying, increment]
    hunt._measure(first, {})
    armed.append(True)
    with pytest.raises(WorkerError, match="gives up"):
        hunt._measure(second, {})


def test_a_slow_time_of_the_machine_does_not_stay_in_the_profile(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan takes twice as long in its own rounds as beside the next candidate: that was the machine."""
    hunt = Hunt(question(TWO, Constraints(max_replicas=1), ("eager",)), TRACED, bench, 60.0, quiet)
    first, second = (planned(hunt.question, num_stages=count) for count in (1, 2))
    bench.functions += [increment]
    told = iter([[8.0], [4.0], [2.2, 2.2]])
    monkeypatch.setattr(
        "autosplit.searching.hunt.taken_of", lambda entry, since_ns=0: tuple(Samples((seconds,)) for seconds in next(told))
    )
    bottlenecks_s = []
    for measured in (first, second):
        hunt._measure(measured, {})
        bottlenecks_s += [predict(plan, GRAPH, TWO, hunt.subject(1)[1]).prediction.bottleneck_s for plan in (first, measured)]
    assert bottlenecks_s == pytest.approx([8.0, 8.0, 4.0, 2.2], rel=1e-3)
