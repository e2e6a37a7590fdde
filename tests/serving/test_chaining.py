"""Networks one behind the other: all at work at once, bounded, and a failure anywhere is the answer."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace

import pytest
import torch
from pipelines import add, double, fail_on_7, increment, local, request, spec

from autosplit.errors import DeadlineError, RefusedError, StageError, UsageError
from autosplit.serving.hostmanager import HostManager
from autosplit.values.machine import Machine, parse_device
from autosplit.values.timeline import chrome_trace

pytestmark = pytest.mark.timeout(60)

MACHINE = Machine.of([parse_device("null:0")])


def test_the_next_request_runs_while_this_one_is_in_the_next_network() -> None:
    """Each request meets its successor: neither network may finish before both are at work, and the trace shows it."""
    entered = {(name, number): threading.Event() for name in ("one", "two") for number in range(10)}

    def first(x: torch.Tensor) -> torch.Tensor:
        number = int(x[0])
        entered["one", number].set()
        assert number == 0 or entered["two", number - 1].wait(10)
        return x

    def second(x: torch.Tensor) -> torch.Tensor:
        number = int(x[0])
        entered["two", number].set()
        assert number == 9 or entered["one", number + 1].wait(10)
        return x

    with HostManager(MACHINE) as host:
        host.add_network("one", [local("a", first, "x", "y")], ["x"], ["y"])
        host.add_network("two", [local("a", second, "y", "z")], ["y"], ["z"])
        chain = host.chain("one", "two")
        futures = [chain.submit(request(number)) for number in range(10)]
        assert [float(future.result(20)[0][0]) for future in futures] == list(range(10))
        actions = host.record()
    computed = {(one.stage, one.request): one for one in actions if one.kind == "compute"}
    for number in range(9):
        this, following = computed["two/a", number], computed["one/a", number + 1]
        assert this.start_s < following.end_s and following.start_s < this.end_s
    lanes = {event["args"]["name"] for event in chrome_trace(actions)["traceEvents"] if event["name"] == "thread_name"}
    assert lanes == {"one/a.0", "two/a.0"}


def test_a_failure_in_any_network_is_the_answer_of_its_request_alone() -> None:
    with HostManager(MACHINE) as host:
        host.add_network("one", [local("a", increment, "x", "y")], ["x"], ["y"])
        host.add_network("two", [local("b", fail_on_7, "y", "z")], ["y"], ["z"])
        chain = host.chain("one", "two", "one")
        host.run("two", request(0))
        futures = [chain.submit(request(number)) for number in range(10)]
        assert [future.number for future in futures] == list(range(10))
        for number, future in enumerate(futures):
            if number != 6:
                assert future.result(10)[0][0] == number + 3
        with pytest.raises(StageError, match=r"request 6 of the chain, in network 'two': stage 'b' .* seven is not for me"):
            futures[6].result(10)
        host.remove_network("two")
        with pytest.raises(RefusedError, match="the pipeline is closed"):
            chain.run(request(1))


def held(gate: threading.Event) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives back what it takes once the gate is open."""

    def hold(x: torch.Tensor) -> torch.Tensor:
        gate.wait(30)
        return x

    return hold


def test_a_chain_is_bounded_and_its_requests_end_when_they_are_cancelled_or_late() -> None:
    gate = threading.Event()
    with HostManager(MACHINE) as host:
        host.add_network("one", [local("a", double, "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=1)
        host.add_network("two", [local("b", held(gate), "y", "z")], ["y"], ["z"], max_in_flight=1)
        chain = host.chain("one", "two")
        futures = [chain.submit(request(number)) for number in range(3)]
        assert chain.limit == 3
        with pytest.raises(RefusedError, match="3 requests of the chain one -> two are unfinished, which is the limit"):
            chain.submit(request(9), timeout_s=0.01)
        futures[2].cancel()
        with pytest.raises(DeadlineError, match="while it waited in the admission queue"):
            chain.submit(request(2), deadline_s=0.3).result(10)
        while host["two"].occupancy.num_held != 1:
            time.sleep(0.001)
        futures[1].cancel()
        assert host["two"].occupancy.num_held == 0
        gate.set()
        assert futures[0].result(10)[0][0] == 0 and chain.run(request(4))[0][0] == 8
        with pytest.raises(CancelledError):
            futures[1].result(10)


def test_room_in_a_chain_is_waited_for_as_long_as_asked() -> None:
    gate = threading.Event()
    with HostManager(MACHINE) as host:
        host.add_network("one", [local("a", held(gate), "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=0)
        chain = host.chain("one")
        first = chain.submit(request(1))
        threading.Timer(0.05, gate.set).start()
        assert chain.submit(request(2), timeout_s=math.inf).result(10)[0][0] == 2 and first.done()


def test_networks_that_do_not_fit_are_named() -> None:
    with HostManager(MACHINE) as host:
        host.add_network("one", [local("a", double, "x", "y")], ["x"], ["y", "x"])
        host.add_network("two", [local("a", add, "x y", "z")], ["x", "y"], ["z"])
        narrow = local("a", lambda w: w[:4], "w", "v")
        wide = replace(narrow, inputs=(spec("w", width=5),))
        host.add_network("wide", [wide], ["w"], ["v"])
        assert host.chain("one", "two").run(request(3))[0][0] == 9
        with pytest.raises(UsageError, match="'one' has 2 outputs, and 'wide' takes 1 inputs"):
            host.chain("one", "wide")
        with pytest.raises(UsageError, match=r"output 'z' of 'two' is float32\[4\], and input 'w' of 'wide' is float32\[5\]"):
            host.chain("two", "wide")
        with pytest.raises(UsageError, match="no network 'three'"):
            host.chain("one", "three")
