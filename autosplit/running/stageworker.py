"""The loop of one worker: it loads a stage, then takes requests from its input rings and writes results to its output rings."""

import contextlib
import os
import select
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from autosplit.backends.staticio import StaticIO
from autosplit.devices.accelerators import PROVIDERS
from autosplit.devices.calls import START, answer, reply_reason, reply_with
from autosplit.devices.forking import freed_memory_returned
from autosplit.devices.processes import anonymous_bytes, reset_peak
from autosplit.errors import AutosplitError, BackendError, DeviceError
from autosplit.running import statusblock
from autosplit.running.lookahead import Lookahead
from autosplit.running.messages import Ready, WorkerConfig
from autosplit.running.ring import DATA, ERROR, FLAG, POSTED_NS, SKIPPED, VARIANT, Slot
from autosplit.running.stagerings import StageRings
from autosplit.running.statusblock import StatusBlock, WorkerStatus
from autosplit.tracing.splitting import states_in
from autosplit.tracing.tensorspec import announced, check_outputs

if TYPE_CHECKING:
    from autosplit.backends.base import Begun

LISTEN_NS = 1_000_000
"""How long requests may keep a worker from the host's calls, beside the time of one request."""


class _Lost(Exception):  # noqa: N818 - not an error of a request: no request can run in this process any more
    """The device of the worker carries out no more work; the text says why."""


class _Restarted(Exception):  # noqa: N818 - not an error: the slots were numbered anew
    """The worker was paused in the middle of a request, and goes on with request ``first``."""

    def __init__(self, first: int) -> None:
        super().__init__(first)
        self.first = first


def main(control: Connection) -> None:
    """The main function of a worker process; its config is the first message."""
    with contextlib.suppress(OSError):  # if the kernel refuses, memory of the fork server counts too
        reset_peak(os.getpid())
    serve_stage(control, control.recv())


def serve_stage(control: Connection, config: WorkerConfig) -> None:
    """Load the stage, reply Ready or the error, and serve until the host closes the control channel."""
    workers: list[StageWorker] = []

    def load() -> Ready:
        start = time.perf_counter()
        try:
            PROVIDERS.update(config.providers)
            for module in {id(one.module): one.module for one in config.stage.at_each_size()}.values():
                module.import_packages()
            before_bytes = anonymous_bytes(os.getpid())
            workers.append(StageWorker(config, control))
            note = workers[0].load()
            return Ready(before_bytes, time.perf_counter() - start, note)
        except AutosplitError:
            raise
        except Exception:
            raise BackendError(traceback.format_exc()) from None

    if reply_with(control, START, load):
        try:
            workers[0].serve()
        except _Lost as lost:  # a new process may open the device again, and runs the requests that were in progress
            reply_reason(control, DeviceError(f"ended because device '{config.device.name}' does not answer: {lost}"))


class StageWorker:
    """One worker: its stage, its rings and its words of the status block."""

    def __init__(self, config: WorkerConfig, control: Connection) -> None:
        self._config = config
        self._control = control
        self._control_poll = select.poll()
        self._control_poll.register(control.fileno(), select.POLLIN)
        self._status_block = StatusBlock(config.status_block)
        self.status = WorkerStatus(self._status_block.status(config.number))
        self._rings = StageRings(config, self.status, control.fileno(), self._handle_interrupt)
        self._sequence: int | None = None
        self._step = len(config.stage.devices)
        self._stages = config.stage.at_each_size()
        self._announced = cache(lambda variant: announced(self._stages[variant].outputs))

    def load(self) -> str:
        """Load the stage at each size; return its note about itself, or ''."""
        states = {} if self._config.states is None else self._config.states.open()
        with freed_memory_returned(), states_in(states):
            loaded = self._config.stage.load_each_size(self._config.replica, shared=self._config.spin_s == 0)
        for one, run, is_new in loaded:
            if is_new:
                one.warm_up(run)
        self._runs = [run for _, run, _ in loaded]
        self._static = {variant: run for variant, run in enumerate(self._runs) if isinstance(run, StaticIO)}
        for variant, static in self._static.items():
            check_outputs(static.outputs, self._announced(variant))
        self._rings.bind(self._static)
        self._num_contexts = len(getattr(self._runs[0], "contexts", (None,)))
        self._lookahead = Lookahead(self._rings, self._runs, self._num_contexts, self._status_block)
        return str(getattr(self._runs[0], "note", ""))

    def serve(self) -> None:
        """Carry out calls of the host and take requests, in turn, until the control channel closes."""
        sequence = self._carry_out_calls(None)
        listen_ns = 0
        with torch.inference_mode():
            while True:
                try:
                    now = time.monotonic_ns()
                    if now >= listen_ns:
                        listen_ns = now + LISTEN_NS
                        sequence = self._carry_out_calls(sequence)
                    sequence = self._serve_one(sequence)
                except _Restarted as restarted:
                    sequence = restarted.first

    def _carry_out_calls(self, sequence: int | None) -> int:
        """Carry out the calls of the host; return the next request once it is known and no more calls are there."""
        self._sequence = sequence
        while self._sequence is None or self._control_poll.poll(0):
            answer(self._control, self)
        return self._sequence

    def run_from(self, first: int, alone_until: int) -> None:
        """Call of the host: take requests from ``first`` on; before ``alone_until`` one at a time, to find a crashing one."""
        self._lookahead.alone_until = alone_until
        self._sequence = first + (self._config.replica - first) % self._step

    def pause(self) -> None:
        """Call of the host: touch no ring until ``run_from``."""
        self.status.enter(statusblock.PAUSED, 0)
        self._lookahead.clear()
        self._sequence = None

    def events(self, clear: bool) -> list[tuple[int, ...]]:
        """Call of the host: see ``WorkerStatus.rows``."""
        return self.status.rows(clear=clear)

    def _handle_interrupt(self, sequence: int) -> None:
        """Carry out calls that came during a wait. Raises: _Restarted: the worker was paused, and its requests begin anew."""
        words = self.status.words
        state = words[statusblock.STATE]
        first = self._carry_out_calls(sequence)
        if words[statusblock.STATE] == statusblock.PAUSED:
            raise _Restarted(first) from None
        words[statusblock.STATE] = state

    def _serve_one(self, sequence: int) -> int:
        """Wait for the inputs of a request, run it, write its outputs, free its inputs, hand over the last output.

        Args:
            sequence: the oldest request that was not handed over yet.
        Returns: the next request.
        """
        status = self.status
        asked = status.enter(statusblock.WAITING, sequence)
        ahead = self._lookahead.pop() if self._num_contexts > 1 else None
        slots, begun = (ahead.slots, ahead.begun) if ahead else (self._rings.take(sequence), None)
        got = status.enter(statusblock.RUNNING, sequence)
        flag, result = self._compute(sequence, slots, begun)
        ran = time.monotonic_ns()
        if self._num_contexts > 1 and flag == DATA:
            flag, result = self._tried(sequence, slots, lambda: self._checked(slots, result.outputs()))
        posted = max([slot.header[POSTED_NS] for slot in slots])
        number = self._status_block.number(sequence)  # before the hand-over: another request may take its place then
        blocked = self._rings.hand_over(sequence, flag, result, slots[0].header[VARIANT])
        status.count(number, flag, asked, posted, got, ran, time.monotonic_ns(), blocked)
        return sequence + self._step

    def _compute(self, sequence: int, slots: Sequence[Slot], begun: "Begun | Exception | None") -> tuple[int, Any]:
        """The flag of the request from here on, and its outputs or the text of the error.

        A stage that works on several requests at once gives a begun request in place of its outputs.
        """
        flags = [slot.header[FLAG] for slot in slots]
        if any(flags):
            flag = ERROR if ERROR in flags else SKIPPED
            return flag, slots[flags.index(flag)].read_text()
        if self._status_block.expired(sequence):
            return SKIPPED, b""
        if self._num_contexts == 1:
            return self._tried(sequence, slots, lambda: self._outputs(slots))
        return self._tried(sequence, slots, lambda: self._lookahead.compute(sequence, slots, begun))

    def _tried(self, sequence: int, slots: Sequence[Slot], make: Callable[[], Any]) -> tuple[int, Any]:
        """What is made for a request, or the text of the error."""
        try:
            return DATA, make()
        except Exception:
            return ERROR, self._explain(sequence, slots, traceback.format_exc())

    def _outputs(self, slots: Sequence[Slot]) -> Sequence[torch.Tensor]:
        """Compute the outputs of a request, which fit their slots."""
        variant = slots[0].header[VARIANT]
        if (static := self._static.get(variant)) is None:
            return self._checked(slots, self._runs[variant](self._rings.inputs(slots)))
        self._rings.read(slots, variant)
        static.compute()
        return static.outputs

    def _checked(self, slots: Sequence[Slot], outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The outputs. Raises: ValueError: they do not fit their slots."""
        check_outputs(outputs, self._announced(slots[0].header[VARIANT]))
        return outputs

    def _explain(self, sequence: int, slots: Sequence[Slot], trace: str) -> bytes:
        """The text of a StageError. Raises: _Lost: the device is lost, so that no request is at fault."""
        if (ask := getattr(self._runs[0], "device_failure", None)) and (reason := ask()):
            raise _Lost(reason)
        stage, number = self._stages[slots[0].header[VARIANT]], self._status_block.number(sequence)
        return stage.failure_text(self._config.replica, number, self._rings.inputs(slots), trace).encode()
