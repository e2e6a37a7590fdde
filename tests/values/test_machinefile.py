import time
from dataclasses import replace

import pytest

from autosplit.errors import DeviceError, UsageError
from autosplit.planning.plans import plan_model
from autosplit.planning.question import Question
from autosplit.values.constraints import Constraints
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.machine import Device
from autosplit.values.machinefile import read_machine
from autosplit.values.plan import Source
from autosplit.values.profile import Profile


def test_machine_file(tmp_path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(
        "devices:\n- {name: 'cpu:0', memory: 300MB}\n- {name: 'null:0'}\n"
        "links:\n- {source: 'cpu:0', target: 'null:0', bytes_per_s: 1.0e9}\n"
    )
    found = read_machine(path)
    assert found["cpu:0"] == Device("cpu:0", "cpu", (0,), memory_bytes=300_000_000)
    assert found.link("cpu:0", "null:0").send_s_per_byte == 1e-9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: [", "not valid YAML"),
        ("[" * 2_000, "not valid YAML"),
        ("devices: [{name: 2026-13-45}]", "not valid YAML"),
        ("devices: !!timestamp x", "not valid YAML"),
        ("devices: !!bool x", "not valid YAML"),
        ("[]", "not understood"),
        ("devices: []", "no devices"),
        ("devices: [{name: 'cpu:0', speed: 3}]", "devices.0.speed"),
        ("devices: [{name: 'cpu:0', memory: lots}]", "not a size"),
        ("devices: [{name: 'cpu:0', memory: 0}]", "cap of 'cpu:0' must be at least 1 byte, but is 0"),
        ("devices: [{name: 'cpu:0', memory: true}]", "devices.0.memory"),
        ("devices: [{name: 'cpu:0-1', count: 8}" + ", {name: 'cpu:1-2', count: 8}]", "overlap in more than 16 ways"),
        ("devices: [{name: 'cpu:0'}]\nlinks: [{source: a, target: b}]", "bytes_per_s"),
        ("devices: [{name: 'cpu:0'}]\nlinks: [{source: a, target: b, bytes_per_s: 0}]", "bytes_per_s: Input should be greater"),
        ("devices: [{name: 'cpu:0'}]\nlinks: [{source: host, target: 'cpu:0', bytes_per_s: 1.0e-320}]", "bytes_per_s: Input"),
        ("devices: [{name: 'cpu:0'}]\nlinks: [{source: host, target: 'cpu:0', bytes_per_s: 1, latency_s: .inf}]", "finite"),
        ("devices: [{name: 'cpu:0'}]\nlinks: [{source: host, target: 'cpu:O', bytes_per_s: 1}]", "'cpu:O' is not among its dev"),
    ],
)
def test_faults_of_a_machine_file(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises((UsageError, DeviceError), match=message):
        read_machine(path)


def test_all_faults_of_a_machine_file_are_named_at_once(tmp_path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(
        "devices: [{name: gpu:0, memory: lots}, cpu:1]\nlinks: [{source: host, target: 'cpu:0', bytes_per_s: 0}]\nx: 1"
    )
    with pytest.raises(UsageError) as failure:
        read_machine(path)
    for fault in (
        "(5 faults)",
        "devices.0.name: device 'gpu:0' is not understood",
        "devices.0.memory: memory 'lots' is not a size",
        "devices.1: Input should be a mapping of names to values, but is 'cpu:1'",
        "links.0.bytes_per_s: Input should be greater than or equal to 1, but is 0",
        "x: Extra inputs are not permitted; there is no such field",
    ):
        assert fault in str(failure.value)
    path.write_text("devices: [{name: 'cpu:0'}]\nlinks: [" + "{source: host, target: 'cpu:0', bytes_per_s: 1}," * 2 + "]")
    with pytest.raises(DeviceError, match="from 'host' to 'cpu:0' is given 2 times"):
        read_machine(path)


def test_a_machine_file_that_is_no_text(tmp_path) -> None:
    (tmp_path / "machine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not valid YAML"):
        read_machine(tmp_path / "machine.yaml")


def test_machine_file_that_is_absent(tmp_path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_machine(tmp_path / "absent.yaml")


def test_what_a_device_supports_its_backends_in_order_and_how_many_there_are(tmp_path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(
        "devices:\n- {name: 'cpu:0-1', count: 3, backends: [onnxruntime, eager], memory: 1KiB}\n"
        "- {name: 'cpu:9'}\n- {name: 'null:1', count: 2, operators: ['aten.conv*', fc]}\n"
    )
    found = read_machine(path)
    assert [device.name for device in found.devices] == ["cpu:0-1", "cpu:2-3", "cpu:4-5", "cpu:9", "null:1", "null:2"]
    assert found["cpu:4-5"] == Device("cpu:4-5", "cpu", (4, 5), 0, 1024, backends=("onnxruntime", "eager"))
    assert found["null:2"] == Device("null:2", "null", index=2, operators=("aten.conv*", "fc"))


HOSTILE = {
    "a device of 12 KB": ("devices: [{name: 'cpu:0-9999" + "+0-9999" * 1500 + "'}]", "more than 2048 cores"),
    "a name of 1 MB": ("devices: [{name: '" + "x" * 1_000_000 + "'}]", "device 'xxx"),
    "long core sets that overlap": (
        "devices: [" + ",".join(f"{{name: 'cpu:{n}-{n + 2000}'}}" for n in range(1000)) + "]", "overlap on core",
    ),
    "a row of core sets that overlap": (
        "devices: [" + ",".join(f"{{name: 'cpu:{n}-{n + 1}'}}" for n in range(1000)) + "]", "overlap in more than 16 ways",
    ),
    "many devices": ("devices: [" + "{name: 'null:0'}," * 2000 + "]", "at most 1024"),
    "a large count": ("devices: [{name: 'null:0', count: 1000000000}]", "less than or equal to 1024"),
    "counts that are large together": ("devices: [{name: 'null:0', count: 900}, {name: 'cpu:0', count: 900}]", "has 1800 dev"),
    "a count past the last number": ("devices: [{name: 'null:9999', count: 2}]", "'null:10000' is not understood"),
    "an unknown backend": ("devices: [{name: 'cpu:0', backends: [onxruntime]}]", "close names: 'onnxruntime'"),
    "a huge integer in a link": (
        "devices: [{name: 'cpu:0'}]\nlinks: [{source: host, target: 'cpu:0', bytes_per_s: 1" + "0" * 400 + "}]",
        "a number has 401",
    ),
    "an alias that is long when it is written out": (
        "devices: [{name: &a [" + "x," * 9000 + "]}, {name: *a}, {name: [*a, *a]}]",
        "devices.2.name: Input should be a valid string",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_machine_files_are_refused_in_a_sentence_within_a_second(tmp_path, text: str, message: str) -> None:
    path, started_s = tmp_path / "machine.yaml", time.process_time()
    path.write_text(text)
    with pytest.raises((UsageError, DeviceError), match=message) as failure:
        read_machine(path)
    assert time.process_time() - started_s < 3 and len(str(failure.value)) < 10_000


def test_a_plan_keeps_to_what_the_devices_of_a_machine_file_take(tmp_path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(
        "devices:\n- {name: 'null:0', backends: [openvino], operators: [fc]}\n- {name: 'null:1', backends: [eager]}\n"
    )
    machine, names = read_machine(path), ("fc", "relu", "out")
    ops = [Op(n, f"aten.{n}", "", (names[i - 1] if i else "x",), (n,), (), n) for i, n in enumerate(names)]
    graph = Graph("net", ("x",), ("out",), tuple(ops), {n: Value(n, (8,), "float32", 32) for n in ("x", *names)}, {}).verify()
    seconds = {(name, device): 1.0 for name in names for device in ("null:0", "null:1")}
    by = [Profile.given(graph, seconds, backend=backend).measured for backend in ("eager", "openvino")]
    profile = replace(Profile.empty(graph), measured=by[0] | by[1]).on(machine)
    wanted = Constraints(max_replicas=1).verify(graph, machine)
    plan = plan_model(Question(graph, profile, Source("m:f"), machine, ("eager", "openvino"), wanted, time_limit_s=2.0))
    placed = [(stage.devices, stage.backend, stage.ops) for stage in plan.stages]
    assert placed == [(("null:0",), "openvino", ("fc",)), (("null:1",), "eager", ("relu", "out"))]


def test_a_bus_is_two_wires_and_an_accelerator_s_link_brings_weights(tmp_path) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(
        "devices: [{name: 'cpu:0'}, {name: 'cuda:0', count: 2}]\n"
        "links: [{source: host, target: 'cuda:0', bytes_per_s: 1.0e10}, {source: host, target: 'cpu:0', bytes_per_s: 1.0e10}]\n"
        "buses: [{devices: ['cuda:0', 'cuda:1'], bytes_per_s: 2.0e10}]\n"
    )
    machine = read_machine(path)
    assert machine.link("host", "cuda:0").pinned_s_per_byte == 1e-10 and not machine.link("host", "cpu:0").pinned_s_per_byte
    gpus, all_ends = ("cuda:0", "cuda:1"), ("host", "cpu:0", "cuda:0", "cuda:1")
    assert [(wire.sources, wire.targets, wire.s_per_byte) for wire in machine.wires] == [
        (all_ends, gpus, 5e-11),
        (gpus, all_ends, 5e-11),
    ]
    path.write_text("devices: [{name: 'cpu:0'}]\nbuses: [{devices: ['cuda:9'], bytes_per_s: 1}]\n")
    with pytest.raises(DeviceError, match="'cuda:9' is not among its devices"):
        read_machine(path)
