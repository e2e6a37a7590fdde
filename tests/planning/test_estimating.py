"""Seconds on devices that are not here: from a stated speed, a roofline, a table, or another machine's profile; always said."""

from dataclasses import replace
from pathlib import Path

import pytest

from autosplit.errors import AutosplitError, ProfileError, UsageError
from autosplit.planning.estimating import as_measured_elsewhere, estimated, require_costs, sources
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Device, Machine, Speed, parse_device
from autosplit.values.machinefile import read_machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Provenance, Samples, Setting

GRAPH = Graph(
    "net",
    ("x",),
    ("z",),
    (
        Op("fc", "aten.linear.default", "fc", ("x",), ("y",), ("w",), "fc"),
        Op("relu", "aten.relu.default", "", ("y",), ("z",), (), "relu"),
    ),
    {name: Value(name, (8, size), "float32", 32 * size) for name, size in (("x", 100), ("y", 50), ("z", 50))},
    {"w": Value("w", (50, 100), "float32", 20_000)},
).verify()
HERE = Setting("cpu:0", "eager", 1)
H100 = Provenance("AMD EPYC", 16, accelerator={"name": "NVIDIA H100"}, date="2026-11-01")


def profile() -> Profile:
    return Profile.given(GRAPH, {("fc", "cpu:0"): 7.0, ("relu", "cpu:0"): 3.5})


def machine(name: str, speed: Speed | None) -> Machine:
    return Machine.of([parse_device("cpu:0"), replace(parse_device(name), speed=speed)])


def test_a_speed_divides_the_times_of_the_device_that_it_names() -> None:
    found = estimated(profile(), GRAPH, machine("cpu:2-5", Speed(times=3.5, of="cpu:0")))
    for threads in (1, 4):
        assert found.table(GRAPH, Setting("cpu:2-5", "eager", threads)) == {"fc": 2.0, "relu": 1.0}
    assert found.table(GRAPH, HERE) == {"fc": 7.0, "relu": 3.5} and not found.measured[HERE].is_estimate
    assert found.measured[Setting("cpu:2-5", "eager", 1)].is_estimate
    assert found.notes == ("ESTIMATE: the times on 'cpu:2-5' were not measured; they are those of 'cpu:0' over 3.5",)
    with pytest.raises(ProfileError, match=r"3\.5 x 'cpu:9', which was not measured"):
        estimated(profile(), GRAPH, machine("cuda:0", Speed(times=3.5, of="cpu:9")))


def test_a_roofline_takes_the_larger_of_operations_and_bytes() -> None:
    """The product has 2 * 8 * 50 * 100 operations and 24,800 bytes, the activation 400 and 3,200."""
    fast = estimated(profile(), GRAPH, machine("cuda:0", Speed(flops=1e4, bytes_per_s=1e9)))
    assert fast.table(GRAPH, Setting("cuda:0", "eager", 1)) == {"fc": 8.0, "relu": 0.04}
    narrow = estimated(profile(), GRAPH, machine("cuda:0", Speed(flops=1e12, bytes_per_s=100)))
    assert narrow.table(GRAPH, Setting("cuda:0", "eager", 1)) == {"fc": 248.0, "relu": 32.0}
    assert "a roofline of 1e+12 operations and 100 bytes a second" in narrow.notes[0]


def test_a_table_names_ops_by_pattern_and_lacks_none() -> None:
    found = estimated(profile(), GRAPH, machine("npu:0", Speed(op_s=(("*", 1.0), ("aten.linear*", 2.0)))))
    assert found.table(GRAPH, Setting("npu:0", "eager", 1)) == {"fc": 2.0, "relu": 1.0}
    with pytest.raises(UsageError, match=r"'relu' \(aten.relu.default\) has no seconds"):
        estimated(profile(), GRAPH, machine("npu:0", Speed(op_s=(("fc", 1.0),))))


def test_a_profile_of_another_machine_counts_by_kind_and_number_of_cores() -> None:
    measured = {
        Setting(name, "eager", 1): Measured({"fc": Samples((s,)), "relu": Samples((s,))}, per="op", provenance=H100)
        for name, s in (("cpu:0", 5.0), ("cuda:0", 2.0))
    }
    stored = replace(Profile.empty(GRAPH), measured=measured)
    devices = [parse_device("cuda:0"), parse_device("cuda:1"), parse_device("cpu:7")]
    found = as_measured_elsewhere(profile(), stored, devices, "H100")
    assert [found.op_s("fc", device.name, "eager") for device in devices] == [2.0, 2.0, 5.0]
    assert found.notes[0] == (
        "ESTIMATE: the times on 'cuda:0', 'cuda:1' are those of 'cuda:0' on another machine (NVIDIA H100, 2026-11-01)"
    )
    assert all(found.measured[Setting(device.name, "eager", 1)].is_estimate for device in devices)
    with pytest.raises(ProfileError, match="no stored profile of 'net' of machine 'H100' has one; state its speed"):
        as_measured_elsewhere(profile(), stored, [parse_device("npu:0")], "H100")


def test_a_device_without_times_names_the_ways_out() -> None:
    both = machine("cuda:0", None)
    assert sources(both) == ("cpu:0", "cuda:0")
    assert sources(Machine.of([replace(parse_device("cuda:0"), speed=Speed(times=9, of="cpu:1"))])) == ("cpu:1",)
    require_costs(both, ["cuda:0"], "H100")
    require_costs(machine("cuda:0", Speed(flops=1, bytes_per_s=1)), ["cuda:0"], "")
    with pytest.raises(ProfileError, match=r"'cuda:0' is not here, and its times are not known; state its speed.*--profile-of"):
        require_costs(both, ["cuda:0"], "")


def test_a_machine_file_states_speeds(tmp_path: Path) -> None:
    (tmp_path / "seconds.json").write_text('{"*": 0.5, "fc": 1}')
    path = tmp_path / "machine.yaml"
    path.write_text(
        "devices:\n- {name: cpu:0, count: 2, speed: 1 x cpu:0}\n- {name: cuda:0, speed: {flops: 1.0e+14, bytes_per_s: 9.0e+11}}\n"
        "- {name: npu:0, speed: {table: seconds.json}}\n"
    )
    found: list[Device] = list(read_machine(path).devices)
    assert [device.speed for device in found[1:]] == [
        Speed(times=1.0, of="cpu:0"),
        Speed(flops=1e14, bytes_per_s=9e11),
        Speed(op_s=(("*", 0.5), ("fc", 1.0))),
    ]
    for wrong in ("fast", "0 x cpu:0", "2 x gpu", "{flops: 1}", "{flops: -1, bytes_per_s: 1}", "{table: absent.json}", "[1]"):
        path.write_text(f"devices: [{{name: cuda:0, speed: {wrong}}}]")
        with pytest.raises(AutosplitError):
            read_machine(path)
    (tmp_path / "seconds.json").write_text('{"fc": "long"}')
    path.write_text("devices: [{name: cuda:0, speed: {table: seconds.json}}]")
    with pytest.raises(UsageError, match="does not fit"):
        read_machine(path)
