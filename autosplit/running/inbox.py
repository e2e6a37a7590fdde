"""Inbox: what lies in the rings of one receiver, taken the most urgent first, where requests need not keep their order.

Pipelines that answer as ready have rings with a slot for every request in flight. A sender never waits for a slot, so no
order of taking can block anybody, and a request waits for no more others than there are in flight::

    in the rings: 4 (priority 0), 5 (priority 0), 6 (priority -1)  ->  taken: 6, 4, 5

A slot says in its number what lies in it. The number is seen before its token is, and with as many tokens as numbers the
slots that were seen are whole.
"""

import os
import select
import time
from collections.abc import Sequence

from autosplit.running.ring import EMPTY, SEQUENCE, Interrupted, RingEnd, Slot, take_token
from autosplit.running.words import Words


class Inbox:
    """The receiving ends of one stage replica, or one of the host's.

    Args:
        ports: for each source, the ends of its rings; a request is here once each source has brought its part.
        words: who tells the priorities.
        interrupt_fd: a descriptor that ends a wait when it is readable, or -1.
        spin_s: how long to look before blocking.
    """

    def __init__(self, ports: Sequence[Sequence[RingEnd]], words: Words, interrupt_fd: int = -1, spin_s: float = 0.0) -> None:
        self._ports = ports
        self._words = words
        self._interrupt_fd = interrupt_fd
        self._spin_s = spin_s
        self._tokens = {end.fd: 0 for ends in ports for end in ends}
        self._poll = select.poll()
        for fd in (*self._tokens, interrupt_fd):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)

    def restart(self) -> None:
        """The tokens were counted anew."""
        self._tokens = dict.fromkeys(self._tokens, 0)

    def pick(self) -> tuple[int, list[Slot]] | None:
        """The most urgent request of those that are here, and its slots; then arrival counts. None if none is."""
        found = [self._arrived(ends) for ends in self._ports]
        here = set.intersection(*(set(port) for port in found))
        if not here:
            return None
        sequence = min(here, key=lambda one: (self._words.priority(one), one))
        slots = []
        for end, slot in (port[sequence] for port in found):
            slot.header[SEQUENCE] = EMPTY
            self._tokens[end.fd] -= 1
            slots.append(slot)
        return sequence, slots

    def wait(self) -> tuple[int, list[Slot]]:
        """The same, once one is here. Raises: Interrupted: the interrupt descriptor became readable first."""
        spin_until = time.perf_counter() + self._spin_s
        while (found := self.pick()) is None:
            while not (events := self._poll.poll(0)) and time.perf_counter() < spin_until:
                os.sched_yield()
            events = events or self._poll.poll()
            if any(fd == self._interrupt_fd for fd, _ in events):
                raise Interrupted
        return found

    def _arrived(self, ends: Sequence[RingEnd]) -> dict[int, tuple[RingEnd, Slot]]:
        """What one source has brought, by number; a ring with a slot that is just being filled is looked at again later."""
        found = {}
        for end in ends:
            while take_token(end.fd):
                self._tokens[end.fd] += 1
            mine = {slot.header[SEQUENCE]: (end, slot) for slot in end.ring.slots}
            mine.pop(EMPTY, None)
            if len(mine) == self._tokens[end.fd]:
                found.update(mine)
        return found
