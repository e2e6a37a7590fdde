"""Three Ray nodes on this machine, then two, then one: profile, plan, run, and go on when a process stops or dies.

One cluster serves all tests of this file, because its start takes most of their time. Tests that end hosts come last, and
nothing is judged by seconds: other processes may have the cores.
"""

import asyncio
import json
import math
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

import autosplit
from autosplit import api, cli, scratch
from autosplit.backends.workspace import Workspace
from autosplit.clusters import frames, hostprofile
from autosplit.clusters.agent import PURPOSE, REQUESTS, SEGMENT, SENDER
from autosplit.clusters.handshake import dial
from autosplit.costs.wires import Wires
from autosplit.deploying import contest
from autosplit.deploying.networks import deploy, place
from autosplit.measuring.store import Store
from autosplit.memory.stages import BUFFER_BYTES, OP_BYTES
from autosplit.running.recording import record
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.pipelines import open_pipeline
from autosplit.tracing.family import Family
from autosplit.values.machine import HOST
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.planfile import read_plan
from autosplit.values.shapes import Shapes
from autosplit.values.timeline import Action, chrome_trace

ray_util = pytest.importorskip("ray.util", reason="a cluster of hosts needs Ray: pip install 'autosplit[ray]'")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[autosplit.Cluster]:
    """Three local nodes. Their folder has a long name: nodes failed there, because a socket's path has at most 107 bytes."""
    folder = tmp_path_factory.mktemp("x" * 90)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(folder))
        patched.setattr(tempfile, "tempdir", None)  # read TMPDIR again
        with autosplit.Cluster("local:3") as opened:
            yield opened
    for _ in range(300):  # small processes remove the files of agents that were killed
        left = list(folder.glob("autosplit-*"))
        if not left:
            return
        time.sleep(0.1)
    pytest.fail(f"a closed cluster left {left}")


@pytest.fixture(scope="module")
def traced() -> autosplit.Traced:
    return autosplit.trace("autosplit.examples.mlp:mlp?depth=4&width=32")


@pytest.fixture(scope="module")
def setup(cluster: autosplit.Cluster, tmp_path_factory: pytest.TempPathFactory) -> autosplit.Setup:
    store = tmp_path_factory.mktemp("profiles")
    return autosplit.Setup(backends=("eager",), hosts=cluster, progress=False, store=store)


@pytest.fixture(scope="module")
def profile(traced: autosplit.Traced, setup: autosplit.Setup) -> autosplit.Profile:
    return autosplit.measure(traced, setup=setup)


@pytest.fixture(scope="module")
def family() -> Family:
    return autosplit.trace("autosplit.examples.mlp:mlp?depth=4&width=32", sizes={"batch": "1..8"})


@pytest.fixture(scope="module")
def sized_profile(family: Family, setup: autosplit.Setup) -> autosplit.Profile:
    return autosplit.measure(family, setup=setup)


def sized_halves(
    family: Family, cluster: autosplit.Cluster, dynamic: tuple[str, ...] = (), ends: tuple[int, int] = (0, -1)
) -> Plan:
    """``halves`` with a variant for each of three sizes."""
    shapes = Shapes({}, {"batch": "1..8"}, {"batch": (1, 3, 8)}, dynamic=dynamic)
    return replace(halves(family.variants[0], cluster, ends=ends), shapes=shapes)


def requests_of_three_sizes(num_requests: int) -> list[torch.Tensor]:
    return [torch.randn((1, 2, 7)[number % 3], 32) for number in range(num_requests)]


def require_right(family: Family, requests: list[torch.Tensor], answers: list[torch.Tensor]) -> None:
    for x, y in zip(requests, answers, strict=True):
        assert torch.allclose(y, family.at({"batch": len(x)}).run(x), atol=1e-6)


def halves(traced: autosplit.Traced, cluster: autosplit.Cluster, stages: int = 2, ends: tuple[int, int] = (0, -1)) -> Plan:
    """A plan with a stage on each of two devices in turn, by default the first and the last."""
    names, ops = [cluster.machine.devices[end].name for end in ends], [op.name for op in traced.graph.ops]
    borders = [round(len(ops) * number / stages) for number in range(stages + 1)]
    placed = tuple(
        Stage(f"stage{number}", tuple(ops[borders[number] : borders[number + 1]]), (names[number % len(names)],))
        for number in range(stages)
    )
    return Plan(traced.source, traced.graph.hash, "", placed, UNKNOWN)


def scratch_folders_of(pid: int) -> list[Path]:
    """The scratch folders of a process that still runs."""
    markers = scratch.private_folder(Path(tempfile.gettempdir()), "scratch").glob("*/.autosplit-scratch")
    return [marker.parent for marker in markers if json.loads(marker.read_text(encoding="utf-8"))["pid"] == pid]


def test_hosts_are_one_machine(cluster: autosplit.Cluster) -> None:
    machine = cluster.machine
    hosts = ["node-a", "node-b", "node-c"]
    assert [device.host for device in machine.devices] == hosts
    assert all(device.name.startswith(f"{device.host}/cpu:") and device.memory_bytes for device in machine.devices)
    pairs = set(permutations((HOST, *hosts), 2))
    assert pairs == set(machine.links)
    assert all(link.latency_s > 0 for link in machine.links.values())
    assert all(Wires(machine.wires).s_per_byte(*pair) > 0 for pair in pairs), "every pair of hosts has a measured wire"


def test_stages_on_hosts_have_the_priority_of_other_processes(cluster: autosplit.Cluster) -> None:
    """Ray gives what it starts a niceness of 15, so stages got the time that nothing else on the machine wanted."""
    assert {psutil.Process(facts.pid).nice() for facts in cluster.hosts.values()} == {psutil.Process().nice()}


def test_agents_import_nothing_from_the_current_folder_of_the_driver(cluster: autosplit.Cluster) -> None:
    """Ray put it before Python's own modules."""
    ray = pytest.importorskip("ray")
    path = ray.get(ray.remote(num_cpus=0)(lambda: __import__("sys").path).remote())
    assert path and str(Path.cwd()) not in path


def test_only_loopback_is_listened_on(cluster: autosplit.Cluster) -> None:
    started = psutil.Process().children(recursive=True)
    ports = [port for process in started for port in process.net_connections("inet") if port.status == psutil.CONN_LISTEN]
    assert {port.laddr.port for port in ports} >= {facts.port for facts in cluster.hosts.values()}
    assert {port.laddr.ip.removeprefix("::ffff:") for port in ports} == {"127.0.0.1"}
    servers = [process for process in started if process.name() in ("raylet", "gcs_server")]
    tokens = {process.environ().get("RAY_AUTH_TOKEN") for process in servers}
    assert tokens == {os.environ["RAY_AUTH_TOKEN"]}, "other users of this machine do not know the token of the nodes"


def test_agents_let_no_stranger_in(traced: autosplit.Traced, cluster: autosplit.Cluster) -> None:
    """Not somebody without the secret, not another driver with its own; and who knows the secret reaches what runs, no more."""
    [x] = traced.example_inputs
    address = cluster.address("node-a")
    with open_pipeline(traced, halves(traced, cluster), hosts=cluster) as model:
        hello = {PURPOSE: REQUESTS, SEGMENT: model.pipeline._transport._deployment._segments[0].name, SENDER: "stranger"}  # type: ignore[attr-defined]
        with socket.create_connection(address, 10) as sock, suppress(ConnectionResetError):
            sock.sendall(b"GET / HTTP/1.1".ljust(200))
            assert len(b"".join(iter(lambda: sock.recv(4096), b""))) == 64, "a random number and a keyed hash of it"
        with pytest.raises(autosplit.WorkerError, match="does not know the secret of this run"):
            dial(address, b"secret of another driver", hello)
        for strange in ({**hello, SEGMENT: "of another driver"}, {**hello, PURPOSE: "run"}, {SENDER: "nobody"}):
            with dial(address, cluster.secret, strange) as sock:
                assert sock.recv(1) == b""
        assert torch.equal(model(x), traced.run(x))
    assert ray_util.list_named_actors(all_namespaces=True) == [], "no other driver of this Ray cluster finds an agent by name"


def test_every_host_is_profiled(profile: autosplit.Profile, cluster: autosplit.Cluster) -> None:
    names = {device.name for device in cluster.machine.devices}
    assert {setting.device for setting in profile.measured} == names
    assert {(link.source, link.target) for link in profile.links} >= {(a, b) for a in names | {HOST} for b in names if a != b}
    assert profile.wires == cluster.machine.wires


def test_hosts_on_different_cores_of_one_machine_are_measured_side_by_side(cluster: autosplit.Cluster) -> None:
    """They slow each other through its caches and memory; one of them alone was measured too fast."""
    groups = hostprofile.alike(list(cluster.hosts.values()))
    assert sorted(facts.name for group in groups for facts in group) == ["node-a", "node-b", "node-c"]
    assert all(set(one.cores) & set(other.cores) for group in groups for one, other in combinations(group, 2))


def test_what_was_measured_on_hosts_is_kept(
    traced: autosplit.Traced,
    profile: autosplit.Profile,
    setup: autosplit.Setup,
    cluster: autosplit.Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert setup.store is not None
    assert set(Store(Path(setup.store)).load(traced.graph).measured) <= set(profile.measured)
    monkeypatch.setattr(hostprofile, "unsplit", lambda traced: pytest.fail("the hosts measure again what the store holds"))
    again = autosplit.measure(traced, setup=setup)
    assert (again.measured, again.links) == (profile.measured, profile.links)


def test_a_searched_plan_gives_the_answers_of_the_model(
    traced: autosplit.Traced, profile: autosplit.Profile, cluster: autosplit.Cluster
) -> None:
    setup = autosplit.Setup(hosts=cluster, progress=False)
    demands = autosplit.Constraints(num_stages=2, max_replicas=1)
    found = autosplit.search(traced, profile, None, demands, setup=setup, budget=autosplit.Budget(search_s=0))
    assert len({name.partition("/")[0] for stage in found.plan.stages for name in stage.devices}) == 2
    inputs = [torch.randn_like(traced.example_inputs[0]) for _ in range(50)]
    with open_pipeline(traced, found.plan, hosts=cluster) as model:
        for x, y in zip(inputs, model.stream(inputs), strict=True):
            assert torch.equal(y, traced.run(x))
        rows = model.stats().rows()
    assert [row["requests"] for row in rows] == [50, 50]
    assert [row["device"] for row in rows] == [stage.devices[0] for stage in found.plan.stages]


def test_commands_measure_plan_and_run_a_range_over_hosts(
    family: Family,
    sized_profile: autosplit.Profile,
    setup: autosplit.Setup,
    cluster: autosplit.Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They find the measurements in the store, and their results are those of the calls that they make."""
    names, results, auto = {device.name for device in cluster.machine.devices}, list[Any](), api.auto
    assert {setting.device for setting in sized_profile.measured} == names
    assert sized_profile.shapes is not None and sized_profile.shapes.buckets["batch"][-1] == 8
    monkeypatch.setattr(api, "auto", lambda *given, **named: results.append(auto(*given, **named)) or results[-1])
    monkeypatch.setattr("autosplit.clusters.cluster.Cluster", lambda name: nullcontext(cluster))
    # Where one host was measured slow, a small budget leaves out baselines that are predicted far behind.
    monkeypatch.setattr(contest, "uncertainty", lambda request_s: math.inf)
    plan, model = tmp_path / "plan.yaml", ("autosplit.examples.mlp:mlp?depth=4&width=32", "--batch", "1..8", "--backend", "eager")
    demands = ("--budget", "0.1s", "--stages", "2", "--max-replicas", "1", "--profiles", setup.store)
    for words in (("auto", *model, *demands, "--rounds", "1"), ("search", *model, *demands), ("run", plan, "--rounds", "1")):
        output = ("-o", plan) if words[0] != "run" else ("--no-baselines",)
        found = CliRunner().invoke(cli.app, [str(word) for word in (*words, "--cluster", "local:3", *output)])
        assert found.exit_code == 0, found.output
        written = read_plan(plan)
        assert written.shapes is not None and written.shapes.sizes == {"batch": "1..8"}
        assert len({name.partition("/")[0] for name in written.devices}) == 2
    assert "requests of several sizes" in found.output
    [result] = results
    outcomes = result.report.outcomes
    assert all(outcome.outputs_equal for outcome in outcomes.values()) and not result.report.left_out
    assert {name for one in outcomes.values() for stage in one.plan.stages for name in stage.devices} <= names
    requests = requests_of_three_sizes(6)
    with open_pipeline(family, result.plan, hosts=cluster) as model:
        require_right(family, requests, list(model.stream(requests)))


def test_a_plan_may_come_back_to_a_host_and_have_replicas_on_both(traced: autosplit.Traced, cluster: autosplit.Cluster) -> None:
    plan = halves(traced, cluster, stages=4)
    a, b, *_ = (device.name for device in cluster.machine.devices)
    stages = list(plan.stages)
    stages[1] = Stage("stage1", stages[1].ops, (b, a))
    plan = Plan(traced.source, traced.graph.hash, "", tuple(stages), UNKNOWN)
    inputs = [torch.randn_like(traced.example_inputs[0]) for _ in range(20)]
    with open_pipeline(traced, plan, hosts=cluster) as model:
        answers = list(model.stream(inputs))
        assert [row["requests"] for row in model.stats().rows()] == [20, 10, 10, 20, 20]
    assert all(torch.equal(y, traced.run(x)) for x, y in zip(inputs, answers, strict=True))


@pytest.mark.parametrize("dynamic", [(), ("eager",)])
def test_requests_of_several_sizes_run_over_hosts(family: Family, cluster: autosplit.Cluster, dynamic: tuple[str, ...]) -> None:
    plan, requests = sized_halves(family, cluster, dynamic), requests_of_three_sizes(12)
    with open_pipeline(family, plan, hosts=cluster) as model:
        require_right(family, requests, list(model.stream(requests)))
        stages = model.pipeline.wiring.stages
        assert [stage.devices[0].host for stage in stages] == ["node-a", "node-c"]
        assert {len(stage.at_each_size()) for stage in stages} == {3}
        assert len({one.module for one in stages[0].at_each_size()}) == (1 if dynamic else 3)
        with pytest.raises(autosplit.UsageError, match="'batch' is 9"):
            model(torch.randn(9, 32))
    with Workspace() as workspace:
        largest = place(family.variants[0], replace(plan, shapes=None), cluster.machine, workspace)
    own_bytes = [0 if dynamic else BUFFER_BYTES["eager"] + 3 * len(stage.ops) * OP_BYTES["eager"] for stage in plan.stages]
    for stage, one, added in zip(stages, largest, own_bytes, strict=True):  # weights count once, programs at each size
        assert stage.memory_bytes == {name: size + added for name, size in one.memory_bytes.items()}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing for a block."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def test_every_kind_of_request_runs_over_hosts(traced: autosplit.Traced, cluster: autosplit.Cluster) -> None:
    inputs = [torch.randn_like(traced.example_inputs[0]) for _ in range(7)]
    expected = [traced.run(x) for x in inputs]
    plan = halves(traced, cluster)
    with Workspace() as workspace, HostManager(engine_factory=cluster.engine_factory()) as host:
        for name in ("one", "two"):
            deploy(host, name, traced, plan, cluster.machine, workspace)
        one = host["one"]
        found = {
            "submit, the networks in turn": [host.submit("one" if k % 2 else "two", [x]) for k, x in enumerate(inputs)],
        }
        answers = {way: [future.result(300)[0] for future in futures] for way, futures in found.items()}
        answers["run"] = [host.run("one", [x])[0] for x in inputs]
        answers["run many"] = [y for (y,) in one.run_many([(x,) for x in inputs])]
        answers["stream"] = [y for (y,) in one.stream((x,) for x in inputs)]
        answers["asyncio"] = [asyncio.run(host.run_async("one", [x]))[0] for x in inputs]
        session = autosplit.Session(one)
        for x in inputs:
            session.set_input(one.wiring.inputs[0], x)
            session.run()
        answers["session"] = [session.get_output()[0] for _ in inputs]
        for way, ys in answers.items():
            assert all(torch.equal(y, right) for y, right in zip(ys, expected, strict=True)), way
        [chained] = host.chain("one", "two").run([inputs[0]])
        assert torch.equal(chained, traced.run(expected[0]))
        while sum(worker["num_requests"] for worker in host.health()["workers"] if worker["network"] == "two") < 10:
            time.sleep(0.01)  # a worker counts a request after it handed it on
        text = host.prometheus()
    for stage, name in (("stage0", "node-a"), ("stage1", "node-c")):
        device = cluster.machine.devices[ord(name[-1]) - ord("a")].name
        labels = f'device="{device}",host="{name}",network="two",outcome="done",replica="0",stage="{stage}"'
        assert f"autosplit_requests_total{{{labels}}} 5.0" in text.splitlines()


def test_the_trace_has_a_process_for_each_host_on_one_clock(
    traced: autosplit.Traced, cluster: autosplit.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas on two hosts each count their requests by themselves; the trace has the numbers of the whole pipeline."""
    first, second, third = (device.name for device in cluster.machine.devices)
    ops = tuple(op.name for op in traced.graph.ops)
    stages = Stage("stage0", ops[:3], (first, second)), Stage("stage1", ops[3:], (third,))
    plan = Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN)
    offsets, read = [], cluster.clock_offset
    monkeypatch.setattr(cluster, "clock_offset", lambda host: offsets.append(read(host)) or offsets[-1])
    with open_pipeline(traced, plan, hosts=cluster) as model:
        list(model.stream([traced.example_inputs[0]] * 20))
        actions = record(model.pipeline)
    assert all(abs(offset.ahead_ns) <= offset.error_ns for offset in offsets), "the hosts are on one machine and have one clock"
    trace = chrome_trace([], measured=actions)["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {"predicted", *(f"measured on node-{letter}" for letter in "abc")}
    computed: dict[str, dict[int, Action]] = {"stage0": {}, "stage1": {}}
    for action in actions:
        if action.kind == "compute":
            computed[action.stage][action.request] = action
    assert set(computed["stage0"]) == set(computed["stage1"]) == set(range(20))
    for number, action in computed["stage0"].items():
        assert action.host == ("node-a", "node-b")[number % 2]
        error_s = 2 * max(offset.error_ns for offset in offsets) / 1e9
        assert action.end_s <= computed["stage1"][number].start_s + error_s


def test_a_dead_worker_is_replaced_on_its_host(traced: autosplit.Traced, cluster: autosplit.Cluster) -> None:
    [x] = traced.example_inputs
    with open_pipeline(traced, halves(traced, cluster), hosts=cluster) as model:
        answers = [model.submit(x) for _ in range(20)]
        os.kill(model.pipeline.pids[1], signal.SIGKILL)
        answers += [model.submit(x) for _ in range(20)]
        assert all(torch.equal(answer.result(300), traced.run(x)) for answer in answers)
        assert model.stats().restarts == 1


def test_the_document_runs(cluster: autosplit.Cluster, profile: autosplit.Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.setattr(autosplit.Cluster, "measure", lambda *given: profile)  # its model is that of the other tests
    monkeypatch.setattr(autosplit, "Cluster", lambda name: nullcontext(cluster), raising=False)
    document: dict[str, Any] = {}
    exec(code, document)
    traced = document["traced"]
    assert torch.equal(document["answer"], traced.run(*traced.example_inputs))


def test_a_silent_host_is_replaced(
    traced: autosplit.Traced, profile: autosplit.Profile, cluster: autosplit.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped closes nothing and says nothing, as a link that drops every packet."""
    monkeypatch.setattr(frames, "SILENCE_S", 3.0)  # others send a sign of life each 0.5 s, on a busy machine
    [x] = traced.example_inputs
    with open_pipeline(traced, halves(traced, cluster), hosts=cluster, profile=profile) as model:
        assert [stage.devices[0].host for stage in model.pipeline.wiring.stages] == ["node-a", "node-c"]
        answers = [model.submit(x) for _ in range(10)]
        with stopped(cluster.hosts["node-c"].pid):
            answers += [model.submit(x) for _ in range(30)]
            assert all(torch.equal(answer.result(300), traced.run(x)) for answer in answers)
        [note] = model.pipeline.replanned
        assert "host 'node-c' was lost: it was silent for 3 s" in note or "says that it was silent" in note
    assert set(cluster.lost) == {"node-c"}
    assert [device.host for device in cluster.machine.devices] == ["node-a", "node-b"]
    assert cluster.refresh() == ["node-c"], cluster.lost
    assert not cluster.lost
    with open_pipeline(traced, halves(traced, cluster), hosts=cluster) as model:
        assert [stage.devices[0].host for stage in model.pipeline.wiring.stages] == ["node-a", "node-c"]
        assert torch.equal(model(x), traced.run(x))


def test_a_lost_host_is_named_or_replaced(
    traced: autosplit.Traced,
    profile: autosplit.Profile,
    family: Family,
    sized_profile: autosplit.Profile,
    cluster: autosplit.Cluster,
) -> None:
    """The last test: it ends the agent of a host, and two are left."""
    [x] = traced.example_inputs
    plan = halves(traced, cluster, ends=(0, 1))
    folders = scratch_folders_of(cluster.hosts["node-b"].pid)
    with (
        open_pipeline(traced, plan, hosts=cluster) as alone,
        open_pipeline(traced, plan, hosts=cluster, profile=profile) as spare,
        open_pipeline(family, sized_halves(family, cluster, ends=(0, 1)), hosts=cluster, profile=sized_profile) as sized,
    ):
        answers: dict[Any, list[Future[Any]]] = {model: [model.submit(x) for _ in range(30)] for model in (alone, spare)}
        requests = requests_of_three_sizes(90)
        of_sizes = [sized.submit(x) for x in requests]
        os.kill(cluster.hosts["node-b"].pid, signal.SIGKILL)
        with pytest.raises(autosplit.WorkerError, match="host 'node-b' was lost"):
            while True:
                alone(x)
        assert "silent" not in cluster.lost["node-b"], "a lost host is found by its connections, not by a time limit"
        for answer in answers[alone]:
            assert answer.exception(300) is None or "node-b" in str(answer.exception(300))
        assert all(torch.equal(answer.result(300), traced.run(x)) for answer in [*answers[spare], spare.submit(x)])
        of_sizes += [sized.submit(x) for x in requests]
        require_right(family, requests * 2, [answer.result(300) for answer in of_sizes])
        assert {len(stage.at_each_size()) for stage in sized.pipeline.wiring.stages} == {3}
        for model in (spare, sized):
            [note] = model.pipeline.replanned
            assert "host 'node-b' was lost" in note
        assert {row["device"].partition("/")[0] for row in spare.stats().rows()} <= {"node-a", "node-c"}
    assert set(cluster.lost) == {"node-b"}
    for _ in range(300):  # a small process outlives the agent and removes its files
        if folders and not any(folder.exists() for folder in folders):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"the killed agent left {folders}")
