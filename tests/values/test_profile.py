import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.errors import ProfileError
from autosplit.planning.plans import backend_choices
from autosplit.planning.predicting import measured_backends
from autosplit.planning.question import Question
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import shared_memory_link
from autosplit.values.machine import Device, Machine
from autosplit.values.plan import Source
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Provenance, Samples, Setting

ON_0 = Setting("cpu:0", "eager", 1)
ON_1 = Setting("cpu:1", "eager", 1)


def chain(num_ops: int = 4, name: str = "chain") -> Graph:
    """A chain whose even ops share one signature and whose odd ops share another."""
    values = {f"v{i}": Value(f"v{i}", (1,), "float32", 4) for i in range(num_ops + 1)}
    ops = tuple(Op(f"op{i}", "relu", "", (f"v{i}",), (f"v{i + 1}",), (), f"sig{i % 2}") for i in range(num_ops))
    return Graph(name, ("v0",), (f"v{num_ops}",), ops, values, {}).verify()


def samples(*values: float) -> Samples:
    return Samples(values)


def profiled(whole: float | None = 12.0) -> Profile:
    """Even ops take 1 s, odd ops 2 s (6 s in all), and the whole model takes 12 s."""
    measured = Measured(
        {"sig0": samples(1, 1, 5), "sig1": samples(2)}, whole=samples(whole) if whole else None, provenance=Provenance(cpu="test")
    )
    profile = Profile.empty(chain())
    return profile.with_measured(ON_0, measured).with_measured(ON_1, measured)


def test_the_statistic_is_the_median_and_the_spread_is_the_interquartile_range_over_it() -> None:
    assert samples(1, 100, 2).median_s == 2
    assert samples(1, 2, 3, 4, 5).spread == pytest.approx(2 / 3)
    assert samples(3).spread == 0 and samples(0, 0).spread == 0


def test_op_times_are_scaled_so_that_they_sum_to_the_whole() -> None:
    profile = profiled()
    assert profile.scales[ON_0] == 2
    assert profile.op_s("op1", "cpu:0", "eager") == 4
    assert sum(profile.op_s(op, "cpu:0", "eager", 1) for op in chain().ops) == profile.whole_s("cpu:0", "eager")
    assert profiled(whole=None).op_s("op1", "cpu:0", "eager") == 2


def test_table_gives_planners_every_op_on_every_device() -> None:
    for device in ("cpu:0", "cpu:1"):
        table = profiled().table(chain(), Setting(device, "eager", 1))
        assert table == {f"op{i}": 2 + 2 * (i % 2) for i in range(4)}


def test_table_refuses_another_model_and_what_was_not_measured() -> None:
    with pytest.raises(ProfileError, match="not of 'other'"):
        profiled().table(chain(5, "other"), ON_0)
    with pytest.raises(ProfileError, match="no measurement of onnxruntime on cpu:0 with 1 thread"):
        profiled().table(chain(), Setting("cpu:0", "onnxruntime", 1))
    with pytest.raises(ProfileError, match="with 2 threads"):
        profiled().op_s("op0", "cpu:0", "eager", 2)
    refused = replace(profiled(), notes=("openvino is left out: its numbers are wrong", "onnxruntime is left out: of no use"))
    with pytest.raises(ProfileError, match=r"eager on cpu:1 with 1 thread\); openvino is left out: its numbers are wrong$"):
        refused.op_s("op0", "cpu:0", "openvino")


def test_most_threads_are_the_default() -> None:
    twice = Measured({"sig0": samples(0.5), "sig1": samples(1)})
    profile = profiled().with_measured(Setting("cpu:0", "eager", 2), twice)
    assert profile.op_s("op0", "cpu:0", "eager") == 0.5
    assert profile.op_s("op0", "cpu:0", "eager", 1) == 2


def test_a_measured_stage_pulls_its_ops_and_leaves_the_other_device_alone() -> None:
    profile = profiled().with_stage(["op0", "op1"], ON_0, samples(9.0), busy=["cpu:1"])
    assert profile.stage_s(["op0", "op1"], "cpu:0", "eager") == 9
    assert sum(profile.op_s(op, "cpu:0", "eager") for op in ("op0", "op1")) == pytest.approx(9)
    # Ops of no stage take the ratio of the stages measured in their setting, here 9 / 6.
    assert profile.op_s("op2", "cpu:0", "eager") == pytest.approx(3)
    assert profile.op_s("op2", "cpu:1", "eager") == 2


def test_a_small_stage_says_little_of_the_rest() -> None:
    measured = Measured({"sig0": samples(1.0), "sig1": samples(1.0)})
    profile = Profile.empty(chain(100)).with_measured(ON_0, measured).with_stage(["op0"], ON_0, samples(1e-4), busy=["cpu:1"])
    assert profile.op_s("op0", "cpu:0", "eager") == pytest.approx(1e-4)
    assert profile.op_s("op1", "cpu:0", "eager") == pytest.approx(1e-4**0.1)


def test_a_stage_that_took_no_time_leaves_the_others_theirs() -> None:
    profile = profiled().with_stage(["op0"], ON_0, samples(0.0), busy=["cpu:1"])
    assert profile.op_s("op0", "cpu:0", "eager") == 0
    assert profile.op_s("op1", "cpu:0", "eager") == profiled().op_s("op1", "cpu:0", "eager") > 0


def test_the_newest_measurement_of_a_stage_counts_and_busy_neighbours_beat_idle_ones() -> None:
    stage = ["op0", "op1"]
    profile = profiled().with_stage(stage, ON_0, samples(9.0), busy=["cpu:1"]).with_stage(stage, ON_0, samples(8.0))
    assert profile.stage_s(stage, "cpu:0", "eager") == 9
    assert profile.with_stage(stage, ON_0, samples(10.0), busy=["cpu:1"]).stage_s(stage, "cpu:0", "eager") == 10


def test_the_newest_of_stages_that_contradict_each_other_hold() -> None:
    halves, model = (["op0"], ["op1", "op2"]), ["op0", "op1", "op2"]
    profile = profiled()
    for stage, seconds in ((halves[0], 3.0), (halves[1], 4.0), (model, 9.0)):
        profile = profile.with_stage(stage, ON_0, samples(seconds), busy=["cpu:1"])

    def predicted(profile: Profile) -> list[float]:
        return [sum(profile.op_s(op, "cpu:0", "eager") for op in stage) for stage in (*halves, model)]

    assert predicted(profile)[2] == pytest.approx(9)
    again = profile.with_newest((stage, ON_0) for stage in halves)
    assert predicted(again) == pytest.approx([3, 4, 7]) and set(again.stages) == set(profile.stages)
    assert predicted(again.with_stage(model, ON_0, samples(9.0), busy=["cpu:1"]))[2] == pytest.approx(9)


def test_the_whole_model_that_did_not_run_is_not_charged_for_the_cuts_of_stages_that_did() -> None:
    profile = (
        profiled().with_stage(["op0"], ON_0, samples(8.0), busy=["cpu:1"]).with_stage(["op1", "op2", "op3"], ON_0, samples(6.0))
    )
    model = [f"op{number}" for number in range(4)]
    timed_s = profile.whole_s("cpu:0", "eager")

    def predicted(profile: Profile) -> float:
        return sum(profile.op_s(op, "cpu:0", "eager") for op in model)

    assert predicted(profile) == pytest.approx(14) and timed_s == 12
    assert predicted(profile.with_newest([(model, ON_0)])) == pytest.approx(timed_s)
    ran = profile.with_stage(model, ON_0, samples(10.0), busy=["cpu:1"])
    assert predicted(ran.with_newest([(model, ON_0)])) == pytest.approx(10) and ran.with_newest([(model, ON_0)]) == ran
    nowhere = profile.with_newest([(model, Setting("cpu:7", "eager", 1)), (model[:2], ON_0)])
    assert nowhere == profile
    partly = replace(profile, measured={**profile.measured, ON_0: replace(profile.measured[ON_0], refused={"op0": "not taken"})})
    assert partly.with_newest([(model, ON_0)]) == partly


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=3))
def test_overlapping_stages_that_agree_are_all_met(truth: list[float]) -> None:
    profile = profiled(whole=None)
    for stage in (("op0", "op1"), ("op1", "op2"), ("op0", "op1", "op2")):
        total = sum(truth[int(op[2])] for op in stage)
        profile = profile.with_stage(stage, ON_0, samples(total), busy=["cpu:1"])
    for stage in (("op0", "op1"), ("op1", "op2")):
        fitted = sum(profile.op_s(op, "cpu:0", "eager") for op in stage)
        assert fitted == pytest.approx(sum(truth[int(op[2])] for op in stage), rel=0.05)


def test_round_trip_keeps_everything_and_the_hash() -> None:
    profile = profiled().with_stage(["op0"], ON_0, samples(3.0), ["cpu:1"]).with_links([shared_memory_link("cpu:0", "cpu:1")])
    again = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert again == profile and again.hash == profile.hash
    assert profile.with_stage(["op0"], ON_0, samples(4.0)).hash != profile.hash


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_samples_that_are_no_durations_are_refused(wrong: float) -> None:
    with pytest.raises(ProfileError, match="finite and not negative"):
        profiled().with_stage(["op0"], ON_0, samples(1.0, wrong))
    with pytest.raises(ProfileError, match="op 'sig1'"):
        profiled().with_measured(ON_0, Measured({"sig0": samples(1), "sig1": samples(wrong)}))
    with pytest.raises(ProfileError, match="whole model"):
        profiled().with_measured(ON_0, Measured({"sig0": samples(1), "sig1": samples(1)}, whole=samples(wrong)))
    with pytest.raises(ProfileError, match=r"a byte that passes a cut \(eager on cpu:0"):
        profiled().with_measured(ON_0, Measured({"sig0": samples(1), "sig1": samples(1)}, cut_s_per_byte=wrong))


def test_verify_lists_every_fault_at_once() -> None:
    empty = Measured({"sig0": Samples(()), "sig1": samples(-1)}, whole=samples(1))
    with pytest.raises(ProfileError, match=r"(?s)2 faults.*has no samples.*finite"):
        profiled().with_measured(ON_0, empty)
    with pytest.raises(ProfileError, match="not 1 of its ops, such as 'sig1'"):
        profiled().with_measured(ON_0, Measured({"sig0": samples(1)}, whole=samples(1)))
    with pytest.raises(ProfileError, match="unknown op 'nope'"):
        profiled().with_stage(["nope"], ON_0, samples(1.0))
    with pytest.raises(ProfileError, match="never measured"):
        profiled().with_stage(["op0"], Setting("cpu:7", "eager", 1), samples(1.0))


@pytest.mark.parametrize("damage", ["measured", "graph", "stages"])
def test_incomplete_data_is_a_profile_error(damage: str) -> None:
    data = profiled().to_dict()
    del data[damage]
    with pytest.raises(ProfileError, match="incomplete"):
        Profile.from_dict(data)


@pytest.mark.parametrize("damage", ["ops", "links", "cuts", "signatures"])
def test_data_of_another_type_is_a_profile_error(damage: str) -> None:
    data = profiled().with_links([shared_memory_link("cpu:0", "cpu:1")]).to_dict()
    if damage == "ops":
        data["measured"][0]["ops"] = []
    elif damage == "links":
        data["links"][0]["latency_s"] = "fast"
    elif damage == "cuts":
        data["measured"][0]["cut_s_per_byte"] = "dear"
    else:
        data["signatures"]["op0"] = 1
    with pytest.raises(ProfileError, match="incomplete"):
        Profile.from_dict(data)


def test_given_numbers_make_a_profile() -> None:
    graph = chain(2)
    seconds = {("op0", "null:0"): 1.0, ("op1", "null:0"): 2.0, ("op0", "null:1"): 3.0, ("op1", "null:1"): 4.0}
    profile = Profile.given(graph, seconds)
    for device in ("null:0", "null:1"):
        assert profile.table(graph, Setting(device, "eager", 1)) == {op: seconds[op, device] for op in ("op0", "op1")}


def test_frame_and_html_show_every_op_and_setting() -> None:
    profile = profiled()
    assert len(profile.frame()) == 8 and profile.frame().loc["op1", "seconds"].tolist() == [4.0, 4.0]
    assert "<table>" in profile._repr_html_() and "cpu:1" in profile._repr_html_()
    assert "2 settings" in repr(profile)


def test_a_device_runs_its_own_backends_only_the_preferred_one_first() -> None:
    wide = {name: Setting("cpu:0", name, 1) for name in ("eager", "onnxruntime", "openvino")}
    profile = profiled().with_stage(["op0"], ON_0, samples(1.0))
    for setting in wide.values():
        profile = profile.with_measured(setting, profile.measured[ON_0])
    machine = Machine.of([Device("cpu:0", "cpu", (0,), backends=("openvino", "eager")), Device("cpu:1", "cpu", (1,))])
    found = profile.on(machine)
    assert list(found.measured) == [ON_1, wide["openvino"], wide["eager"]] and len(found.stages) == 1
    assert measured_backends(profile, machine) == measured_backends(found, machine) == ("eager",)
    apart = Machine.of([replace(machine["cpu:0"], backends=("openvino",)), replace(machine["cpu:1"], backends=("eager",))])
    assert set(measured_backends(profile.on(apart), apart)) == {"openvino", "eager"}
    question = Question(chain(), profile.on(apart), Source("m:f"), apart, ("eager", "openvino"))
    assert backend_choices(question) == [{"cpu:0": "openvino", "cpu:1": "eager"}]
