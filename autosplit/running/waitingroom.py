"""WaitingRoom: callers wait for a place in the admission queue in the order in which they came.

Callers are woken once the queue is half empty, because waking one for each free place costs a core. Meanwhile there are free
places, and a newcomer would take one. So it waits behind the others, which might wait for ever otherwise.
"""

import threading
import time
from collections.abc import Callable


class WaitingRoom:
    """Callers that wait for a place. The lock of the condition is held around every call.

    Args:
        condition: on the lock that guards the queue; nobody else waits on it.
        has_room: whether a caller need not wait.
        check_thread: called before a wait; raises UsageError in a thread that must not wait.
    """

    def __init__(self, condition: threading.Condition, has_room: Callable[[], bool], check_thread: Callable[[], None]) -> None:
        self._condition = condition
        self._has_room = has_room
        self._check_thread = check_thread
        self._num_here = 0
        self._is_over = False

    def is_free(self) -> bool:
        """Whether a caller would not wait."""
        return self._is_over or (self._has_room() and not self._num_here)

    def enter(self, timeout_s: float | None) -> bool:
        """Wait for a place behind all other callers; return whether the caller may go on.

        Args:
            timeout_s: how long to wait; None waits without limit, and 0 returns at once.
        """
        if self.is_free():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        self._check_thread()
        until_s = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        enters = False
        self._num_here += 1
        try:
            while self._condition.wait(max(0.0, until_s - time.monotonic())) and not (self._has_room() or self._is_over):
                pass
            enters = self._has_room() or self._is_over
        finally:
            self._num_here -= 1
            if not enters:  # a timeout or Ctrl-C: the wake-up may have come at that moment, and another caller waits for it
                self.wake(1)
        return enters

    def wake_when_half_empty(self, num_waiting: int, queue_capacity: int) -> None:
        """Wake callers once at most half of the places of the queue are taken."""
        if num_waiting <= queue_capacity // 2:
            self.wake(queue_capacity - num_waiting)

    def wake(self, num_places: int) -> None:
        """Wake the callers that have waited longest, one for each free place, if there is room."""
        if self._has_room():
            self._condition.notify(max(1, num_places))

    def end(self) -> None:
        """Wake all callers and let everybody pass from now on: the owner refuses them with the reason."""
        self._is_over = True
        self._condition.notify_all()
