"""The host's ends of the rings that bring results, and the one place where its thread blocks."""

import select
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autosplit.errors import AutosplitError, DeadlineError, StageError
from autosplit.running.copying import Copies
from autosplit.running.inbox import Inbox
from autosplit.running.lanes import Lanes
from autosplit.running.provisioner import Deployment, host_channels
from autosplit.running.ring import ERROR, FLAG, RingEnd, Slot


@dataclass(slots=True)
class Drain:
    """The host's end of a ring that brings results: its values by name and the number of its next request."""

    end: RingEnd
    copies: dict[str, Copies]
    first: int
    every: int
    next: int
    inbox: Inbox | None
    """What takes results as they come, where they need not keep their order."""

    def rewind(self, lanes: Lanes) -> None:
        """Expect the first request of this ring that is not done."""
        base = lanes.base(self.first)
        self.next = base + (self.first - base) % self.every
        if self.inbox is not None:
            self.inbox.restart()

    def until(self, num_soon: int, lanes: Lanes) -> int:
        """The request of this ring to wait for, if ``num_soon`` are to be taken together of those that were fed."""
        ahead = min(num_soon, lanes.next(self.first) - self.next) - 1
        return self.next + max(0, ahead) // self.every * self.every

    def ready(self, until: int) -> bool:
        """Whether there is something to take, in order up to request ``until``."""
        return self.end.ready(until) if self.inbox is None else self.inbox.waits()

    def take(self) -> Iterator[tuple[int, Slot]]:
        """Requests with their slots, as long as some are here."""
        if self.inbox is not None:
            while (found := self.inbox.pick()) is not None:
                yield found[0], found[1][0]
            return
        while self.end.ready(sequence := self.next):
            self.next += self.every
            yield sequence, self.end.acquire(sequence)


def error_of(slot: Slot, number: int) -> AutosplitError:
    """What became of request ``number``, which brought no tensors."""
    if slot.header[FLAG] == ERROR:
        return StageError(slot.read_text().decode(errors="replace"))
    return DeadlineError(f"request {number} was skipped: its deadline passed before the last stage")


class Drains:
    """All of them, and what else may wake the thread.

    Args:
        deployment: its rings.
        fds: other descriptors that end a wait.
    """

    def __init__(self, deployment: Deployment, fds: Iterable[int]) -> None:
        wiring = deployment.wiring
        self.num_tokens = 0
        """Results that each request brings."""
        self._drains: list[Drain] = []
        for number in host_channels(wiring)[1]:
            channel = wiring.channels[number]
            self.num_tokens += 1
            for first, ring in enumerate(deployment.rings[number]):
                end = RingEnd(ring, sends=False)
                copies = {spec.name: Copies(spec, 4 * wiring.most_in_flight) for spec in channel.specs}
                inbox = None if wiring.in_order else Inbox([[end]], deployment.words)
                self._drains.append(Drain(end, copies, first, channel.every, first, inbox))
        self._own = {drain.end.fd for drain in self._drains}
        self._poll = select.poll()
        for fd in (*self._own, *fds):
            self.watch(fd)

    def __iter__(self) -> Iterator[Drain]:
        return iter(self._drains)

    def watch(self, fd: int) -> None:
        """Let this descriptor end a wait from now on."""
        self._poll.register(fd, select.POLLIN)

    def forget(self, fd: int) -> None:
        """No longer."""
        self._poll.unregister(fd)

    def wait(self, patience_ms: int | None, num_soon: int, lanes: Lanes) -> set[int]:
        """Wait until results or something else is here, at most ``patience_ms``; the other descriptors that are readable.

        If they are here already, this is only a look at the others.

        Args:
            patience_ms: None waits for ever.
            num_soon: results that are to be here, or as many as are under way.
            lanes: what was fed.
        """
        here = False
        for drain in self._drains:
            until = drain.until(num_soon, lanes) if drain.inbox is None else 0
            drain.end.fall_asleep(until)
            here = drain.ready(until) or here
        found = {fd for fd, _ in self._poll.poll(0 if here else patience_ms)}
        for drain in self._drains:
            drain.end.wake_up(called=drain.end.fd in found)
        return found - self._own
