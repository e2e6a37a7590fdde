"""Lookahead: a stage that works on several requests at once begins requests while an earlier one is computed.

Copies then run beside the computing, no stream waits for another, and the device never waits for the worker in between.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from autosplit.running.ring import DATA, FLAG, VARIANT, Slot
from autosplit.running.stagerings import StageRings
from autosplit.running.statusblock import StatusBlock

if TYPE_CHECKING:
    from autosplit.backends.base import Begun, Runnable

LOOK_AHEAD_S = 1e-3
"""How long a request that comes while another one is computed may have to wait for an idle stream."""


class Ahead(NamedTuple):
    """A request that was taken early: its slots, and the request as it was begun, or why it was not; None without tensors."""

    sequence: int
    slots: list[Slot]
    begun: "Begun | Exception | None" = None


class Lookahead:
    """The requests that were taken while an earlier one was computed, oldest first.

    Attributes:
        alone_until: no request is begun while one before this number is computed.
    """

    def __init__(self, rings: StageRings, runs: "Sequence[Runnable]", num_contexts: int, status_block: StatusBlock) -> None:
        self._rings = rings
        self._runs, self._num_contexts = runs, num_contexts
        self._status_block = status_block
        self._taken: deque[Ahead] = deque()
        self.alone_until = 0

    def pop(self) -> Ahead | None:
        """The oldest request that was taken, if there is one."""
        return self._taken.popleft() if self._taken else None

    def clear(self) -> None:
        """Forget all of them; they come again."""
        self._taken.clear()

    def compute(self, sequence: int, slots: Sequence[Slot], begun: "Begun | Exception | None") -> "Begun":
        """Begin a request unless it is begun, and wait until it is computed; meanwhile begin those after it.

        Raises: the failure with which it was begun, in its turn.
        """
        if isinstance(begun, Exception):
            raise begun
        begun = begun or self._begin(slots)
        self._begin_following(sequence)
        while len(self._taken) < self._num_contexts - 1:
            if begun.wait(LOOK_AHEAD_S):
                return begun
            self._begin_following(sequence)
        begun.wait()
        return begun

    def _begin_following(self, sequence: int) -> None:
        """Begin requests whose inputs are here, as many as the stage takes."""
        if sequence < self.alone_until:
            return
        newest = self._taken[-1].sequence if self._taken else sequence
        while len(self._taken) < self._num_contexts - 1 and (found := self._rings.take_ready(newest)) is not None:
            newest, slots = found
            ahead = Ahead(newest, slots)
            if all(slot.header[FLAG] == DATA for slot in slots) and not self._status_block.expired(newest):
                try:
                    ahead = ahead._replace(begun=self._begin(slots))
                except Exception as failure:  # no second try: it would come after later requests, which have their turns in order
                    ahead = ahead._replace(begun=failure)
            self._taken.append(ahead)

    def _begin(self, slots: Sequence[Slot]) -> "Begun":
        run = self._runs[slots[0].header[VARIANT]]
        return run.begin(self._rings.inputs(slots))  # type: ignore[attr-defined, no-any-return]
