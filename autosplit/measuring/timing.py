"""Time a stage pass by pass: the whole as it will run, and the same ops one by one, interleaved so that drift hits both."""

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
from autosplit.tracing.splitting import StageProgram
from autosplit.values.samples import Precision

WARM_UP_PASSES = 3
WARM_UP_S = 0.2
"""Passes are made until there were so many, or for so long: a slow model is warm after fewer."""

PREEMPTED_S = 200e-6
"""A longer wait for the core within one pass is another process's time slice; a shorter one is a wake-up of our own."""


SWEPT_BYTES = 4 << 20
"""More than a core's own cache holds."""

LONG_S = 5.0
"""Rounds that took so long are enough if there were two."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How many rounds to make, and which of them to keep.

    Until ``seconds`` have passed or ``most`` rounds were made, but at least ``least`` rounds (two where they take ``LONG_S``),
    and never for less than ``overlap_s``: devices that start together must be busy together. The last ``most`` rounds are kept.
    """

    seconds: float
    least: int = 3
    most: int = 60
    overlap_s: float = 0.3

    def more(self, done: int, elapsed_s: float) -> bool:
        """Whether another round is due after ``done`` rounds in ``elapsed_s`` seconds."""
        least = min(self.least, 2) if elapsed_s > LONG_S else self.least
        return done < least or elapsed_s < min(self.overlap_s, self.seconds) or (done < self.most and elapsed_s < self.seconds)


@dataclass(frozen=True, slots=True)
class Timed:
    """What the rounds gave: samples of the whole, and the nodes of each profiled pass (ops for eager).

    ``waited`` is the share of the time that this process was ready to run and another one had its core.
    """

    whole_s: tuple[float, ...]
    nodes: tuple[RuntimeNode, ...]
    waited: float = 0.0


class TimingInterpreter(fx.Interpreter):
    """Runs a flat program in graph order and times every op; picking from a tuple counts for the op that made it.

    A cast that lowering put in counts for the op that needed it.

    Args:
        module: the program.
        clock: seconds. Of a single thread its CPU time is asked, which stands still while other processes have the core.
    """

    def __init__(self, module: fx.GraphModule, clock: Callable[[], float]) -> None:
        super().__init__(module)
        self._clock = clock
        self.samples_s: dict[str, list[float]] = {op_of(node): [] for node in filter(is_op, module.graph.nodes)}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One pass: one more sample of every op."""
        for samples in self.samples_s.values():
            samples.append(0.0)
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """One node, timed if it is an op; fetching its arguments is left out."""
        if not is_op(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target: Callable[..., Any] = n.target  # type: ignore[assignment]
        start = self._clock()
        result = target(*args, **kwargs)
        self.samples_s[op_of(n)][-1] += self._clock() - start
        return result

    def nodes(self) -> list[RuntimeNode]:
        """Every op with its samples, one a pass."""
        return [RuntimeNode(name, "op", tuple(samples)) for name, samples in self.samples_s.items()]


class EagerProbe:
    """The ops of a stage one by one in torch, on a fixed number of threads."""

    def __init__(self, module: fx.GraphModule, threads: int) -> None:
        self._interpreter = TimingInterpreter(module, time.thread_time if threads == 1 else time.perf_counter)
        self._threads = threads

    def run(self, inputs: Sequence[torch.Tensor]) -> None:
        """One pass with every op timed."""
        torch.set_num_threads(self._threads)
        self._interpreter.run(*inputs)

    def nodes(self) -> list[RuntimeNode]:
        """Every op with its samples, one a pass."""
        return self._interpreter.nodes()


class Timer:
    """A stage on one backend, loaded and warm, ready to be timed.

    Args:
        program: the stage.
        folder: where it was saved and prepared.
        backend: the name of the backend.
        threads: its threads.
        inputs: one tensor for each input.
        precision: what the backend computes in.
    """

    def __init__(
        self,
        program: StageProgram,
        folder: Path,
        backend: str,
        threads: int,
        inputs: Sequence[torch.Tensor],
        precision: Precision = "f32",
    ) -> None:
        self._inputs = inputs
        self._threads = threads
        self.run: Runnable = get_backend(backend).load(folder, threads, precision)
        if backend == "eager":
            self._probe: Probe | None = EagerProbe(in_precision(program, precision).module, threads)
        else:
            self._probe = probe(backend, folder, threads, precision)
        begun = time.perf_counter()
        for _ in range(WARM_UP_PASSES):
            self._pass()
            if time.perf_counter() - begun > WARM_UP_S:
                break
        if self._probe is not None:
            self._probe.run(inputs)

    def rouse(self) -> None:
        """One pass that is not counted: the first after a pause of seconds takes up to a third longer."""
        self._pass()

    def whole(self, rounds: Rounds) -> tuple[float, ...]:
        """Seconds of each pass of the whole stage, without the time that other processes had the core."""
        samples: list[float] = []
        start = time.perf_counter()
        while rounds.more(len(samples), time.perf_counter() - start):
            samples.append(self._pass())
        return tuple(samples[-rounds.most :])

    def interleaved(self, rounds: Rounds) -> Timed:
        """Whole passes and profiled passes in turn, after one that is not counted; only whole ones can be timed after that."""
        self.rouse()  # it may have been ready for seconds while the host was at work
        samples: list[float] = []
        start, waited_s = time.perf_counter(), run_queue_s(self._threads)
        while rounds.more(len(samples), time.perf_counter() - start):
            samples.append(self._pass())
            if self._probe is not None:
                self._probe.run(self._inputs)
        nodes = self._probe.nodes() if self._probe is not None else []
        waited = (run_queue_s(self._threads) - waited_s) / (time.perf_counter() - start)
        self._probe = None
        # The first sample of every node is of the warm-up pass, so the last ones are taken.
        kept = min(len(samples), rounds.most)
        return Timed(tuple(samples[-kept:]), tuple(replace(node, samples_s=node.samples_s[-kept:]) for node in nodes), waited)

    def _pass(self) -> float:
        """One pass, less the time slices of other processes, but never less than the CPU time of this thread."""
        waited_s = run_queue_s(self._threads)
        cpu_s, start = time.thread_time(), time.perf_counter()
        outputs = self.run(self._inputs)
        seconds, cpu_s = time.perf_counter() - start, time.thread_time() - cpu_s
        waited_s = run_queue_s(self._threads) - waited_s
        del outputs
        # A wait that is longer than the pass lay outside it, at least in part.
        return max(seconds - waited_s, cpu_s) if PREEMPTED_S < waited_s < seconds else seconds


def cut_s(stages: Sequence[tuple[Runnable, Sequence[torch.Tensor]]], rounds: Rounds) -> float:
    """Seconds that two neighbouring stages take more than both as one: the median over rounds, 0 if it is less.

    Each begins as behind another process, with what it reads no longer in the core's own cache.

    Args:
        stages: the first one, the second one, and both as one; each with its inputs.
        rounds: how many to make; each stage runs once in a round.
    """
    swept = torch.zeros(SWEPT_BYTES, dtype=torch.uint8)
    extra: list[float] = []
    for run, inputs in stages:
        run(inputs)
    start = time.perf_counter()
    while rounds.more(len(extra), time.perf_counter() - start):
        taken = []
        for run, inputs in stages:
            swept.add_(1)
            begun = time.perf_counter()
            outputs = run(inputs)
            taken.append(time.perf_counter() - begun)
            del outputs
        extra.append(taken[0] + taken[1] - taken[2])
    return max(0.0, statistics.median(extra))


def eager_weights(program: StageProgram, threads: int, inputs: Sequence[torch.Tensor], passes: int) -> dict[str, float]:
    """Op name to the least seconds that eager took it in a few passes: how a backend that fuses shares its time out."""
    timed = EagerProbe(program.module, threads)
    for _ in range(passes):
        timed.run(inputs)
    return {node.name: min(node.samples_s) for node in timed.nodes()}


def run_queue_s(threads: int) -> float:
    """Seconds that this process has been ready to run while others had its cores; 0 where the kernel does not say.

    Args:
        threads: how many of its threads work at a time: the waits of one after the other add up, of several at once the
            longest counts.
    """
    waits = thread_times_s("self", 1)
    return sum(waits) if threads == 1 else max(waits, default=0.0)


def op_of(node: fx.Node) -> str:
    """The op of the graph that a node works for."""
    return str(node.meta.get("op", node.name))
