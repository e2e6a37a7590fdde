"""Time a stage on an accelerator by events in its own queue: one pair for each op, one wait for each pass.

A clock of the host would time how long an op takes to queue, not to run. An op that is shorter than its launch appears as long
as the launch, since the queue is empty then; all ops are scaled to the recorded whole. Compute is timed from inputs on the
device to outputs on the device. The links charge for the copies.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autosplit.backends.base import get_backend
from autosplit.backends.lowering import in_precision
from autosplit.backends.placing import place_runnable
from autosplit.backends.profiling import RuntimeNode
from autosplit.devices.accelerators import Accelerator, Queue
from autosplit.measuring.stage_timer import PassBudget, Timed, op_of
from autosplit.tracing.flattening import is_op
from autosplit.tracing.splitting import StageProgram, place_stage
from autosplit.values.samples import Precision

WARM_UP_PASSES = 3


class EventOpTimer(fx.Interpreter):
    """Runs a flat program in graph order in a queue, with an event before and after every op.

    Picking from a tuple counts for the op that made it; a cast that lowering added counts for the op that needed it.
    """

    def __init__(self, module: fx.GraphModule, accelerator: Accelerator, queue: Queue) -> None:
        super().__init__(module)
        self._accelerator, self._queue = accelerator, queue
        self._events = {node: (accelerator.event(), accelerator.event()) for node in filter(is_op, module.graph.nodes)}
        self._samples_s: dict[str, list[float]] = {op_of(node): [] for node in self._events}

    def run_node(self, n: fx.Node) -> Any:
        """One node, between its events if it is an op."""
        if n not in self._events:
            return super().run_node(n)
        start, end = self._events[n]
        start.record(self._queue)
        result = super().run_node(n)
        end.record(self._queue)
        return result

    def sample(self, inputs: Sequence[torch.Tensor]) -> None:
        """One pass over inputs that are on the device, and one more sample of every op."""

        def one_pass() -> None:
            with torch.inference_mode():
                self.run(*inputs)

        self._accelerator.enqueue(self._queue, one_pass)
        self._accelerator.synchronise()
        for samples in self._samples_s.values():
            samples.append(0.0)
        for node, (start, end) in self._events.items():
            self._samples_s[op_of(node)][-1] += end.seconds_since(start)

    def nodes(self) -> list[RuntimeNode]:
        """Every op with one sample for each pass."""
        return [RuntimeNode(name, "op", tuple(samples)) for name, samples in self._samples_s.items()]


class AcceleratorTimer:
    """A stage on an accelerator, placed as it will run and warm.

    Args:
        program: the stage.
        folder: where it was saved.
        backend: the name of the backend.
        accelerator: where it runs.
        inputs: one tensor in host memory for each input.
        precision: what the backend computes in.
    Raises: BackendError: the backend does not run there.
    """

    def __init__(
        self,
        program: StageProgram,
        folder: Path,
        backend: str,
        accelerator: Accelerator,
        inputs: Sequence[torch.Tensor],
        precision: Precision = "f32",
    ) -> None:
        self._accelerator = accelerator
        chosen = get_backend(backend)
        self.run = place_runnable(
            accelerator, lambda device, queue: chosen.place(folder, device, queue, precision), program.inputs, program.outputs
        )
        self._context = self.run.contexts[0]
        for _ in range(WARM_UP_PASSES * len(self.run.contexts)):
            self.run(inputs)
        self._start, self._end = accelerator.event(), accelerator.event()
        self._on_device = [staged.device for staged in self._context.inputs]
        self._ops = event_op_timer(program, accelerator, self.run.computing, precision) if backend == "eager" else None
        if self._ops is not None:
            self._ops.sample(self._on_device)

    def eager_op_s(self, program: StageProgram, num_passes: int) -> dict[str, float]:
        """Op name to its least seconds in eager here, by which a backend that fuses shares its time out."""
        ops = event_op_timer(program, self._accelerator, self.run.computing, "f32")
        for _ in range(num_passes):
            ops.sample(self._on_device)
        return {node.name: min(node.samples_s) for node in ops.nodes()}

    def whole(self, budget: PassBudget, wake: bool = False) -> tuple[float, ...]:
        """Seconds of each pass of the whole stage. An accelerator needs no pass to ``wake`` it."""
        return self._passes(budget, None)

    def interleaved(self, budget: PassBudget) -> Timed:
        """Whole passes and passes op by op in turn."""
        samples = self._passes(budget, self._ops)
        nodes = self._ops.nodes() if self._ops is not None else []
        return Timed(samples, tuple(RuntimeNode(n.name, n.kind, n.samples_s[-len(samples) :]) for n in nodes))

    def _passes(self, budget: PassBudget, ops: EventOpTimer | None) -> tuple[float, ...]:
        samples: list[float] = []
        began = time.perf_counter()
        while budget.more(len(samples), time.perf_counter() - began):
            self._start.record(self.run.computing)
            self._accelerator.enqueue(self.run.computing, self._context.compute)
            self._end.record(self.run.computing)
            self._end.synchronise()
            samples.append(self._end.seconds_since(self._start))
            if ops is not None:
                ops.sample(self._on_device)
        return tuple(samples[-budget.most :])


def event_op_timer(program: StageProgram, accelerator: Accelerator, queue: Queue, precision: Precision) -> EventOpTimer:
    """The ops of a stage one by one in torch on an accelerator."""
    return EventOpTimer(place_stage(in_precision(program, precision), accelerator.device).module, accelerator, queue)
