"""Threads that compute instructions with the thread that calls them. They inherit its cores, so each such thread has a team.

The first of the cores is left to the caller.
"""

import os
import signal
import threading
import weakref

import numpy as np

Words = np.ndarray[tuple[int], np.dtype[np.int64]]


class _Team:
    """The threads of a caller, which sleep until it calls them by an eventfd, and the memory by which they divide a tape.

    A pipe would wake a thread on the core of its caller, which it believes to sleep next.
    """

    def __init__(self) -> None:
        from autosplit.backends.rowloops import ONE, TEAM_BYTES  # loads numba

        self.num_threads, self.words = 0, np.zeros(TEAM_BYTES // 8, np.int64)
        self.words[ONE // 8] = 1
        self.address = self.words.ctypes.data
        self.channel = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        weakref.finalize(self, _dismiss, self.channel, self.words).atexit = False

    def grow(self, num_threads: int) -> None:
        """Have at least so many threads."""
        while self.num_threads < num_threads:
            self.num_threads += 1
            arguments = os.dup(self.channel), self.words
            threading.Thread(target=_serve, args=arguments, name="autosplit-rows", daemon=True).start()


def team_of(others: int) -> tuple[int, int]:
    """The address of the team's words and the eventfd of ``rowloops.play``, for a call with so many other threads."""
    found: _Team | None = getattr(_own, "team", None)
    if found is None:
        found = _own.team = _Team()
    if found.num_threads < others:
        found.grow(others)
    return found.address, found.channel


def _serve(channel: int, words: Words) -> None:
    from autosplit.backends.rowloops import answer_calls  # loads numba

    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one would end the wait for a call
    if others := sorted(os.sched_getaffinity(0))[1:]:
        os.sched_setaffinity(0, others)  # where these were busy, the thread was woken on its caller's core, and late
    count = np.zeros(1, np.int64)
    try:
        answer_calls(words.ctypes.data, channel, count.ctypes.data)
    finally:
        os.eventfd_write(channel, 1)  # the next one ends, too
        os.close(channel)


def _dismiss(channel: int, words: Words) -> None:
    from autosplit.backends.rowloops import DISMISSED, TAPE

    words[TAPE // 8 + 2] = DISMISSED
    os.eventfd_write(channel, 1)
    os.close(channel)


_own = threading.local()


def _forget() -> None:
    """In a forked process, where threads of the team do not run: a call would reach those of the parent."""
    global _own
    _own = threading.local()


os.register_at_fork(after_in_child=_forget)
