import pytest

from autosplit.shapes.buckets import Times, choose_buckets
from autosplit.shapes.profiles import Point, mixed, weights_of
from autosplit.values.links import shared_memory_link
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting
from autosplit.values.shapes import Traffic

SETTING = Setting("cpu:0", "eager", 1)
OTHER = Setting("cpu:0", "openvino", 1)
LINEAR = Times((0.0, 1.0, 0.0), {})


def profile(a_s, b_s, **changes):
    measured = {SETTING: Measured({"a": Samples((a_s,)), "b": Samples((b_s,))}, "op", whole=Samples((a_s + b_s,)), **changes)}
    return Profile("m", "h", {"a": "A", "b": "B"}, measured, links=(shared_memory_link("cpu:0", "cpu:1"),)).verify()


LARGEST = Point(0.25, 1.0, {"a": 1.0, "b": 1.0}, {"eager": 1.0})
SMALL = Point(0.75, 0.2, {"a": 0.1, "b": 0.4}, {"eager": 0.5})
"""Op a shrinks four times as much as op b, and a request takes half the seconds."""


def test_mean_of_the_ops_follows_their_bytes_and_the_seconds_of_the_whole():
    long = profile(3.0, 1.0, cut_s_per_byte=1e-9)
    found = mixed(long, [LARGEST, SMALL])
    scale = 0.5 * 4.0 / (3.0 * 0.1 + 1.0 * 0.4)
    assert found.op_s("a", *SETTING) == pytest.approx(0.25 * 3.0 + 0.75 * scale * 0.3)
    assert found.op_s("b", *SETTING) == pytest.approx(0.25 * 1.0 + 0.75 * scale * 0.4)
    assert found.whole_s(*SETTING) == pytest.approx(0.25 * 4.0 + 0.75 * 2.0)
    assert found.links[0].send_s_per_byte == pytest.approx(0.4 * long.links[0].send_s_per_byte)
    assert found.measured[SETTING].cut_s_per_byte == pytest.approx(0.4e-9)


def test_backend_that_was_not_timed_is_left_out_and_refused_ops_stay_refused():
    long = profile(3.0, 1.0)
    both = long.with_measured(OTHER, long.measured[SETTING])
    assert list(mixed(both, [LARGEST, SMALL]).measured) == [SETTING]
    refused = long.with_measured(SETTING, Measured({"a": Samples((1.0,))}, "op", refused={"b": "too large"}))
    assert mixed(refused, [LARGEST, SMALL]).accepted(SETTING) == ["a"]


def test_weights_keep_the_expected_seconds():
    traffic = Traffic(("seq",), {(10,): 3, (30,): 4, (100,): 3})
    buckets = choose_buckets(LINEAR, traffic, {"seq": range(1, 101)})
    weights = weights_of(buckets, LINEAR, traffic, [(100,), (10,), (40,)])
    assert sum(weights) == pytest.approx(1)
    assert sum(w * s for w, s in zip(weights, (100, 10, 40), strict=True)) == pytest.approx(buckets.expected_s)
    assert weights_of(buckets, LINEAR, traffic, [(100,)]) == [pytest.approx(1)]
