"""A stage on an accelerator: inputs there, compute, outputs back, each in a queue of its own, two requests under way.

::

    arriving    in k   | in k+1    | in k+2 ...
    computing          | compute k | compute k+1 ...
    leaving                        | out k ...

Every request has a context: staging memory in the host and tensors on the device that never move, so that the compute between
them can be recorded once and replayed (a CUDA graph). Events order the queues; the host waits for results alone.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import torch

from autosplit.backends.base import Runnable
from autosplit.devices.accelerators import Accelerator, Event, Queue, Work
from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec, storage_bytes, view_storage

NUM_CONTEXTS = 2


class Berth:
    """A tensor of one layout in two places: staging memory of the host, and memory of the device.

    A transfer moves the bytes as they lie, gaps included: a copy of a strided tensor would not leave the host to itself.
    """

    def __init__(self, accelerator: Accelerator, spec: TensorSpec) -> None:
        self.spec = spec
        num_bytes = max(1, storage_bytes(spec))
        with torch.inference_mode(False):  # else only inference mode may write to them later
            self._staging, self._memory = accelerator.staging(num_bytes), accelerator.empty(num_bytes)
        self.host, self.device = view_storage(self._staging, spec), view_storage(self._memory, spec)

    def arrive(self) -> None:
        """Staging memory to device."""
        self._memory.copy_(self._staging, non_blocking=True)

    def leave(self) -> None:
        """Device to staging memory."""
        self._staging.copy_(self._memory, non_blocking=True)

    def copy(self) -> torch.Tensor:
        """What came to the host, in memory of its own."""
        copy = empty_like_spec(self.spec)
        copy_into(copy, self.host)
        return copy

    def zero(self) -> None:
        """Zeros on the device."""
        self._memory.zero_()

    def fill(self, made: torch.Tensor) -> None:
        """Put a tensor of the device here. Raises: ValueError: it is of another shape or dtype; a copy would stretch it."""
        if made.shape != self.device.shape or made.dtype != self.device.dtype:
            announced = f"{self.device.dtype} {list(self.device.shape)}"
            raise ValueError(
                f"output '{self.spec.name}' is {made.dtype} {list(made.shape)} on the device, and {announced} was announced"
            )
        copy_into(self.device, made)


@dataclass(frozen=True, eq=False)
class Context:
    """What one request occupies from its inputs to its outputs."""

    inputs: tuple[Berth, ...]
    outputs: tuple[Berth, ...]
    compute: Work
    arrived: Event
    computed: Event
    left: Event

    def arrive(self) -> None:
        """All inputs to the device."""
        for berth in self.inputs:
            berth.arrive()

    def leave(self) -> None:
        """All outputs to the host."""
        for berth in self.outputs:
            berth.leave()


@dataclass(frozen=True, slots=True)
class Begun:
    """A request under way in its context."""

    context: Context

    def wait(self, most_s: float = math.inf) -> bool:
        """Block until it is computed: a device computes one request at a time. Raises: RuntimeError: the device failed."""
        self.context.computed.synchronise()
        return True

    def outputs(self) -> list[torch.Tensor]:
        """Its outputs in staging memory, valid until its context begins another request."""
        self.context.left.synchronise()
        return [berth.host for berth in self.context.outputs]


@dataclass
class PlacedStage:
    """A stage on an accelerator as a function of host tensors; ``begin`` is the first half of a call.

    Attributes:
        accelerator: where it is.
        contexts: requests that can be under way at once.
        computing: the queue that computes.
        note: why it is not one recorded graph, or ''.
    """

    accelerator: Accelerator
    contexts: Sequence[Context]
    computing: Queue
    note: str = ""
    _arriving: Queue = field(init=False)
    _leaving: Queue = field(init=False)

    def __post_init__(self) -> None:
        self._arriving, self._leaving = self.accelerator.queue(), self.accelerator.queue()
        self._turns = cycle(self.contexts)

    @property
    def num_contexts(self) -> int:
        """Requests that can be under way at once."""
        return len(self.contexts)

    def begin(self, inputs: Sequence[torch.Tensor]) -> Begun:
        """Take the inputs, which are free then, and put all of the request into the queues.

        The outputs of the request ``NUM_CONTEXTS`` before it are gone then.
        """
        context = next(self._turns)
        context.left.synchronise()
        for berth, value in zip(context.inputs, inputs, strict=True):
            copy_into(berth.host, value)
        self.accelerator.enqueue(self._arriving, context.arrive)
        context.arrived.record(self._arriving)
        context.arrived.hold(self.computing)
        self.accelerator.enqueue(self.computing, context.compute)
        context.computed.record(self.computing)
        context.computed.hold(self._leaving)
        self.accelerator.enqueue(self._leaving, context.leave)
        context.left.record(self._leaving)
        return Begun(context)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A whole request; the outputs are the caller's."""
        begun = self.begin(inputs)
        begun.outputs()
        return [berth.copy() for berth in begun.context.outputs]


Place = Callable[[Accelerator, Queue], tuple[Runnable, bool]]
"""Puts a stage on a device: a function of tensors there, working in the queue, and whether that can be recorded."""


def place_runnable(
    accelerator: Accelerator,
    place: Place,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    record: bool = True,
) -> PlacedStage:
    """A stage on an accelerator, its contexts warm and, where that works, recorded.

    Args:
        accelerator: where.
        place: what a backend does to put the stage there.
        inputs: the stage's inputs, in order.
        outputs: its outputs, in order.
        record: whether to record graphs at all.
    Raises: BackendError: the backend refuses. What the stage raises on zeros is for the first request to show.
    """
    computing = accelerator.queue()
    run, recordable = place(accelerator, computing)
    accelerator.synchronise()  # weights are copied in another queue
    note = "" if recordable else "its runtime launches the kernels itself"
    contexts: list[Context] = []
    for _ in range(NUM_CONTEXTS):
        sources = tuple(Berth(accelerator, spec) for spec in inputs)
        sinks = tuple(Berth(accelerator, spec) for spec in outputs)
        work = _compute(run, sources, sinks)
        accelerator.enqueue(computing, partial(_clear, sources))
        if record and not note:
            try:
                work = accelerator.capture(computing, work)
            except Exception as failure:
                note = f"no graph was recorded: {' '.join(str(failure).split())[:200]}"
        with contextlib.suppress(Exception):
            accelerator.enqueue(computing, work)
            accelerator.synchronise()
        contexts.append(Context(sources, sinks, work, *(accelerator.event() for _ in range(3))))
    return PlacedStage(accelerator, contexts, computing, note)


def _compute(run: Runnable, sources: Sequence[Berth], sinks: Sequence[Berth]) -> Work:
    def work() -> None:
        with torch.inference_mode():
            for berth, made in zip(sinks, run([berth.device for berth in sources]), strict=True):
                berth.fill(made)

    return work


def _clear(berths: Sequence[Berth]) -> None:
    """Zeros, so that a stage that looks up rows warms up on rows that are there."""
    for berth in berths:
        berth.zero()
