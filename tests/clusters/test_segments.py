"""Segments of a plan, and the requests over them, without any host."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from hosts import Hosts
from pipelines import WIDTH, at_widths, double, local, request

import autosplit
from autosplit.bundling.bundler import write_bundle
from autosplit.clusters import hoststransport
from autosplit.clusters.hostsdeployment import Answered, HostsDeployment, Lost
from autosplit.clusters.raynodes import connected
from autosplit.clusters.segments import segments_of
from autosplit.errors import DeviceError, PlanError, StageError, UsageError
from autosplit.running.engine import Engine
from autosplit.running.modules import LocalFunction
from autosplit.running.request import AnswerFuture, Request
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import Replan, wire
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import parse_device
from autosplit.values.plan import UNKNOWN, Plan, Process, Stage


def spec(name: str) -> TensorSpec:
    return TensorSpec(name, (1,), (1,), "float32")


def stage(name: str, inputs: str, outputs: str, *devices: str) -> StagePlacement:
    values = [tuple(map(spec, names)) for names in (inputs, outputs)]
    return StagePlacement(name, LocalFunction(lambda: None), *values, tuple(map(parse_device, devices)))


def names(specs: Sequence[TensorSpec]) -> str:
    return "".join(one.name for one in specs)


def test_segments_hand_on_what_later_ones_read() -> None:
    stages = [
        stage("one", "x", "ab", "a/cpu:0"),
        stage("two", "a", "c", "a/cpu:1"),
        stage("three", "cy", "d", "b/cpu:0"),
        stage("four", "dx", "e", "b/cpu:0", "a/cpu:0"),
    ]
    found = segments_of(stages, ["x", "y", "unread"], ["e", "b", "e"])
    assert [(names(one.inputs[0]), names(one.outputs[0]), one.hosts) for one in found] == [
        ("xy", "xybc", ("a",)),
        ("xybc", "xbd", ("b",)),
        ("xbd", "eb", ("b", "a")),
    ]
    assert [[device.name for device in one.devices] for one in found[2].on("a").stages] == [["cpu:0"]]


def test_a_stage_on_this_machine_is_refused() -> None:
    with pytest.raises(PlanError, match="device without a host"):
        segments_of([stage("one", "x", "y", "cpu:0")], ["x"], ["y"])


def test_stages_on_hosts_do_not_run_here_nor_in_a_bundle(tmp_path: Path) -> None:
    traced = autosplit.trace("autosplit.examples.mlp:mlp?depth=1&width=4")
    whole = Stage("stage0", tuple(op.name for op in traced.graph.ops), ("node-a/cpu:0",))
    plan = Plan(traced.source, traced.graph.hash, "", (whole,), UNKNOWN)
    for process in get_args(Process):
        with pytest.raises(DeviceError, match="node-a/cpu:0 are on hosts of a cluster; give the cluster"):
            autosplit.open_pipeline(traced, replace(plan, process=process))
    with pytest.raises(UsageError, match=r"'mlp' is on hosts of a cluster .*, and a bundle runs on one machine"):
        write_bundle({"mlp": (traced, plan)}, tmp_path / "app.asb")
    assert list(tmp_path.iterdir()) == []


class FakeDeployment(HostsDeployment):
    """Keeps what is sent."""

    max_in_flight, num_restarts = 2, 0
    wiring = wire([at_widths(local("a", double, "x", "y"), 2)], ["x"], ["y"])

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.variants: list[int] = []
        self.cancelled: list[int] = []

    def send(self, request: Request) -> None:
        assert [len(value) for value in request.inputs] == [(WIDTH, 2)[request.variant]]
        self.variants.append(request.variant)
        self.sent.append(request.number)

    def skip(self, number: int) -> None:
        self.cancelled.append(number)

    def close(self, timeout_s: float) -> None:
        pass


class Bench:
    """An engine over fake deployments, of which each loss takes the next one; it answers with the value ``10 * number``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replan: Replan | None = None) -> None:
        self.deployments: list[FakeDeployment] = []

        def deploy(*_: object) -> FakeDeployment:
            self.deployments.append(FakeDeployment())
            return self.deployments[-1]

        monkeypatch.setattr(hoststransport, "HostsDeployment", deploy)
        self.engine = Engine(partial(hoststransport.HostsTransport, Hosts(), replan=replan), FakeDeployment.wiring, 8)  # type: ignore[arg-type]
        self.events = self.engine._transport._events  # type: ignore[attr-defined]
        self.deployment = self.deployments[0]

    def submit(self, width: int = WIDTH) -> AnswerFuture:
        return self.engine.submit(request(0, width), timeout_s=0)

    def answer(self, number: int) -> None:
        self.events.put(Answered(number, {"y": torch.tensor(10.0 * number)}, ""))


def test_a_request_that_runs_and_is_cancelled_is_skipped_by_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    running = [bench.submit(), bench.submit()]
    assert running[0].cancel() and bench.deployment.cancelled == [0]
    bench.answer(0)
    bench.events.put(Answered(1, None, "StageError\nhost 'b': op 'fc' failed"))
    with pytest.raises(StageError, match="host 'b': op 'fc' failed"):
        running[1].result(5)
    bench.engine.close(drain=True)


def test_requests_run_again_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = threading.Event()

    def replan(lost: str) -> Sequence[StagePlacement]:
        ready.set()
        return FakeDeployment.wiring.stages

    bench = Bench(monkeypatch, replan)
    futures = [bench.submit(width=width) for width in (2, WIDTH, 2)]
    bench.answer(1)
    bench.events.put(Lost("b", "it was silent"))
    assert ready.wait(5)
    for number in (0, 2):
        bench.answer(number)
    assert [float(future.result(5)[0]) for future in futures] == [0.0, 10.0, 20.0]
    again = bench.deployments[1]
    assert bench.deployment.sent == [0, 1, 2] and again.sent == [0, 2], "the request with a result does not run again"
    assert bench.deployment.variants == [1, 0, 1] and again.variants == [1, 1], "a request runs again at its own size"
    assert bench.engine.restarts == 1
    assert bench.engine.replanned == ["host 'b' was lost: it was silent; planned anew: a on null:0"]
    bench.engine.close(drain=True)


@pytest.mark.parametrize(
    "cluster,error,text",
    [
        ("nonsense", UsageError, "write auto, HOST:PORT or local:3"),
        ("local:0", UsageError, "write local:1 to local:16"),
        ("127.0.0.1:1", DeviceError, "no Ray cluster answers at '127.0.0.1:1'"),
    ],
)
def test_clusters_that_are_not_there(cluster: str, error: type[Exception], text: str) -> None:
    pytest.importorskip("ray", reason="a cluster of hosts needs Ray: pip install 'autosplit[ray]'")
    with pytest.raises(error, match=text), connected(cluster):
        pass
