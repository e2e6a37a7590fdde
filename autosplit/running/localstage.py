"""LocalStage: one loaded copy of a stage in the caller's process.

``compute`` runs a request in the thread of its caller. With ``start`` and ``finish`` a thread of the runtime, or of a
``ThreadContext``, runs it, and no other Python thread stands between the request and its answer.
"""

import contextlib
import functools
import itertools
import logging
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

import torch

from autosplit.devices.processes import anonymous_bytes
from autosplit.errors import AutosplitError, BackendError, DeadlineError, RefusedError, StageError
from autosplit.running import statusblock
from autosplit.running.copying import CopyPool
from autosplit.running.messages import Ready, WorkerEvent
from autosplit.running.monitor import WorkerHealth, WorkerReport, worker_health, worker_report
from autosplit.running.request import MatchingTensors, Request
from autosplit.running.ring import DATA, ERROR, SKIPPED
from autosplit.running.stage import StagePlacement
from autosplit.running.statusblock import STATUS_WORDS, WorkerStatus
from autosplit.running.wiring import Wiring
from autosplit.tracing.splitting import states_in
from autosplit.tracing.tensorspec import Announced, TensorSpec, announced, check_outputs, laid_out, zeros
from autosplit.values.samples import FROM_ONNX

if TYPE_CHECKING:
    from autosplit.backends.base import Context, Done, Runnable

log = logging.getLogger(__name__)

Inbox = SimpleQueue[Callable[[], None] | None]
"""Requests for the thread of a copy; None ends it."""

NUM_USUAL = 3
"""A core that is lent to another process makes one request slow, and seldom three in a row."""


class _LoadedVariant(NamedTuple):
    """The stage at the sizes of one variant.

    ``contexts`` compute requests in threads of the runtime; there are none without such threads. ``sources`` are positions and
    layouts of its inputs, ``targets`` its outputs with memory for those that are copied.
    """

    stage: StagePlacement
    run: "Runnable"
    contexts: Sequence["Context"]
    sources: Sequence[tuple[int, TensorSpec]]
    targets: Sequence[tuple[str, CopyPool | None]]
    announced: Sequence[Announced]


class LocalStage:
    """The only stage of a network, loaded in this process with its backend; with the counters of a worker.

    Args:
        wiring: a network of one stage.
        replica: which of the stage's devices it is for. The cores are those of the thread that makes the copy.
    Raises: BackendError: the stage cannot be loaded.
    """

    def __init__(self, wiring: Wiring, replica: int) -> None:
        [stage] = wiring.stages
        self._stage, self.replica = stage, replica
        self._last_ns = (1 << 62,) * NUM_USUAL
        self._num_started = 0
        self._status = WorkerStatus(memoryview(bytearray(8 * STATUS_WORDS)).cast("q"))
        self._words = self._status.words
        self._passed = [(name, wiring.inputs.index(name)) for name in wiring.outputs if name in wiring.inputs]
        before_bytes, begun_s = anonymous_bytes(os.getpid()), time.perf_counter()
        try:
            stage.module.import_packages()
            self._variants = list[_LoadedVariant]()
            with states_in({}):
                loaded = stage.load_each_size(replica, shared=len(stage.devices) > 1)
            most, outputs = 4 * wiring.most_in_flight, zip(*(one.outputs for one, _, _ in loaded), strict=True)
            pools = [CopyPool(specs, most) for specs in outputs]
            for one, run, is_new in loaded:
                same = None if is_new else next(found for found in self._variants if found.stage.module == one.module)
                self._variants.append(_loaded_variant(one, run, wiring, pools, same))
        except AutosplitError:
            raise
        except Exception as failure:
            raise BackendError(f"stage '{stage.name}' could not be loaded in the caller's process: {failure}") from failure
        self.ready = Ready(before_bytes, time.perf_counter() - begun_s, str(getattr(self._variants[0].run, "note", "")))
        self._words[statusblock.STATE] = statusblock.WAITING
        self._words[statusblock.SINCE_NS] = self._idle_ns = time.monotonic_ns()

    def compute(self, request: Request) -> None:
        """Compute the answer of a request, or its error, in this thread. Raises: whatever ends the stage, such as Ctrl-C."""
        try:
            self._compute(request)
        except BaseException:  # in the thread of one caller, and another one may wait for this request
            request.error = RefusedError("the thread that computed the request was interrupted; submit it again")
            raise

    def _compute(self, request: Request) -> None:
        number = request.number
        got = ran = self._status.enter(statusblock.RUNNING, number)
        flag = DATA
        if 0 < request.deadline_ns <= got:
            request.error = DeadlineError(f"request {number} was skipped: its deadline passed before its stage began")
            flag = SKIPPED
        else:
            try:
                outputs = self._variants[request.variant].run(self._inputs(request))
                ran = time.monotonic_ns()
                self._take(request, outputs)
            except Exception:
                flag, ran = ERROR, time.monotonic_ns()
                request.error = StageError(self._explain(request, traceback.format_exc()))
        request.inputs = ()
        request.made_ns = time.monotonic_ns()
        self._words[statusblock.STATE] = statusblock.WAITING
        self._count(request, flag, got, ran)

    def places(self) -> "list[tuple[Context, ...]]":
        """Places for requests that threads of the runtime compute, each a context for each variant; none without such threads."""
        return list(zip(*[one.contexts for one in self._variants], strict=True))

    def thread_place(self, inbox: Inbox) -> "tuple[Context, ...]":
        """A place for requests that the thread of an inbox computes."""
        return tuple(ThreadContext(one.run, inbox) for one in self._variants)

    def start(self, request: Request, context: "Context", done: "Done") -> None:
        """Start a request in an idle context; ``done`` runs later, in another thread. Raises: why it cannot start."""
        words = self._words
        if not self._num_started:
            words[statusblock.STATE], words[statusblock.SINCE_NS] = statusblock.RUNNING, request.sent_ns
        self._num_started += 1
        words[statusblock.SEQUENCE] = request.number
        context.start(self._inputs(request), done)

    def finish(self, request: Request, context: "Context", failure: BaseException | None) -> None:
        """Give a request its outputs, or the error of its ``failure``; the context is idle after this."""
        request.made_ns = time.monotonic_ns()
        try:
            if failure is not None:
                raise failure
            self._take(request, context.outputs())
        except Exception:
            request.error = StageError(self._explain(request, traceback.format_exc()))
        except BaseException:  # SystemExit in the stage, for example
            log.exception("request %d ended the thread of its copy, which goes on with others", request.number)
            request.error = RefusedError("the thread that computed the request was interrupted; submit it again")
        request.inputs = ()

    def count(self, request: Request) -> None:
        """Count a request that ``start`` and ``finish`` have seen; not for several threads at once, nor beside ``start``.

        Its time begins once the request before it was finished, so that the times of requests side by side add up.
        """
        self._num_started -= 1
        if not self._num_started:
            self._words[statusblock.STATE] = statusblock.WAITING
        flag = DATA if request.error is None else ERROR
        self._count(request, flag, max(request.sent_ns, self._idle_ns), request.made_ns)

    def _inputs(self, request: Request) -> list[torch.Tensor]:
        """The inputs of the stage, laid out as it was traced."""
        given, sources = request.inputs, self._variants[request.variant].sources
        if given.__class__ is MatchingTensors:
            return [given[at] for at, _ in sources]
        return [laid_out(given[at], spec) for at, spec in sources]

    def _take(self, request: Request, outputs: Sequence[torch.Tensor]) -> None:
        """Check outputs and make them the request's own. Raises: ValueError: they are not as announced."""
        variant = self._variants[request.variant]
        check_outputs(outputs, variant.announced)
        for (name, copies), value in zip(variant.targets, outputs, strict=True):
            request.values[name] = value if copies is None else copies.copy(value, request.variant)
        for name, position in self._passed:
            request.values[name] = request.inputs[position].clone()

    def _count(self, request: Request, flag: int, got: int, ran: int) -> None:
        """Add a request to the sums of the stage: it was begun at ``got`` and computed at ``ran``, in monotonic nanoseconds."""
        asked, posted, sent = self._idle_ns, request.submitted_ns, request.made_ns
        self._words[statusblock.SINCE_NS] = self._idle_ns = sent
        self._status.count(request.number, flag, asked, posted, got, ran, sent)
        self._last_ns = (*self._last_ns[1:], ran - got)

    @property
    def usual_ns(self) -> int:
        """Nanoseconds that a request takes to be computed if nothing holds it up: the least of the last ``NUM_USUAL``."""
        return min(self._last_ns)

    def events(self, *, clear: bool) -> list[WorkerEvent]:
        """The times of its last requests; with ``clear``, each comes once."""
        return [WorkerEvent(*row) for row in self._status.rows(clear=clear)]

    def report(self, events: list[WorkerEvent]) -> WorkerReport:
        """Its times; its process holds more than the stage, so the memory is that of the whole process."""
        return worker_report(self._stage, self.replica, self._words, events, self.ready, os.getpid())

    def health(self) -> WorkerHealth:
        """Its state and sums, as those of a worker."""
        return worker_health(self._stage, self.replica, os.getpid(), True, self._words, 0)

    def unload(self) -> None:
        """Let go of the weights; there are no more requests. The threads of the runtime have returned from Python by then."""
        for context in itertools.chain.from_iterable(one.contexts for one in self._variants):
            with contextlib.suppress(Exception):
                context.wait()
        self._variants = []

    def _explain(self, request: Request, trace: str) -> str:
        variant = self._variants[request.variant]
        inputs = [request.inputs[at] for at, _ in variant.sources]
        return variant.stage.failure_text(self.replica, request.number, inputs, trace)


def _loaded_variant(
    stage: StagePlacement, run: "Runnable", wiring: Wiring, pools: Sequence[CopyPool], same: _LoadedVariant | None
) -> _LoadedVariant:
    """Warm up the stage at the sizes of one variant.

    ``pools`` has memory for copies of each output at all sizes, and ``same`` is a variant with the same function.
    """
    sources = [(wiring.inputs.index(spec.name), spec) for spec in stage.inputs]
    if same is not None:
        return same._replace(stage=stage, sources=sources, announced=announced(stage.outputs))
    contexts: Sequence[Context] = getattr(run, "contexts", ())
    run = run if stage.module.kind in FROM_ONNX else _with_threads_kept(run)
    stage.warm_up(run)
    shared = _shared_outputs(run, stage) if stage.module.warms_up else [True] * len(stage.outputs)
    targets = [(spec.name, pool if used else None) for spec, pool, used in zip(stage.outputs, pools, shared, strict=True)]
    return _LoadedVariant(stage, run, contexts, sources, targets, announced(stage.outputs))


class ThreadContext:
    """A copy at the sizes of one variant on a runtime without threads for requests: the thread that loaded it computes them."""

    def __init__(self, run: "Runnable", inbox: Inbox) -> None:
        self._run, self._inbox = run, inbox
        self._made: Sequence[torch.Tensor] = ()

    def start(self, inputs: Sequence[torch.Tensor], done: "Done") -> None:
        """Leave a request to the thread."""
        self._inbox.put(functools.partial(self.compute, inputs, done))

    def wait(self, most_s: float = math.inf) -> bool:
        """Whether the thread has ended: it reports each failure itself."""
        return False

    def outputs(self) -> Sequence[torch.Tensor]:
        """The outputs of the last request."""
        made, self._made = self._made, ()
        return made

    def compute(self, inputs: Sequence[torch.Tensor], done: "Done") -> None:
        """Compute a request in this thread."""
        failure = None
        try:
            self._made = self._run(inputs)
        except BaseException as raised:
            failure = raised
        del inputs
        done(failure)


def _with_threads_kept(run: "Runnable") -> "Runnable":
    """The function, after which torch has the number of threads that it had before: it is one for the whole process."""

    def kept(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        before = torch.get_num_threads()
        try:
            return run(inputs)
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    return kept


def _shared_outputs(run: "Runnable", stage: StagePlacement) -> list[bool]:
    """Whether an answer needs a copy, for each output.

    It does if its memory is that of an input, a weight or another output, or is used again, or if autograd refuses the tensor.
    """
    inputs = [zeros(spec) for spec in stage.inputs]
    try:
        first = run(inputs)
        second = run(inputs)
    except Exception:  # the first request will show it
        return [True] * len(stage.outputs)
    places = [value.untyped_storage().data_ptr() for value in second]
    taken = {value.untyped_storage().data_ptr() for value in (*inputs, *first)}
    return [
        value.is_inference() or value.requires_grad or place in taken or places.count(place) > 1
        for value, place in zip(second, places, strict=True)
    ]
