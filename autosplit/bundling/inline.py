"""Run the stages of a network in the caller's own process, without rings and workers: one by one, or each in a thread.

With threads, a request passes the stages through bounded queues, so that several stages work on different requests at once::

    run()  -> caller's thread: stage 0, stage 1, ...  -> answer
    submit -> queue -> thread of stage 0 -> queue -> thread of stage 1 -> ... -> future
"""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType

import torch

from autosplit.errors import RefusedError, StageError, UsageError, raise_faults
from autosplit.running.request import Tensors
from autosplit.running.wiring import StagePlacement, wire
from autosplit.tracing.tensorspec import differences, laid_out


@dataclass(frozen=True, eq=False)
class _Job:
    """A request under way: the values that are there, and the future of its answer."""

    values: dict[str, torch.Tensor]
    answer: "Future[Tensors]" = field(default_factory=Future)


class InlineEngine:
    """Stages as functions of the values that are there; takes requests as a Pipeline does. A stage has one replica.

    Args:
        stages: in topological order.
        inputs, outputs: the names of the values that a request gives and gets.
        threaded: whether each stage has a thread of its own, on the cores of its device.
    """

    def __init__(
        self, stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str], *, threaded: bool = False
    ) -> None:
        self.wiring = wire(stages, inputs, outputs)
        self._specs = [self.wiring.input_specs.get(name) for name in self.wiring.inputs]
        self._runs = []
        for stage in stages:
            stage.module.import_packages()
            self._runs.append(stage.module.load(stage.threads or 1, stage.devices[0].name, shared=True))
        last = {spec.name: number for number, stage in enumerate(stages) for spec in stage.inputs}
        self._dropped = [
            [name for name, reader in last.items() if reader == number and name not in outputs] for number in range(len(stages))
        ]
        self._queues = [queue.Queue[_Job | None](stage.queue_depth) for stage in stages] if threaded else []
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=stages[number].name, daemon=True)
            for number in range(len(self._queues))
        ]
        for thread in self._threads:
            thread.start()

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """One request, start to end."""
        return self.submit(inputs).result()

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
        """The answers to all requests, in their order."""
        return list(self.stream(requests))

    def stream(self, requests: Iterable[Sequence[torch.Tensor]]) -> Iterator[Tensors]:
        """The answers to any number of requests, in their order; the queues bound how many are in memory."""
        under_way: deque[Future[Tensors]] = deque()
        for inputs in requests:
            under_way.append(self.submit(inputs))
            while under_way and (under_way[0].done() or len(under_way) > self.wiring.window):
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def submit(self, inputs: Sequence[torch.Tensor]) -> "Future[Tensors]":
        """The future of one request, which is done when this returns if the stages have no threads.

        Raises: UsageError: the inputs do not fit. RefusedError: the engine is closed.
        """
        if self._closed:
            raise RefusedError("the bundle is closed; load it again")
        job = _Job(self._values(inputs))
        if self._queues:
            self._queues[0].put(job)
            return job.answer
        with torch.inference_mode():
            for number in range(len(self._runs)):
                if not self._step(number, job):
                    return job.answer
        self._finish(job)
        return job.answer

    def close(self) -> None:
        """Answer what was taken in, then end the threads."""
        if self._closed:
            return
        self._closed = True
        if self._queues:
            self._queues[0].put(None)
        for thread in self._threads:
            thread.join()
        self._runs.clear()

    def __enter__(self) -> "InlineEngine":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _values(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        if len(inputs) != len(self._specs):
            raise UsageError(f"{len(inputs)} inputs were given, and the network takes {len(self._specs)}")
        pairs = [(spec, value) for spec, value in zip(self._specs, inputs, strict=True) if spec is not None]
        faults = differences([spec for spec, _ in pairs], [value for _, value in pairs])
        raise_faults(UsageError, "the inputs do not fit the network", faults)
        values = dict(zip(self.wiring.inputs, inputs, strict=True))
        return {**values, **{spec.name: laid_out(value, spec) for spec, value in pairs}}

    def _step(self, number: int, job: _Job) -> bool:
        """Run a stage on a request; False if it failed, and the future says so."""
        stage, values = self.wiring.stages[number], job.values
        given = [values[spec.name] for spec in stage.inputs]
        try:
            made = self._runs[number](given)
        except Exception as failure:
            op = None
            with contextlib.suppress(Exception):
                op = stage.module.failing_op(given)
            where = f" while executing '{op}'" if op else ""
            text = f"stage '{stage.name}' failed{where}: {type(failure).__name__}: {failure}"
            job.answer.set_exception(StageError(text))
            return False
        values.update(zip((spec.name for spec in stage.outputs), made, strict=True))
        for name in self._dropped[number]:
            del values[name]
        return True

    def _finish(self, job: _Job) -> None:
        job.answer.set_result(tuple(job.values[name] for name in self.wiring.outputs))

    def _serve(self, number: int) -> None:
        """The life of a stage's thread: take jobs until None comes, and pass on those that did not fail."""
        with contextlib.suppress(OSError):  # cores that this process may not use
            os.sched_setaffinity(0, self.wiring.stages[number].devices[0].cores or os.sched_getaffinity(0))
        target = self._queues[number + 1] if number + 1 < len(self._queues) else None
        with torch.inference_mode():
            for job in iter(self._queues[number].get, None):
                if self._step(number, job):
                    target.put(job) if target else self._finish(job)
        if target:
            target.put(None)
