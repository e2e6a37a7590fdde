import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.measuring.link_ends import SIZES_BYTES
from autosplit.measuring.links import _similar_links, fit, measure_links, open_rings, with_overhead
from autosplit.measuring.measuring_worker import Workers
from autosplit.measuring.request_overhead import RequestOverhead, processor_s
from autosplit.values.links import Link
from autosplit.values.machine import HOST, parse_device


@settings(deadline=None)
@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-8))
def test_fit_finds_the_line(fixed: float, slope: float) -> None:
    found = fit(SIZES_BYTES, [fixed + slope * size for size in SIZES_BYTES])
    assert found[0] == pytest.approx(fixed, rel=1e-3) and found[1] == pytest.approx(slope, rel=1e-3)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_fit_is_never_negative(seconds: list[float]) -> None:
    fixed, slope = fit(SIZES_BYTES, seconds)
    assert fixed >= 0 and slope >= 0


def test_pairs_that_were_not_measured_take_the_median_of_those_between_the_same_kinds() -> None:
    links = [
        Link("a", "b", 1.0, 1.0, 1.0, 1.0, 1.0),
        Link("b", "a", 3.0, 3.0, 3.0, 3.0, 3.0),
        Link(HOST, "a", 9.0, 9.0, 9.0, 9.0, 9.0),
    ]
    kinds = {HOST: HOST, **dict.fromkeys("abc", "cpu")}
    others = {(link.source, link.target): link.latency_s for link in _similar_links(links, kinds)}
    none_was = {("a", HOST): 2.0, ("b", HOST): 2.0, ("c", HOST): 2.0}
    cores = {("a", "c"): 2.0, ("b", "c"): 2.0, ("c", "a"): 2.0, ("c", "b"): 2.0}
    assert others == {(HOST, "b"): 9.0, (HOST, "c"): 9.0, **cores, **none_was}


def test_of_many_devices_the_links_of_accelerators_and_of_two_cores_are_measured() -> None:
    with open_rings([parse_device(name) for name in [*(f"cpu:{core}" for core in range(9)), "cuda:0"]]) as rings:
        assert len(rings.fds("cuda:0")) == len(rings.fds("cpu:0")) > 0 == len(rings.fds("cpu:8"))
    with open_rings([parse_device(f"{kind}:{number}") for kind in ("cpu", "cuda") for number in range(8)]) as rings:
        measured = {name for pair in rings.without(["cuda:1"]).rings for name in pair}
    assert measured == {HOST, "cpu:0", "cpu:1", "cuda:0", "cuda:2", "cuda:3"}


def test_a_request_costs_no_less_than_it_did_in_a_pipeline() -> None:
    warm, cold = RequestOverhead(host_s=5.0, worker_s=4.0), RequestOverhead(host_s=9.0, worker_s=8.0)
    between, answer, feed = (
        with_overhead(Link(*ends, 0.0, send_s, 0.0, 1.0, 0.0), ["a", "b"], warm, cold)
        for ends, send_s in ((("a", "b"), 3.0), (("a", HOST), 1.0), ((HOST, "a"), 1.0))
    )
    assert (between.send_s, between.receive_s, between.cold_send_s, between.cold_receive_s) == (3, 2, 4, 4)
    assert (answer.send_s, answer.receive_s, answer.when_cold().receive_s) == (2, 5, 9)
    assert (feed.send_s, feed.receive_s, feed.when_cold().send_s) == (1, 2, 1)


def test_a_thread_that_ended_since_it_was_listed_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known_s, listed = processor_s(os.getpid()), Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path / "0" / "schedstat", *listed(path, pattern)])
    assert processor_s(os.getpid()) >= known_s > 0
    assert processor_s(0) == 0


@pytest.mark.timeout(90)
def test_links_between_real_workers() -> None:
    devices = [parse_device(f"cpu:{core}") for core in sorted(os.sched_getaffinity(0))[:2]]
    names = [HOST, *(device.name for device in devices)]
    with open_rings(devices) as rings, Workers(devices, rings.fds) as workers:
        links = measure_links(rings, workers)
    assert sorted((link.source, link.target) for link in links) == sorted((a, b) for a in names for b in names if a != b)
    assert all(link.send_s + link.send_s_per_byte > 0 and link.latency_s >= 0 and link.receive_s >= 0 for link in links)
    assert all(link.cold_receive_s > 0 and link.when_cold().receive_s >= link.receive_s > 0 for link in links)


def test_devices_without_cores_have_no_links() -> None:
    with open_rings([parse_device("null:0")]) as rings, Workers(rings.devices) as workers:
        assert measure_links(rings, workers) == []
