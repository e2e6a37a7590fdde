"""Several networks on one host: added, run, drained and refused from many threads; memory caps."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import CORES, Gate, double, fail_on_7, increment, local, request, spawned

from autosplit.errors import BackendError, DeviceError, RefusedError, UsageError
from autosplit.running.modules import LocalFunction
from autosplit.running.stage import StagePlacement
from autosplit.serving.devicemanager import DeviceManager, device_health
from autosplit.serving.hostmanager import HostManager
from autosplit.values.machine import Machine, parse_device

pytestmark = pytest.mark.timeout(60)

MACHINE = Machine.of([parse_device("null:0"), parse_device("null:1")])


def weighed(name: str, num_bytes: int, device: str = "null:0", replicas: int = 1) -> StagePlacement:
    """A doubling stage that says it holds ``num_bytes``."""
    plain = local(name, double, "x", "y")
    return StagePlacement(name, LocalFunction(double, num_bytes), plain.inputs, plain.outputs, (parse_device(device),) * replicas)


class Unloadable(LocalFunction):
    """A stage that cannot be loaded, though there is memory for it; its function is called instead."""

    def load(self, threads, device, shared, streams=1):
        self.function()
        raise RuntimeError("broken weights")


def test_networks_come_run_and_go() -> None:
    with HostManager(MACHINE) as host:
        host.add_network("one", [local("a", double, "x", "y")], ["x"], ["y"])
        host.add_network("two", [local("a", increment, "x", "y", 2)], ["x"], ["y"])
        assert host.networks() == {"one": "ready", "two": "ready"}
        assert host.run("one", request(3))[0][0] == 6 and host.submit("two", request(3)).result(10)[0][0] == 4
        with pytest.raises(UsageError, match="there is a network 'one' already"):
            host.add_network("one", [local("a", double, "x", "y")], ["x"], ["y"])
        host.remove_network("one")
        with pytest.raises(UsageError, match="there is no network 'one'; the networks are: two"):
            host.run("one", request(3))
        while sum(worker["num_requests"] for worker in host.health()["workers"]) < 1:
            time.sleep(0.001)  # a worker counts a request after it handed it on
        health = host.health()
        assert list(health["networks"]) == ["two"] and health["devices"]["null:1"]["state"] == "ready"
        assert [(worker["stage"], worker["num_requests"]) for worker in health["workers"]] == [("a", 1), ("a", 0)]
    assert host.networks() == {}


def test_removing_a_busy_network_drains_or_refuses() -> None:
    gate = threading.Event()

    def hold(x: torch.Tensor) -> torch.Tensor:
        gate.wait(30)
        return x + 1

    host = HostManager(MACHINE)
    host.add_network("net", [local("a", hold, "x", "y")], ["x"], ["y"])
    future = host.submit("net", request(1))
    while host.health()["devices"]["null:0"]["state"] != "busy":
        time.sleep(0.001)
    with pytest.raises(RefusedError, match="network 'net' has 1 requests without an answer"):
        host.remove_network("net", when_busy="refuse")
    remover = threading.Thread(target=host.remove_network, args=("net",))
    remover.start()
    while host.networks() != {"net": "draining"}:
        time.sleep(0.001)
    assert host.health()["devices"]["null:0"]["state"] == "draining"
    with pytest.raises(RefusedError, match="network 'net' is draining: it takes no requests"):
        host.submit("net", request(1))
    gate.set()
    remover.join()
    assert future.result(0)[0][0] == 2 and host.networks() == {}
    host.close()


def test_memory_that_is_short_is_refused_with_numbers_and_nothing_stays() -> None:
    host = HostManager(MACHINE.with_memory({"null:0": 1000}))
    host.add_network("one", [weighed("a", 700, replicas=2)], ["x"], ["y"])
    assert host.devices["null:0"].free_bytes == 300
    other = StagePlacement("b", LocalFunction(double, 400), *_specs("y", "z"), (parse_device("null:0"),))
    with pytest.raises(
        DeviceError,
        match=r"stage 'b' of network 'two' needs 400 B on device 'null:0', and 300 B of 1000 B are free \(it holds one/a 700 B\)",
    ):
        host.add_network("two", [weighed("a", 100, "null:1"), other], ["x"], ["z"])
    assert host.devices["null:1"].used_bytes == 0 and host.networks() == {"one": "ready"}
    held: list[int] = []
    note = Unloadable(lambda: held.append(host.devices["null:1"].used_bytes), 50)
    bad = StagePlacement("bad", note, *_specs("y", "z"), (parse_device("null:1"),))
    with pytest.raises(BackendError, match=r"(?s)stage 'bad' could not be loaded on device 'null:1'.*broken weights"):
        host.add_network("two", [weighed("a", 100, "null:1"), bad], ["x"], ["z"])
    assert held == [150] and host.devices["null:1"].used_bytes == 0 and host.networks() == {"one": "ready"}
    with pytest.raises(UsageError, match="wants device 'null:7'; the devices here are: null:0, null:1"):
        host.add_network("two", [weighed("a", 1, "null:7")], ["x"], ["y"])
    host.close()


class Growing(DeviceManager):
    """A device during whose every look another network comes, with a device of its own."""

    host: HostManager

    def grow(self) -> None:
        name = f"null:{len(self.host.devices)}"
        self.host.devices[name] = DeviceManager(parse_device(name))

    @property
    def used_bytes(self) -> int:
        self.grow()
        return 0

    def unload(self, network: str) -> None:
        self.grow()
        super().unload(network)


class Loading(str):
    """A name during whose formatting another stage is loaded."""

    manager: DeviceManager

    def __format__(self, how: str) -> str:
        self.manager.load("other", f"stage{len(self.manager.loaded)}", 1)
        return str(self)


def test_a_device_that_runs_one_model_takes_no_second_network() -> None:
    single = replace(parse_device("null:1"), one_model=True)
    with HostManager(Machine.of([parse_device("null:0"), single])) as host:
        two = local("a", double, "x", "y"), local("b", double, "y", "z")
        host.add_network("one", [replace(stage, devices=(single,)) for stage in two], ["x"], ["z"])  # its stages are one model
        again = replace(two[0], devices=(single,))
        with pytest.raises(DeviceError, match=r"on device 'null:1', which runs one model at a time and has network 'one'"):
            host.add_network("two", [again], ["x"], ["y"])
        host.add_network("two", [two[0]], ["x"], ["y"])
        host.remove_network("one")
        host.add_network("three", [again], ["x"], ["y"])
        assert set(host.networks()) == {"two", "three"}


def test_devices_that_share_a_memory_share_its_cap() -> None:
    machine = Machine.of([replace(parse_device("null:0"), memory_bytes=1000), replace(parse_device("null:1"), shares="null:0")])
    with HostManager(machine) as host:
        host.add_network("one", [weighed("a", 700, "null:1")], ["x"], ["y"])
        assert host.devices["null:0"].used_bytes == 700 and host.devices["null:1"].free_bytes == 300
        for device in ("null:0", "null:1"):
            with pytest.raises(DeviceError, match=rf"400 B on device '{device}', and 300 B of 1000 B are free .*one/a 700 B"):
                host.add_network("two", [weighed("b", 400, device)], ["x"], ["y"])
        host.remove_network("one")
        host.add_network("two", [weighed("b", 400)], ["x"], ["y"])
        assert host.devices["null:1"].free_bytes == 600


def test_networks_that_come_meanwhile_disturb_no_look_and_no_removal() -> None:
    with HostManager() as host:
        host.add_network("net", [local("a", double, "x", "y")], ["x"], ["y"])
        growing = Growing(parse_device("null:0"))
        growing.host = host
        host.devices["null:0"] = growing
        assert 'autosplit_device_used_bytes{device="null:0"} 0.0' in host.prometheus()
        host.remove_network("net")
        assert host.networks() == {} and len(host.devices) > 2
    manager = DeviceManager(parse_device("null:1"))
    name = Loading("net")
    name.manager = manager
    manager.load(name, "a", 1)
    assert device_health(manager, [], [])["stages"] == ["net/a"]


def _specs(reads: str, makes: str) -> tuple[Any, Any]:
    stage = local("s", double, reads, makes)
    return stage.inputs, stage.outputs


def test_adding_removing_and_running_from_many_threads() -> None:
    host = HostManager(MACHINE)
    faults: list[str] = []

    def live(name: str) -> None:
        for cycle in range(5):
            host.add_network(name, [local("a", double, "x", "u", 2), local("b", increment, "u", "y")], ["x"], ["y"])
            futures = [host.submit(name, request(number)) for number in range(10)]
            host.remove_network(name)
            wrong = [number for number, future in enumerate(futures) if future.result(0)[0][0] != 2 * number + 1]
            if wrong:
                faults.append(f"{name} {cycle}: {wrong}")

    threads = [threading.Thread(target=live, args=(f"net{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [] and host.networks() == {}
    host.close()


def test_networks_can_be_awaited() -> None:
    async def ask(host: HostManager) -> list[float]:
        answers = await asyncio.gather(*(host.run_async("net", request(number)) for number in range(20)))
        return [float(answer[0][0]) for answer in answers]

    with HostManager(MACHINE) as host:
        host.add_network("net", [local("a", double, "x", "y")], ["x"], ["y"], queue_capacity=1)
        assert asyncio.run(ask(host)) == [2 * number for number in range(20)]


def test_two_networks_share_the_cores_of_one_host() -> None:
    with HostManager(Machine.of(CORES)) as host:
        host.add_network("one", [spawned("a", "double", "x", "y")], ["x"], ["y"])
        host.add_network("two", [spawned("a", "increment", "x", "y")], ["x"], ["y"])
        assert [float(host.run(name, request(5))[0][0]) for name in ("one", "two")] == [10, 6]
        state = host.health()["devices"][CORES[0].name]
        assert state["stages"] == ["one/a", "two/a"] and state["resident_bytes"] > 2 << 20
        for pid in (worker["pid"] for worker in host.health()["workers"]):
            assert os.sched_getaffinity(pid) == set(CORES[0].cores)
            held = [(path, str(path.readlink())) for path in Path(f"/proc/{pid}/fd").iterdir()]
            shared = [path for path, target in held if target.startswith("/memfd:autosplit")]
            assert len(shared) == 3 and {path.stat().st_mode & 0o777 for path in shared} == {0o600}
            sockets = {target[len("socket:[") : -1] for _, target in held if target.startswith("socket:[")}
            assert len(sockets) == 1 and not sockets & listening(pid)


def listening(pid: int) -> set[str]:
    """Inodes of sockets that others could reach: all of the internet's, and those of Unix that listen or have a name."""
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        found |= {line.split()[9] for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]}
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[3], 16) & 0x10000 or len(words) > 7:
            found.add(words[6])
    return found


def held_host(**settings: Any) -> tuple[HostManager, Gate]:
    """A host with two networks that hold every request until the gate opens."""
    gate, host = Gate(), HostManager(MACHINE, **settings)
    for name in ("one", "two"):
        host.add_network(name, [local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=4)
    return host, gate


def test_one_limit_holds_for_all_networks_of_a_host() -> None:
    host, gate = held_host(limit=2, when_full="refuse")
    first, second = host.submit("one", request(1)), host.submit("two", request(2))
    with pytest.raises(RefusedError, match="the request was refused: 2 requests are unfinished, which is the limit"):
        host.submit("one", request(3))
    gate.opened.set()
    assert first.result(10)[0][0] == 2 and second.result(10)[0][0] == 3
    with pytest.raises(UsageError, match="there is no network 'three'"):
        host.submit("three", request(4))
    assert [host.run("one", request(number))[0][0] for number in range(5)] == [1, 2, 3, 4, 5], "a failed submit takes no place"
    host.close()


def test_a_host_at_its_limit_blocks() -> None:
    host, gate = held_host(limit=1)
    first = host.submit("one", request(1))
    with pytest.raises(RefusedError, match="1 requests are unfinished"):
        host.submit("two", request(2), timeout_s=0.01)
    threading.Timer(0.01, gate.opened.set).start()
    assert host.submit("two", request(2)).result(10)[0][0] == 3 and first.done(), "it waited for the first answer"
    seen: list[BaseException] = []

    def again(_: Any) -> None:
        try:
            host.submit("one", request(1))
            host.submit("one", request(1))
        except UsageError as failure:
            seen.append(failure)

    gate.opened.clear()  # else the answer may be there before the callback, which then runs in this thread
    host.submit("one", request(1)).add_done_callback(again)
    gate.opened.set()
    while not seen:
        time.sleep(0.001)
    assert "a callback of an answer cannot wait" in str(seen[0])
    host.close()


def test_a_limit_holds_while_many_threads_submit() -> None:
    most = []

    def count(x: torch.Tensor) -> torch.Tensor:
        most.append(sum(network["num_running"] + network["num_waiting"] for network in host.health()["networks"].values()))
        return x

    with HostManager(MACHINE, limit=3) as host:
        for name in ("one", "two"):
            host.add_network(name, [local("a", count, "x", "y")], ["x"], ["y"], queue_capacity=20)
        threads = [
            threading.Thread(target=lambda: [host.run(name, request(1)) for name in ("one", "two") * 10]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(most) == 160 and max(most) <= 3


def test_a_saturated_network_takes_the_idle_devices() -> None:
    machine = Machine.of([parse_device(f"null:{number}") for number in range(5)]).with_memory({"null:4": 10})
    with HostManager(machine) as host:
        host.add_network("other", [weighed("a", 10, "null:2")], ["x"], ["y"])
        stages = [weighed("a", 70), StagePlacement("b", LocalFunction(double, 5), *_specs("y", "z"), (parse_device("null:1"),))]
        pipeline = host.add_network("net", stages, ["x"], ["z"], saturate=True)
        assert [[device.name for device in stage.devices] for stage in pipeline.wiring.stages] == [
            ["null:0", "null:3"],
            ["null:1", "null:4"],
        ]
        assert host.devices["null:3"].used_bytes == 70 and host.devices["null:4"].used_bytes == 5
        assert [host.run("net", request(number))[0][0] for number in range(4)] == [0, 4, 8, 12]
        host.remove_network("net")
        host.remove_network("other")
        held = [weighed("a", 70), StagePlacement("b", LocalFunction(double, 11), *_specs("y", "z"), (parse_device("null:1"),))]
        pipeline = host.add_network("net", held, ["x"], ["z"], saturate=True)
        assert pipeline.wiring.stages[1].devices[-1].name == "null:3", "null:4 has no room for the stage"


def test_a_request_has_the_number_that_messages_name() -> None:
    with HostManager(MACHINE) as host:
        host.add_network("net", [local("a", fail_on_7, "x", "y")], ["x"], ["y"])
        futures = [host.submit("net", request(number)) for number in (1, 7, 2)]
        failure = futures[1].exception(10)
        assert [future.number for future in futures] == [0, 1, 2] and "failed on request 1" in str(failure), str(failure)
