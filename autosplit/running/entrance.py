"""Entrance: callers wait for room in the admission queue in the order in which they came.

A caller that waits is called once the queue is half empty, because waking one for each free place costs a core. Meanwhile there
is room, and a caller that came just then would take it. So it waits behind the others; else those might wait for ever.
"""

import threading
import time
from collections.abc import Callable


class Entrance:
    """Where callers wait for room. The lock of its condition is held around every call.

    Args:
        condition: on the lock that guards the queue; nobody else waits on it.
        has_room: whether a caller need not wait.
        check_thread: called before a wait; raises UsageError in a thread that must not wait.
    """

    def __init__(self, condition: threading.Condition, has_room: Callable[[], bool], check_thread: Callable[[], None]) -> None:
        self._condition = condition
        self._has_room = has_room
        self._check_thread = check_thread
        self._num_outside = 0
        self._is_over = False

    def is_free(self) -> bool:
        """Whether a caller would not wait."""
        return self._is_over or (self._has_room() and not self._num_outside)

    def enter(self, timeout_s: float | None) -> bool:
        """Wait for room behind all who wait already; return whether the caller may go on.

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
        self._num_outside += 1
        try:
            while self._condition.wait(max(0.0, until_s - time.monotonic())) and not (self._has_room() or self._is_over):
                pass
            enters = self._has_room() or self._is_over
        finally:
            self._num_outside -= 1
            if not enters:  # a timeout or Ctrl-C: the call may have come at that moment, and another one waits for it
                self.call(1)
        return enters

    def call_at_half(self, num_waiting: int, room: int) -> None:
        """Call callers once at most half of the ``room`` places of the queue are taken."""
        if num_waiting <= room // 2:
            self.call(room - num_waiting)

    def call(self, num_places: int) -> None:
        """Call those who have waited longest, one for each free place, if there is room."""
        if self._has_room():
            self._condition.notify(max(1, num_places))

    def end(self) -> None:
        """Let everybody pass from now on: the owner refuses them with the reason."""
        self._is_over = True
        self._condition.notify_all()
