"""Run a stage on an accelerator: copy inputs in, compute, copy outputs out, each in its own queue, for three requests at once.

::

    arriving    in k   | in k+1    | in k+2 ...
    computing          | compute k | compute k+1 ...
    leaving                        | out k ...

A request has a context: staging memory in the host, and tensors on the device that never move, so that the computation can be
recorded once and replayed (a CUDA graph). Events order the queues; the host waits for results only.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import torch

from autosplit.backends.base import Runnable
from autosplit.devices.accelerators import Accelerator, Event, Queue, Work, failure_of
from autosplit.errors import one_line
from autosplit.memory.slots import NUM_CONTEXTS
from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec, storage_bytes, view_storage


class StagedTensor:
    """A tensor in staging memory of the host and in memory of the device, with the same layout in both.

    Transfers copy all bytes, gaps included, because a copy of a strided tensor would block the host.
    """

    def __init__(self, accelerator: Accelerator, spec: TensorSpec) -> None:
        self.spec = spec
        num_bytes = max(1, storage_bytes(spec))
        with torch.inference_mode(False):  # else only inference mode could write to them later
            self._staging, self._memory = accelerator.staging(num_bytes), accelerator.empty(num_bytes)
        self.host, self.device = view_storage(self._staging, spec), view_storage(self._memory, spec)

    def arrive(self) -> None:
        """Staging memory to device."""
        self._memory.copy_(self._staging, non_blocking=True)

    def leave(self) -> None:
        """Device to staging memory."""
        self._staging.copy_(self._memory, non_blocking=True)

    def copy(self) -> torch.Tensor:
        """A copy of the tensor in staging memory."""
        copy = empty_like_spec(self.spec)
        copy_into(copy, self.host)
        return copy

    def zero(self) -> None:
        """Zeros on the device."""
        self._memory.zero_()

    def fill(self, made: torch.Tensor) -> None:
        """Copy a tensor of the device to the device memory. Raises: ValueError: it has another shape or dtype."""
        if made.shape != self.device.shape or made.dtype != self.device.dtype:
            announced = f"{self.device.dtype} {list(self.device.shape)}"
            raise ValueError(
                f"output '{self.spec.name}' is {made.dtype} {list(made.shape)} on the device, and {announced} was announced"
            )
        copy_into(self.device, made)


@dataclass(frozen=True, eq=False)
class RequestContext:
    """The memory and events of one request at a time."""

    sources: tuple[StagedTensor, ...]
    sinks: tuple[StagedTensor, ...]
    compute: Work
    arrived: Event
    computed: Event
    left: Event

    def arrive(self) -> None:
        """All inputs to the device."""
        for tensor in self.sources:
            tensor.arrive()

    def leave(self) -> None:
        """All outputs to the host."""
        for tensor in self.sinks:
            tensor.leave()

    def wait(self, most_s: float = math.inf) -> bool:
        """Block until its request is computed, whatever ``most_s``. Raises: RuntimeError: the device failed."""
        self.computed.synchronise()
        return True

    def outputs(self) -> list[torch.Tensor]:
        """The outputs of its request in staging memory, valid until it takes another one."""
        self.left.synchronise()
        return [tensor.host for tensor in self.sinks]


@dataclass
class PlacedStage:
    """A stage on an accelerator as a function of host tensors; ``begin`` is the first half of a call.

    Attributes:
        contexts: one for each request that can be in progress.
        note: the reason if it is not one recorded graph, or ''.
    """

    accelerator: Accelerator
    contexts: Sequence[RequestContext]
    computing: Queue
    note: str = ""
    _arriving: Queue = field(init=False)
    _leaving: Queue = field(init=False)

    def __post_init__(self) -> None:
        self._arriving, self._leaving = self.accelerator.queue(), self.accelerator.queue()
        self._turns = cycle(self.contexts)

    def device_failure(self) -> str:
        """Why the device carries out no more work, '' if it does."""
        return failure_of(self.accelerator)

    def begin(self, inputs: Sequence[torch.Tensor]) -> RequestContext:
        """Copy the inputs and enqueue the request, which overwrites the outputs of the request ``NUM_CONTEXTS`` before it."""
        context = next(self._turns)
        context.left.synchronise()
        for tensor, value in zip(context.sources, inputs, strict=True):
            copy_into(tensor.host, value)
        self.accelerator.enqueue(self._arriving, context.arrive)
        context.arrived.record(self._arriving)
        context.arrived.hold(self.computing)
        self.accelerator.enqueue(self.computing, context.compute)
        context.computed.record(self.computing)
        context.computed.hold(self._leaving)
        self.accelerator.enqueue(self._leaving, context.leave)
        context.left.record(self._leaving)
        return context

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run one request to its end, and copy its outputs."""
        begun = self.begin(inputs)
        begun.outputs()
        return [tensor.copy() for tensor in begun.sinks]


Place = Callable[[Accelerator, Queue], tuple[Runnable, bool]]
"""Puts a stage on a device; see ``Backend.place``."""


def place_runnable(
    accelerator: Accelerator,
    place: Place,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    record: bool = True,
) -> PlacedStage:
    """Put a stage on an accelerator, warm up its contexts, and record them as graphs if that works.

    Raises: BackendError: the backend refuses the stage. An error of the stage on zeros is left to the first request.
    """
    computing = accelerator.queue()
    run, recordable = place(accelerator, computing)
    accelerator.synchronise()  # another queue copies the weights
    note = "" if recordable else "its kernels are launched one by one"
    contexts: list[RequestContext] = []
    for _ in range(NUM_CONTEXTS):
        sources = tuple(StagedTensor(accelerator, spec) for spec in inputs)
        sinks = tuple(StagedTensor(accelerator, spec) for spec in outputs)
        work = _compute(run, sources, sinks)
        accelerator.enqueue(computing, partial(_clear, sources))
        if record and not note:
            try:
                work = accelerator.capture(computing, work)
            except Exception as failure:
                note = f"no graph was recorded: {one_line(failure)}"
        with contextlib.suppress(Exception):
            accelerator.enqueue(computing, work)
            accelerator.synchronise()
        contexts.append(RequestContext(sources, sinks, work, *(accelerator.event() for _ in range(3))))
    return PlacedStage(accelerator, contexts, computing, note)


def _compute(run: Runnable, sources: Sequence[StagedTensor], sinks: Sequence[StagedTensor]) -> Work:
    def work() -> None:
        with torch.inference_mode():
            for tensor, made in zip(sinks, run([tensor.device for tensor in sources]), strict=True):
                tensor.fill(made)

    return work


def _clear(tensors: Sequence[StagedTensor]) -> None:
    """Write zeros, which are valid row numbers for a stage that looks up rows."""
    for tensor in tensors:
        tensor.zero()
