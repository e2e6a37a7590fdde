"""Two stages of a model over two hosts: through ours, and through other systems.

Two Ray nodes in network namespaces have a core each, and cards of 1 Gbit/s. A caller on a third node keeps 8 requests in flight.
In each round each way is opened in a process of its own, asked for a right answer, timed, left idle, and closed, so that no way
takes time from another one. A way that raises or does not answer in ``LIMIT_S`` is left out from then on, with its reason.

Ray Serve needs more packages: ``pip install "ray[serve]"``. ``make bench-hosts`` runs this module.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import autosplit
from autosplit.clusters.raynodes import Node, connected
from autosplit.commands.console import say
from autosplit.compat.torchparts import pytree
from autosplit.deploying.service import as_call
from autosplit.devices.processes import receive, spawn_worker
from autosplit.errors import WorkerError
from autosplit.tables import bytes_text, seconds_text
from autosplit.tracing.splitting import load_stage
from autosplit.values.plan import UNKNOWN, Plan, Stage
from benchmarks import peers
from benchmarks.hostplans import MODELS
from benchmarks.idle import total_s_per_min
from benchmarks.namespaces import namespaces
from benchmarks.transports import first_line, seconds

MBIT_PER_S = 1000.0
ROUNDS, ROUND_S, WARM_UP_S, IDLE_S, LIMIT_S = 3, 4.0, 0.5, 4.0, 90
CARD = "eth0"

Run = Callable[[int], Any]
"""Runs so many requests, and returns the last answer."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model that was cut in two.

    It has the cluster's address, the stages' folders and ops, files of the model's inputs and outputs, and a sentence about the
    stages.
    """

    address: str
    model: str
    folders: Sequence[Path]
    ops: Sequence[tuple[str, ...]]
    inputs: Path
    outputs: Path
    description: str

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The inputs."""
        return tuple(torch.load(self.inputs))

    def is_right(self, answer: Any) -> bool:
        """Whether an answer has the outputs of the model, bit for bit."""
        leaves, expected = pytree.tree_leaves(answer), torch.load(self.outputs)
        return len(leaves) == len(expected) and all(map(torch.equal, leaves, expected))


@dataclass
class Found:
    """What the rounds of a way found: requests a second, processor seconds a minute while idle, and why it is left out."""

    per_s: list[float] = field(default_factory=list)
    idle_s_per_min: list[float] = field(default_factory=list)
    failure: str = ""


class HostRank:
    """A rank of torch's pipelining in an actor."""

    def listen(self, address: str) -> int:
        """Open the store of the group; return its port."""
        import torch.distributed as dist

        self._store = dist.TCPStore(address, 0, None, is_master=True)
        return self._store.port

    def join(self, rank: int, folder: Path, store: tuple[str, int], values: Sequence[torch.Tensor]) -> None:
        """Join the group."""
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = CARD
        torch.set_num_threads(1)
        self._rank = peers.GlooRank(rank, folder, dist.TCPStore(*store, None, is_master=False), values)

    def run(self, num_batches: int) -> Any:
        """As ``GlooRank.run``."""
        return self._rank.run(num_batches)


def ours(stack: ExitStack, job: Job) -> Run:
    """A plan of the two stages on a ``Cluster``."""
    cluster = stack.enter_context(autosplit.Cluster(job.address))
    traced = autosplit.trace(MODELS[job.model])
    names = [device.name for device in cluster.machine.devices]
    stages = tuple(Stage(f"stage{k}", ops, (name,)) for k, (ops, name) in enumerate(zip(job.ops, names, strict=True)))
    plan = Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN)
    service = stack.enter_context(autosplit.open_pipeline(traced, plan, hosts=cluster))
    args, kwargs = as_call(traced, job.values)
    return partial(peers.in_flight, lambda: service.submit(*args, **kwargs).result)


def ray_graph(stack: ExitStack, job: Job) -> Run:
    """An actor on each host, in a compiled graph. Its channels get room for the tensors."""
    import ray

    nodes, values = _nodes(stack, job), job.values
    actors = [peers.actor_on(node, peers.RayStage, folder) for node, folder in zip(nodes, job.folders, strict=True)]
    specs = [
        spec for folder in job.folders for stage in [load_stage(folder, trust=True)] for spec in (*stage.inputs, *stage.outputs)
    ]
    graph = peers.compiled(stack, actors, _buffer_size_bytes=max(spec.num_bytes for spec in specs) + peers.ROOM_BYTES)
    return partial(peers.in_flight, lambda: partial(ray.get, graph.execute(values)))


def gloo(stack: ExitStack, job: Job) -> Run:
    """A rank on each host. The first rank has the inputs, and the answers stay with the last one, but for the last batch."""
    import ray

    nodes = _nodes(stack, job)
    ranks = [peers.actor_on(node, HostRank) for node in nodes]
    store = nodes[0].address, ray.get(ranks[0].listen.remote(nodes[0].address))
    ray.get([rank.join.remote(k, job.folders[k], store, job.values) for k, rank in enumerate(ranks)])

    def run(count: int) -> Any:
        answers = ray.get([rank.run.remote(-(-count // peers.NUM_MICROBATCHES)) for rank in ranks])
        return [leaf.chunk(peers.NUM_MICROBATCHES)[-1] for leaf in pytree.tree_leaves(answers[-1])]

    return run


def ray_serve(stack: ExitStack, job: Job) -> Run:
    """A deployment on each host. The answer of the first handle is the argument of the second one."""
    nodes = _nodes(stack, job)
    from ray import serve

    serve.start(proxy_location="Disabled")
    stack.callback(serve.shutdown)
    handles = []
    for number, (node, folder) in enumerate(zip(nodes, job.folders, strict=True)):
        place = {"num_cpus": 0, "resources": {f"node:{node.address}": 0.001}}
        options = {"max_ongoing_requests": peers.NUM_MICROBATCHES, "ray_actor_options": place}
        deployment = serve.deployment(peers.RayStage, f"stage{number}").options(**options)
        handles.append(serve.run(deployment.bind(folder), name=f"stage{number}", route_prefix=None))
    values = job.values
    return partial(peers.in_flight, lambda: handles[1].run.remote(handles[0].run.remote(values)).result)


def nothing(stack: ExitStack, job: Job) -> Run:
    """The Ray nodes alone, whose processor time while idle is in that of all ways."""
    _nodes(stack, job)
    return lambda count: None


WAYS: dict[str, Callable[[ExitStack, Job], Run]] = {
    "autosplit": ours,
    "Ray compiled graph": ray_graph,
    "gloo pipelining": gloo,
    "Ray Serve": ray_serve,
}
NODES_ALONE = "Ray nodes alone"


def _nodes(stack: ExitStack, job: Job) -> list[Node]:
    return stack.enter_context(connected(job.address))


def drive(control: Connection) -> None:
    """The process of a way: open it, send its requests a second or why it failed, and close it when told."""
    way, job = control.recv()
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(LIMIT_S)
    try:
        with ExitStack() as stack:
            run = {**WAYS, NODES_ALONE: nothing}[way](stack, job)
            per_s = 0.0 if way == NODES_ALONE else rate(run, job)
            signal.alarm(0)
            control.send((per_s, ""))
            control.recv()
    except Exception as failure:
        signal.alarm(0)
        control.send((0.0, first_line(failure)))


def rate(run: Run, job: Job) -> float:
    """Requests a second over about ``ROUND_S``. Raises: ValueError: an answer is wrong."""
    count = peers.NUM_MICROBATCHES
    if not job.is_right(run(count)):
        raise ValueError("its answer is not that of the model")
    while (taken_s := seconds(partial(run, count))) < WARM_UP_S:
        count *= 2
    count = peers.NUM_MICROBATCHES * max(1, round(ROUND_S * count / taken_s / peers.NUM_MICROBATCHES))
    return count / seconds(partial(run, count))


def _too_late(*_: object) -> None:
    raise TimeoutError(f"no answer in {LIMIT_S} s")


def take_turn(way: str, job: Job, found: Found) -> None:
    """One round of a way."""
    worker = spawn_worker("benchmarks.hostpeers:drive", name=way)
    try:
        worker.connection.send((way, job))
        per_s, found.failure = receive(worker, LIMIT_S + 30, "during its round")
        if not found.failure:
            found.per_s += [per_s] if per_s else []
            found.idle_s_per_min.append(total_s_per_min(IDLE_S))
            worker.connection.send("close")
    except WorkerError as failure:
        found.failure = str(failure)
    finally:
        worker.wait(30.0)
        worker.close()


def prepared(model: str, address: str, folder: Path) -> Job:
    """Cut a model in two, and keep the stages, the inputs and the outputs in a folder."""
    traced = autosplit.trace(MODELS[model])
    programs = peers.balanced_cut(traced)
    values: Sequence[torch.Tensor] = traced.example_inputs
    first_s, second_s = map(peers.seconds, programs)
    job = Job(
        address,
        model,
        peers.save(programs, folder),
        [one.ops for one in programs],
        folder / "inputs",
        folder / "outputs",
        f"`{MODELS[model]}`: stages of {seconds_text(first_s)} and {seconds_text(second_s)} by themselves on one core, "
        f"{bytes_text(peers.stages_between(programs))} between them.",
    )
    torch.save(list(values), job.inputs)
    torch.set_num_threads(1)  # a stage has one core, and other numbers of threads round otherwise
    with torch.inference_mode():
        for program in programs:
            values = program.module(*values)
    torch.save(list(values), job.outputs)
    return job


def measure(model: str) -> tuple[Job, dict[str, Found]]:
    """The model as it was cut, and what was found of each way and of the Ray nodes alone."""
    found = {way: Found() for way in [NODES_ALONE, *WAYS]}
    with tempfile.TemporaryDirectory(prefix="autosplit-ns-") as text, ExitStack() as stack:
        folder = Path(text)
        address, _ = stack.enter_context(namespaces([MBIT_PER_S] * 2, folder))
        job = prepared(model, address, folder)
        take_turn(NODES_ALONE, job, found[NODES_ALONE])
        for number in range(ROUNDS):
            for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
                if not found[way].failure:
                    take_turn(way, job, found[way])
                    say(f"{model}, round {number + 1} of {ROUNDS}: {way}: {found[way]}")
    return job, found
