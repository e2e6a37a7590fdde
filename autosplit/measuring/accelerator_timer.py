"""Time a stage on an accelerator by events in its own queue: one pair for each op, one wait for each pass.

A clock of the host would time how long an op takes to queue, not to run. An op that is shorter than its launch appears as long
as the launch, since the queue is empty then; all ops are scaled to the recorded whole. Compute is timed from inputs on the
device to outputs on the device. The links charge for the copies.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autosplit.backends.base import get_backend
from autosplit.backends.lowering import in_precision
from autosplit.backends.placing import place_runnable
from autosplit.devices.accelerators import Accelerator, Queue
from autosplit.measuring.stage_timer import LoadedStage, OpTimer, Timer, op_of
from autosplit.tracing.flattening import is_op
from autosplit.tracing.splitting import StageProgram, place_stage
from autosplit.values.samples import Precision

WARM_UP_PASSES = 3


class EventOpTimer(OpTimer):
    """Runs a flat program in graph order in a queue, with an event before and after every op."""

    def __init__(self, module: fx.GraphModule, accelerator: Accelerator, queue: Queue) -> None:
        super().__init__(module)
        self._accelerator, self._queue = accelerator, queue
        self._events = {node: (accelerator.event(), accelerator.event()) for node in filter(is_op, module.graph.nodes)}

    def run_node(self, n: fx.Node) -> Any:
        """One node, between its events if it is an op."""
        if n not in self._events:
            return fx.Interpreter.run_node(self, n)
        start, end = self._events[n]
        start.record(self._queue)
        result = fx.Interpreter.run_node(self, n)
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


class AcceleratorTimer(Timer):
    """A stage on an accelerator, placed as it will run and warm: waking it has no effect.

    Raises: BackendError: the backend does not run there.
    """

    def __init__(self, stage: LoadedStage, backend: str, accelerator: Accelerator, precision: Precision = "f32") -> None:
        self._accelerator, self._program, program = accelerator, stage.program, stage.program
        place = get_backend(backend).place
        accelerator.allow_tf32(precision == "tf32")
        self.run = self._placed = place_runnable(
            accelerator, lambda device, queue: place(stage.folder, device, queue, precision), program.inputs, program.outputs
        )
        for _ in range(WARM_UP_PASSES * len(self._placed.contexts)):
            self.run(stage.inputs)
        self._start, self._end, self._is_long = accelerator.event(), accelerator.event(), True
        self._inputs = [staged.device for staged in self._placed.contexts[0].sources]
        self._probe = event_op_timer(program, accelerator, self._placed.computing, precision) if backend == "eager" else None
        if self._probe is not None:
            self._probe.sample(self._inputs)

    def eager_op_s(self) -> dict[str, float]:
        """As ``OpTimer.least_s``, in eager here."""
        ops = event_op_timer(self._program, self._accelerator, self._placed.computing, "f32")  # only shares count
        return ops.least_s(self._inputs)

    def _waited_s(self) -> float:
        """0: the device computes whether the host waits for its core or not."""
        return 0.0

    def _pass(self) -> float:
        """Seconds of one pass from inputs on the device to outputs on the device."""
        self._start.record(self._placed.computing)
        self._accelerator.enqueue(self._placed.computing, self._placed.contexts[0].compute)
        self._end.record(self._placed.computing)
        self._end.synchronise()
        return self._end.seconds_since(self._start)


def event_op_timer(program: StageProgram, accelerator: Accelerator, queue: Queue, precision: Precision) -> EventOpTimer:
    """The ops of a stage one by one in torch on an accelerator."""
    return EventOpTimer(place_stage(in_precision(program, precision), accelerator.device).module, accelerator, queue)
