"""A request, from its inputs to its answer; Intake makes it of tensors that fit the network."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from autosplit.compat.futures import DoneFuture, SafeFuture
from autosplit.errors import SHOWN_FAULTS, AutosplitError, DeadlineError, UsageError, raise_faults
from autosplit.running.wiring import Wiring
from autosplit.tracing.tensorspec import differences, is_dense, kind_of

Tensors = tuple[torch.Tensor, ...]

_NEVER_NS = 2.0**62
"""The latest deadline, in 146 years: a word of shared memory still holds it."""


class MatchingTensors(tuple[torch.Tensor, ...]):
    """Tensors with the layout of the network's inputs, which need no further check."""

    __slots__ = ()


class RequestTimes(NamedTuple):
    """Times at which a request was submitted, sent, finished by the last stage, and answered, in monotonic nanoseconds.

    ``number`` requests were sent before it; ``lane`` is its lane of replicas that never meet (see ``inflight``).
    """

    lane: int
    number: int
    submitted_ns: int
    sent_ns: int
    made_ns: int
    done_ns: int


class AnswerFuture(SafeFuture[Any]):
    """The future of a request. Cancelling it calls ``stop`` with it, which reaches the stages.

    Attributes:
        number: the number by which messages and logs name the request; None while it waits in the queue.
        sequence: the number in its lane (see ``inflight``), by which workers know the request; None while it waits in the queue.
    """

    def __init__(self, stop: "Callable[[AnswerFuture], None]") -> None:
        super().__init__()
        self.number: int | None = None
        self.sequence: int | None = None
        self._stop = stop

    def cancel(self) -> bool:
        """Cancel the request; if it runs, it ends at the next stage border."""
        if not super().cancel():
            return False
        self._stop(self)
        return True


class Finished(DoneFuture[Any], AnswerFuture):
    """The future of a request that was answered at once."""

    def __init__(self, number: int, result: Any, error: Exception | None) -> None:
        DoneFuture.__init__(self, result, error)
        self.number, self.sequence = number, number


@dataclass(eq=False, slots=True)
class Request:
    """One request.

    The answer goes to ``future`` if there is one, else it stays here: ``wake`` is called once ``answered`` is set.
    """

    inputs: Sequence[torch.Tensor]
    deadline_ns: int
    submitted_ns: int
    future: AnswerFuture | None = None
    returns: Callable[[Tensors], Any] | None = None
    """Makes the result of the future; None for the tensors themselves."""
    caller_keeps_inputs: bool = False
    """The caller does not change the inputs until the answer, so the request takes no place in the queue."""
    holds_inputs: bool = False
    """The inputs are a copy that nobody else changes."""
    priority: int = 0
    variant: int = 0
    """The variant of the stages whose inputs have these shapes."""
    sequence: int = -1
    """The number in its lane once it was sent to workers; ``number``: the number of requests that were sent before it."""
    lane: int = 0
    number: int = -1
    sent_ns: int = 0
    made_ns: int = 0
    tokens: int = 0
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    error: AutosplitError | None = None
    answered: bool = False
    waiter: "threading.Lock | None" = None

    @property
    def has_waiter(self) -> bool:
        """Whether a caller may wait for this answer alone, and not for the last of many."""
        return self.future is not None or not self.caller_keeps_inputs

    def times(self) -> RequestTimes:
        """The times of a request that is answered now."""
        now_ns = time.monotonic_ns()
        return RequestTimes(self.lane, self.number, self.submitted_ns, self.sent_ns, self.made_ns or now_ns, now_ns)

    def will_wait(self) -> None:
        """Let ``wake`` end the next ``wait``, also if it is called before."""
        self.waiter = threading.Lock()
        self.waiter.acquire()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is answered or ``wake`` is called; False if ``timeout_s`` passed first."""
        if self.answered:
            return True
        if self.waiter is None:
            self.will_wait()
        assert self.waiter is not None
        if self.answered:  # before there was a lock to be released
            return True
        return self.waiter.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        """End the present or the next ``wait``."""
        if self.waiter is not None:
            with contextlib.suppress(RuntimeError):  # it was woken already
                self.waiter.release()

    def expired(self) -> bool:
        """Whether the deadline has passed while the request waited, which becomes its error then."""
        if not 0 < self.deadline_ns <= time.monotonic_ns():
            return False
        self.error = DeadlineError("the request's deadline passed while it waited in the admission queue")
        return True


def monotonic_deadline(deadline_s: float | None) -> int:
    """A deadline in seconds from now as monotonic nanoseconds; 0 stands for no deadline."""
    if deadline_s is None:
        return 0
    if not deadline_s > 0 or math.isinf(deadline_s):
        raise UsageError(f"deadline_s must be more than 0 seconds from now, but is {deadline_s}")
    return time.monotonic_ns() + int(min(deadline_s * 1e9, _NEVER_NS))


class Intake:
    """Makes requests of tensors that fit the inputs of a network."""

    def __init__(self, wiring: Wiring) -> None:
        self._names, self._specs = wiring.inputs, wiring.input_specs
        named = list(enumerate(wiring.inputs))
        self._checks = [(at, self._specs[name].shape, self._specs[name].torch_dtype) for at, name in named if name in self._specs]
        self._unread = [(at, name) for at, name in named if name not in self._specs]
        read = [wiring.inputs[at] for at, _, _ in self._checks]
        self._layouts = [[specs[name] for name in read] for specs in wiring.input_layouts]
        shapes = [tuple(spec.shape for spec in specs) for specs in self._layouts]
        self._variants = {shape: variant for variant, shape in reversed(list(enumerate(shapes)))}

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        deadline_ns: int = 0,
        *,
        caller_keeps_inputs: bool = False,
        variant: int = 0,
    ) -> Request:
        """The request; ``variant`` is that of MatchingTensors.

        Raises: UsageError: the number, a shape, a dtype or the kind of a tensor does not fit.
        """
        if inputs.__class__ is MatchingTensors:
            return Request(inputs, deadline_ns, time.monotonic_ns(), caller_keeps_inputs=caller_keeps_inputs, variant=variant)
        names = self._names
        if not isinstance(inputs, Sequence):
            raise UsageError(f"a request is a list of tensors, one for each input, but is {kind_of(inputs) or 'one tensor'}")
        if len(inputs) != len(names):
            raise UsageError(f"{len(inputs)} inputs were given, and the pipeline takes {len(names)}: {', '.join(names)}")
        for position, shape, dtype in self._checks:
            value = inputs[position]
            if not is_dense(value) or value.shape != shape or value.dtype != dtype:
                variant = self._variant_of([inputs[at] for at, _, _ in self._checks])
                break
        for position, name in self._unread:
            if not is_dense(inputs[position]):
                raise UsageError(f"input '{name}' is {kind_of(inputs[position])}, and a dense tensor is expected")
        return Request(tuple(inputs), deadline_ns, time.monotonic_ns(), caller_keeps_inputs=caller_keeps_inputs, variant=variant)

    def _variant_of(self, inputs: Sequence[torch.Tensor]) -> int:
        """The variant that takes tensors of these shapes. Raises: UsageError: there is none, or a dtype or kind does not fit."""
        dense = all(map(is_dense, inputs))
        variant = self._variants.get(tuple(tuple(value.shape) for value in inputs)) if dense else None
        if variant is None or any(value.dtype != dtype for value, (_, _, dtype) in zip(inputs, self._checks, strict=True)):
            faults = differences(self._layouts[variant or 0], inputs)
            if len(self._layouts) > 1 and variant is None:
                shown = self._layouts[:SHOWN_FAULTS]
                sizes = "; ".join(", ".join(f"'{spec.name}' {list(spec.shape)}" for spec in specs) for specs in shown)
                rest = " and smaller ones" * (len(shown) < len(self._layouts))
                faults.append(f"requests must have exactly the shapes of one of {len(self._layouts)} variants: {sizes}{rest}")
            raise_faults(UsageError, "the inputs do not fit the pipeline", faults)
        return variant or 0
