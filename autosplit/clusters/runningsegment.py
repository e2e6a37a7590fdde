"""RunningSegment: a segment of a plan that runs on a host, between the connections that bring requests and take answers.

::

    connection -> slot -> Pipeline of the segment (workers, rings) -> connection to the next host, or to the driver

A slot is free again once the answer of its request was sent on, so as many requests are in a segment as it has slots.
"""

import socket
import threading
from concurrent.futures import Future
from typing import Any

from autosplit.clusters.frames import BROKEN, CANCEL, ERROR, REQUEST, Connection, Frame, FrameBuffer, Outgoing, Receiver, left_ns
from autosplit.clusters.handshake import CONNECT_S
from autosplit.clusters.segments import DRIVER, Segment
from autosplit.errors import AutosplitError, RefusedError, WorkerError
from autosplit.parsing import shown
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import MatchingTensors, Tensors

MOST_SLOTS = 65_536
"""Most requests that a driver may have under way."""

MOST_QUEUED = 1024
"""Most errors and cancellations that wait for the next host: there is one of each for a request under way."""


class RunningSegment(Receiver):
    """A segment that runs: its pipeline, and the connections to the hosts behind it."""

    def __init__(self, host: str, order: Segment) -> None:
        self.order = order
        self._route = order.route or ("",)
        self._host = host
        names = [[spec.name for spec in specs] for specs in (order.inputs[0], order.outputs[0])]
        self.pipeline = Pipeline(order.stages, names[0], names[1])
        self._sources: dict[str, Connection] = {}
        self._targets: dict[str, Connection] = {}
        self._running: dict[int, Future[Tensors] | None] = {}
        """The requests here; None until the pipeline has taken one in."""
        self._lock = threading.Lock()
        self._connected = threading.Condition(self._lock)
        """Told of each connection that is ready to take answers."""
        self._control: Connection | None = None

    def report_to(self, sock: socket.socket) -> None:
        """Report lost hosts to the driver over a connection; the segment ends with it. Raises: WorkerError: it has one."""
        with self._lock:
            if self._control is not None:
                raise WorkerError(f"segment '{self.order.name}' reports to its driver already")
            self._control = Connection(sock, DRIVER, self)

    def feed_from(self, sock: socket.socket, sender: str) -> None:
        """Take requests from a connection. Raises: WorkerError: the sender is none of the sources, or is connected already."""
        with self._lock:
            if sender not in self.order.sources:
                sources = ", ".join(self.order.sources)
                raise WorkerError(f"segment '{self.order.name}' takes requests from {sources}, and not from {shown(sender)}")
            if sender in self._sources:
                raise WorkerError(f"segment '{self.order.name}' takes requests of '{sender}' over another connection already")
            self._sources[sender] = Connection(sock, sender, self, self.order.inputs, num_slots=self.order.num_slots)

    def answer_to(self, sock: socket.socket, num_credits: Any) -> None:
        """Send answers to the driver over a connection. Raises: WorkerError: as ``send_to``, or a wrong number of credits."""
        if type(num_credits) is not int or not 0 < num_credits <= MOST_SLOTS:
            raise WorkerError(f"the driver has {shown(num_credits)} slots, and 1 to {MOST_SLOTS} are allowed")
        self.send_to("", sock, num_credits)

    def send_to(self, target: str, sock: socket.socket, num_credits: int) -> None:
        """Send answers to a host, or to the driver (``''``), over a connection.

        Raises: WorkerError: the answers do not go there, or go there already.
        """
        with self._connected:
            if target not in self._route:
                raise WorkerError(f"the answers of segment '{self.order.name}' do not go to '{target or DRIVER}'")
            if target in self._targets:
                raise WorkerError(f"the answers of segment '{self.order.name}' go to '{target or DRIVER}' already")
            self._targets[target] = Connection(sock, target or DRIVER, self, self.order.outputs, num_credits=num_credits)
            self._connected.notify_all()

    def request(self, connection: Connection, frame: Frame, slot: FrameBuffer) -> None:
        """Run a request. Raises: ConnectionError: a request of this number is here already."""
        with self._lock:
            if frame.number in self._running:
                raise ConnectionError(f"it sent request {frame.number}, which is under way already")
            self._running[frame.number] = None
        deadline_ns = left_ns(frame.left_s)
        try:
            tensors = MatchingTensors(slot.tensors(frame.variant))
            future = self.pipeline.submit_unbounded(
                tensors, priority=frame.priority, deadline_ns=deadline_ns, variant=frame.variant, number=frame.number
            )
        except AutosplitError as failure:
            with self._lock:
                del self._running[frame.number]
            connection.release(slot)
            self._fail(frame.number, failure)
            return
        with self._lock:
            self._running[frame.number] = future
        future.add_done_callback(lambda done: self._answer(connection, frame, slot, deadline_ns, done))

    def error(self, connection: Connection, frame: Frame, text: str) -> None:
        """Hand the failure of a request on. Raises: ConnectionError: see ``_hand_on``."""
        self._hand_on(Outgoing(ERROR, frame.number, text=text.encode()))

    def cancel(self, connection: Connection, frame: Frame) -> None:
        """End a request here, or behind this segment. Raises: ConnectionError: see ``_hand_on``."""
        with self._lock:
            future = self._running.get(frame.number)
        if future is None or not future.cancel():
            self._hand_on(Outgoing(CANCEL, frame.number))

    def broken(self, connection: Connection, text: str) -> None:
        """Raises: ConnectionError: hosts report lost hosts to the driver alone."""
        raise ConnectionError("it reported a lost host to another host, and the driver alone takes such reports")

    def lost(self, connection: Connection, reason: str) -> None:
        """Tell the driver which host was lost. Without the driver itself, end."""
        if connection is self._control:
            threading.Thread(target=self.close, name="autosplit-ending").start()  # close waits for this thread
        elif self._control is not None:
            self._control.post(Outgoing(BROKEN, text=f"{connection.peer}\n{reason}".encode()))

    def close(self) -> None:
        """End the connections and the workers."""
        with self._lock:
            connections = [*self._sources.values(), *self._targets.values()]
        for connection in filter(None, (self._control, *connections)):
            connection.close()
        self.pipeline.close(drain=False)

    def _answer(self, connection: Connection, frame: Frame, slot: FrameBuffer, deadline_ns: int, done: "Future[Tensors]") -> None:
        """Send the answer of a request on. A failure ends the connection that brought the request, and so fails the request."""
        try:
            with self._lock:
                self._running.pop(frame.number, None)
            failure = RefusedError("the request was cancelled") if done.cancelled() else done.exception()
            if failure is not None:
                connection.release(slot)
                self._fail(frame.number, failure)
                return
            self._target(frame.number).post(
                Outgoing(
                    REQUEST,
                    frame.number,
                    frame.priority,
                    deadline_ns,
                    done.result(),
                    frame.variant,
                    sent=lambda: connection.release(slot),
                )
            )
        except Exception as failure:
            connection.lose(failure)

    def _hand_on(self, frame: Outgoing) -> None:
        """Send an error or a cancellation on. Raises: ConnectionError: too many of them wait, or no host takes them."""
        target = self._target(frame.number)
        if target.num_queued >= MOST_QUEUED:
            raise ConnectionError(f"it sent errors and cancellations while {MOST_QUEUED} frames wait for the next host")
        target.post(frame)

    def _fail(self, number: int, failure: BaseException) -> None:
        text = f"{type(failure).__name__}\nhost '{self._host}': {failure}"
        self._target(number).post(Outgoing(ERROR, number, text=text.encode()))

    def _target(self, number: int) -> Connection:
        """The connection that takes the answer of a request. The first request may be quicker than the thread that opens it.

        Raises: ConnectionError: none was opened within ``CONNECT_S``.
        """
        target = self._route[number % len(self._route)]
        with self._connected:
            if not self._connected.wait_for(lambda: target in self._targets, CONNECT_S):
                raise ConnectionError(f"no connection to '{target or DRIVER}' was opened for its answers")
            return self._targets[target]
