import os
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from simulated import cuda

from autosplit.backends.base import states
from autosplit.devices import discovering, limits
from autosplit.devices.accelerators import Facts
from autosplit.devices.calls import serve
from autosplit.devices.discovering import (
    caches,
    cpu_quota,
    describe,
    discover,
    machine_for,
    memory_limit_bytes,
    parse_memory,
    span,
    versions,
)
from autosplit.errors import DeviceError, UsageError
from autosplit.values.machine import Machine, parse_device

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """An empty tree of control groups that discovery reads in place of the machine's."""
    (tmp_path / "groups").mkdir()
    own = tmp_path / "own"
    own.write_text("0::/\n")
    monkeypatch.setattr(discovering.cpu_quota, "__defaults__", (tmp_path / "groups", own))
    return tmp_path / "groups", own


def write(folder, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_quota_of_version_2_is_the_smallest_on_the_way_to_the_root(groups) -> None:
    root, own = groups
    own.write_text("0::/pod/box\n")
    write(root, cpu__max="max 100000")
    write(root / "pod", cpu__max="150000 100000")
    write(root / "pod" / "box", cpu__max="400000 100000")
    assert cpu_quota(root, own) == 1.5


def test_quota_of_version_1(groups) -> None:
    root, own = groups
    own.write_text("4:memory:/other\n1:cpu,cpuacct:/box\n")
    write(root / "cpu,cpuacct" / "box", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert cpu_quota(root, own) == 0.5


def test_a_group_that_is_not_mounted_is_read_at_its_root(groups) -> None:
    root, own = groups
    own.write_text("1:cpu:/host/path/of/the/container\n")
    write(root / "cpu", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert cpu_quota(root, own) == 2


@pytest.mark.parametrize(
    "files", [{}, {"cpu__max": "max 100000"}, {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, {"cpu__max": ""}]
)
def test_no_quota(groups, files) -> None:
    root, own = groups
    write(root, **files)
    write(root / "cpu", **files)
    own.write_text("1:cpu:/\n0::/\n")
    assert cpu_quota(root, own) is None
    assert cpu_quota(root, own.with_name("absent")) is None


def test_memory_limit_of_both_versions(groups) -> None:
    root, own = groups
    own.write_text("4:memory:/a\n0::/b\n")
    whole = memory_limit_bytes(root, own)
    write(root / "memory" / "a", memory__limit_in_bytes="9223372036854771712")
    assert memory_limit_bytes(root, own) == whole
    write(root / "memory" / "a", memory__limit_in_bytes="3000000")
    assert memory_limit_bytes(root, own) == 3000000
    write(root / "b", memory__max="2000000")
    assert memory_limit_bytes(root, own) == 2000000


def test_one_device_a_usable_core_by_default() -> None:
    assert [device.name for device in discover().devices if device.kind == "cpu"] == [
        f"cpu:{core}" for core in limits.usable_cores()
    ]


def test_a_quota_below_the_affinity_takes_cores_away(groups, monkeypatch) -> None:
    root, _ = groups
    monkeypatch.setattr(limits, "affinity", lambda: (0, 1, 2, 3))
    monkeypatch.setattr(discovering, "affinity", limits.affinity)
    write(root, cpu__max="250000 100000")
    assert limits.usable_cores() == (0, 1)
    write(root, cpu__max="50000 100000")
    assert limits.usable_cores() == (0,)
    with pytest.raises(DeviceError, match=r"hold 2 cores.*pays for 0.5; name at most 1"):
        machine_for("cpu:0,cpu:1")


def test_named_devices_must_be_here(monkeypatch) -> None:
    monkeypatch.setattr(discovering, "affinity", lambda: (0, 1, 3))
    monkeypatch.setattr(discovering, "cpu_quota", lambda: None)
    assert [device.name for device in machine_for("cpu:0-1, cpu:3").devices] == ["cpu:0-1", "cpu:3"]
    with pytest.raises(
        DeviceError, match=r"(?s)2 faults.*'cpu:1-2' names core 2, and this process may use cores 0-1,3.*'cuda:99' is not here"
    ):
        machine_for("cpu:1-2,cuda:99")
    assert [[device.name for device in one.devices] for one in machine_for("cpu:0-1,cpu:1").layouts] == [["cpu:0-1"], ["cpu:1"]]
    for name, words in (("gpu", "not understood"), ("cuda", "'cuda:0' is not here: this machine has 0 CUDA devices")):
        with pytest.raises(DeviceError, match=words):
            machine_for(name)
    assert machine_for("cpu").devices == tuple(device for device in discover().devices if device.kind == "cpu")
    assert machine_for(["cpu:0", "cpu:3"]).devices == machine_for("cpu:0,cpu:3").devices
    with pytest.raises(DeviceError, match="no devices"):
        machine_for(",")


def test_null_devices_are_everywhere() -> None:
    assert len(machine_for("null:0,null:1").devices) == 2


def test_machine_file_and_devices_exclude_each_other(tmp_path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("devices:\n- {name: 'null:0', memory: 300MB}\n")
    assert machine_for(machine_file=file)["null:0"].memory_bytes == 300_000_000
    assert machine_for(machine_file=file, memory="1GB")["null:0"].memory_bytes == 1_000_000_000
    with pytest.raises(UsageError, match="given twice"):
        machine_for("null:0", file)


def test_all_names_and_caps_that_are_not_understood_are_told_at_once() -> None:
    with pytest.raises(DeviceError, match=r"\(2 faults\):\n  \* device 'gpu' is not .*\n  \* device 'cpu:1-0' counts down"):
        machine_for("gpu,null:0,cpu:1-0")
    with pytest.raises(UsageError, match=r"\(2 faults\):\n  \* memory 'big' is not a size.*\n  \* .* is not understood at '3MB'"):
        machine_for("null:0", memory="null:0=big,3MB")
    with pytest.raises(DeviceError, match=r"\(2 faults\):\n  \* device 'null:7' is not .*\n  \* device 'null:8' is not"):
        machine_for("null:0", memory="null:7=1KB,null:8=1KB")


def test_memory_by_device() -> None:
    machine = Machine.of([parse_device("null:0"), parse_device("null:1")])
    assert parse_memory("2KB", machine) == {"null:0": 2000, "null:1": 2000}
    assert parse_memory({"null:1": "1KiB"}, machine) == {"null:1": 1024}
    assert machine_for("null:0,null:1", memory="null:1=5KB")["null:1"].memory_bytes == 5000
    for wrong in ("null:0=1KB,null:1", "null:0=1KB,null:0=2KB", "lots"):
        with pytest.raises(UsageError):
            parse_memory(wrong, machine)
    with pytest.raises(DeviceError, match="'null:7' is not one of"):
        machine_for("null:0", memory="null:7=1KB")


def test_caches_are_read_for_one_core(tmp_path) -> None:
    for index, (level, kind, size) in enumerate([("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "1M")]):
        write(tmp_path / "cpu3" / "cache" / f"index{index}", level=level, type=kind, size=size)
    assert caches(3, tmp_path) == {"L1": 32 * 1024, "L2": 1 << 20}
    assert caches(4, tmp_path) == {}


def test_versions_come_from_metadata() -> None:
    found = versions(["eager", "onnxruntime"])
    assert found["torch"].startswith("2.") and set(found) <= {"torch", "onnxruntime", "onnx", "onnxscript"}


def test_describe_lists_devices_and_backends() -> None:
    description = describe(states())
    assert description.facts["cores"] == span(CORES)
    assert {row["backend"] for row in description.backends} == {"eager", "onnxruntime", "openvino", "inductor"}
    assert "eager" in description._repr_html_() and len(description.frame()) == len(description.devices)
    data = description.to_dict()
    assert set(data) == {"machine", "devices", "backends"}
    assert data["machine"]["memory_bytes"] > 1 << 20 and "memory" not in data["machine"]  # which was a text


@pytest.fixture
def two_gpus(monkeypatch):
    """Two devices that this process does not have to ask about."""
    facts = Facts("GPU", 16 << 30, 15 << 30, "9.0", "570.1", "CUDA 12.8")
    with cuda():
        monkeypatch.setattr(discovering, "facts_of", lambda names: dict.fromkeys(names, facts))
        yield


def test_cuda_devices_get_free_memory_as_their_cap_and_a_core_to_feed_them(two_gpus, monkeypatch) -> None:
    for name in ("affinity", "usable_cores"):
        monkeypatch.setattr(discovering, name, lambda: (0, 1, 2, 3))
    machine = machine_for("cpu:1,cuda:0,cuda:1", memory="cuda:1=1GiB")
    assert [machine[f"cuda:{index}"].cores for index in (0, 1)] == [(0,), (2,)]
    assert [device.memory_bytes for device in machine.devices] == [None, 15 << 30, 1 << 30]
    assert [device.name for device in discover().devices] == ["cpu:0", "cpu:1", "cuda:0", "cuda:1"]
    assert machine_for("cpu:0-3,cuda:0")["cuda:0"].cores == (3,)  # none is free


def test_a_cuda_device_that_is_not_here_is_named(two_gpus) -> None:
    with pytest.raises(DeviceError, match=r"'cuda:2' is not here: this machine has 2 CUDA devices$"):
        machine_for("cuda:2")
    with cuda("simulated:Absent"), pytest.raises(DeviceError, match=r"'cuda:0' is not here: this machine has 0 CUDA devices$"):
        machine_for("cuda:0")


def test_cuda_devices_are_described(two_gpus) -> None:
    row = next(row for row in describe().devices if row["device"] == "cuda:1")
    assert row["what"] == "GPU, 16.0 GiB, compute capability 9.0" and row["memory"] == "15.0 GiB free"


def test_a_device_that_does_not_answer_is_named(monkeypatch) -> None:
    def start(target: str, name: str) -> SimpleNamespace:
        ours, theirs = Pipe()
        threading.Thread(target=serve, args=(theirs,)).start()
        return SimpleNamespace(connection=ours, name=name, close=ours.close)

    monkeypatch.setattr(discovering, "spawn_worker", start)
    with cuda("simulated:Lost"), pytest.raises(DeviceError, match="device 'cuda:0' cannot be used: RuntimeError: it fell off"):
        discovering.facts_of(("cuda:0",))


def test_threads_stay_within_the_quota(monkeypatch) -> None:
    monkeypatch.setattr(limits, "cpu_quota", lambda: 0.5)
    assert limits.usable_threads([0, 1]) == 1
    monkeypatch.setattr(limits, "cpu_quota", lambda: None)
    assert limits.usable_threads([0, 1, 2]) == 3
