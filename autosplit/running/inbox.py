"""Inbox: take requests from the rings of one receiver, the most urgent first, where they need not keep their order.

Pipelines that answer as ready have rings with a slot for every request in flight. A sender never waits for a slot, so requests
may be taken in any order without a deadlock::

    in the rings: 4 (priority 0), 5 (priority 0), 6 (priority -1)  ->  taken: 6, 4, 5

A slot keeps the number of its request until it is released, so the inbox remembers the numbers that were taken.
"""

import os
import select
import time
from collections.abc import Sequence

from autosplit.running.ring import EMPTY, SEQUENCE, Interrupted, RingEnd, Slot, fence
from autosplit.running.statusblock import StatusBlock


class Inbox:
    """The receiving ends of one stage replica, or of the host.

    Args:
        ports: for each source, the ends of its rings; a request is ready once each source has sent its part.
        status_block: tells the priorities.
        interrupt_fd: a descriptor that ends a wait when it is readable, or -1.
        spin_s: seconds of polling before a wait blocks.
    """

    def __init__(
        self, ports: Sequence[Sequence[RingEnd]], status_block: StatusBlock, interrupt_fd: int = -1, spin_s: float = 0.0
    ) -> None:
        self._ports = ports
        self._status_block = status_block
        self._interrupt_fd = interrupt_fd
        self._spin_s = spin_s
        self._ends = [end for ends in ports for end in ends]
        self._taken: dict[Slot, int] = {}
        """The number that was taken last from each slot."""
        self._poll = select.poll()
        for fd in (*(end.fd for end in self._ends), interrupt_fd):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)

    def restart(self) -> None:
        """Forget what was taken: the slots were numbered anew."""
        self._taken.clear()

    def pick(self) -> tuple[int, list[Slot]] | None:
        """Take the most urgent request that is ready, with its slots; None if there is none. Then arrival counts."""
        found = [self._arrived(ends) for ends in self._ports]
        here = set.intersection(*(set(port) for port in found))
        if not here:
            return None
        fence()
        sequence = min(here, key=lambda one: (self._status_block.priority(one), one))
        slots = [port[sequence] for port in found]
        self._taken.update(dict.fromkeys(slots, sequence))
        return sequence, slots

    def waits(self) -> bool:
        """Whether ``pick`` would find a request."""
        return bool(set.intersection(*(set(self._arrived(ends)) for ends in self._ports)))

    def wait(self) -> tuple[int, list[Slot]]:
        """Take the most urgent request once one is ready. Raises: Interrupted: the interrupt descriptor became readable first."""
        spin_until = time.perf_counter() + self._spin_s
        while (found := self.pick()) is None:
            if time.perf_counter() < spin_until:
                os.sched_yield()
            else:
                found = self._block()
                if found is not None:
                    break
        return found

    def _block(self) -> tuple[int, list[Slot]] | None:
        for end in self._ends:
            end.fall_asleep()
        found = self.pick()
        readable = {fd for fd, _ in self._poll.poll()} if found is None else set()
        for end in self._ends:
            end.wake_up(called=end.fd in readable)
        if self._interrupt_fd in readable:
            raise Interrupted
        return found

    def _arrived(self, ends: Sequence[RingEnd]) -> dict[int, Slot]:
        """The slots that one source has filled and that were not taken yet, by number."""
        found = {}
        for slot in (slot for end in ends for slot in end.ring.slots):
            sequence = slot.header[SEQUENCE]
            if sequence not in (EMPTY, self._taken.get(slot)):
                found[sequence] = slot
        return found
