"""HostsDeployment: the stages of a pipeline on their hosts, and the events that come back: answers, failures, a lost host."""

import contextlib
import itertools
import queue
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from autosplit.clusters.agent import ANSWERS, CONTROL, NUM_SLOTS, PURPOSE, REQUESTS, SEGMENT, SENDER
from autosplit.clusters.fleet import Fleet
from autosplit.clusters.frames import CANCEL, REQUEST, Connection, Frame, FrameBuffer, Outgoing, Receiver
from autosplit.clusters.handshake import dial
from autosplit.clusters.segments import DRIVER, segments_of
from autosplit.errors import AutosplitError
from autosplit.parsing import shown
from autosplit.running.messages import WorkerEvent
from autosplit.running.monitor import WorkerHealth, WorkerReport
from autosplit.running.request import Request
from autosplit.running.wiring import Wiring
from autosplit.tracing.tensorspec import copy_into, empty_like_spec

REPORT_S = 10.0
"""Seconds for an agent's report."""

ENDING_S = 5.0
"""Seconds for ending the stages of a host."""

Found = TypeVar("Found")

_numbers = itertools.count()


class Answered(NamedTuple):
    """The number of a request, and its outputs by name or the text of its error, from the last host."""

    number: int
    values: dict[str, torch.Tensor] | None
    error: str


class Lost(NamedTuple):
    """A host was lost, with the reason."""

    host: str
    reason: str


Events = queue.SimpleQueue[Answered | Lost | None]
"""None: a waiting request may have passed its deadline, or this is the end."""


class HostsDeployment(Receiver):
    """The segments of a pipeline, loaded on their hosts and connected; frames that come from hosts become events.

    Args:
        events: filled with answers and the loss of a host.
    Raises: AutosplitError: a stage could not be loaded, or hosts could not be connected. Nothing is left running.
    """

    def __init__(self, cluster: Fleet, wiring: Wiring, events: Events) -> None:
        self._cluster, self.wiring = cluster, wiring
        self._segments = segments_of(wiring.stages, wiring.inputs, wiring.outputs, f"deployment-{next(_numbers)}")
        self._places = [(number, host) for number, segment in enumerate(self._segments) for host in dict.fromkeys(segment.hosts)]
        """Each segment on each of its hosts."""
        self._positions = [wiring.inputs.index(spec.name) for spec in self._segments[0].inputs[0]]
        self._control: list[Connection] = []
        self._answers: list[Connection] = []
        self._requests: dict[str, Connection] = {}
        self._events, self._is_ending = events, False
        self._hosts = {host for _, host in self._places}
        self._due: dict[tuple[str, int], int] = {}
        """The host that will answer a request, and the number of the request, with the variant of its answer."""
        self.num_restarts = 0
        """Workers that agents started anew, as of the last reports."""
        self.max_in_flight = sum(self._segments[number].num_slots for number, _ in self._places)
        try:
            self._load()
            self._connect()
        except BaseException:
            self.close(timeout_s=ENDING_S)
            raise

    def send(self, request: Request) -> None:
        """Send a request to the first host; does not wait."""
        number, tensors = request.number, tuple(request.inputs[position] for position in self._positions)
        last = self._segments[-1].hosts
        self._due[last[number % len(last)], number] = request.variant
        self._first(number).post(Outgoing(REQUEST, number, request.priority, request.deadline_ns, tensors, request.variant))

    def skip(self, number: int) -> None:
        """Tell the hosts that a request is not wanted any more."""
        self._first(number).post(Outgoing(CANCEL, number))

    def request(self, connection: Connection, frame: Frame, slot: FrameBuffer) -> None:
        """An answer came: copy it out of its slot. Raises: ConnectionError: it is not due from this host, or has another size."""
        variant = self._settle(connection, frame)
        if frame.variant != variant:
            raise ConnectionError(f"it answered request {frame.number} with tensors of variant {frame.variant}, not {variant}")
        values = {}
        for spec, tensor in zip(self._segments[-1].outputs[frame.variant], slot.tensors(frame.variant), strict=True):
            values[spec.name] = empty_like_spec(spec)
            copy_into(values[spec.name], tensor)
        connection.release(slot)
        self._events.put(Answered(frame.number, values, ""))

    def error(self, connection: Connection, frame: Frame, text: str) -> None:
        """A request failed. Raises: ConnectionError: its answer is not due from this host."""
        self._settle(connection, frame)
        self._events.put(Answered(frame.number, None, text))

    def broken(self, connection: Connection, text: str) -> None:
        """A host reports that its connection to another one broke. Raises: ConnectionError: the pipeline has no such host."""
        host, _, reason = text.partition("\n")
        if host not in (DRIVER, *self._hosts):
            raise ConnectionError(f"it reported the loss of {shown(host)}, which is no host of this pipeline")
        self._tell(connection.peer if host == DRIVER else host, f"host '{connection.peer}' says that {reason}")

    def lost(self, connection: Connection, reason: str) -> None:
        """A connection to a host broke."""
        self._tell(connection.peer, reason)

    def close(self, timeout_s: float) -> None:
        """End the connections, and the segments on hosts that were not lost."""
        self._is_ending = True
        for connection in (*self._control, *self._answers, *self._requests.values()):
            connection.close()
        for number, host in self._places:
            if host not in self._cluster.lost:
                with contextlib.suppress(AutosplitError):
                    self._cluster.ask([(host, "close_segment", self._segments[number].name)], timeout_s=timeout_s)

    def health(self) -> list[WorkerHealth]:
        """The state of each worker, in the order of stages and replicas."""
        found = {(one.stage, f"{host}/{one.device}"): one for host, mine in self._ask("health") for one in mine}
        return [replace(one, replica=replica, device=device) for one, device, replica in self._in_order(found)]

    def reports(self, *, clear: bool) -> list[WorkerReport]:
        """The work of each worker, in the order of stages and replicas, on this machine's clock."""
        found: dict[tuple[str, str], WorkerReport] = {}
        self.num_restarts = 0
        for host, (reports, num_restarts) in self._ask("reports", clear):
            self.num_restarts += num_restarts
            with contextlib.suppress(AutosplitError):  # it may be lost by now
                ahead_ns = self._cluster.clock_offset(host).ahead_ns
                for stats, events in reports:
                    moved = [_shifted(event, ahead_ns) for event in events]
                    found[stats.stage, f"{host}/{stats.device}"] = WorkerReport(stats, moved)
        workers = self._in_order(found)
        return [WorkerReport(replace(one.stats, replica=number, device=device), one.events) for one, device, number in workers]

    def _settle(self, connection: Connection, frame: Frame) -> int:
        try:
            return self._due.pop((connection.peer, frame.number))
        except KeyError:
            raise ConnectionError(f"it answered request {frame.number}, which it does not have") from None

    def _tell(self, host: str, reason: str) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._events.put(Lost(host, reason))

    def _in_order(self, found: Mapping[tuple[str, str], Found]) -> Iterator[tuple[Found, str, int]]:
        """Of each worker the value that was found for its stage and device, the device and the replica."""
        places = ((stage.name, device.name, k) for stage in self.wiring.stages for k, device in enumerate(stage.devices))
        return ((found[stage, device], device, replica) for stage, device, replica in places if (stage, device) in found)

    def _ask(self, method: str, *given: object) -> list[tuple[str, Any]]:
        """Each host that answers a question about its segment, with the answer."""
        answers: list[tuple[str, Any]] = []
        for number, host in self._places:
            if host not in self._cluster.lost:
                with contextlib.suppress(AutosplitError):
                    [found] = self._cluster.ask([(host, method, self._segments[number].name, *given)], timeout_s=REPORT_S)
                    answers.append((host, found))
        return answers

    def _first(self, number: int) -> Connection:
        hosts = self._segments[0].hosts
        return self._requests[hosts[number % len(hosts)]]

    def _load(self) -> None:
        """Bring the stage files to the hosts, and start the workers of all segments side by side."""
        segments = self._segments
        folders = {host: {folder for s in segments if host in s.hosts for folder in s.folders} for _, host in self._places}
        names, files = self._cluster.ship(folders)
        orders = []
        for number, host in self._places:
            own = {names[folder]: files[names[folder]] for folder in segments[number].folders}
            segment = segments[number].on(host).moved(lambda folder: Path(names[folder]))
            orders.append((host, "open_segment", segment, own))
        self._cluster.ask(orders)

    def _connect(self) -> None:
        """Connect the hosts: this machine to all, each segment to the next, and this machine to the first and the last ones."""
        cluster, first, last = self._cluster, self._segments[0], self._segments[-1]
        for number, host in self._places:
            self._control.append(Connection(self._dial(self._segments[number].name, host, CONTROL), host, self))
        calls = []
        for number, host in self._places:
            if self._segments[number] is not last:
                following = self._segments[number + 1]
                targets = {one: (cluster.address(one), following.num_slots) for one in following.hosts}
                calls.append((host, "connect", self._segments[number].name, targets))
        cluster.ask(calls)
        for host in dict.fromkeys(last.hosts):
            sock = self._dial(last.name, host, ANSWERS, **{NUM_SLOTS: self.max_in_flight})
            self._answers.append(Connection(sock, host, self, last.outputs, num_slots=self.max_in_flight))
        for host in dict.fromkeys(first.hosts):
            sock = self._dial(first.name, host, REQUESTS)
            self._requests[host] = Connection(sock, host, self, first.inputs, num_credits=first.num_slots)

    def _dial(self, segment: str, host: str, purpose: str, **more: int) -> socket.socket:
        hello = {PURPOSE: purpose, SEGMENT: segment, SENDER: DRIVER, **more}
        return dial(self._cluster.address(host), self._cluster.secret, hello)


def _shifted(event: WorkerEvent, ahead_ns: int) -> WorkerEvent:
    """The event on a clock that is ``ahead_ns`` behind; ``blocked_ns`` is a duration, and the first two fields are not times."""
    times = {name: getattr(event, name) - ahead_ns for name in event._fields if name.endswith("_ns") and name != "blocked_ns"}
    return event._replace(**times)
