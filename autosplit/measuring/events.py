"""Time a stage on an accelerator: events in its own queue, one pair for each op, and one wait for each pass.

A clock of the host would see how long it takes to queue an op, not to run it. An event sees that too of ops that are shorter
than their launch, for the queue is empty then: such ops are taken for about as long as a launch, and all are scaled to what
the whole takes, recorded. Compute is timed from inputs on the device to outputs on the device; what the way there and back
costs is in the links.
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
from autosplit.measuring.timing import Rounds, Timed, op_of
from autosplit.tracing.flattening import is_op
from autosplit.tracing.splitting import StageProgram, place_stage
from autosplit.values.samples import Precision

WARM_UP_PASSES = 3


class EventProbe(fx.Interpreter):
    """Runs a flat program in graph order in a queue, with an event before and after every op.

    Picking from a tuple counts for the op that made it, a cast that lowering put in for the op that needed it.
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
        """Every op with its samples, one a pass."""
        return [RuntimeNode(name, "op", tuple(samples)) for name, samples in self._samples_s.items()]


class AcceleratedTimer:
    """A stage on an accelerator, placed as it will run and warm, ready to be timed.

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
        self._on_device = [berth.device for berth in self._context.inputs]
        self._probe = event_probe(program, accelerator, self.run.computing, precision) if backend == "eager" else None
        if self._probe is not None:
            self._probe.sample(self._on_device)

    def weights(self, program: StageProgram, passes: int) -> dict[str, float]:
        """Op name to the least seconds that eager took it here: how a backend that fuses shares its time out."""
        probe = event_probe(program, self._accelerator, self.run.computing, "f32")
        for _ in range(passes):
            probe.sample(self._on_device)
        return {node.name: min(node.samples_s) for node in probe.nodes()}

    def whole(self, rounds: Rounds) -> tuple[float, ...]:
        """Seconds of each pass of the whole stage."""
        return self._rounds(rounds, None)

    def interleaved(self, rounds: Rounds) -> Timed:
        """Whole passes and passes op by op in turn."""
        samples = self._rounds(rounds, self._probe)
        nodes = self._probe.nodes() if self._probe is not None else []
        return Timed(samples, tuple(RuntimeNode(n.name, n.kind, n.samples_s[-len(samples) :]) for n in nodes))

    def _rounds(self, rounds: Rounds, probe: EventProbe | None) -> tuple[float, ...]:
        samples: list[float] = []
        began = time.perf_counter()
        while rounds.more(len(samples), time.perf_counter() - began):
            self._start.record(self.run.computing)
            self._accelerator.enqueue(self.run.computing, self._context.compute)
            self._end.record(self.run.computing)
            self._end.synchronise()
            samples.append(self._end.seconds_since(self._start))
            if probe is not None:
                probe.sample(self._on_device)
        return tuple(samples[-rounds.most :])


def event_probe(program: StageProgram, accelerator: Accelerator, queue: Queue, precision: Precision) -> EventProbe:
    """The ops of a stage one by one in torch on an accelerator."""
    return EventProbe(place_stage(in_precision(program, precision), accelerator.device).module, accelerator, queue)
