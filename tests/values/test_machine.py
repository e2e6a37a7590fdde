import time
from dataclasses import replace
from itertools import combinations

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import DeviceError, UsageError
from autosplit.values.links import Link, shared_memory_link
from autosplit.values.machine import HOST, Machine, parse_bytes, parse_device, span, union


def machine(*names: str) -> Machine:
    return Machine.of([parse_device(name) for name in names])


@pytest.mark.parametrize(
    ("name", "cores", "index"),
    [
        ("cpu:3", (3,), 0),
        ("cpu:0-2", (0, 1, 2), 0),
        ("cpu:4+0-1", (4, 0, 1), 0),
        ("cuda:1", (), 1),
        ("null:4", (), 4),
        (" cpu:1 ", (1,), 0),
    ],
)
def test_device_names(name: str, cores: tuple[int, ...], index: int) -> None:
    device = parse_device(name)
    assert (device.name, device.cores, device.index) == (name.strip(), cores, index)


@pytest.mark.parametrize(
    "name",
    [
        *["", "cpu", "cpu:", "cpu:-1", "cpu:1-", "cpu:a", "gpu:0", "cuda:0-1", "cpu:0+", "null:0-3", "cpu:0,1"],
        *["cuda:00", "cpu:01", "cpu:0-100000000000", "cpu:\u0663"],
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="not understood"):
        parse_device(name)


def test_the_union_of_devices_is_one_core_set() -> None:
    one = union(machine("cpu:3", "cpu:0-1").with_memory({"cpu:3": 70}).devices)
    assert (one.name, one.cores, one.memory_bytes) == ("cpu:0-1+3", (0, 1, 3), 70)
    assert parse_device(one.name).cores == one.cores


def test_a_core_named_twice_in_one_device() -> None:
    with pytest.raises(DeviceError, match="names a core twice"):
        parse_device("cpu:0-2+1")


def test_a_core_set_that_counts_down_is_turned_round_in_the_message() -> None:
    with pytest.raises(DeviceError, match="write 1-3"):
        parse_device("cpu:3-1")


@given(st.integers(0, 500), st.integers(0, 20))
def test_core_sets_hold_every_core_between(first: int, extra: int) -> None:
    assert parse_device(f"cpu:{first}-{first + extra}").cores == tuple(range(first, first + extra + 1))


def test_every_fault_of_a_machine_is_listed() -> None:
    with pytest.raises(DeviceError, match=r"(?s)2 faults.*cap of 'cpu:3' must be at least 1 byte.*'null:0' is given twice"):
        Machine.of([replace(parse_device("cpu:3"), memory_bytes=0), parse_device("null:0"), parse_device("null:0")])
    with pytest.raises(DeviceError, match="no devices"):
        Machine.of([])


def test_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(DeviceError, match="'cpu:7' is not one of this machine's devices: cpu:0, cpu:1"):
        machine("cpu:0", "cpu:1")["cpu:7"]


def test_links_default_to_shared_memory_and_measured_ones_win() -> None:
    measured = Link("cpu:0", "cpu:1", 1e-5, 1e-6, 1e-11, 2e-6, 2e-11)
    linked = machine("cpu:0", "cpu:1").with_links([measured])
    assert linked.link("cpu:0", "cpu:1") is measured
    assert linked.link("cpu:1", "cpu:0") == shared_memory_link("cpu:1", "cpu:0")
    assert linked.link(HOST, "cpu:0").source == HOST
    assert measured.seconds(1e6) == pytest.approx(1e-5 + 3e-6 + 1e6 * 3e-11)


def test_a_link_that_the_user_gave_stays_where_another_one_was_measured() -> None:
    given, measured = (Link("cpu:0", "cpu:1", latency_s, 0, 0, 0, 0) for latency_s in (1.0, 2.0))
    back = Link("cpu:1", "cpu:0", 3.0, 0, 0, 0, 0)
    linked = machine("cpu:0", "cpu:1").with_links([given]).with_measured([measured, back])
    assert linked.link("cpu:0", "cpu:1") is given and linked.link("cpu:1", "cpu:0") is back


def test_memory_caps() -> None:
    capped = machine("cpu:0", "cpu:1").with_memory({"cpu:1": 100})
    assert capped["cpu:1"].memory_bytes == 100 and capped["cpu:0"].memory_bytes is None
    with pytest.raises(DeviceError, match="at least 1 byte, but is 0"):
        capped.with_memory({"cpu:0": 0})
    with pytest.raises(DeviceError, match="cpu:9"):
        capped.with_memory({"cpu:9": 5})


@pytest.mark.parametrize(
    ("text", "size"),
    [("300MB", 300_000_000), ("1.5GiB", 3 << 29), ("4096", 4096), (17, 17), ("2 kb", 2000), ("1T", 10**12), ("8B", 8)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1.2.3", "many", "1PB", "5i", "5iB", "9" * 400])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes(text)


def test_tables() -> None:
    shown = machine("cpu:0-1", "null:0").with_memory({"null:0": 1 << 20})
    assert shown.frame().loc["null:0", "memory"] == "1.0 MiB" and "cpu:0-1" in shown._repr_html_()


def layouts(*names: str) -> list[list[str]]:
    return [[device.name for device in layout.devices] for layout in machine(*names).layouts]


def test_devices_that_share_cores_are_alternatives_in_layouts() -> None:
    assert layouts("cpu:0", "cpu:1", "null:0") == [["cpu:0", "cpu:1", "null:0"]]
    assert layouts("cpu:0-1", "cpu:0", "cpu:1", "null:0") == [["cpu:0", "cpu:1", "null:0"], ["cpu:0-1", "null:0"]]
    assert sorted(layouts("cpu:0-1", "cpu:1-2", "cpu:2-3")) == [["cpu:0-1", "cpu:2-3"], ["cpu:1-2"]]
    halves = layouts("cpu:0-3", "cpu:0-1", "cpu:2-3", *(f"cpu:{core}" for core in range(4)))
    assert sorted(map(len, halves)) == [1, 2, 3, 3, 4]
    one = machine("cpu:0-1", "cpu:0", "cpu:1")
    assert one.around(["cpu:0-1"]).devices == (one["cpu:0-1"],) and len(one.around(["cpu:1"]).devices) == 2


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=5, unique=True))
def test_layouts_are_the_largest_sets_without_a_core_in_common(cores: list[frozenset[int]]) -> None:
    names = [f"cpu:{span(part, '+')}" for part in cores]
    free = [
        set(chosen)
        for size in range(1, len(names) + 1)
        for chosen in combinations(names, size)
        if sum(len(parse_device(name).cores) for name in chosen) == len({c for n in chosen for c in parse_device(n).cores})
    ]
    largest = [chosen for chosen in free if not any(chosen < other for other in free)]
    found = [set(layout) for layout in layouts(*names)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, largest))


def test_core_sets_that_overlap_in_too_many_ways_are_refused() -> None:
    with pytest.raises(DeviceError, match="overlap in more than 16 ways; name fewer"):
        machine(*(f"cpu:{core}-{core + 1}" for core in range(40)))
    with pytest.raises(DeviceError, match="more than 16 devices overlap on core 16, such as"):
        machine(*(f"cpu:{core}-{core + 20}" for core in range(40)))


def test_one_core_set_beside_each_of_its_cores_takes_no_time() -> None:
    # maximal cliques of the complement took 109 s
    start = time.monotonic()
    assert [len(layout) for layout in layouts("cpu:0-999", *(f"cpu:{core}" for core in range(1000)))] == [1000, 1]
    assert time.monotonic() - start < 10
