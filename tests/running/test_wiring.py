"""Placements become channels between the right stages, with the right rings and slots; wrong placements are refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import double, local

from autosplit.errors import PlanError
from autosplit.memory.slots import HOST
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import wire
from autosplit.tracing.tensorspec import TensorSpec


def stage(name: str, reads: str, makes: str, replicas: int = 1, depth: int = 4) -> StagePlacement:
    return local(name, double, reads, makes, replicas, queue_depth=depth)


def shown(stages: list[StagePlacement], inputs: str, outputs: str) -> list[str]:
    """Each channel as ``a>b: values``; the host is ``.``"""
    names = [*(one.name for one in stages), "."]
    wiring = wire(stages, inputs.split(), outputs.split())
    return [f"{names[c.source]}>{names[c.target]}: {' '.join(spec.name for spec in c.layouts[0])}" for c in wiring.channels]


def test_a_chain() -> None:
    assert shown([stage("a", "x", "u"), stage("b", "u", "y")], "x", "y") == [".>a: x", "a>b: u", "b>.: y"]


def test_the_values_between_two_stages_share_a_channel() -> None:
    stages = [stage("a", "x", "u v"), stage("b", "v u", "y")]
    assert shown(stages, "x", "y") == [".>a: x", "a>b: v u", "b>.: y"]
    channel = wire(stages, ["x"], ["y"]).channels[1]
    assert (channel.source_index, channel.target_index) == ((1, 0), (0, 1))


def test_skips_inputs_for_later_stages_and_outputs_of_early_ones() -> None:
    stages = [stage("a", "x", "u"), stage("b", "u", "v"), stage("c", "v u z", "y")]
    assert shown(stages, "x z", "y u u x") == [".>a: x", "a>b: u", ".>c: z", "a>c: u", "b>c: v", "a>.: u", "c>.: y"]


def test_stages_without_inputs_or_readers_are_paced_by_empty_tokens() -> None:
    stages = [stage("constant", "", "c"), stage("log", "c x", "unread"), stage("net", "x", "y")]
    assert shown(stages, "x", "y") == [".>constant: ", ".>log: x", "constant>log: c", ".>net: x", "log>.: ", "net>.: y"]


def test_a_value_read_twice_by_one_stage_is_sent_for_each_input() -> None:
    channel = wire([stage("a", "x", "u"), stage("b", "u u", "y")], ["x"], ["y"]).channels[1]
    assert (channel.source_index, channel.target_index) == ((0, 0), (0, 1))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 60))
def test_every_request_meets_its_replicas_on_one_ring(sources: int, targets: int, number: int) -> None:
    channel = wire([stage("a", "x", "u", sources), stage("b", "u", "y", targets)], ["x"], ["y"]).channels[1]
    assert channel.pairs()[number % channel.every] == (number % sources, number % targets)
    assert len(set(channel.pairs())) == channel.every


def test_slots_follow_from_queue_depth_skips_and_window() -> None:
    stages = [stage("a", "x", "u"), stage("b", "u", "v", depth=2), stage("c", "v u", "y", depth=2)]
    slots = {(c.source, c.target): c.num_slots for c in wire(stages, ["x"], ["y"], window=10).channels}
    assert slots == {(HOST, 0): 11, (0, 1): 2, (1, 2): 2, (0, 2): 3, (2, HOST): 10}
    assert {c.num_slots for c in wire(stages, ["x"], ["y"], window=1).channels} == {1, 2}


@pytest.mark.parametrize(
    "stages,inputs,outputs,fault",
    [
        ([], "x", "x", "there are no stages"),
        ([stage("a", "x", "u", replicas=0)], "x", "u", "stage 'a' is on no device"),
        ([stage("a", "x", "u", depth=0)], "x", "u", "stage 'a' has a queue depth of 0; it must be at least 1"),
        ([stage("a", "z", "u")], "x", "u", "stage 'a' reads 'z', which is not an input, and no stage makes it"),
        ([stage("a", "v", "u"), stage("b", "u", "v")], "x", "v", "reads 'v' from stage 'b', which does not come before it"),
        ([stage("a", "u", "u")], "x", "u", "reads 'u' from stage 'a', which does not come before it"),
        ([stage("a", "x", "u"), stage("b", "x", "u")], "x", "u", "value 'u' is made twice, once by stage 'a'"),
        ([stage("a", "x", "x")], "x", "x", "value 'x' is made twice"),
        ([stage("a", "x", "u"), stage("a", "x", "v")], "x", "v", "2 stages are called 'a'"),
        ([stage("a", "x", "u")], "x", "y", "output 'y' is not an input, and no stage makes it"),
    ],
)
def test_what_cannot_be_wired(stages: list[StagePlacement], inputs: str, outputs: str, fault: str) -> None:
    with pytest.raises(PlanError, match="the stages do not fit together") as caught:
        wire(stages, inputs.split(), outputs.split())
    assert fault in str(caught.value)


def test_an_input_has_one_shape_for_all_stages_that_read_it() -> None:
    other = replace(stage("b", "x", "y"), inputs=(TensorSpec("x", (5,), (1,), "float32"),))
    with pytest.raises(PlanError, match=r"stage 'b' reads 'x' as float32 \[5\], and stage 'a' reads it as float32 \[4\]"):
        wire([stage("a", "x", "u"), other], ["x"], ["u", "y"])


def test_settings_that_no_stage_can_have() -> None:
    asked = stage("a", "x", "y")
    for wrong, fault in [
        ({"threads": 0}, "stage 'a' has threads=0; it must be more than 0"),
        ({"hang_s": -1}, "stage 'a' has hang_s=-1; it must be more than 0"),
        ({"hang_s": float("nan")}, "stage 'a' has hang_s=nan; it must be more than 0"),
        ({"streams": 0}, "stage 'a' has streams=0; it must be more than 0"),
        ({"module": lambda x: x}, "stage 'a' has a function as its module; give a StageFolder, a PythonFunction"),
    ]:
        with pytest.raises(PlanError) as caught:
            wire([replace(asked, **wrong)], ["x"], ["y"])  # type: ignore[arg-type]
        assert fault in str(caught.value)


def test_a_window_of_no_requests() -> None:
    with pytest.raises(PlanError, match="in flight must be at least 1, but is 0"):
        wire([stage("a", "x", "y")], ["x"], ["y"], window=0)


def test_there_is_room_for_more_requests_if_they_are_small() -> None:
    def most(num_floats: int, **settings: object) -> tuple[int, int]:
        spec = [TensorSpec(name, (num_floats,), (1,), "float32") for name in "xy"]
        one = replace(stage("a", "x", "y"), inputs=(spec[0],), outputs=(spec[1],))
        wiring = wire([one], ["x"], ["y"], **settings)  # type: ignore[arg-type]
        assert {channel.num_slots for channel in wiring.channels} == {wiring.most_in_flight, wiring.most_in_flight + 1}
        return wiring.window, wiring.most_in_flight

    assert most(1024) == (3, 16)
    assert most(16 * 1024) == (3, 4)  # 4 of 2 times 64 KiB in 512 KiB
    assert most(150_000) == (3, 3)
    assert most(1024, window=5) == (5, 5)
