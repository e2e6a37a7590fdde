"""Two stages through other systems: a plain loop, gloo pipelining of torch, a compiled graph of Ray."""

import ctypes
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autosplit.clusters.raynodes import Node
from autosplit.devices.limits import affinity
from autosplit.devices.processes import receive, spawn_worker
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, load_stage, save_stage, split

NUM_MICROBATCHES = 8
"""Requests in flight: microbatches of a batch, executions of a graph."""

ROOM_BYTES = 1 << 16
"""Room in a channel of Ray for what it puts around a tensor."""

Round = Callable[[int], float]
"""Runs so many requests, and returns the seconds that they took."""


def balanced_cut(traced: Traced) -> list[StageProgram]:
    """Two stages with one value between them, cut where both take the same time on one thread."""
    ops = [op.name for op in traced.graph.ops]
    index, crossing = traced.graph.index, []
    last_read = {value: max((index[op] for op in readers), default=-1) for value, readers in traced.graph.consumers.items()}
    for value in traced.graph.outputs:
        last_read[value] = len(ops)
    made = {value: index[op] for value, op in traced.graph.producer.items()}
    for cut in range(1, len(ops)):
        if sum(place < cut <= last_read[value] for value, place in made.items()) == 1:
            crossing.append(cut)
    low, high = 0, len(crossing) - 1
    while high - low > 1:
        middle = (low + high) // 2
        cut = crossing[middle]
        stages = split(traced, [ops[:cut], ops[cut:]])
        first, second = (seconds(stage) for stage in stages)
        low, high = (middle, high) if first < second else (low, middle)
    cut = crossing[low]
    return split(traced, [ops[:cut], ops[cut:]])


def seconds(stage: StageProgram, count: int = 10) -> float:
    """The shortest of a few calls, on one thread."""
    inputs = [torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in stage.inputs]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    with torch.inference_mode():
        for _ in range(count):
            start = time.perf_counter()
            stage.module(*inputs)
            found.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return min(found)


def save(programs: list[StageProgram], folder: Path) -> list[Path]:
    """Stage folders."""
    for program in programs:
        save_stage(program, folder / program.name)
    return [folder / program.name for program in programs]


def loop_worker(control: Connection) -> None:
    """One process: both stages, one after the other."""
    folders, threads, array = control.recv()
    value = torch.from_numpy(array)
    torch.set_num_threads(threads)
    modules = [load_stage(folder, trust=True).module for folder in folders]
    with torch.inference_mode():
        while True:
            control.send("ready")
            for _ in range(control.recv()):
                values = (value,)
                for module in modules:
                    values = module(*values)


def plain_loop(stack: ExitStack, folders: list[Path], value: torch.Tensor, cores: list[int]) -> Round:
    """Both stages in one process, pinned to ``cores``."""
    worker = spawn_worker("benchmarks.peers:loop_worker", name="loop", cores=cores)
    stack.callback(worker.close)
    worker.connection.send((folders, len(cores), value.numpy()))
    receive(worker, 120, "during loading")

    def run(count: int) -> float:
        start = time.perf_counter()
        worker.connection.send(count)
        receive(worker, 600, "during a round")
        return time.perf_counter() - start

    return run


class GlooRank:
    """One rank of torch.distributed.pipelining: GPipe over gloo."""

    def __init__(self, rank: int, folder: Path, store: Any, values: Sequence[torch.Tensor]) -> None:
        import torch.distributed as dist
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        stage = PipelineStage(load_stage(folder, trust=True).module, rank, 2, torch.device("cpu"))
        self._schedule = ScheduleGPipe(stage, NUM_MICROBATCHES)
        self._batch = [torch.cat([value] * NUM_MICROBATCHES) for value in values] if rank == 0 else []

    def run(self, num_batches: int) -> Any:
        """Run whole batches; return what the last stage gave for the last batch."""
        answer = None
        with torch.no_grad():
            for _ in range(num_batches):
                answer = self._schedule.eval(*self._batch)
        return answer


def gloo_worker(control: Connection) -> None:
    """A rank as a process of this machine."""
    from torch._C._distributed_c10d import FileStore

    rank, folder, store, array = control.recv()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    runner = GlooRank(rank, folder, FileStore(store, 2), [torch.from_numpy(array)])
    while True:
        control.send("ready")
        runner.run(control.recv())


def gloo(stack: ExitStack, folders: list[Path], value: torch.Tensor, cores: list[int]) -> Round:
    """Two ranks, each pinned to a core; a round is whole batches of 8 microbatches."""
    store = stack.enter_context(tempfile.TemporaryDirectory())
    workers = []
    for rank, folder in enumerate(folders):
        workers.append(spawn_worker("benchmarks.peers:gloo_worker", name=f"gloo rank {rank}", cores=[cores[rank]]))
        stack.callback(workers[-1].close, timeout_s=1.0)
        workers[-1].connection.send((rank, folder, f"{store}/store", value.numpy()))
    for worker in workers:
        receive(worker, 120, "during loading")

    def run(count: int) -> float:
        num_batches = -(-count // NUM_MICROBATCHES)
        start = time.perf_counter()
        for worker in workers:
            worker.connection.send(num_batches)
        for worker in workers:
            receive(worker, 600, "during a round")
        return (time.perf_counter() - start) * count / (num_batches * NUM_MICROBATCHES)

    return run


class RayStage:
    """A stage on one thread of an actor's process, which keeps freed memory, as workers of ours do."""

    def __init__(self, folder: Path, cores: Sequence[int] = ()) -> None:
        libc = ctypes.CDLL(None)
        for parameter, setting in ((-3, 1 << 30), (-1, 2**31 - 1), (-2, 64 << 20)):
            libc.mallopt(parameter, setting)
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(1)
        self._module = load_stage(folder, trust=True).module

    def run(self, values: Sequence[torch.Tensor]) -> Any:
        """The outputs of the stage."""
        with torch.inference_mode():
            return self._module(*values)


def compiled(stack: ExitStack, actors: Sequence[Any], **options: Any) -> Any:
    """Two actors of ``RayStage`` as a compiled graph of Ray, which ends with its actors."""
    from ray.dag import InputNode

    with InputNode() as node:
        graph = actors[1].run.bind(actors[0].run.bind(node))
        graph = graph.experimental_compile(_max_inflight_executions=NUM_MICROBATCHES, **options)
    stack.callback(lambda: graph.teardown(kill_actors=True))
    return graph


def in_flight(send: Callable[[], Callable[[], Any]], count: int) -> Any:
    """Keep ``NUM_MICROBATCHES`` requests in flight until ``count`` are answered; return the last answer.

    ``send`` sends a request, and returns the function that waits for its answer.
    """
    waiting: deque[Callable[[], Any]] = deque()
    for _ in range(count):
        if len(waiting) == NUM_MICROBATCHES:
            waiting.popleft()()
        waiting.append(send())
    answer = None
    while waiting:
        answer = waiting.popleft()()
    return answer


def ray_graph(stack: ExitStack, folders: list[Path], value: torch.Tensor, cores: list[int]) -> Round:
    """Two Ray actors, each pinned to a core, in a compiled graph. Raises: ImportError: Ray is not installed."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False, runtime_env={"working_dir": None})
    stack.callback(ray.shutdown)
    actors = [ray.remote(num_cpus=1)(RayStage).remote(folder, [core]) for folder, core in zip(folders, cores, strict=True)]
    graph = compiled(stack, actors)

    def run(count: int) -> float:
        start = time.perf_counter()
        in_flight(lambda: partial(ray.get, graph.execute((value,))), count)
        return time.perf_counter() - start

    run(2)
    return run


def actor_on(node: Node, kind: type, *arguments: Any, **options: Any) -> Any:
    """A Ray actor on a node of a cluster. It takes no processor of the node's, which agents of ours have."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=place, **options)(kind).remote(*arguments)


def two_cores() -> list[int]:
    """The first and the last core that this process may use."""
    cores = affinity()
    return [cores[0], cores[-1]]


def stages_between(programs: list[StageProgram]) -> int:
    """Bytes that cross the cut."""
    return sum(sum(spec.num_bytes for spec in one.outputs) for one, _ in pairwise(programs))
