"""Threads that compute instructions with the thread that calls them. They inherit its cores, so each such thread has a team."""

import os
import signal
import threading
import weakref

import numpy as np


class _Team:
    """The threads of a caller, which sleep until it writes to their pipe, and the memory by which they divide a tape."""

    def __init__(self) -> None:
        from autosplit.backends.rowloops import TEAM_BYTES  # loads numba

        self.num_threads, self.words = 0, np.zeros(TEAM_BYTES // 8, np.int64)
        self.address = self.words.ctypes.data
        self._reading, self.channel = os.pipe()
        os.set_blocking(self.channel, False)
        weakref.finalize(self, _dismiss, self._reading, self.channel).atexit = False

    def grow(self, num_threads: int) -> None:
        """Have at least so many threads."""
        while self.num_threads < num_threads:
            self.num_threads += 1
            arguments = os.dup(self._reading), self.words
            threading.Thread(target=_serve, args=arguments, name="autosplit-rows", daemon=True).start()


def team_of(others: int) -> tuple[int, int]:
    """The address of the team's words and the pipe of ``rowloops.play``, for a call with so many other threads."""
    found: _Team | None = getattr(_own, "team", None)
    if found is None:
        found = _own.team = _Team()
    if found.num_threads < others:
        found.grow(others)
    return found.address, found.channel


def _serve(channel: int, words: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
    from autosplit.backends.rowloops import answer_calls  # loads numba

    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # one would end the wait for a message
    message = np.zeros(3, np.int64)
    try:
        answer_calls(words.ctypes.data, channel, message.ctypes.data)
    finally:
        os.close(channel)


def _dismiss(reading: int, channel: int) -> None:
    """Let the threads end: they read from copies of a pipe that nobody writes any more."""
    os.close(channel)
    os.close(reading)


_own = threading.local()


def _forget() -> None:
    """In a forked process, where threads of the team do not run: whoever writes to their pipe calls those of the parent."""
    global _own
    _own = threading.local()


os.register_at_fork(after_in_child=_forget)
