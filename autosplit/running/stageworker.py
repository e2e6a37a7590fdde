"""A worker: it loads one stage, then takes its requests in order, each from its input rings to its output rings."""

import select
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autosplit.devices.accelerators import PROVIDERS
from autosplit.devices.processes import resident_bytes
from autosplit.running import statusblock
from autosplit.running.inbox import Inbox
from autosplit.running.messages import (
    Events,
    Failed,
    Load,
    Loaded,
    Pause,
    Paused,
    Ready,
    Report,
    RingPort,
    Run,
    Use,
    Using,
    WorkerConfig,
)
from autosplit.running.modules import Module
from autosplit.running.ring import DATA, ERROR, FLAG, POSTED_NS, SKIPPED, Interrupted, Ring, RingEnd, RingHandle, Slot
from autosplit.running.statusblock import StatusBlock
from autosplit.running.versions import Versions
from autosplit.tracing.tensorspec import is_dense, kind_of

if TYPE_CHECKING:
    from autosplit.backends.base import Begun

KEPT_EVENTS = 16_384

LISTEN_NS = 1_000_000
"""How long requests may keep a worker from hearing the host, beside the time of one."""

LOOK_AHEAD_S = 1e-3
"""How long a request that comes while another one is computed may have to wait for a stream that is idle."""


class _Rewound(Exception):  # noqa: N818 - not an error: the tokens were counted anew
    """The worker was paused in the middle of a request, and goes on with request ``first``."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first


@dataclass(frozen=True, slots=True)
class _NotBegun:
    """A request that could not be begun ahead, as one under way; its failure is told in its turn."""

    failure: Exception

    def wait(self, most_s: float = 0.0) -> bool:
        """Raises: what beginning it raised."""
        raise self.failure

    def outputs(self) -> Sequence[torch.Tensor]:
        """Raises: the same."""
        raise self.failure


class _Ahead(NamedTuple):
    """The request to run after this one: its slots, and what was begun of it, if it could be."""

    sequence: int
    slots: list[Slot]
    begun: "Begun | None" = None


def main(control: Connection) -> None:
    """The whole life of a worker process: its config is the first message."""
    serve_stage(control, control.recv())


def serve_stage(control: Connection, config: WorkerConfig) -> None:
    """Load the stage, say so, and serve until the host closes the control channel."""
    start = time.perf_counter()
    try:
        PROVIDERS.update(config.providers)
        config.module.import_packages()
        before = resident_bytes()
        stage = StageWorker(config, control)
        for version in config.versions:
            stage.load(version.module)
            stage.versions.use(version.first)
    except Exception:
        control.send(Failed(traceback.format_exc()))
        return
    after = resident_bytes()
    stage.status[statusblock.RESIDENT_BYTES] = after
    control.send(Ready(before, after, time.perf_counter() - start, stage.versions.note))
    stage.serve()


class StageWorker:
    """The loop of one worker over its rings."""

    def __init__(self, config: WorkerConfig, control: Connection) -> None:
        self.config = config
        self.versions = Versions(config)
        self._ahead: deque[_Ahead] = deque()
        self.control = control
        self.status_block = StatusBlock(config.status_block)
        self.status = self.status_block.status(config.number)
        self._place = memoryview(self.status).cast("B")
        self._sums = [self.status[word] for word in statusblock.SUMS]
        self.events: deque[tuple[int, ...]] = deque(maxlen=KEPT_EVENTS)
        self._control_poll = select.poll()
        self._control_poll.register(control.fileno(), select.POLLIN)
        self._sources = [(self._ends(port, sends=False), port.index) for port in config.sources]
        self._sinks = [(self._ends(port, sends=True), port.index) for port in config.sinks]
        self._inbox: Inbox | None = None
        self._early: set[int] = set()
        """Requests that were handed over before others that came before them."""
        if not config.in_order:
            ports = [[end for end in ends if end is not None] for ends, _ in self._sources]
            self._inbox = Inbox(ports, self.status_block, control.fileno(), config.spin_s)
        self._announced = [
            (position, view.shape, view.dtype)
            for ends, index in self._sinks
            for position, view in zip(index, _any_ring(ends).slots[0].tensors, strict=True)
        ]

    def serve(self) -> None:
        """Obey the host and take requests, in turn, until the control channel closes."""
        sequence = self._obey(None)
        listen_ns = 0
        with torch.inference_mode():
            while True:
                try:
                    now = time.monotonic_ns()
                    if now >= listen_ns:
                        listen_ns = now + LISTEN_NS
                        sequence = self._obey(sequence)
                    sequence = self._take(sequence)
                except _Rewound as pause:
                    sequence = pause.first

    def load(self, module: Module) -> None:
        """Load a module beside those in use."""
        self.versions.load(module, self._zeros)

    def _zeros(self) -> list[torch.Tensor]:
        """Inputs like those that come."""
        slots = [_any_ring(ends).slots[0] for ends, _ in self._sources]
        return [torch.zeros_like(view) for view in self._inputs(slots)]

    def _obey(self, sequence: int | None) -> int:
        """Answer the host's messages; return the next request once it is known and nothing more is there to read."""
        while sequence is None or self._control_poll.poll(0):
            match self.control.recv():
                case Run(first):
                    replica, count = self.config.replica, self.config.num_replicas
                    sequence = first + (replica - first) % count
                    if self._inbox is not None:
                        self._inbox.restart()
                        self._early.clear()
                case Pause():
                    self._enter(statusblock.PAUSED, 0)
                    self.status[statusblock.FLOOR] = 0
                    self._ahead.clear()
                    self.control.send(Paused())
                    sequence = None
                case Load(module):
                    self.status[statusblock.STATE] = statusblock.STARTING  # loading is not hanging
                    try:
                        self.load(module)
                        self.control.send(Loaded())
                    except Exception:
                        self.control.send(Failed(traceback.format_exc()))
                case Use(first):
                    self.versions.use(first)
                    self.control.send(Using())
                case Report(clear):
                    self.control.send(Events(tuple(self.events)))
                    if clear:
                        self.events.clear()
        return sequence

    def _take(self, first: int) -> int:
        """One request: wait for its inputs, run, write its outputs, free its inputs, hand over the last output.

        Args:
            first: the oldest request that was not taken yet.
        Returns: the same for the next call.
        """
        if self._inbox is not None:
            self.status[statusblock.FLOOR] = first
        asked = self._enter(statusblock.WAITING, first)
        sequence, slots, begun = self._ahead.popleft() if self._ahead else (*self._next(first), None)
        got = self._enter(statusblock.RUNNING, sequence)
        flag, result = self._compute(sequence, slots, begun)
        ran = self._enter(statusblock.SENDING, sequence)
        if self.versions.num_contexts > 1 and flag == DATA:
            result = result.outputs()
        blocked, posted = 0, max([slot.header[POSTED_NS] for slot in slots])
        for number, (ends, index) in enumerate(self._sinks, 1):
            end = self._end(ends, sequence)
            if not end.ready(sequence):
                before = time.monotonic_ns()
                self._acquire(end, sequence)
                blocked += time.monotonic_ns() - before
            slot = end.acquire(sequence)
            if flag == DATA:
                slot.write([result[position] for position in index])
            else:
                slot.write_text(flag, result)
            if number == len(self._sinks):  # before the last output: who has the answer may fill the slots of the inputs
                self._free_inputs(sequence)
            end.release(sequence)
        if not self._sinks:
            self._free_inputs(sequence)
        self._count(sequence, flag, asked, posted, got, ran, time.monotonic_ns(), blocked)
        return self._after(sequence, first)

    def _free_inputs(self, sequence: int) -> None:
        for ends, _ in self._sources:
            self._end(ends, sequence).release(sequence)

    def _next(self, first: int) -> tuple[int, list[Slot]]:
        """The request to run now, once its inputs are here: the oldest one, or the most urgent one of a pipeline as ready."""
        if self._inbox is None:
            return first, [self._acquire(self._end(ends, first), first) for ends, _ in self._sources]
        while True:
            try:
                return self._inbox.wait()
            except Interrupted:
                self._heed(first)

    def _after(self, sequence: int, first: int) -> int:
        """The oldest request that was not taken yet, now that this one was."""
        step = self.config.num_replicas
        if sequence != first:
            self._early.add(sequence)
            return first
        first += step
        while first in self._early:
            self._early.remove(first)
            first += step
        return first

    def _acquire(self, end: RingEnd, sequence: int) -> Slot:
        """The next slot of a ring; messages that come meanwhile are obeyed, and the request goes on where it was."""
        while True:
            try:
                return end.acquire(sequence)
            except Interrupted:
                self._heed(sequence)

    def _heed(self, sequence: int) -> None:
        """Obey messages that came during a wait. Raises: _Rewound: the worker was paused, and its requests begin anew."""
        state = self.status[statusblock.STATE]
        first = self._obey(sequence)
        if self.status[statusblock.STATE] == statusblock.PAUSED:
            raise _Rewound(first) from None
        self.status[statusblock.STATE] = state

    def _compute(self, sequence: int, slots: Sequence[Slot], begun: "Begun | None" = None) -> tuple[int, Any]:
        """The flag of the request's tokens from here on, and its outputs or the text of the error.

        Of a stage that begins several requests, the request as it was begun stands for its outputs.
        """
        passed = {slot.header[FLAG]: slot for slot in slots}
        for flag in (ERROR, SKIPPED):
            if flag in passed:
                return flag, passed[flag].read_text()
        if self.status_block.expired(sequence):
            return SKIPPED, b""
        inputs = self._inputs(slots)
        version, run = self.versions.of(sequence)
        try:
            if self.versions.num_contexts > 1:
                return DATA, self._await(begun or run.begin(inputs), sequence)  # type: ignore[attr-defined]
            outputs = run(inputs)
            self._check(outputs)
            return DATA, outputs
        except Exception:
            return ERROR, self._explain(sequence, version.module, inputs, traceback.format_exc())

    def _inputs(self, slots: Sequence[Slot]) -> list[Any]:
        """The stage's inputs, as views of the slots."""
        inputs: list[Any] = [None] * self.config.num_inputs
        for slot, (_, index) in zip(slots, self._sources, strict=True):
            for position, view in zip(index, slot.tensors, strict=True):
                inputs[position] = view
        return inputs

    def _await(self, begun: "Begun", sequence: int) -> "Begun":
        """Wait until a request is computed, and meanwhile begin those after it whose inputs are here, as many as the stage takes.

        So copies run beside the computing, no stream waits for another, and the device never waits for this process in between.
        """
        self._begin_following(sequence)
        while len(self._ahead) < self.versions.num_contexts - 1:
            if begun.wait(LOOK_AHEAD_S):
                return begun
            self._begin_following(sequence)
        begun.wait()
        return begun

    def _begin_following(self, sequence: int) -> None:
        newest = self._ahead[-1].sequence if self._ahead else sequence
        while len(self._ahead) < self.versions.num_contexts - 1 and (found := self._following(newest)) is not None:
            newest, slots = found
            ahead = _Ahead(newest, slots)
            if all(slot.header[FLAG] == DATA for slot in slots) and not self.status_block.expired(newest):
                ahead = _Ahead(newest, slots, self._begin(newest, self._inputs(slots)))
            self._ahead.append(ahead)

    def _begin(self, sequence: int, inputs: Sequence[torch.Tensor]) -> "Begun":
        """Begin a request, once only: another try would come after later requests, which have their turns in order."""
        try:
            return self.versions.of(sequence)[1].begin(inputs)  # type: ignore[attr-defined, no-any-return]
        except Exception as failure:
            return _NotBegun(failure)

    def _following(self, sequence: int) -> tuple[int, list[Slot]] | None:
        """The request to run after this one, if its inputs are here."""
        if self._inbox is not None:
            return self._inbox.pick()
        following = sequence + self.config.num_replicas
        ends = [self._end(ends, following) for ends, _ in self._sources]
        ready = all(end.ready(following) for end in ends)
        return (following, [end.acquire(following) for end in ends]) if ready else None

    def _check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise if the outputs do not fit the slots they go to: a copy would stretch some of them in silence."""
        if len(outputs) != self.config.num_outputs:
            raise ValueError(f"it returned {len(outputs)} outputs instead of the {self.config.num_outputs} announced")
        for position, shape, dtype in self._announced:
            made = outputs[position]
            if not is_dense(made):
                raise ValueError(f"output {position} is {kind_of(made)}, and a dense {dtype} {list(shape)} was announced")
            if made.shape != shape or made.dtype != dtype:
                raise ValueError(f"output {position} is {made.dtype} {list(made.shape)}, and {dtype} {list(shape)} was announced")

    def _explain(self, sequence: int, module: Module, inputs: Sequence[torch.Tensor], trace: str) -> bytes:
        config = self.config
        try:
            op = module.failing_op(inputs)
        except Exception:
            op = None
        where = f" while executing '{op}'" if op else ""
        cause = trace.strip().splitlines()[-1]
        return (
            f"stage '{config.stage}' (replica {config.replica} of {config.num_replicas}, device '{config.device}') failed on "
            f"request {self.status_block.number(sequence)}{where}: {cause}\nThe worker's traceback follows.\n{trace}"
        ).encode()

    def _count(self, sequence: int, flag: int, asked: int, posted: int, got: int, ran: int, sent: int, blocked: int) -> None:
        """Note a request; the arguments are the fields of an Event."""
        self.events.append((sequence, flag, asked, posted, got, ran, sent, blocked))
        sums = self._sums
        sums[flag] += 1
        sums[3] += ran - got
        sums[4] += got - asked + blocked
        sums[5] += sent - ran - blocked
        if got > posted:
            sums[6] += got - posted
        statusblock.write_sums(self._place, sums)

    def _enter(self, state: int, sequence: int) -> int:
        now = time.monotonic_ns()
        statusblock.write_place(self._place, now, sequence, state)
        return now

    def _ends(self, port: RingPort, *, sends: bool) -> list[RingEnd | None]:
        def open_end(handle: RingHandle | None) -> RingEnd | None:
            if handle is None:
                return None
            ring = Ring(handle)
            return RingEnd(ring, sends=sends, interrupt_fd=self.control.fileno(), spin_s=0.0 if sends else self.config.spin_s)

        return [open_end(handle) for handle in port.rings]

    @staticmethod
    def _end(ends: Sequence[RingEnd | None], sequence: int) -> RingEnd:
        end = ends[sequence % len(ends)]
        assert end is not None  # the wiring gives this worker the rings of all its requests
        return end


def _any_ring(ends: Sequence[RingEnd | None]) -> Ring:
    """One of the rings of a port; they are all alike."""
    return next(end for end in ends if end is not None).ring
