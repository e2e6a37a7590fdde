"""Time a stage on CPU cores: whole passes and passes op by op in turn, so that drift of the machine hits both."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autosplit.backends.base import Runnable, get_backend
from autosplit.backends.lowering import in_precision
from autosplit.backends.profiling import Probe, RuntimeNode, probe
from autosplit.devices.processes import thread_times_s
from autosplit.tracing.flattening import is_op
from autosplit.tracing.splitting import StageProgram, load_stage
from autosplit.values.samples import Precision, Samples

INPUTS = "inputs.pt"
"""The file beside a saved stage that holds one tensor for each of its inputs."""

NUM_EAGER_PASSES = 2

WARM_UP_PASSES = 3
"""Warm-up ends after this many passes, or after ``LONG_S``."""

PREEMPTED_S = 200e-6
"""A longer wait for the core within one pass is another process's time slice; a shorter one is a wake-up of our own."""

SWEPT_BYTES = 4 << 20
"""More than the private cache of a core holds."""

LONG_S = 0.2
"""After this many seconds fewer passes are enough. So long a pass needs no other one to warm up or to wake the core."""

CERTAIN, LEAST_CERTAIN = 0.01, 5
"""Passes end once the standard error of their median is below this share of it, as after so many passes at least.

Predictions err by 3.6 % (median). Of 28 recorded measurements of 13 to 120 passes, half end after 5 passes, whose median is 0.7 %
off that of all (2.7 % at the 90th percentile); with half of this share, after 16 passes (1.8 %).
"""


@dataclass(frozen=True, slots=True)
class PassBudget:
    """The passes to make: until their median is certain, ``seconds`` are over, or ``most`` are made, but at least ``least``.

    The last ``most`` are kept. ``least_long`` passes are enough where they took ``LONG_S``. Devices that start together must be
    busy together, so passes go on for at least ``overlap_s``. Passes of an ``earlier`` round count for the median as
    ``Samples.with_round`` says, so a later round is short unless it finds the machine faster than then.
    """

    seconds: float
    least: int = 3
    most: int = 60
    overlap_s: float = 0.3
    least_long: int = 2
    earlier: Samples | None = None

    def more(self, samples_s: Sequence[float], elapsed_s: float) -> bool:
        """Whether another pass is due after passes of these seconds, which took ``elapsed_s`` in all."""
        least = min(self.least, self.least_long) if elapsed_s > LONG_S else self.least
        if len(samples_s) < least or elapsed_s < min(self.overlap_s, self.seconds):
            return True
        known = samples_s if self.earlier is None else self.earlier.with_round(Samples(tuple(samples_s))).samples_s
        return len(samples_s) < self.most and elapsed_s < self.seconds and not is_certain(known)


def is_certain(samples_s: Sequence[float]) -> bool:
    """Whether the standard error of the median is below ``CERTAIN`` of it.

    It is that of a normal distribution, whose spread is taken from the median distance to the median, so that single slow passes
    do not count.

    >>> is_certain([1.0, 1.01, 0.99, 1.0, 1.0]), is_certain([1.0, 1.1, 0.9, 1.0, 1.1]), is_certain([1.0])
    (True, False, False)
    """
    middle_s = statistics.median(samples_s) if len(samples_s) >= LEAST_CERTAIN else 0.0
    distance_s = 1.4826 * statistics.median(abs(one_s - middle_s) for one_s in samples_s)
    return math.sqrt(math.pi / 2 / len(samples_s)) * distance_s < CERTAIN * middle_s


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of whole passes, and the nodes (ops for eager) of the profiled passes between them, if any.

    ``waited`` is the share of the time in which this process was ready to run and another one had its core.
    """

    whole_s: tuple[float, ...]
    nodes: tuple[RuntimeNode, ...]
    waited: float = 0.0


@dataclass(frozen=True, eq=False, slots=True)
class LoadedStage:
    """A stage, the folder where it was saved and prepared, and one tensor for each of its inputs."""

    program: StageProgram
    folder: Path
    inputs: Sequence[torch.Tensor]

    @staticmethod
    def load(folder: Path) -> "LoadedStage":
        """The stage in a folder, with the inputs beside it."""
        return LoadedStage(load_stage(folder, trust=True), folder, torch.load(folder / INPUTS, weights_only=True))


class OpTimer(fx.Interpreter):
    """Runs a flat program in graph order on a fixed number of threads and times every op.

    Picking from a tuple counts for the op that made it; a cast that lowering added counts for the op that needed it. A single
    thread is timed by its CPU time, which stands still while other processes have the core.
    """

    def __init__(self, module: fx.GraphModule, threads: int = 1) -> None:
        super().__init__(module)
        self._threads = threads
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self._samples_s: dict[str, list[float]] = {op_of(node): [] for node in filter(is_op, module.graph.nodes)}

    def sample(self, inputs: Sequence[torch.Tensor]) -> Any:
        """One pass, and one more sample of every op; returns the outputs."""
        torch.set_num_threads(self._threads)
        for samples in self._samples_s.values():
            samples.append(0.0)
        return self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        """One node, timed if it is an op; fetching its arguments is left out."""
        if not is_op(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Callable[..., Any] = n.target  # type: ignore[assignment]
        start = self._clock()
        result = target(*args, **kwargs)
        self._samples_s[op_of(n)][-1] += self._clock() - start
        return result

    def nodes(self) -> list[RuntimeNode]:
        """Every op with one sample for each pass."""
        return [RuntimeNode(name, "op", tuple(samples)) for name, samples in self._samples_s.items()]

    def least_s(self, inputs: Sequence[torch.Tensor]) -> dict[str, float]:
        """Op name to its least seconds over a few passes, by which a backend that fuses shares its time out."""
        for _ in range(NUM_EAGER_PASSES):
            self.sample(inputs)
        return {name: min(samples) for name, samples in self._samples_s.items()}


class Timer:
    """A stage on one backend, loaded and warm. ``outputs`` are those of its first pass, to be checked."""

    def __init__(self, stage: LoadedStage, backend: str, threads: int, precision: Precision = "f32") -> None:
        self._inputs, self._threads = stage.inputs, threads
        self.run: Runnable = get_backend(backend).load(stage.folder, threads, precision, trust=True)
        self._probe: Probe | OpTimer | None = (
            OpTimer(in_precision(stage.program, precision).module, threads)
            if backend == "eager"
            else probe(backend, stage.folder, threads, precision)
        )
        begun, num_passes = time.perf_counter(), 1
        self.outputs = self.run(self._inputs)
        self._is_long = time.perf_counter() - begun > LONG_S
        while num_passes < WARM_UP_PASSES and time.perf_counter() - begun < LONG_S:
            self._pass()
            num_passes += 1
        if self._probe is not None and not self._is_long:
            self._probe.sample(self._inputs)

    def time(self, budget: PassBudget, ops: bool = False, wake: bool = False) -> Timed:
        """Passes of the whole stage, without the time slices of other processes.

        Args:
            ops: make a profiled pass after each; possible once, since reading the profiler ends it.
            wake: make one pass first that is not counted, unless it is long; after a pause of seconds a short one takes up to a
                third longer.
        """
        if wake and not self._is_long:
            self._pass()
        probe = self._probe if ops else None
        samples: list[float] = []
        start, waited_s = time.perf_counter(), self._waited_s()
        while budget.more(samples, time.perf_counter() - start):
            samples.append(self._pass())
            if probe is not None:
                probe.sample(self._inputs)
        waited = (self._waited_s() - waited_s) / (time.perf_counter() - start)
        # The last samples are taken, because the first one of every node is of the warm-up pass.
        kept = min(len(samples), budget.most)
        nodes = [replace(node, samples_s=node.samples_s[-kept:]) for node in probe.nodes()] if probe is not None else []
        self._probe = None if ops else self._probe
        return Timed(tuple(samples[-kept:]), tuple(nodes), waited)

    def _waited_s(self) -> float:
        """Seconds so far that this process was ready to run while others had its cores."""
        return run_queue_s(self._threads)

    def _pass(self) -> float:
        """Seconds of one pass less the time slices of other processes, but never less than the CPU time of this thread."""
        waited_s = run_queue_s(self._threads)
        cpu_s, start = time.thread_time(), time.perf_counter()
        outputs = self.run(self._inputs)
        seconds, cpu_s = time.perf_counter() - start, time.thread_time() - cpu_s
        waited_s = run_queue_s(self._threads) - waited_s
        del outputs
        # A wait that is longer than the pass lay outside it, at least in part.
        return max(seconds - waited_s, cpu_s) if PREEMPTED_S < waited_s < seconds else seconds


def cut_s(stages: Sequence[tuple[Runnable, Sequence[torch.Tensor]]], budget: PassBudget) -> float:
    """Median seconds that two neighbouring stages take longer than both as one; 0 if they do not.

    The private cache is swept before each stage, as if another core had written its inputs.

    Args:
        stages: the first stage, the second one, and both as one; each with its inputs.
        budget: a pass runs each of the three once.
    """
    swept = torch.zeros(SWEPT_BYTES, dtype=torch.uint8)
    extra: list[float] = []
    for run, inputs in stages:
        run(inputs)
    start = time.perf_counter()
    while budget.more(extra, time.perf_counter() - start):
        taken = []
        for run, inputs in stages:
            swept.add_(1)
            begun = time.perf_counter()
            outputs = run(inputs)
            taken.append(time.perf_counter() - begun)
            del outputs
        extra.append(taken[0] + taken[1] - taken[2])
    return max(0.0, statistics.median(extra))


def run_queue_s(threads: int) -> float:
    """Seconds that this process was ready to run while others had its cores; 0 where the kernel does not say.

    Waits of one thread add up; of several ``threads`` that work at a time the longest counts.
    """
    waits = thread_times_s("self", 1)
    return sum(waits) if threads == 1 else max(waits, default=0.0)


def op_of(node: fx.Node) -> str:
    """The op of the graph that a node works for."""
    return str(node.meta.get("op", node.name))
